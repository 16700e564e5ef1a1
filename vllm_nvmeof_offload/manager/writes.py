# SPDX-License-Identifier: Apache-2.0
"""Write-behind: which cached entries are written to the pool, and what becomes of a write.

Bounded: writes under way pin their cache slots, so at most a share of the slots is in writes;
the rest waits in `Tiers.unwritten`, evictable. While no target answers, everything waits.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable

from vllm_nvmeof_offload.errors import Outcome, OutcomeKind
from vllm_nvmeof_offload.manager.index import Entry, Event, State
from vllm_nvmeof_offload.manager.ledger import Ledger, OpKind
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.protocol import Command, WriteCommand

__all__ = ["WriteBehind"]

#: A pool slot whose writes failed this often is not used again.
_FAILURES_MAX = 3


class WriteBehind:
    """`pending_max` is set once the capacity is known."""

    def __init__(
        self,
        tiers: Tiers,
        ledger: Ledger,
        commands: list[Command],
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.pending = 0
        self.pending_max = 1
        self._tiers = tiers
        self._ledger = ledger
        self._commands = commands
        self._counters = counters
        self._clock = clock
        self._failures: Counter[int] = Counter()  # pool slot → failed writes

    def want(self, entry: Entry) -> None:
        """`entry` is cached and shall be written."""
        if self._tiers.pool.capacity:
            self._tiers.unwritten[entry.identity.key] = entry

    def drain(self) -> None:
        """Begin as many writes as may be."""
        unwritten = self._tiers.unwritten
        while unwritten and self.pending < self.pending_max:
            key, entry = next(iter(unwritten.items()))
            if entry.state is State.CACHED:
                pool_slot = self._tiers.take_pool_slot()
                if pool_slot is None:
                    return  # until a slot is released, or a target answers again
                self._begin(entry, pool_slot)
            del unwritten[key]

    def _begin(self, entry: Entry, pool_slot: int) -> None:
        assert entry.cache_slot is not None
        entry.pool_slot = pool_slot
        entry.on(Event.WRITE_BEGIN)
        self._tiers.cache.use(entry.cache_slot)
        self._tiers.pool.use(pool_slot)
        op = self._ledger.open(
            OpKind.WRITE, self._clock(), (entry,), (entry.cache_slot,), (pool_slot,)
        )
        command = WriteCommand(op.number, entry.identity, entry.cache_slot, pool_slot)
        self._commands.append(command)
        self.pending += 1
        self._tiers.settle(entry)

    def ended(self, entry: Entry, failure: Outcome | None) -> None:
        """A write is over on every rank; any rank's failure is its failure (rule 5)."""
        self.pending -= 1
        if entry.state is State.DOOMED:
            return  # its slots were orphaned when it was doomed
        if failure is None:
            entry.on(Event.WRITTEN)
            self._counters["written"] += 1
            return
        pool_slot = entry.pool_slot
        assert pool_slot is not None
        entry.on(Event.WRITE_FAILED)
        self._failures[pool_slot] += failure.kind is OutcomeKind.IO_ERROR
        full = failure.errno == errno.ENOSPC
        worn = self._failures[pool_slot] >= _FAILURES_MAX
        self._counters["write_failed"] += 1
        self._counters["pool_slots_retired"] += full or worn
        self._tiers.leave_pool(entry, retire=full or worn)
