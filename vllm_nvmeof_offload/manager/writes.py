# SPDX-License-Identifier: Apache-2.0
"""Writes to the pool: when a cached chunk is written, and what follows a write's outcome.

Writes under way pin their cache slots, so they are bounded to a share of the slots; the other
chunks wait (`Tiers.waiting`), evictable. While no target answers, all of them wait.

Write-through begins a write as soon as this bound allows. On-eviction writing (demotion) begins
one ahead of need, because eviction must not wait for a write: while less than a share of the
cache slots is free or clean, and for each chunk that was evicted although a colder one waits. So
hot chunks are never written, and a chunk that is evicted before its write is counted as refused.
"""

from __future__ import annotations

import errno
from collections import Counter

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind, Scope
from vllm_nvmeof_offload.manager.handshake import CoreConfig, WritePolicy
from vllm_nvmeof_offload.manager.index import Entry, Event, State
from vllm_nvmeof_offload.manager.ledger import Ledger, Op
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.protocol import OpKind, WriteCommand

#: A pool slot is retired after this many reads, or writes, in a row have failed.
_FAILURES_MAX = 3


class WriteBehind:
    """Begins writes and follows them to their end."""

    def __init__(self, config: CoreConfig, tiers: Tiers, ledger: Ledger) -> None:
        slots = tiers.cache.capacity
        self.pending = 0
        self._pending_max = max(1, int(config.writes_pending_share * slots))
        self._clean_min = max(1, int(config.clean_share * slots))
        self._on = tiers.pool.capacity > 0 and config.write_policy is not WritePolicy.OFF
        self._tiers = tiers
        self._ledger = ledger
        #: By pool slot, in a row. Counted apart: a device may take bytes and not return them.
        self._failed_reads, self._failed_writes = Counter[int](), Counter[int]()

    def want(self, entry: Entry) -> None:
        """`entry` is cached for the first time: let it wait for its write."""
        if self._on:
            assert entry.cache_slot is not None
            self._tiers.want(entry.cache_slot)

    def drain(self) -> None:
        """Begin as many writes as the policy wants and the bound allows."""
        tiers = self._tiers
        while self.pending < self._pending_max and self._due():
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
            tiers.begin_write(entry, pool_slot)
            op = self._ledger.open(OpKind.WRITE, (entry,), (slot,), (pool_slot,))
            command = WriteCommand(op.number, entry.identity, slot, pool_slot)
            self._ledger.unsent[op.number] = command
            self.count(pool_slot, 1)
            tiers.settle(entry)

    def _due(self) -> bool:
        """Whether the write policy wants another write."""
        tiers = self._tiers
        if not tiers.demotes or tiers.passed_over:
            return True
        return tiers.cache.free + len(tiers.clean) + self.pending < self._clean_min

    def count(self, pool_slot: int, change: int) -> None:
        """+1: a write to this slot is planned. -1: it is over, or was never sent."""
        self.pending += change
        self._tiers.targets.pending[self._tiers.pool.lane(pool_slot)] += change

    def ended(self, entry: Entry, pool_slot: int, failure: Outcome | None) -> None:
        """A write is over on every rank; any rank's failure is its failure (rule 5)."""
        self.count(pool_slot, -1)
        if entry.state is State.DOOMED:
            return  # its slots were orphaned when it was doomed
        tiers = self._tiers
        if failure is None:
            self._failed_writes.pop(pool_slot, None)
            tiers.on(entry, Event.WRITTEN)
            tiers.counters["written_chunks"] += 1
            return
        tiers.on(entry, Event.WRITE_FAILED)
        worn = _blame(self._failed_writes, pool_slot, failure) or failure.errno == errno.ENOSPC
        tiers.counters["retired_pool_slots"] += worn
        tiers.leave_pool(entry, retire=worn)

    def read_failed(self, pool_slot: int, failure: Outcome) -> bool:
        """A read of this pool slot has failed; returns whether to retire the slot."""
        return _blame(self._failed_reads, pool_slot, failure)

    def reads_ended(self, op: Op) -> None:
        """A load or fetch is over: its successful reads end their slots' rows of failures."""
        if self._failed_reads:
            for index, slot in enumerate(op.pool_slots):
                if slot is not None and index not in op.failures:
                    self._failed_reads.pop(slot, None)

    def reset(self) -> None:
        """Every slot is empty: forget their failures."""
        self._failed_reads.clear()
        self._failed_writes.clear()


def _blame(failed: Counter[int], pool_slot: int, failure: Outcome) -> bool:
    """Count a slot's failure, unless the whole target has failed; returns whether to retire it."""
    if failure.kind is OutcomeKind.IO_ERROR and failure.scope is Scope.SLOT:
        failed[pool_slot] += 1
    return failed[pool_slot] >= _FAILURES_MAX
