# SPDX-License-Identifier: Apache-2.0
"""The health of each target: ok, degraded, suspect or gone. No I/O; runs on the pipeline's thread.

verdict    condition                                                 I/O on the target
========   =======================================================   =========================
ok         none of the conditions below                              all
degraded   a controller is not live, or a path not optimized; or     all
           the target is not writable: its file system is read-only,
           or its region's lease was not renewed in time
suspect    an operation is past its deadline and the kernel still    none: I/O fails at once
           has its buffer; or none of its controllers carries I/O    with DEADLINE
gone       `FAILURES_MAX` of its reads, or of its writes, in a row   none, as above, until it
           fail with an error of target scope (`errors.ERRORS`),     is reattached
           except EROFS; or `FAILED_SLOTS_MAX` slots in a row fail
           with EIO; or its block device has disappeared

A target that is ok or degraded is *usable*, which is all that the manager checks. A suspect target
recovers when the kernel has returned every buffer and a controller carries I/O. A target that is
gone recovers only when it is reattached (`attached`, `reattach`).

The manager keeps a lost target's entries, but look-ups of them miss. After the target returns,
reads verify header and CRC, so a wrong or outdated disk only causes misses.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind, Scope
from vllm_nvmeof_offload.protocol import Verdict, slot_of

#: After this many failures of target scope in a row in one direction, the target is gone.
FAILURES_MAX = 3
#: A single EIO can be a bad spot. After EIO on this many slots in a row, the target is gone.
FAILED_SLOTS_MAX = 8
_READ_ONLY = "its file system is read-only"


@dataclass(frozen=True, slots=True)
class PathStates:
    """Counts of a target's controllers: known, carrying I/O, and live with only optimized paths.

    `known` is 0 if sysfs shows none. `device` is whether the target's block device exists.
    `attachment` is the observed attachment; `TargetHealth` ignores observations of older ones.
    """

    known: int = 0
    carrying: int = 0
    best: int = 0
    device: bool = True
    attachment: int = 0


@dataclass(slots=True)
class _Run:
    """The failures in one direction since its last success."""

    of_target: int = 0
    slots: set[int] = field(default_factory=set)

    @property
    def is_too_long(self) -> bool:
        return self.of_target >= FAILURES_MAX or len(self.slots) >= FAILED_SLOTS_MAX


class TargetHealth:
    """The health of one target. Each call to `attached` increments the attachment's number."""

    def __init__(self, *, can_return: bool = True) -> None:
        """Without `can_return` nothing reattaches the target, so failures do not make it gone."""
        self.verdict = Verdict.OK
        #: The reason why the target is not ok, for display.
        self.reason = ""
        self.attachment = 0
        self._can_return = can_return
        self._under_way: Counter[int] = Counter()  # operations in progress, by attachment
        self._late: Counter[int] = Counter()  # operations past their deadline, by attachment
        self._lost = ""  # why the target is gone; empty if it is not
        self._unwritable: set[str] = set()  # why the target is not writable
        self._paths = PathStates()
        self._runs = {False: _Run(), True: _Run()}  # by is_write

    def busy(self, attachment: int) -> bool:
        """Return whether an operation uses the attachment's descriptors."""
        return self._under_way[attachment] > 0

    def began(self, attachment: int, count: int) -> None:
        """Count operations submitted with the files of this attachment."""
        self._under_way[attachment] += count

    def late(self, attachment: int, count: int) -> None:
        """Count operations past their deadline whose buffers the kernel still has."""
        self._late[attachment] += count
        self._judge()

    def released(self, attachment: int, count: int, late: int) -> None:
        """Count released operations: `count` within their deadline, and `late` after it."""
        self._under_way[attachment] -= count + late
        if late:
            self._late[attachment] -= late
            self._judge()

    def ended(self, attachment: int, outcome: Outcome, place: int, *, is_write: bool) -> None:
        """Apply an outcome. Deadlines and cancellations do not count against the target."""
        if attachment != self.attachment:
            return
        run = self._runs[is_write]
        if outcome.kind is not OutcomeKind.IO_ERROR:
            if outcome.kind not in (OutcomeKind.DEADLINE, OutcomeKind.CANCELLED):
                run.of_target = 0  # the target returned bytes, right or wrong
                run.slots.clear()
                if is_write:
                    self.writes(True, _READ_ONLY)
            return
        if outcome.errno == errno.EROFS:
            self.writes(False, _READ_ONLY)  # reads continue
            return
        if outcome.scope is Scope.TARGET:
            run.of_target += 1
        elif outcome.errno == errno.EIO:
            run.slots.add(slot_of(place))  # regardless of the member
        if run.is_too_long:
            operations = "writes" if is_write else "reads"
            self.lost(f"too many {operations} in a row failed, the last one with {outcome}")

    def watched(self, paths: PathStates) -> None:
        if paths.attachment != self.attachment:
            return
        self._paths = paths
        if not paths.device:
            self.lost("its block device has disappeared")
        self._judge()

    def writes(self, may: bool, reason: str) -> None:
        """Add a reason why writes are impossible, or remove it if `may`."""
        (self._unwritable.discard if may else self._unwritable.add)(reason)
        self._judge()

    def lost(self, reason: str) -> None:
        """Mark the target gone until `attached`."""
        if self._can_return:
            self._lost = self._lost or reason
            self._judge()

    def attached(self) -> None:
        """Reset the state when new descriptors serve the target."""
        self.attachment += 1
        self._lost = ""
        self._paths = PathStates()
        self._unwritable.clear()
        self._runs = {False: _Run(), True: _Run()}
        self._judge()

    def _judge(self) -> None:
        paths, late = self._paths, self._late[self.attachment]
        if self._lost:
            found = Verdict.GONE, self._lost
        elif late:
            found = Verdict.SUSPECT, f"{late} operations are past their deadline"
        elif paths.known and not paths.carrying:
            found = Verdict.SUSPECT, f"none of its {paths.known} controllers carries I/O"
        elif paths.best < paths.known:
            found = Verdict.DEGRADED, f"{paths.best} of {paths.known} controllers are fully usable"
        elif self._unwritable:
            found = Verdict.DEGRADED, f"not writable: {min(self._unwritable)}"
        else:
            found = Verdict.OK, ""
        self.verdict, self.reason = found
