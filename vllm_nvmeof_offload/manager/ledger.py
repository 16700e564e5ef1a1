# SPDX-License-Identifier: Apache-2.0
"""The ledger of operations: commands not sent yet, and the reports and releases still owed.

A fact holds when all ranks reported it, and a failure on any rank is the fact's failure. An
op's slots are released when all ranks have released them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import CANCELLED, Outcome
from vllm_nvmeof_offload.manager.index import Entry
from vllm_nvmeof_offload.protocol import CancelCommand, Command, OpKind, OpReport, ReleaseReport


@dataclass(slots=True, eq=False)
class Op:
    """One operation under way: a command, and all that is known of its execution."""

    number: int
    kind: OpKind
    issued_s: float
    outcomes_left: int
    releases_left: int
    #: By chunk, in the command's order.
    entries: tuple[Entry, ...]
    #: By chunk: the slots that it uses; None: none, or released already.
    cache_slots: list[int | None]
    pool_slots: list[int | None]
    #: Chunks of a load, by index, that are read into the cache slot of their entry.
    landing: frozenset[int]
    failures: dict[int, Outcome] = field(default_factory=dict)
    #: For a load or probe, by target: chunks that others had yet to read before it.
    queued: tuple[int, ...] = ()
    #: A fetch that was cancelled: its end does not concern its entry any more.
    detached: bool = False
    #: A fetch that is there to be timed.
    probe: bool = False
    #: Its duration on the slowest of the ranks that have reported.
    seconds: float = 0.0
    #: For a load or fetch: how long the model had computed prompts when it was planned.
    prompts_s: float = 0.0


class Ledger:
    """Ops under way by number, oldest first.

    prompts_s: seconds that the model has computed prompts, since the start.
    """

    def __init__(
        self,
        world_size: int,
        clock: Callable[[], float],
        prompts_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.prompts_s = prompts_s
        #: Commands to send with the next step, in order, by op number. A cancellation has its
        #: target's number, negated: a cancelled op was sent, so its own command is not here.
        self.unsent: dict[int, Command] = {}
        self._world_size = world_size
        self._clock = clock
        self._last = 0
        self._ops: dict[int, Op] = {}

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops.values())

    def open(
        self,
        kind: OpKind,
        entries: tuple[Entry, ...] = (),
        cache_slots: Sequence[int | None] = (),
        pool_slots: Sequence[int | None] = (),
        landing: frozenset[int] = frozenset(),
    ) -> Op:
        self._last += 1
        ranks, slots = self._world_size, (list(cache_slots), list(pool_slots))
        op = Op(self._last, kind, self._clock(), ranks, ranks, entries, *slots, landing)
        if kind in (OpKind.LOAD, OpKind.FETCH):
            op.prompts_s = self.prompts_s()
        self._ops[op.number] = op
        return op

    def cancel(self, number: int) -> None:
        """Ask the ranks to stop the part of this op, which was sent, that has not started."""
        self.unsent[-number] = CancelCommand(number)

    def withdraw(self, number: int) -> Op:
        """Take back an op whose command was not sent: no rank will report on it."""
        self.unsent.pop(number, None)
        return self._ops.pop(number)

    def apply(self, report: OpReport | ReleaseReport) -> tuple[Op, bool, bool]:
        """Count one rank's report: (op, its outcome is known now, it is released now)."""
        op = self._ops[report.op]
        decided = False
        if isinstance(report, OpReport):
            assert op.outcomes_left > 0, f"op {op.number} reported too often"
            for index, outcome in report.failures:
                # A real failure on any rank outweighs a cancellation on another.
                if op.failures.get(index, CANCELLED) == CANCELLED:
                    op.failures[index] = outcome
            op.outcomes_left -= 1
            op.seconds = max(op.seconds, report.seconds)
            decided = op.outcomes_left == 0
            if not report.released:
                return op, decided, False
        op.releases_left -= 1
        assert op.releases_left >= op.outcomes_left, f"op {op.number} released before its outcome"
        if op.releases_left:
            return op, decided, False
        del self._ops[op.number]
        return op, decided, True
