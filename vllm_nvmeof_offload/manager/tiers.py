# SPDX-License-Identifier: Apache-2.0
"""Both tiers' entries, slots and eviction: the part of the core that hands out places.

`SlotPool` allocates numbered slots, `Targets` chooses the target of each write and evicts from
the pool, `Tiers` unites both tiers with the index. An entry is in a tier's policy exactly while
it is evictable there (`settle`), and rests in the index exactly while no operation works on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.manager.adoption import Agreement
from vllm_nvmeof_offload.manager.eviction import EvictionPolicy, LruPolicy, MakePolicy, Recency
from vllm_nvmeof_offload.manager.index import Entry, Event, Index, State
from vllm_nvmeof_offload.manager.kv_events import KvEventLog
from vllm_nvmeof_offload.manager.ledger import Op
from vllm_nvmeof_offload.manager.types import CoreConfig, Source, WritePolicy
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import VERDICTS, AdoptedEntries, RateReport, VerdictReport

__all__ = ["SlotPool", "Targets", "Tiers"]


_FREE, _TAKEN, _ORPHAN, _RETIRED = range(4)


class SlotPool:
    """Allocator over slots 0 … capacity-1: 1 byte per slot, and 8 per slot that is free again.

    A slot is *taken* from `take` until it is free again. Operations on it count as *users*. A
    slot whose entry is gone is *orphaned*: it becomes free when its last user has released it, so
    that no buffer is reused before every rank has released it (protocol, rules 1 and 7).

    Slot s is in *lane* `s % lanes`: a pool's target. The caller chooses the lane.
    """

    def __init__(self, capacity: int, lanes: int = 1) -> None:
        self.capacity = capacity
        self.lanes = lanes
        self.orphans = 0
        self.retired = 0
        self._state = bytearray(capacity)
        self._next = list(range(lanes))  # by lane: slots from here on were never taken
        self._again = [array("q") for _ in range(lanes)]  # by lane: taken once, and free again
        self._free = [len(range(lane, capacity, lanes)) for lane in range(lanes)]
        #: By slot in use: the number of operations that work on it.
        self.users: dict[int, int] = {}

    @property
    def taken(self) -> int:
        """Slots that are not free, orphaned and retired ones included."""
        return self.capacity - self.free

    @property
    def free(self) -> int:
        return sum(self._free)

    def free_in(self, lane: int) -> int:
        return self._free[lane]

    def lane(self, slot: int) -> int:
        return slot % self.lanes

    def take(self, lane: int = 0) -> int | None:
        """Take a free slot of this lane; None if there is none."""
        if not self._free[lane]:
            return None
        again = self._again[lane]
        if again:
            slot = again.pop()
        else:
            slot = self._next[lane]
            while self._state[slot] != _FREE:  # taken by number, at adoption
                slot += self.lanes
            self._next[lane] = slot + self.lanes
        self._state[slot] = _TAKEN
        self._free[lane] -= 1
        return slot

    def take_numbered(self, slots: npt.NDArray[np.int64]) -> None:
        """Take these very slots, distinct and in range, before any `take`: adoption."""
        state = np.frombuffer(self._state, np.uint8)
        assert not state.any(), "slots are adopted before any is allocated"
        state[slots] = _TAKEN
        assert int(np.count_nonzero(state)) == len(slots), "a slot twice"
        for lane, count in enumerate(np.bincount(slots % self.lanes, minlength=self.lanes)):
            self._free[lane] -= int(count)

    def use(self, slot: int) -> None:
        """One more operation works on this slot."""
        assert self._state[slot] == _TAKEN, f"slot {slot} is used but not taken"
        self.users[slot] = self.users.get(slot, 0) + 1

    def release(self, slot: int) -> None:
        """One operation less works on this slot; its last user frees an orphan."""
        left = self.users[slot] - 1
        assert left >= 0
        if left:
            self.users[slot] = left
            return
        del self.users[slot]
        if self._state[slot] == _ORPHAN:
            self.orphans -= 1
            self._free_again(slot)

    def in_use(self, slot: int) -> bool:
        return slot in self.users

    def orphan(self, slot: int, retire: bool = False) -> None:
        """The slot's entry is gone: free it now, or at its last user.

        retire: never hand it out again (the medium refuses it); the capacity shrinks by one.
        """
        assert self._state[slot] == _TAKEN
        if retire:
            self._state[slot] = _RETIRED
            self.retired += 1
        elif slot in self.users:
            self._state[slot] = _ORPHAN
            self.orphans += 1
        else:
            self._free_again(slot)

    def orphan_unused(self) -> None:
        """Free every slot that is taken and has no user: a reset."""
        state = np.frombuffer(self._state, np.uint8)
        unused = state == _TAKEN
        unused[list(self.users)] = False
        for lane in range(self.lanes):
            slots = np.flatnonzero(unused[lane :: self.lanes]) * self.lanes + lane
            self._free[lane] += len(slots)
            # Highest first: `take` pops from the end.
            self._again[lane].frombytes(slots[::-1].astype(np.int64).tobytes())
        state[unused] = _FREE

    def _free_again(self, slot: int) -> None:
        self._state[slot] = _FREE
        lane = self.lane(slot)
        self._free[lane] += 1
        self._again[lane].append(slot)


#: The least share of the fastest target's rate that counts: a slow target must get a write now
#: and then, because only a write shows that it is fast again.
_SPEED_MIN = 1 / 32
#: A queue may be this many times as long as the shortest one, in time, and still be added to.
_PATIENCE = 2.0


class Targets:
    """The pool's slots over its targets: pool slot p is on target `p % count`.

    Each target has an eviction policy of its own: with one suspect, the others go on evicting.
    A target without slots has none.
    """

    def __init__(self, slots: int, count: int, policy: MakePolicy) -> None:
        self.count = count
        self.slots = SlotPool(slots, count)
        #: By pool slot: when its chunk was last used. Returns do not count here (`Recency`).
        self.recency = Recency(slots)
        #: By target: writes that were sent and not reported by every rank.
        self.pending = [0] * count
        #: By target: bytes/s at which its slowest rank reads, and writes; 0: unknown.
        self.read_rates = [0.0] * count
        self.write_rates = [0.0] * count
        self._reads: list[dict[int, float]] = [{} for _ in range(count)]  # by rank, bytes/s
        self._writes: list[dict[int, float]] = [{} for _ in range(count)]  # by rank, bytes/s
        self._speeds = [0.0] * count  # write rates as shares of the fastest one's; 0: unknown
        self._passes = [0.0] * count  # by target: writes that it was given, over its speed
        self._pass = 0.0  # the least of those that could be chosen
        self._turn = 0  # the target that is chosen where nothing else decides
        self._make_policy = policy
        #: Targets that some rank finds unusable.
        self.suspects: set[int] = set()
        self._verdicts: list[dict[int, VerdictReport]] = [{} for _ in range(count)]  # by rank
        self.forget()

    def forget(self) -> None:
        """Nothing is evictable."""
        self.recency.forget_all()
        used = memoryview(self.recency.used)
        targets = range(min(self.count, self.slots.capacity))
        self._policies = [self._make_policy(used[t :: self.count]) for t in targets]

    # -- verdicts ---------------------------------------------------------------------

    def verdict(self, report: VerdictReport) -> bool:
        """Returns whether the target became usable, or unusable, for all ranks together."""
        verdicts, before = self._verdicts[report.target], len(self.suspects)
        verdicts[report.rank] = report
        usable = all(one.usable for one in verdicts.values())
        (self.suspects.discard if usable else self.suspects.add)(report.target)
        return len(self.suspects) != before

    def worst_verdicts(self) -> list[int]:
        """By target, an index of `protocol.VERDICTS`."""
        by_target = ([VERDICTS.index(v.verdict) for v in one.values()] for one in self._verdicts)
        return [max(indices, default=0) for indices in by_target]

    def usable(self, slot: int) -> bool:
        return not self.suspects or slot % self.count not in self.suspects

    # -- placement --------------------------------------------------------------------

    def rate(self, report: RateReport) -> None:
        """One rank has measured one target."""
        self._reads[report.target][report.rank] = report.read_bytes_per_s
        self.read_rates[report.target] = min(self._reads[report.target].values())
        self._writes[report.target][report.rank] = report.write_bytes_per_s
        self.write_rates[report.target] = min(self._writes[report.target].values())
        fastest = max(self.write_rates)
        self._speeds = [max(r / fastest, _SPEED_MIN) if r else 0.0 for r in self.write_rates]

    def choose(self) -> int | None:
        """The target of the next write, with a free slot or an evictable one; None: there is none.

        A target whose queue takes much longer than the shortest one's (twice, in time) gets
        nothing. Among the others, one with a free slot comes before one that must evict, because
        a hit from a slower target is better than none. Among equals, the one that was given the
        fewest writes for its rate is chosen, so that shares follow the rates even while every
        queue is empty. Queues are pending writes over the slowest rank's measured rate; while any
        rate is unknown, all count as equal, and the targets take turns.
        """
        ready = [
            target
            for target, policy in enumerate(self._policies)
            if (self.slots.free_in(target) or len(policy)) and target not in self.suspects
        ]
        if len(ready) < 2:
            return ready[0] if ready else None
        speeds, passes, count = self._speeds, self._passes, self.count
        if not all(speeds[target] for target in ready):
            speeds = [1.0] * count
        # A target that was away does not catch up: it begins where the others are.
        self._pass = max(self._pass, min(passes[target] for target in ready))
        longest = _PATIENCE * min(self.pending[target] / speeds[target] for target in ready)
        _, reached, _, chosen = min(
            (
                not self.slots.free_in(target),
                max(passes[target], self._pass),
                (target - self._turn) % count,
                target,
            )
            for target in ready
            if self.pending[target] / speeds[target] <= longest
        )
        passes[chosen] = reached + 1 / speeds[chosen]
        self._turn = (chosen + 1) % count
        return chosen

    # -- eviction ---------------------------------------------------------------------

    def adopt(self, slots: npt.NDArray[np.int64]) -> None:
        """Take these slots, which are ascending and hold adopted chunks, as evictable."""
        self.slots.take_numbered(slots)
        for target, policy in enumerate(self._policies):
            for index in (slots[slots % self.count == target] // self.count).tolist():
                policy.admit(index)

    def place(self, slot: int, *, evictable: bool) -> None:
        """`slot` is evictable, or is not."""
        index, target = divmod(slot, self.count)
        policy = self._policies[target]
        (policy.admit if evictable else policy.withdraw)(index)

    def touch(self, slot: int, now: int, *, ended: bool = False) -> None:
        """See `Recency.use`."""
        self.recency.use(slot, now, ended=ended)
        index, target = divmod(slot, self.count)
        self._policies[target].touch(index)

    def victim(self, target: int) -> int | None:
        """The slot of this target to evict next."""
        index = self._policies[target].victim()
        return None if index is None else index * self.count + target


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

    # -- slots ------------------------------------------------------------------------

    def take_cache_slot(self, *, spare_unwritten: bool = False) -> int | None:
        """A free slot, evicting if need be; None if everything is pinned.

        spare_unwritten: do not evict chunks that on-eviction writing has not written yet.
        """
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
        if idle and state in (State.CACHED, State.BOTH, State.POOLED):
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
