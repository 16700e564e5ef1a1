# SPDX-License-Identifier: Apache-2.0
"""Writes to the pool: which cached chunks are written when, and what becomes of a write.

Bounded: writes under way pin their cache slots, so at most a share of the slots is in writes;
the rest waits (`Tiers.waiting`), evictable. While no target answers, everything waits.

Write-through begins a write as soon as it may. On-eviction writing (demotion) begins one ahead
of need, for eviction must not wait for a write: while less than a share of the cache slots is
free or clean, and for each chunk that was evicted although a colder one waits. So what is hot
is never written, and a chunk that must go before its write could begin is counted as refused.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind, Scope
from vllm_nvmeof_offload.manager.index import Entry, Event, State
from vllm_nvmeof_offload.manager.ledger import Ledger, Op, OpKind
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.manager.types import CoreConfig, WritePolicy
from vllm_nvmeof_offload.protocol import Command, WriteCommand

__all__ = ["WriteBehind"]

#: A pool slot of which so many reads, or writes, in a row have failed is not used again.
_FAILURES_MAX = 3


class WriteBehind:
    """Its bounds are set by `attach`, once the capacity is known."""

    def __init__(
        self,
        config: CoreConfig,
        tiers: Tiers,
        ledger: Ledger,
        commands: list[Command],
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.pending = 0
        self.pending_max = 1
        self._clean_min = 1
        self._config = config
        self._tiers = tiers
        self._ledger = ledger
        self._commands = commands
        self._counters = counters
        self._clock = clock
        #: By pool slot, in a row. Apart: what a device takes it may not give back.
        self._failed_reads: Counter[int] = Counter()
        self._failed_writes: Counter[int] = Counter()

    def attach(self, cache_slots: int) -> None:
        self.pending_max = max(1, int(self._config.writes_pending_share * cache_slots))
        self._clean_min = max(1, int(self._config.clean_share * cache_slots))

    def want(self, entry: Entry) -> None:
        """`entry` is cached, for the first time: write it, now or later, unless nobody wants."""
        if self._tiers.pool.capacity and self._config.write_policy is not WritePolicy.OFF:
            assert entry.cache_slot is not None
            self._tiers.want(entry.cache_slot)

    def drain(self) -> None:
        """Begin as many writes as may be, and need be."""
        tiers = self._tiers
        while self.pending < self.pending_max and self._due():
            slot = tiers.waiting.peek()
            if slot is None:
                tiers.passed_over = 0
                return
            pool_slot = tiers.take_pool_slot()
            if pool_slot is None:
                return  # until a slot is released, or a target answers again
            entry = tiers.index.in_cache_slot(slot)
            assert entry.state is State.CACHED
            tiers.unwant(slot)
            tiers.passed_over -= tiers.passed_over > 0
            self._begin(entry, pool_slot)

    def _due(self) -> bool:
        """Whether a write may begin, as far as the write policy goes."""
        tiers = self._tiers
        if not tiers.demotes or tiers.passed_over:
            return True
        return tiers.cache.free + len(tiers.clean) + self.pending < self._clean_min

    def _begin(self, entry: Entry, pool_slot: int) -> None:
        assert entry.cache_slot is not None
        self._tiers.give_pool(entry, pool_slot)
        self._tiers.on(entry, Event.WRITE_BEGIN)
        self._tiers.cache.use(entry.cache_slot)
        self._tiers.pool.use(pool_slot)
        op = self._ledger.open(
            OpKind.WRITE, self._clock(), (entry,), (entry.cache_slot,), (pool_slot,)
        )
        command = WriteCommand(op.number, entry.identity, entry.cache_slot, pool_slot)
        self._commands.append(command)
        self._count(pool_slot, 1)
        self._tiers.settle(entry)

    def withdrawn(self, pool_slot: int) -> None:
        """A write's command was never sent."""
        self._count(pool_slot, -1)

    def _count(self, pool_slot: int, change: int) -> None:
        self.pending += change
        self._tiers.targets.pending[self._tiers.pool.lane(pool_slot)] += change

    def ended(self, entry: Entry, pool_slot: int, failure: Outcome | None) -> None:
        """A write is over on every rank; any rank's failure is its failure (rule 5)."""
        self._count(pool_slot, -1)
        if entry.state is State.DOOMED:
            return  # its slots were orphaned when it was doomed
        if failure is None:
            self._failed_writes.pop(pool_slot, None)
            self._tiers.on(entry, Event.WRITTEN)
            self._counters["written"] += 1
            return
        self._tiers.on(entry, Event.WRITE_FAILED)
        worn = _blame(self._failed_writes, pool_slot, failure) or failure.errno == errno.ENOSPC
        self._counters["write_failed"] += 1
        self._counters["pool_slots_retired"] += worn
        self._tiers.leave_pool(entry, retire=worn)

    def read_failed(self, pool_slot: int, failure: Outcome) -> bool:
        """A read of this pool slot has failed; returns whether it shall not be used again."""
        return _blame(self._failed_reads, pool_slot, failure)

    def reads_ended(self, op: Op) -> None:
        """A load or fetch is over: a slot that was read well has no failed reads any more."""
        if not self._failed_reads:
            return
        for index, slot in enumerate(op.pool_slots):
            if slot is not None and index not in op.failures:
                self._failed_reads.pop(slot, None)

    def reset(self) -> None:
        """No slot holds anything any more: each begins without failures."""
        self._failed_reads.clear()
        self._failed_writes.clear()


def _blame(failed: Counter[int], pool_slot: int, failure: Outcome) -> bool:
    """Count a slot's failure; returns whether it shall not be used again.

    What lies with the whole target is not the slot's fault.
    """
    if failure.kind is OutcomeKind.IO_ERROR and failure.scope is Scope.SLOT:
        failed[pool_slot] += 1
    return failed[pool_slot] >= _FAILURES_MAX
