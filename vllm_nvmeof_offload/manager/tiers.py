# SPDX-License-Identifier: Apache-2.0
"""Both tiers' entries, slots and eviction: the part of the core that hands out places.

An entry is in a tier's policy exactly while it is evictable there (`settle`). The pool has one
policy a target, asked in turn: with a target suspect, the others go on evicting their own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from vllm_nvmeof_offload.manager.adoption import Agreement
from vllm_nvmeof_offload.manager.index import Entry, Event, Index, State
from vllm_nvmeof_offload.manager.ledger import Op
from vllm_nvmeof_offload.manager.policy import EvictionPolicy
from vllm_nvmeof_offload.manager.slots import SlotPool
from vllm_nvmeof_offload.protocol import SlotIdentity, VerdictReport

__all__ = ["Tiers"]


class Tiers:
    """Index, cache slots, pool slots, policies, and the entries that wait to be written."""

    def __init__(self, policy: Callable[[], EvictionPolicy], counters: Counter[str]) -> None:
        self.index = Index()
        self.cache = SlotPool()
        self.pool = SlotPool()
        self.unwritten: OrderedDict[bytes, Entry] = OrderedDict()
        self._counters = counters
        self._policy = policy
        self._cache_policy = policy()
        self._pool_policies = [policy()]
        self._evicted: list[bytes] = []
        self._uses = 0
        self._suspects: dict[int, set[int]] = {}  # target → ranks that find it suspect

    def attach(self, agreement: Agreement) -> None:
        """Take the agreed sizes and adopt the agreed entries."""
        capacity = agreement.capacity
        self.cache = SlotPool(capacity.cache_slots)
        self.pool = SlotPool(capacity.pool_slots, capacity.target_count)
        self._pool_policies = [self._policy() for _ in range(capacity.target_count)]
        for pool_slot, generation, key in agreement.entries:
            if self.index.get(key) is not None or not self.pool.take_numbered(pool_slot):
                continue
            entry = Entry(SlotIdentity(key, generation), State.POOLED, pool_slot=pool_slot)
            self.index.add(entry)
            self.settle(entry)
        self._counters["adopted"] += len(self.index)

    # -- targets ----------------------------------------------------------------------

    @property
    def suspects(self) -> frozenset[int]:
        """Targets that some rank finds suspect."""
        return frozenset(target for target, ranks in self._suspects.items() if ranks)

    def verdict(self, report: VerdictReport) -> None:
        ranks = self._suspects.setdefault(report.target, set())
        if report.usable:
            ranks.discard(report.rank)
        else:
            ranks.add(report.rank)
        self._counters["verdict_changes"] += 1

    def usable(self, pool_slot: int) -> bool:
        return not self._suspects.get(self.pool.lane(pool_slot))

    # -- slots ------------------------------------------------------------------------

    def take_cache_slot(self) -> int | None:
        """A free slot, evicting if need be; None if everything is pinned."""
        slot = self.cache.take()
        if slot is not None:
            return slot
        key = self._cache_policy.victim()
        if key is None:
            return None
        entry = self.index.get(key)
        assert entry is not None and entry.cache_slot is not None
        self._counters["evicted_cpu"] += 1
        self.leave_cache(entry)
        self._evict(entry, Event.EVICT_CACHE)
        return self.cache.take()

    def take_pool_slot(self) -> int | None:
        """A slot on a target that answers; None if there is none, or all there are pinned."""
        suspects = self.suspects
        slot = self.pool.take(suspects)
        if slot is not None:
            return slot
        for lane in self.pool.lanes_in_turn(suspects):
            key = self._pool_policies[lane].victim()
            if key is None:
                continue
            entry = self.index.get(key)
            assert entry is not None and entry.pool_slot is not None
            self._counters["evicted_pool"] += 1
            self.leave_pool(entry)
            self._evict(entry, Event.EVICT_POOL)
            return self.pool.take(suspects)
        return None

    def leave_cache(self, entry: Entry) -> None:
        assert entry.cache_slot is not None
        self.cache.orphan(entry.cache_slot)
        entry.cache_slot = None

    def leave_pool(self, entry: Entry, *, retire: bool = False) -> None:
        assert entry.pool_slot is not None
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

    # -- entries ----------------------------------------------------------------------

    def touch(self, keys: Iterable[bytes]) -> None:
        """`keys`, in prefix order, were used: the head of a prefix outlives its tail."""
        for key in reversed(list(keys)):
            entry = self.index.get(key)
            if entry is None:
                continue
            self._uses += 1
            entry.used = self._uses
            self._cache_policy.touch(key, entry.used)
            if entry.pool_slot is not None:
                self._pool_policy(entry).touch(key, entry.used)

    def settle(self, entry: Entry) -> None:
        """Admit the entry to the policies in which it is evictable, withdraw it elsewhere."""
        key, state = entry.identity.key, entry.state
        if state is State.DOOMED or self.index.get(key) is not entry:
            return
        if entry.cache_slot is not None:
            free = state in (State.CACHED, State.BOTH) and not self.cache.in_use(entry.cache_slot)
            _place(self._cache_policy, entry, evictable=free)
        if entry.pool_slot is not None:
            free = state in (State.POOLED, State.BOTH) and not self.pool.in_use(entry.pool_slot)
            _place(self._pool_policy(entry), entry, evictable=free)

    def doom(self, entry: Entry) -> None:
        """Miss at once; the slots are freed at their last release (rule 8)."""
        if self.index.get(entry.identity.key) is not entry:
            return  # gone already, or the key has been stored anew since
        entry.on(Event.DOOM)
        self._forget(entry)

    def _evict(self, entry: Entry, event: Event) -> None:
        if entry.on(event) is None:
            self._evicted.append(entry.identity.key)
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Drop from index, policies and backlog; orphan the slots it still has."""
        key = entry.identity.key
        self.index.drop(entry)
        if self.unwritten.pop(key, None) is not None:
            self._counters["write_refused"] += 1
        self._cache_policy.withdraw(key)
        if entry.cache_slot is not None:
            self.leave_cache(entry)
        if entry.pool_slot is not None:
            self._pool_policy(entry).withdraw(key)
            self.leave_pool(entry)

    def _pool_policy(self, entry: Entry) -> EvictionPolicy:
        assert entry.pool_slot is not None
        return self._pool_policies[self.pool.lane(entry.pool_slot)]


def _place(policy: EvictionPolicy, entry: Entry, *, evictable: bool) -> None:
    if not evictable:
        policy.withdraw(entry.identity.key)
    elif entry.identity.key not in policy:
        policy.admit(entry.identity.key, entry.used)
