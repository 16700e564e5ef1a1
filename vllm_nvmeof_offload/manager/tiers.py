# SPDX-License-Identifier: Apache-2.0
"""Both tiers' entries, slots and eviction: the part of the core that hands out places.

An entry is in a tier's policy exactly while it is evictable there (`settle`), and rests in the
index exactly while no operation works on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from vllm_nvmeof_offload.manager.eviction import EvictionPolicy, LruPolicy, MakePolicy, Recency
from vllm_nvmeof_offload.manager.handshake import Agreement, CoreConfig, WritePolicy
from vllm_nvmeof_offload.manager.index import MAY_REST, Entry, Event, Index, Source, State
from vllm_nvmeof_offload.manager.kv_events import KvEventLog
from vllm_nvmeof_offload.manager.ledger import Op
from vllm_nvmeof_offload.manager.slots import SlotPool
from vllm_nvmeof_offload.manager.target_choice import Targets
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import AdoptedEntries

# Look-ups are many, and an enum's member is looked up slowly.
_CPU, _POOL = Source.CPU, Source.POOL


class Tiers:
    """Index, cache slots, pool slots, and the cached chunks that wait to be written.

    write-through: waiting chunks are evictable like any other, and written in the order in which
    they came. on eviction: waiting chunks (`waiting`) are evicted after those that need no write
    (`clean`), and written coldest first.
    """

    def __init__(
        self,
        agreement: Agreement,
        policy: MakePolicy,
        counters: Counts,
        config: CoreConfig,
        changes: KvEventLog | None,
    ) -> None:
        """Adopt the agreed entries. changes: records every chunk that comes to a tier or leaves."""
        capacity = agreement.capacity
        self.demotes = config.write_policy is WritePolicy.ON_EVICTION
        self.counters = counters
        self.index = Index(capacity.cache_slots, capacity.pool_slots)
        self.cache = SlotPool(capacity.cache_slots)
        self.targets = Targets(capacity.pool_slots, capacity.target_count, policy)
        self.pool = self.targets.slots
        self._changes = changes
        self._make_policy = policy
        self._evicted: list[bytes] = []
        self._uses = self._arrivals = 0
        self._recency = Recency(capacity.cache_slots, config.credit_share)
        # By cache slot: when its chunk began to wait.
        self._arrived = array("Q", bytes(8 * capacity.cache_slots))
        self._forget_order()
        self._adopt(agreement.entries)

    def _forget_order(self) -> None:
        """Nothing is evictable in the cache, and nothing waits."""
        self.backlog = 0
        #: Evictions of clean slots while a colder one waited to be written.
        self.passed_over = 0
        self._recency.forget_all()
        self._wanted = bytearray(self.cache.capacity)
        self.clean = self._make_policy(self._recency.used)
        # Written through, chunks are written in the order in which they came, under any policy.
        self.waiting: EvictionPolicy = LruPolicy(self._arrived)
        if self.demotes:
            self.waiting = self._make_policy(self._recency.used)

    def _adopt(self, adopted: AdoptedEntries) -> None:
        slots, count = adopted.pool_slots, len(adopted)
        self.index.adopt(slots, adopted.generations, adopted.keys)
        used = np.frombuffer(self.targets.recency.used, np.uint64)
        used[slots] = np.arange(1, count + 1, dtype=np.uint64)
        self._uses += count
        self.targets.adopt(slots)
        self.counters["adopted_chunks"] += count
        if self._changes is not None:
            self._changes.add(Source.POOL, adopted.keys, removed=False)

    def lookup(self, key: bytes) -> Source | None:
        """Where `key` can be loaded from now; None is a miss."""
        # Called several times per chunk and step. Memory accesses take the time here, so nothing
        # is read, not even a slot's number, before it is needed.
        index, targets = self.index, self.targets
        if key in index.cached:
            return _CPU
        if key in index.pooled:
            return _POOL if not targets.suspects or targets.usable(index.pooled[key]) else None
        entry = index.awake.get(key)
        if entry is None:
            return None
        if entry.in_cache:
            return _CPU
        assert entry.pool_slot is not None
        return _POOL if targets.usable(entry.pool_slot) else None

    # -- slots ------------------------------------------------------------------------

    def take_cache_slot(self, *, spare_unwritten: bool = False) -> int | None:
        """A free slot, evicting if need be, but with `spare_unwritten` no chunk that on-eviction
        writing has not written yet; None if everything is pinned."""
        slot = self.cache.take()
        if slot is not None:
            return slot
        victim = self.clean.victim()
        if victim is not None:
            if self.demotes:
                coldest, used = self.waiting.peek(), self._recency.used
                self.passed_over += coldest is not None and used[coldest] < used[victim]
        elif self.demotes and not spare_unwritten:
            victim = self.waiting.victim()
        if victim is None:
            return None
        entry = self.index.in_cache_slot(victim)
        self.counters["evictions", "cpu"] += 1
        self.leave_cache(entry)
        self._evict(entry, Event.EVICT_CACHE)
        return self.cache.take()

    def hold_back(self, keys: Iterable[bytes]) -> list[int]:
        """Make the cached chunks of `keys` not evictable, until `put_back`: evicting a prefix to
        store its continuation would make the continuation unreachable."""
        found = (self.index.cached.get(key) for key in keys)
        held = [slot for slot in found if slot is not None and slot in self.clean]
        for slot in held:
            self.clean.withdraw(slot)
        return held

    def put_back(self, held: list[int]) -> None:
        for slot in held:
            self.clean.admit(slot)
        held.clear()

    def take_pool_slot(self) -> int | None:
        """A slot on a usable target, evicting if need be; None if all there are pinned."""
        target = self.targets.choose()
        if target is None:
            return None
        slot = self.pool.take(target)
        if slot is not None:
            return slot
        victim = self.targets.victim(target)
        assert victim is not None
        entry = self.index.in_pool_slot(victim)
        self.counters["evictions", "pool"] += 1
        self.leave_pool(entry)
        self._evict(entry, Event.EVICT_POOL)
        return self.pool.take(target)

    def begin_fetch(self, entry: Entry, slot: int) -> None:
        """This pool entry's chunk is to be read into cache slot `slot`, which was just taken."""
        assert entry.pool_slot is not None
        entry.cache_slot = slot
        self._recency.take_over(slot, self.targets.recency, entry.pool_slot)
        self.index.note_slots(entry)
        self.cache.use(slot)
        self.on(entry, Event.FETCH_BEGIN)

    def begin_write(self, entry: Entry, slot: int) -> None:
        """This cached entry's chunk is to be written to pool slot `slot`, which was just taken."""
        assert entry.cache_slot is not None
        entry.pool_slot = slot
        self.targets.recency.take_over(slot, self._recency, entry.cache_slot)
        self.index.note_slots(entry)
        self.cache.use(entry.cache_slot)
        self.pool.use(slot)
        self.on(entry, Event.WRITE_BEGIN)

    def leave_cache(self, entry: Entry) -> None:
        slot = entry.cache_slot
        assert slot is not None
        if self._wanted[slot]:
            self.unwant(slot)
            self.counters["refused_writes"] += 1
        self.clean.withdraw(slot)
        self._recency.forget(slot)
        self.cache.orphan(slot)
        entry.cache_slot = None

    def leave_pool(self, entry: Entry, *, retire: bool = False) -> None:
        assert entry.pool_slot is not None
        self.targets.place(entry.pool_slot, evictable=False)
        self.targets.recency.forget(entry.pool_slot)
        self.pool.orphan(entry.pool_slot, retire)
        entry.pool_slot = None

    def take_evicted(self) -> tuple[bytes, ...]:
        """Keys that were evicted for good since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def release(self, op: Op, *, spare: frozenset[int] = frozenset()) -> None:
        """Release the op's slots, except those of the chunks in `spare`."""
        for tier, slots in ((self.cache, op.cache_slots), (self.pool, op.pool_slots)):
            for index, slot in enumerate(slots):
                if slot is not None and index not in spare:
                    tier.release(slot)
                    slots[index] = None
        for index, entry in enumerate(op.entries):
            if index not in spare:
                self.settle(entry)

    # -- chunks that wait to be written -----------------------------------------------

    def want(self, slot: int) -> None:
        """Let the chunk in this cache slot, in use until `settle`, wait to be written."""
        self._wanted[slot] = 1
        self.backlog += 1
        if not self.demotes:
            self._arrivals += 1
            self._arrived[slot] = self._arrivals
            self.waiting.admit(slot)

    def unwant(self, slot: int) -> None:
        """The chunk in this cache slot waits no more: it is being written, or never will be."""
        self._wanted[slot] = 0
        self.backlog -= 1
        self.waiting.withdraw(slot)

    # -- entries ----------------------------------------------------------------------

    def on(self, entry: Entry, event: Event) -> State | None:
        """`event` has happened to the entry; returns its new state, None for ABSENT."""
        before = entry.state
        after = entry.on(event)
        if self._changes is not None:
            self._changes.moved(entry.identity.key, before, after)
        return after

    def touch(self, keys: Iterable[bytes], *, ended: bool = False) -> None:
        """`keys`, in prefix order, were used; ended: by an ended request. Heads outlive tails."""
        for key in reversed(list(keys)):
            cache_slot, pool_slot = self.index.slots(key)
            self._uses += 1
            if cache_slot is not None:
                self._recency.use(cache_slot, self._uses, ended=ended)
                self._home(cache_slot).touch(cache_slot)
            if pool_slot is not None:
                self.targets.touch(pool_slot, self._uses, ended=ended)

    def settle(self, entry: Entry) -> None:
        """Admit the entry to the policies in which it is evictable, withdraw it elsewhere; if
        no operation works on it, let it rest: the caller must not use this object any more."""
        if not self.index.holds(entry):
            return  # doomed, or released and at rest since
        state, idle = entry.state, True
        if entry.cache_slot is not None:
            idle = not self.cache.in_use(entry.cache_slot)
            home = self._home(entry.cache_slot)
            if idle and state in (State.CACHED, State.BOTH):
                home.admit(entry.cache_slot)
            else:
                home.withdraw(entry.cache_slot)
        if entry.pool_slot is not None:
            free = not self.pool.in_use(entry.pool_slot)
            evictable = free and state in (State.POOLED, State.BOTH)
            self.targets.place(entry.pool_slot, evictable=evictable)
            idle = idle and free
        if idle and state in MAY_REST:
            self.index.rest(entry)

    def doom(self, entry: Entry, *, retire: bool = False) -> None:
        """The key misses at once; the slots are freed at their last release (rule 8), except that
        with `retire` the pool slot is not used again."""
        if not self.index.holds(entry):
            return  # gone already, or the key has been stored again since
        self.on(entry, Event.DOOM)
        self.counters["retired_pool_slots"] += retire and entry.pool_slot is not None
        self._forget(entry, retire=retire)

    def reset(self) -> None:
        """Doom every entry; a slot that nothing uses is free at once."""
        self._forget_order()
        self.targets.forget()
        for entry in list(self.index.awake.values()):
            self.doom(entry)
        if self._changes is not None:
            self._changes.all_leave(self.index)
        self.index.clear()
        self.cache.orphan_unused()
        self.pool.orphan_unused()

    def _evict(self, entry: Entry, event: Event) -> None:
        if self.on(entry, event) is None:
            self._evicted.append(entry.identity.key)
            self._forget(entry)
        else:
            self.settle(entry)

    def _forget(self, entry: Entry, *, retire: bool = False) -> None:
        """Drop from the index and the policies; orphan the slots it still has."""
        self.index.drop(entry)
        if entry.cache_slot is not None:
            self.leave_cache(entry)
        if entry.pool_slot is not None:
            self.leave_pool(entry, retire=retire)

    def _home(self, slot: int) -> EvictionPolicy:
        """The policy that holds this cache slot while it is evictable."""
        return self.waiting if self.demotes and self._wanted[slot] else self.clean
