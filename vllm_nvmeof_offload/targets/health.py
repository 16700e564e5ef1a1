# SPDX-License-Identifier: Apache-2.0
"""The health of each target: ok, degraded, suspect or gone. Pure; runs on the pipeline's thread.

verdict    condition                                                 I/O on the target
========   =======================================================   =========================
ok         none of the conditions below                              all
degraded   a controller is not live, or a path not optimized; or     all
           nothing can be written: the file system is read-only,
           or the region's lease waits to be renewed
suspect    an operation is past its deadline and the kernel still    none: it fails at once
           has its buffer; or no controller of it carries I/O        with DEADLINE
gone       `FAILURES_MAX` of its reads, or of its writes, in a row   none, as above, until it
           fail with an error of target scope (`errors.ERRORS`),     is attached again
           EROFS apart; or `FAILED_SLOTS_MAX` slots in a row fail
           with EIO; or its block device has disappeared

ok and degraded are *usable*, which is all that the manager checks. Suspect ends by itself, when the
kernel has returned every buffer and a controller carries I/O. Gone ends only with `attached`,
whatever else changes meanwhile (`reattach`).

The manager keeps a target's entries while the target is lost; their look-ups miss. Afterwards
header and CRC prove the bytes on disk at each read, so a wrong or an older disk is a miss.
"""

from __future__ import annotations

import enum
import errno
from collections import Counter
from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind, Scope
from vllm_nvmeof_offload.protocol import slot_of

#: This many failures of target scope, without a success of that direction in between, mean gone.
FAILURES_MAX = 3
#: EIO may be one bad place; on this many slots, without a success in between, the target is gone.
FAILED_SLOTS_MAX = 8
_READ_ONLY = "its file system is read-only"


class Verdict(enum.Enum):
    """The verdicts, from best to worst."""

    OK = "ok"
    DEGRADED = "degraded"
    SUSPECT = "suspect"
    GONE = "gone"

    @property
    def usable(self) -> bool:
        return self in (Verdict.OK, Verdict.DEGRADED)


@dataclass(frozen=True, slots=True)
class PathStates:
    """Counts of a target's controllers: known, carrying I/O, and live with only optimized paths.

    `known` is 0 if sysfs shows none. `device`: the target's block device exists. `attachment` is
    the one observed; `TargetHealth` ignores observations of an older one.
    """

    known: int = 0
    carrying: int = 0
    best: int = 0
    device: bool = True
    attachment: int = 0


@dataclass(slots=True)
class _Run:
    """The failures of one direction since its last success."""

    of_target: int = 0
    slots: set[int] = field(default_factory=set)

    @property
    def is_too_long(self) -> bool:
        return self.of_target >= FAILURES_MAX or len(self.slots) >= FAILED_SLOTS_MAX


class TargetHealth:
    """The health of one target. An attachment is a number that each `attached` increments."""

    def __init__(self, *, can_return: bool = True) -> None:
        """Without `can_return` nothing attaches it again, so failures do not make it gone."""
        self.verdict = Verdict.OK
        #: The reason why it is not ok, for display.
        self.reason = ""
        self.attachment = 0
        self._can_return = can_return
        self._under_way: Counter[int] = Counter()  # operations in progress, by attachment
        self._late: Counter[int] = Counter()  # operations past their deadline, by attachment
        self._lost = ""  # the reason why it is gone; empty if it is not
        self._unwritable: set[str] = set()  # the reasons why nothing can be written
        self._paths = PathStates()
        self._runs = {False: _Run(), True: _Run()}  # by is_write

    def busy(self, attachment: int) -> bool:
        """Return whether an operation uses this attachment's descriptors."""
        return self._under_way[attachment] > 0

    def began(self, attachment: int, count: int) -> None:
        """Count operations that were submitted with the files of this attachment."""
        self._under_way[attachment] += count

    def late(self, attachment: int, count: int) -> None:
        """Count operations past their deadline, with buffers that the kernel still has."""
        self._late[attachment] += count
        self._judge()

    def released(self, attachment: int, count: int, late: int) -> None:
        """Count operations that the kernel has released, in time and `late`."""
        self._under_way[attachment] -= count + late
        if late:
            self._late[attachment] -= late
            self._judge()

    def ended(self, attachment: int, outcome: Outcome, place: int, *, is_write: bool) -> None:
        """Apply an outcome. Deadlines and cancellations are not answers of the target."""
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
            self.lost(f"{'writes' if is_write else 'reads'} fail in a row, now with {outcome}")

    def watched(self, paths: PathStates) -> None:
        """Apply the state that sysfs shows now."""
        if paths.attachment != self.attachment:
            return
        self._paths = paths
        if not paths.device:
            self.lost("its block device has disappeared")
        self._judge()

    def writes(self, may: bool, reason: str) -> None:
        """Note whether writes are possible, or the reason why not."""
        (self._unwritable.discard if may else self._unwritable.add)(reason)
        self._judge()

    def lost(self, reason: str) -> None:
        """Mark the target gone until `attached`."""
        if self._can_return:
            self._lost = self._lost or reason
            self._judge()

    def attached(self) -> None:
        """Forget the old descriptors: new ones serve the target."""
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
            found = Verdict.DEGRADED, f"{paths.best} of {paths.known} controllers at their best"
        elif self._unwritable:
            found = Verdict.DEGRADED, f"nothing is written: {min(self._unwritable)}"
        else:
            found = Verdict.OK, ""
        self.verdict, self.reason = found
