# SPDX-License-Identifier: Apache-2.0
"""The ledger of operations under way: who has reported, who has released.

A fact holds when all ranks reported it, and a failure on any rank is the fact's failure. An
op's slots are let go when all ranks have released them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import CANCELLED, Outcome
from vllm_nvmeof_offload.manager.index import Entry
from vllm_nvmeof_offload.protocol import OpReport, ReleaseReport

__all__ = ["Ledger", "Op", "OpKind"]


class OpKind(enum.Enum):
    STORE = "store"
    LOAD = "load"
    WRITE = "write"
    FETCH = "fetch"
    RESET = "reset"


@dataclass(slots=True, eq=False)
class Op:
    """One command under way.

    entries: the entry of each chunk, in the command's order.
    cache_slots, pool_slots: what each chunk uses; None: nothing, or let go already.
    landing: indices of a load's chunks that are read into the cache slot of their entry.
    queued: of a load or probe; by target, chunks that others had yet to read before it.
    detached: a fetch that was cancelled: its entry has left it and does not hear of its end.
    probe: a fetch that is there to be timed.
    seconds: what it took on the slowest rank, as far as they have reported.
    prompts_s: of a load or fetch; how long the model had computed prompts when it was planned.
    """

    number: int
    kind: OpKind
    issued_s: float
    outcomes_left: int
    releases_left: int
    entries: tuple[Entry, ...] = ()
    cache_slots: tuple[int | None, ...] = ()
    pool_slots: tuple[int | None, ...] = ()
    landing: frozenset[int] = frozenset()
    failures: dict[int, Outcome] = field(default_factory=dict)
    queued: tuple[int, ...] = ()
    detached: bool = False
    probe: bool = False
    seconds: float = 0.0
    prompts_s: float = 0.0


_TIMED = (OpKind.LOAD, OpKind.FETCH)


class Ledger:
    """Ops by number, oldest first."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._next = 1
        self._ops: dict[int, Op] = {}
        #: Seconds that the model has computed prompts, since the start.
        self.prompts_s: Callable[[], float] = lambda: 0.0

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops.values())

    def open(
        self,
        kind: OpKind,
        now_s: float,
        entries: tuple[Entry, ...] = (),
        cache_slots: tuple[int | None, ...] = (),
        pool_slots: tuple[int | None, ...] = (),
        landing: frozenset[int] = frozenset(),
    ) -> Op:
        op = Op(
            self._next,
            kind,
            now_s,
            self._world_size,
            self._world_size,
            entries,
            cache_slots,
            pool_slots,
            landing,
        )
        if kind in _TIMED:
            op.prompts_s = self.prompts_s()
        self._next += 1
        self._ops[op.number] = op
        return op

    def withdraw(self, number: int) -> Op:
        """Take back an op whose command was never sent to any rank."""
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
