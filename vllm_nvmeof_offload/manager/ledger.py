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
    entries: tuple[Entry, ...]  # by chunk, in the command's order
    cache_slots: list[int | None]  # by chunk; None: none, or released already
    pool_slots: list[int | None]  # likewise
    landing: frozenset[int]  # chunks of a load that are read into the cache slot of their entry
    failures: dict[int, Outcome] = field(default_factory=dict)  # by chunk
    queued: tuple[int, ...] = ()  # by target: chunks to be read there before a load or probe
    detached: bool = False  # a cancelled fetch: its end does not concern its entry any more
    probe: bool = False  # a fetch that is there to be timed
    seconds: float = 0.0  # on the slowest of the ranks that have reported
    prompts_s: float = 0.0  # how long the model had computed prompts when a read was planned


class Ledger:
    """Ops under way, oldest first. prompts_s: for how long the model has computed prompts."""

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
