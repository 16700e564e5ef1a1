# SPDX-License-Identifier: Apache-2.0
"""The verdict on each target: ok, degraded, suspect, gone. Pure; one thread, the pipeline's.

verdict    when                                                      I/O there
========   =======================================================   =========================
ok         nothing below                                             all
degraded   a controller is not live, or a path not optimized         all
suspect    an operation is past its deadline, and the kernel still   none: it fails at once
           has its buffer; or none of its controllers carries I/O    with DEADLINE
gone       of its reads, or of its writes, `FAILURES_MAX` in a row   none, as above, until
           fail with an error of target scope (`errors.ERRORS`),     attached again
           or EIO on `FAILED_SLOTS_MAX` slots in a row; or its
           block device has disappeared

ok and degraded are *usable*; only that decides anything in the manager. Suspect ends by
itself, when the kernel has returned every buffer and a controller carries I/O. Gone ends with
`attached` alone, whatever else changes meanwhile.

Re-attachment (`reattach`, `prober`). As soon as the kernel has nothing of a gone target any
more, its descriptors are closed and its lock goes, so that the file system can be unmounted: a
dead xfs cannot be mounted again while anything holds the old mount. Short-lived child
processes look at its path: at once when the mount table changes, else every
`reattach.PROBE_S_MIN` seconds, twice as long after each failure, up to `PROBE_S_MAX`. A child
takes the rank directory's lock, finds this pool's superblock (uuid, geometry, epoch), reads a
page of the slab, brings a superblock that missed a reset up to date, and hands its descriptors
over. What is submitted from then on belongs to a new *attachment*; what is still under way in
an older one counts for nothing any more. The device's name, and its wwid, do not matter. A
suspect target is looked at as rarely, and attached again only where another file system than
the one that hangs is mounted there by now.

The manager keeps a target's entries while it is away; look-ups there miss. What is on disk
afterwards proves itself by header and CRC at each read: a wrong or an older disk is a miss.
"""

from __future__ import annotations

import enum
import errno
from collections import Counter
from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind, Scope

__all__ = ["FAILED_SLOTS_MAX", "FAILURES_MAX", "PathStates", "TargetHealth", "Verdict"]

#: Failures of target scope, without a success of that direction between, that make it gone.
FAILURES_MAX = 3
#: EIO may be one bad place. On so many different slots, without a success between, it is not.
FAILED_SLOTS_MAX = 8


class Verdict(enum.Enum):
    """The later, the worse."""

    OK = "ok"
    DEGRADED = "degraded"
    SUSPECT = "suspect"
    GONE = "gone"

    @property
    def usable(self) -> bool:
        return self in (Verdict.OK, Verdict.DEGRADED)


@dataclass(frozen=True, slots=True)
class PathStates:
    """How many controllers a target has, how many carry I/O, how many are live and optimized.

    known 0: none is to be seen, or it lies on something else. device: is its block device there?
    attachment: whose these are; what was seen of an older one counts for nothing.
    """

    known: int = 0
    carrying: int = 0
    best: int = 0
    device: bool = True
    attachment: int = 0


@dataclass(slots=True)
class _Run:
    """Failures of one direction since its last success."""

    of_target: int = 0
    slots: set[int] = field(default_factory=set)

    @property
    def too_long(self) -> bool:
        return self.of_target >= FAILURES_MAX or len(self.slots) >= FAILED_SLOTS_MAX


class TargetHealth:
    """One target's. An attachment is a number that counts up with each `attached`."""

    def __init__(self, *, can_return: bool = True) -> None:
        """can_return: False where nobody would attach it again: failures do not make it gone."""
        self.verdict = Verdict.OK
        #: Why it is not ok, for people.
        self.reason = ""
        self.attachment = 0
        self._can_return = can_return
        self._under_way: Counter[int] = Counter()  # attachment → operations, their buffers too
        self._late: Counter[int] = Counter()  # attachment → those past their deadline
        self._lost = ""  # why it is gone
        self._paths = PathStates()
        self._runs = {False: _Run(), True: _Run()}  # by is_write

    def busy(self, attachment: int) -> bool:
        """Does an operation use this attachment's descriptors?"""
        return self._under_way[attachment] > 0

    # -- operations -------------------------------------------------------------------

    def began(self) -> int:
        """An operation goes to the engine; returns the attachment that it belongs to."""
        self._under_way[self.attachment] += 1
        return self.attachment

    def late(self, attachment: int) -> None:
        """An operation is past its deadline, and the kernel still has its buffer."""
        self._late[attachment] += 1
        self._judge()

    def released(self, attachment: int, *, late: bool) -> None:
        """The kernel has nothing of an operation any more. late: it was reported so before."""
        self._under_way[attachment] -= 1
        if late:
            self._late[attachment] -= 1
            self._judge()

    def ended(self, attachment: int, outcome: Outcome, pool_slot: int, *, is_write: bool) -> None:
        """An operation has its outcome. Deadlines and cancellations are no answer of the target."""
        if attachment != self.attachment:
            return
        run = self._runs[is_write]
        if outcome.kind is not OutcomeKind.IO_ERROR:
            if outcome.kind not in (OutcomeKind.DEADLINE, OutcomeKind.CANCELLED):
                run.of_target = 0  # bytes came, right or wrong
                run.slots.clear()
            return
        if outcome.scope is Scope.TARGET:
            run.of_target += 1
        elif outcome.errno == errno.EIO:
            run.slots.add(pool_slot)
        if run.too_long:
            self.lost(f"{'writes' if is_write else 'reads'} fail in a row, now with {outcome}")

    # -- from outside -----------------------------------------------------------------

    def watched(self, paths: PathStates) -> None:
        """What sysfs shows now."""
        if paths.attachment != self.attachment:
            return
        self._paths = paths
        if not paths.device:
            self.lost("its block device has disappeared")
        self._judge()

    def lost(self, reason: str) -> None:
        """It is gone, until `attached`."""
        if self._can_return:
            self._lost = self._lost or reason
            self._judge()

    def attached(self) -> None:
        """New descriptors serve it: what is known of the old ones is history."""
        self.attachment += 1
        self._lost = ""
        self._paths = PathStates()
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
        else:
            found = Verdict.OK, ""
        self.verdict, self.reason = found
