# SPDX-License-Identifier: Apache-2.0
"""Both tiers' entries, slots and eviction: the part of the core that hands out places.

An entry is in a tier's policy exactly while it is evictable there (`settle`), and rests in the
index exactly while nothing works on it.

Numbered slots of one tier: free, taken, in use by operations, orphaned, retired.

A slot is *taken* from `take` until it is free again. Operations on it count as *users*. A
slot whose entry is gone is *orphaned*: it becomes free when its last user has let go, so
that no buffer is reused before every rank has released it (protocol, rules 1 and 7).

Slots lie in *lanes*, slot s in lane `s % lanes`: a pool's targets. Which lane is asked is the
caller's choice.

The pool's slots over its targets: which target takes the next write, and who makes room.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.manager.adoption import Agreement
from vllm_nvmeof_offload.manager.eviction import EvictionPolicy, LruPolicy, MakePolicy, Recency
from vllm_nvmeof_offload.manager.index import Entry, Event, Index, State
from vllm_nvmeof_offload.manager.kv_events import ResidencyLog
from vllm_nvmeof_offload.manager.ledger import Op
from vllm_nvmeof_offload.manager.types import Source, WritePolicy
from vllm_nvmeof_offload.protocol import VERDICTS, RateReport, VerdictReport

__all__ = [
    "SlotPool",
    "Targets",
    "Tiers",
]


_FREE, _TAKEN, _ORPHAN, _RETIRED = range(4)


class SlotPool:
    """Allocator over slots 0 … capacity-1; a byte a slot, and 8 for one that is free again."""

    def __init__(self, capacity: int = 0, lanes: int = 1) -> None:
        self.capacity = capacity
        self.lanes = lanes
        self.orphans = 0
        self.retired = 0
        self._state = bytearray(capacity)
        self._next = list(range(lanes))  # by lane: slots from here on were never taken
        self._again = [array("q") for _ in range(lanes)]  # by lane: taken once, and free again
        self._free = [len(range(lane, capacity, lanes)) for lane in range(lanes)]
        self._users: dict[int, int] = {}

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
        slot = again.pop() if again else self._take_next(lane)
        self._state[slot] = _TAKEN
        self._free[lane] -= 1
        return slot

    def _take_next(self, lane: int) -> int:
        slot = self._next[lane]
        while self._state[slot] != _FREE:  # taken by number, at adoption
            slot += self.lanes
        self._next[lane] = slot + self.lanes
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
        self._users[slot] = self._users.get(slot, 0) + 1

    def unuse(self, slot: int) -> None:
        """One operation less; frees an orphan at its last user."""
        left = self._users[slot] - 1
        assert left >= 0
        if left:
            self._users[slot] = left
            return
        del self._users[slot]
        if self._state[slot] == _ORPHAN:
            self.orphans -= 1
            self._put_back(slot)

    def in_use(self, slot: int) -> bool:
        return slot in self._users

    def users(self, slot: int) -> int:
        """Operations that work on this slot."""
        return self._users.get(slot, 0)

    @property
    def in_use_count(self) -> int:
        return len(self._users)

    def orphan(self, slot: int, retire: bool = False) -> None:
        """The slot's entry is gone: free it now, or at its last user.

        retire: never hand it out again (the medium refuses it); the capacity shrinks by one.
        """
        assert self._state[slot] == _TAKEN
        if retire:
            self._state[slot] = _RETIRED
            self.retired += 1
        elif slot in self._users:
            self._state[slot] = _ORPHAN
            self.orphans += 1
        else:
            self._put_back(slot)

    def orphan_unused(self) -> None:
        """Free every slot that is taken and has no user, at once: a reset."""
        state = np.frombuffer(self._state, np.uint8)
        unused = state == _TAKEN
        unused[list(self._users)] = False
        for lane in range(self.lanes):
            slots = np.flatnonzero(unused[lane :: self.lanes]) * self.lanes + lane
            self._free[lane] += len(slots)
            # Highest first: `take` pops from the end.
            self._again[lane].frombytes(slots[::-1].astype(np.int64).tobytes())
        state[unused] = _FREE

    def _put_back(self, slot: int) -> None:
        self._state[slot] = _FREE
        lane = self.lane(slot)
        self._free[lane] += 1
        self._again[lane].append(slot)


#: The least share of the fastest target's rate that counts: what has been slow must get a
#: write now and then, or nobody would see that it is fast again.
_SPEED_MIN = 1 / 32
#: How many times the shortest queue another one may be, and still be added to.
_PATIENCE = 2.0


class Targets:
    """Pool slot p lies on target `p % count`. Each target has an eviction policy of its own:
    with one suspect, the others go on evicting theirs."""

    def __init__(self, slots: int, count: int, policy: MakePolicy) -> None:
        self.count = count
        self.slots = SlotPool(slots, count)
        #: By pool slot: when what is there was last used. Without credit: see `recency`.
        self.recency = Recency(slots)
        #: By target: writes sent and not reported by every rank.
        self.pending = [0] * count
        self._rates: list[dict[int, float]] = [{} for _ in range(count)]  # by rank, bytes/s
        #: By target: bytes/s at which its slowest rank reads; 0: unknown.
        self.read_rates = [0.0] * count
        self.write_rates = [0.0] * count  # the same for writes
        self._reads: list[dict[int, float]] = [{} for _ in range(count)]  # by rank, bytes/s
        self._speeds = [0.0] * count  # of each one's slowest rank, as shares of the fastest; 0: ?
        self._passes = [0.0] * count  # by target: how much it was given, over its rate
        self._pass = 0.0  # the least of those that could be chosen
        self._turn = 0  # the target that goes first where nothing else decides
        self._make_policy = policy
        #: Targets that some rank finds suspect, and which ranks do.
        self.suspects: dict[int, set[int]] = {}
        self._verdicts: list[dict[int, int]] = [{} for _ in range(count)]  # by rank
        self.forget()

    def forget(self) -> None:
        """Nothing is evictable."""
        self.recency.forget_all()
        used = memoryview(self.recency.used)
        self._policies = [self._make_policy(used[t :: self.count]) for t in range(self.count)]

    # -- verdicts ---------------------------------------------------------------------

    def verdict(self, report: VerdictReport) -> bool:
        """Returns whether the target became usable, or stopped to be, for all ranks together."""
        was_usable = report.target not in self.suspects
        self._verdicts[report.target][report.rank] = VERDICTS.index(report.verdict)
        ranks = self.suspects.setdefault(report.target, set())
        if report.usable:
            ranks.discard(report.rank)
        else:
            ranks.add(report.rank)
        if not ranks:
            del self.suspects[report.target]
        return was_usable != report.usable if was_usable else not ranks

    def worst_verdicts(self) -> list[int]:
        """By target, an index of `protocol.VERDICTS`."""
        return [max(verdicts.values(), default=0) for verdicts in self._verdicts]

    def usable(self, slot: int) -> bool:
        return not self.suspects or slot % self.count not in self.suspects

    # -- placement --------------------------------------------------------------------

    def rate(self, report: RateReport) -> None:
        self._reads[report.target][report.rank] = report.read_bytes_per_s
        self.read_rates[report.target] = min(self._reads[report.target].values())
        self._rates[report.target][report.rank] = report.write_bytes_per_s
        slowest = self.write_rates = [min(r.values(), default=0.0) for r in self._rates]
        fastest = max(slowest)
        self._speeds = [max(rate / fastest, _SPEED_MIN) if rate else 0.0 for rate in slowest]

    def choose(self) -> int | None:
        """The target of the next write, which has a free slot or an evictable one; or None.

        The rule: a target whose queue takes much longer than the shortest one's (twice, in
        time) gets nothing. Of the others one with a free slot goes before one that must evict:
        a hit from a slower target is better than none. Of those the one that was given least
        for its rate: shares follow the rates even while every queue is empty. Queues are
        writes pending over the slowest rank's measured rate; while any is unknown, all count as
        equal, and the targets take turns.
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
        # One that was away does not catch up: it begins where the others are.
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
        """These slots, ascending, hold chunks from before: take them, evictable."""
        self.slots.take_numbered(slots)
        for target, policy in enumerate(self._policies):
            for index in (slots[slots % self.count == target] // self.count).tolist():
                policy.admit(index)

    def place(self, slot: int, *, evictable: bool) -> None:
        """`slot` is evictable, or is not."""
        index, target = divmod(slot, self.count)
        if evictable:
            self._policies[target].admit(index)
        else:
            self._policies[target].withdraw(index)

    def touch(self, slot: int, now: int, *, ended: bool = False) -> None:
        """See `Recency.use`."""
        self.recency.use(slot, now, ended=ended)
        index, target = divmod(slot, self.count)
        self._policies[target].touch(index)

    def victim(self, target: int) -> int | None:
        """Which slot of this target to evict next."""
        index = self._policies[target].victim()
        return None if index is None else index * self.count + target


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
