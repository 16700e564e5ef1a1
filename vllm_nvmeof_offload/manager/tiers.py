# SPDX-License-Identifier: Apache-2.0
"""Both tiers' entries, slots and eviction: the part of the core that hands out places.

An entry is in a tier's policy exactly while it is evictable there (`settle`), and rests in the
index exactly while nothing works on it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from vllm_nvmeof_offload.manager.adoption import Agreement
from vllm_nvmeof_offload.manager.index import Entry, Event, Index, State
from vllm_nvmeof_offload.manager.ledger import Op
from vllm_nvmeof_offload.manager.plan import Source, WritePolicy
from vllm_nvmeof_offload.manager.policy import EvictionPolicy, LruPolicy, MakePolicy
from vllm_nvmeof_offload.manager.recency import Recency
from vllm_nvmeof_offload.manager.residency import ResidencyLog
from vllm_nvmeof_offload.manager.slots import SlotPool
from vllm_nvmeof_offload.manager.targets import Targets

__all__ = ["Tiers"]


class Tiers:
    """Index, cache slots, pool slots, and the cached chunks that wait to be written.

    write-through: what waits is evictable like anything else, and is written in the order in
    which it came. on eviction: what waits (`waiting`) goes after what need not be written
    (`clean`), and is written coldest first.
    """

    def __init__(
        self,
        policy: MakePolicy,
        counters: Counter[str],
        writes: WritePolicy = WritePolicy.THROUGH,
        credit_share: float = 0.0,
    ) -> None:
        self.demotes = writes is WritePolicy.ON_EVICTION
        #: Told of every chunk that comes to a tier or leaves it; None: nobody asks.
        self.changes: ResidencyLog | None = None
        #: Evictions of clean slots while a colder one waited to be written.
        self.passed_over = 0
        self._counters = counters
        self._make_policy = policy
        self._credit_share = credit_share
        self._evicted: list[bytes] = []
        self._uses = 0
        self._arrivals = 0
        self._size(0, Targets(0, 1, policy))

    def _size(self, cache_slots: int, targets: Targets) -> None:
        self.index = Index(cache_slots, targets.slots.capacity)
        self.cache = SlotPool(cache_slots)
        self.targets = targets
        self.pool = targets.slots
        self.backlog = 0
        self._recency = Recency(cache_slots, self._credit_share)
        self._arrived = array("Q", bytes(8 * cache_slots))  # by cache slot: when it began to wait
        self._forget_order()

    def _forget_order(self) -> None:
        """Nothing is evictable in the cache, and nothing waits."""
        self._recency.forget_all()
        self._wanted = bytearray(self.cache.capacity)
        self.clean: EvictionPolicy = self._make_policy(self._recency.used)
        # Written through, chunks go in the order in which they came, whatever the policy.
        self.waiting: EvictionPolicy = LruPolicy(self._arrived)
        if self.demotes:
            self.waiting = self._make_policy(self._recency.used)

    def attach(self, agreement: Agreement) -> None:
        """Take the agreed sizes and adopt the agreed entries."""
        capacity, adopted = agreement.capacity, agreement.entries
        targets = Targets(capacity.pool_slots, capacity.target_count, self._make_policy)
        self._size(capacity.cache_slots, targets)
        slots, count = adopted.pool_slots, len(adopted)
        self.index.adopt(slots, adopted.generations, adopted.keys)
        used = np.frombuffer(targets.recency.used, np.uint64)
        used[slots] = np.arange(1, count + 1, dtype=np.uint64)
        self._uses += count
        targets.adopt(slots)
        self._counters["adopted"] += count
        if self.changes is not None:
            self.changes.came(Source.POOL, adopted.keys)

    # -- slots ------------------------------------------------------------------------

    def take_cache_slot(self, *, spare_unwritten: bool = False) -> int | None:
        """A free slot, evicting if need be; None if everything is pinned.

        spare_unwritten: do not evict, either, what on-eviction writing has not written yet.
        """
        slot = self.cache.take()
        if slot is not None:
            return slot
        victim = self.clean.victim()
        if victim is not None:
            self._note_who_was_colder(victim)
        elif self.demotes and not spare_unwritten:
            victim = self.waiting.victim()
        if victim is None:
            return None
        entry = self.index.in_cache_slot(victim)
        self._counters["evicted_cpu"] += 1
        self.leave_cache(entry)
        self._evict(entry, Event.EVICT_CACHE)
        return self.cache.take()

    def hold_back(self, keys: Iterable[bytes]) -> list[int]:
        """Make what `keys` have in the cache not evictable, until `put_back`: a prefix must not
        make room for its own continuation, which nobody could find then."""
        found = (self.index.cached.get(key) for key in keys)
        held = [slot for slot in found if slot is not None and slot in self.clean]
        for slot in held:
            self.clean.withdraw(slot)
        return held

    def put_back(self, held: list[int]) -> None:
        for slot in held:
            self.clean.admit(slot)
        held.clear()

    def _note_who_was_colder(self, victim: int) -> None:
        if self.demotes:
            coldest = self.waiting.peek()
            used = self._recency.used
            self.passed_over += coldest is not None and used[coldest] < used[victim]

    def take_pool_slot(self) -> int | None:
        """A slot on a target that answers; None if there is none, or all there are pinned."""
        target = self.targets.choose()
        if target is None:
            return None
        slot = self.pool.take(target)
        if slot is not None:
            return slot
        victim = self.targets.victim(target)
        assert victim is not None
        entry = self.index.in_pool_slot(victim)
        self._counters["evicted_pool"] += 1
        self.leave_pool(entry)
        self._evict(entry, Event.EVICT_POOL)
        return self.pool.take(target)

    def give_cache(self, entry: Entry, slot: int) -> None:
        """`slot`, just taken, is for this pool entry's chunk to be read into."""
        assert entry.pool_slot is not None
        entry.cache_slot = slot
        self._recency.take_over(slot, self.targets.recency, entry.pool_slot)
        self.index.name_cache(entry)

    def give_pool(self, entry: Entry, slot: int) -> None:
        """`slot`, just taken, is for this cached entry's chunk to be written to."""
        assert entry.cache_slot is not None
        entry.pool_slot = slot
        self.targets.recency.take_over(slot, self._recency, entry.cache_slot)
        self.index.name_pool(entry)

    def leave_cache(self, entry: Entry) -> None:
        slot = entry.cache_slot
        assert slot is not None
        if self._wanted[slot]:
            self.unwant(slot)
            self._counters["write_refused"] += 1
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

    def let_go(self, op: Op, *, spare: frozenset[int] = frozenset()) -> None:
        """Let go of what the op uses, but for the chunks in `spare`."""
        for tier, slots in ((self.cache, op.cache_slots), (self.pool, op.pool_slots)):
            for index, slot in enumerate(slots):
                if slot is not None and index not in spare:
                    tier.unuse(slot)
        op.cache_slots = tuple(s if i in spare else None for i, s in enumerate(op.cache_slots))
        op.pool_slots = tuple(s if i in spare else None for i, s in enumerate(op.pool_slots))
        for index, entry in enumerate(op.entries):
            if index not in spare:
                self.settle(entry)

    # -- what waits to be written -----------------------------------------------------

    def want(self, slot: int) -> None:
        """The chunk in this cache slot, in use until `settle`, shall be written."""
        self._wanted[slot] = 1
        self.backlog += 1
        if not self.demotes:
            self._arrivals += 1
            self._arrived[slot] = self._arrivals
            self.waiting.admit(slot)

    def unwant(self, slot: int) -> None:
        """It is being written, or never will be."""
        self._wanted[slot] = 0
        self.backlog -= 1
        self.waiting.withdraw(slot)

    # -- entries ----------------------------------------------------------------------

    def on(self, entry: Entry, event: Event) -> State | None:
        """`event` has happened to the entry; returns its new state, None for ABSENT."""
        before = entry.state
        after = entry.on(event)
        if self.changes is not None:
            self.changes.moved(entry.identity.key, before, after)
        return after

    def touch(self, keys: Iterable[bytes], *, ended: bool = False) -> None:
        """`keys`, in prefix order, were used, `ended`: by an ended request. Heads outlive tails."""
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
        nothing works on it, let it rest: the caller must not use this object any more."""
        if not self.index.holds(entry):
            return  # doomed, or let go and at rest since
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
        if idle and state in (State.CACHED, State.BOTH, State.POOLED):
            self.index.rest(entry)

    def doom(self, entry: Entry, *, retire: bool = False) -> None:
        """Miss at once; the slots are freed at their last release (rule 8).

        retire: but for the pool slot, which is not used again.
        """
        if not self.index.holds(entry):
            return  # gone already, or the key has been stored anew since
        self.on(entry, Event.DOOM)
        self._counters["pool_slots_retired"] += retire and entry.pool_slot is not None
        self._forget(entry, retire=retire)

    def reset(self) -> None:
        """Doom every entry; a slot that nothing uses is free at once."""
        self.backlog = self.passed_over = 0
        self._forget_order()
        self.targets.forget()
        for entry in self.index.awake():
            self.doom(entry)
        if self.changes is not None:
            self.changes.all_leave(self.index)
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
        """The policy that this cache slot is in while it is evictable."""
        return self.waiting if self.demotes and self._wanted[slot] else self.clean
