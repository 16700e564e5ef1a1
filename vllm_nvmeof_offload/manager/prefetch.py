# SPDX-License-Identifier: Apache-2.0
"""The ReloadScheduler: whose chunks to keep, and whose to bring up, before they are asked for.

Pure: events in, holds and fetches out, on an injected clock. It follows requests that wait:

* preempted ones. Their cached chunks are kept and the others fetched, within `reload_share` of
  the cache slots: shortest remaining first, so that most requests are ready soonest; but who
  has waited for `_PATIENCE_S` goes before all who have not.
* new ones in vLLM's queue. What they need of the pool is fetched in queue order, within
  `prefetch_share`.

A request leaves when it starts, when its load is planned, or when it ends. What nobody else
wants is then let go, and fetches under way are cancelled. Work per step is bounded, however
many requests wait and however long they are.

Cache slots held for requests to come: kept from eviction, or filled from the pool.

What is worth holding is `reload`'s choice; here it is done. A held chunk has one more user of
its cache slot, so nothing evicts it and nothing else changes. A fetch that nobody wants any
more is cancelled: its entry is in the pool alone again at once, and its cache slot comes back
when every rank has released it.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.manager.index import Entry, Event, State
from vllm_nvmeof_offload.manager.ledger import Ledger, Op, OpKind
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.manager.types import Source
from vllm_nvmeof_offload.protocol import CancelCommand, Command, FetchCommand

__all__ = [
    "InGpu",
    "Order",
    "Reason",
    "ReloadScheduler",
    "Shelf",
    "Shelves",
]


#: Slots that stay evictable whatever is held: what is computed must find room.
_ROOM_SHARE = 0.125


class Reason(enum.Enum):
    """Why a chunk is held or fetched."""

    RELOAD = "reload"  # for a preempted request
    QUEUE = "queue"  # for a request that waits in vLLM's queue
    PROBE = "probe"  # to learn how fast the pool is, where admission loads nothing from it

    __hash__ = object.__hash__


@dataclass(slots=True, eq=False)
class _Held:
    """op: the fetch that is filling the slot. fetched: it is to be counted at its end."""

    entry: Entry
    slot: int
    reason: Reason
    op: Op | None = None
    fetched: bool = False
    used: bool = False


class Shelf:
    """What is held, by key. `attach` once the capacity is known."""

    def __init__(
        self,
        tiers: Tiers,
        ledger: Ledger,
        commands: list[Command],
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.fetching = 0  # fetches under way that are still wanted
        self.counts = dict.fromkeys(Reason, 0)  # held, by reason
        self._tiers = tiers
        self._ledger = ledger
        self._commands = commands
        self._counters = counters
        self._clock = clock
        self._held: dict[bytes, _Held] = {}
        self._unsent: dict[int, FetchCommand] = {}
        self._probing: list[int] = []  # by target: probes begun since none was under way
        self._room_min = 1

    def attach(self, cache_slots: int) -> None:
        self._room_min = max(1, int(_ROOM_SHARE * cache_slots))

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def keys(self) -> Iterable[bytes]:
        """What is held, in no particular order."""
        return self._held.keys()

    def source(self, key: bytes) -> Source | None:
        """Where `key` is: in a cache slot, or in the pool alone on a target that answers."""
        cache_slot, pool_slot = self._tiers.index.slots(key)
        if cache_slot is not None:
            return Source.CPU
        if pool_slot is not None and self._tiers.targets.usable(pool_slot):
            return Source.POOL
        return None

    def hold(self, key: bytes, reason: Reason) -> bool:
        """Keep a chunk, which has a cache slot, from eviction; False if there is no room to."""
        if key in self._held:
            return True
        if not self._has_room():
            return False
        entry = self._tiers.index.find(key)
        assert entry is not None and entry.cache_slot is not None
        self._keep(_Held(entry, entry.cache_slot, reason))
        self._tiers.settle(entry)
        return True

    def fetch(self, key: bytes, reason: Reason) -> bool:
        """Begin to read a chunk that is in the pool alone into a cache slot, and hold it."""
        if key in self._held:
            return True
        slot = self._tiers.take_cache_slot(spare_unwritten=True) if self._has_room() else None
        if slot is None:
            return False
        tiers = self._tiers
        entry = tiers.index.find(key)
        assert entry is not None and entry.pool_slot is not None
        pool_slot = entry.pool_slot
        tiers.give_cache(entry, slot)
        tiers.cache.use(slot)
        tiers.pool.use(pool_slot)
        tiers.on(entry, Event.FETCH_BEGIN)
        op = self._ledger.open(OpKind.FETCH, self._clock(), (entry,), (slot,), (pool_slot,))
        if reason is Reason.PROBE:
            self._time(op, tiers.pool.lane(pool_slot))
        self._keep(_Held(entry, slot, reason, op, fetched=True))
        tiers.settle(entry)
        self.fetching += 1
        self._counters[f"prefetches:{reason.value}"] += 1
        urgent = reason is Reason.RELOAD
        command = FetchCommand(op.number, entry.identity, pool_slot, slot, urgent=urgent)
        self._commands.append(command)
        self._unsent[op.number] = command
        return True

    def sent(self) -> None:
        """The commands so far are on their way."""
        self._unsent.clear()

    def used(self, key: bytes) -> None:
        """A load takes this chunk from its cache slot."""
        held = self._held.get(key)
        if held is not None:
            held.used = True

    def drop(self, key: bytes) -> None:
        """Nobody wants `key` any more; what is not held is ignored."""
        held = self._held.pop(key, None)
        if held is None:
            return
        how = "used" if held.used else "wasted"
        if held.op is not None:
            self.fetching -= 1
            # Whoever else uses the slot is a load that waits for this very read.
            if not held.used and self._tiers.cache.users(held.slot) == 2:
                how = "cancelled"
                self._cancel(held.entry, held.op)
        self._let_go(held, how)

    def ended(self, op: Op, failure: Outcome | None) -> None:
        """A fetch has its outcome on every rank."""
        held = self._held.get(op.entries[0].identity.key)
        if held is None or held.op is not op:
            return
        held.op = None
        self.fetching -= 1
        if failure is not None or op.probe:
            del self._held[held.entry.identity.key]
            self._let_go(held, "failed" if failure is not None else "probe")

    def gone(self, entry: Entry) -> None:
        """`entry` was doomed."""
        held = self._held.get(entry.identity.key)
        if held is not None and held.entry is entry:
            self._lose(held)

    def reset(self) -> None:
        """Every entry was doomed, and no fetch that was not sent will be."""
        self._unsent.clear()
        for held in list(self._held.values()):
            self._lose(held)

    # -- helpers ----------------------------------------------------------------------

    def _time(self, op: Op, lane: int) -> None:
        """`op` is there to be timed, behind the probes that began with it."""
        if not self.counts[Reason.PROBE]:
            self._probing = [0] * self._tiers.pool.lanes
        op.probe, op.queued = True, tuple(self._probing)
        self._probing[lane] += 1

    def _has_room(self) -> bool:
        """Whether enough stays evictable with one more held."""
        tiers = self._tiers
        evictable = tiers.cache.free + len(tiers.clean)
        if tiers.demotes:
            evictable += len(tiers.waiting)
        return evictable > self._room_min

    def _keep(self, held: _Held) -> None:
        self._tiers.cache.use(held.slot)
        self._held[held.entry.identity.key] = held
        self.counts[held.reason] += 1

    def _lose(self, held: _Held) -> None:
        del self._held[held.entry.identity.key]
        self.fetching -= held.op is not None
        self._let_go(held, "used" if held.used else "failed")

    def _let_go(self, held: _Held, how: str) -> None:
        self.counts[held.reason] -= 1
        if held.fetched:
            self._counters[f"prefetches_ended:{how}"] += 1
        self._tiers.cache.unuse(held.slot)
        self._tiers.settle(held.entry)

    def _cancel(self, entry: Entry, op: Op) -> None:
        """Take the entry off its fetch: whoever looks it up from now on finds it in the pool."""
        assert entry.state is State.FETCHING
        self._tiers.on(entry, Event.FETCH_CANCELLED)
        self._tiers.leave_cache(entry)
        op.detached = True
        if op.number not in self._unsent:
            self._commands.append(CancelCommand(op.number))
            return
        # Never sent: no rank will report on it.
        self._commands.remove(self._unsent.pop(op.number))
        self._tiers.let_go(self._ledger.withdraw(op.number))


#: A preempted request that has waited so long is not overtaken by shorter ones any more.
_PATIENCE_S = 5.0
#: How often it is looked whether a preempted request's chunks are in GPU memory still.
_LOOK_AGAIN_S = 0.05
#: Chunks that one `turn` looks at: about 100 µs.
_LOOKS_MAX = 256
#: … and at so many of one preempted request that are in GPU memory still.
_LOCAL_LOOKS_MAX = 64
#: Bytes of fetches under way: enough for a fast target between two steps.
_FETCH_BYTES_MAX = 256 << 20
_FETCHES_MIN = 4
_PROBES_MAX = 4

#: Where a request stands in vLLM's queue; lower goes first.
Order = tuple[float, ...]
#: Whether the n-th chunk of a request is in GPU memory still.
InGpu = Callable[[int], bool]


class Shelves(Protocol):
    """What `shelf.Shelf` offers to this policy."""

    fetching: int
    counts: dict[Reason, int]

    def __contains__(self, key: bytes) -> bool: ...
    def source(self, key: bytes) -> Source | None: ...
    def hold(self, key: bytes, reason: Reason) -> bool: ...
    def fetch(self, key: bytes, reason: Reason) -> bool: ...
    def drop(self, key: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class _Want:
    """One waiting request. keys: its chunks in prefix order; those before `next` are done.

    local: how many of the first ones are in GPU memory, once vLLM has looked; `in_gpu` till then.
    skipped, skipped_last: the first and last chunk passed over because they were there.
    listed: it is among those that have chunks to look at. done_s: when it last was no more.
    """

    request_id: str
    keys: Sequence[bytes]
    in_gpu: InGpu
    order: Order | None  # None: it was preempted
    arrival: int
    since_s: float
    next: int = 0
    local: int | None = None
    skipped: int | None = None
    skipped_last: int = 0
    held: dict[bytes, None] = field(default_factory=dict)
    listed: bool = False
    done_s: float = 0.0
    left: bool = False

    def is_local(self, chunk: int) -> bool:
        return self.in_gpu(chunk) if self.local is None else chunk < self.local

    @property
    def remaining(self) -> int:
        return len(self.keys) - self.next


class ReloadScheduler:
    """See the module's docstring. Shares are of the cache slots, known by `attach`; 0: off."""

    def __init__(
        self,
        reload_share: float,
        prefetch_share: float,
        shelf: Shelves,
        clock: Callable[[], float],
    ) -> None:
        self._shares = {Reason.RELOAD: reload_share, Reason.QUEUE: prefetch_share}
        self._shelf = shelf
        self._clock = clock
        self._wants: dict[str, _Want] = {}
        self._preempted: dict[str, _Want] = {}  # those of them with chunks to look at
        self._parked: dict[str, _Want] = {}  # preempted, with chunks that were passed over
        self._queue: list[tuple[Order, int, _Want]] = []  # new ones with chunks to look at, a heap
        self._arrivals = 0
        self._wanters: dict[bytes, int] = {}  # held key → requests that want it
        self._limits = dict.fromkeys(Reason, 0)
        self._fetches_max = _FETCHES_MIN

    def attach(self, cache_slots: int, slot_bytes: int) -> None:
        """Learn the sizes."""
        for reason, share in self._shares.items():
            self._limits[reason] = int(share * cache_slots)
        self._fetches_max = max(_FETCHES_MIN, _FETCH_BYTES_MAX // max(1, slot_bytes))

    def __len__(self) -> int:
        """Requests that are followed."""
        return len(self._wants)

    # -- events -----------------------------------------------------------------------

    def queued(self, request_id: str, keys: Sequence[bytes], order: Order, in_gpu: InGpu) -> None:
        """A new request waits. keys: its chunks that a load could bring, in prefix order.

        order: where it stands in the queue; requests of equal order stand as they came.
        """
        if not keys or not self._limits[Reason.QUEUE]:
            return
        self.left(request_id)
        self._follow(request_id, keys, in_gpu, order)

    def preempted(self, request_id: str, keys: Sequence[bytes], in_gpu: InGpu) -> None:
        """A running request was preempted. keys: its full chunks that had been computed."""
        self.left(request_id)
        if keys and self._limits[Reason.RELOAD]:
            self._follow(request_id, keys, in_gpu, None)

    def looked_up(self, request_id: str, local_chunks: int) -> None:
        """vLLM looked the request up; its first `local_chunks` chunks are in GPU memory now.

        If it stays in the queue, what was passed over because it was there is looked at again.
        """
        want = self._wants.get(request_id)
        if want is None or want.skipped is None or local_chunks > want.skipped_last:
            return
        want.local = local_chunks
        self._look_again(want)

    def left(self, request_id: str) -> None:
        """The request runs, or is loading what it needs, or has ended."""
        want = self._wants.pop(request_id, None)
        if want is None:
            return
        want.left, want.listed = True, False
        self._preempted.pop(request_id, None)
        self._parked.pop(request_id, None)
        for key in want.held:
            self._wanters[key] -= 1
            if not self._wanters[key]:
                del self._wanters[key]
                self._shelf.drop(key)

    def reset(self) -> None:
        """Every chunk is void; the shelf has let go of all it held."""
        for want in self._wants.values():
            want.left = True
        self._wants.clear()
        self._preempted.clear()
        self._parked.clear()
        self._queue.clear()
        self._wanters.clear()

    # -- commands ---------------------------------------------------------------------

    def probe(self, keys: Sequence[bytes]) -> None:
        """Read a few of these pool-only chunks in the background, if no probe is under way."""
        if self._shelf.counts[Reason.PROBE]:
            return
        for key in keys[:_PROBES_MAX]:
            if key not in self._shelf and self._shelf.source(key) is Source.POOL:
                self._shelf.fetch(key, Reason.PROBE)

    def turn(self) -> None:
        """Hold and fetch what the shares allow. Once a step."""
        looks = _LOOKS_MAX
        now_s = self._clock()
        for want in [w for w in self._parked.values() if now_s - w.done_s >= _LOOK_AGAIN_S]:
            self._look_again(want)
        if self._preempted:
            for want in sorted(self._preempted.values(), key=lambda w: _urgency(w, now_s)):
                looks, finished = self._advance(want, Reason.RELOAD, looks)
                full = self._shelf.counts[Reason.RELOAD] >= self._limits[Reason.RELOAD]
                if not looks or (full and not finished):
                    break
                if not finished:
                    continue  # the next one may have chunks that only need to be held
                del self._preempted[want.request_id]
                want.listed, want.done_s = False, now_s
                if want.skipped is not None:
                    self._parked[want.request_id] = want
        while self._queue:
            want = self._queue[0][2]
            if not want.left:
                looks, finished = self._advance(want, Reason.QUEUE, looks)
                if not finished:
                    break
            heapq.heappop(self._queue)
            want.listed = False

    def _follow(
        self, request_id: str, keys: Sequence[bytes], in_gpu: InGpu, order: Order | None
    ) -> None:
        self._arrivals += 1
        want = _Want(request_id, keys, in_gpu, order, self._arrivals, self._clock())
        self._wants[request_id] = want
        self._list(want)

    def _list(self, want: _Want) -> None:
        """It has chunks to look at."""
        if want.listed:
            return
        want.listed = True
        if want.order is None:
            self._preempted[want.request_id] = want
        else:
            heapq.heappush(self._queue, (want.order, want.arrival, want))

    def _look_again(self, want: _Want) -> None:
        """What was passed over may have left GPU memory."""
        assert want.skipped is not None
        want.next, want.skipped = want.skipped, None
        self._parked.pop(want.request_id, None)
        self._list(want)

    def _advance(self, want: _Want, reason: Reason, looks: int) -> tuple[int, bool]:
        """Go on with one request: (looks left, whether nothing is left to do for it)."""
        passed_over = 0
        while want.next < len(want.keys):
            if not looks or (passed_over >= _LOCAL_LOOKS_MAX and reason is Reason.RELOAD):
                return looks, False
            looks -= 1
            key = want.keys[want.next]
            source = self._shelf.source(key)
            if source is not Source.CPU and want.is_local(want.next):
                if want.skipped is None:
                    want.skipped = want.next
                want.skipped_last = want.next
                passed_over += 1
            elif source is None:
                want.next = len(want.keys)  # a load ends here: what follows is of no use
                break
            elif not self._take(want, key, source, reason):
                return looks, False
            want.next += 1
        return looks, True

    def _take(self, want: _Want, key: bytes, source: Source, reason: Reason) -> bool:
        """Hold or fetch one chunk for `want`; False if there is no room now."""
        shelf = self._shelf
        if key in want.held:
            return True
        if key not in shelf:
            if source is Source.CPU and reason is Reason.QUEUE:
                return True  # it is where it should be, and was used just now
            if shelf.counts[reason] >= self._limits[reason]:
                return False
            if source is Source.CPU:
                taken = shelf.hold(key, reason)
            else:
                # Reloads have as many again: what is fetched for the queue must not hold them up.
                most = self._fetches_max * (2 if reason is Reason.RELOAD else 1)
                taken = shelf.fetching < most and shelf.fetch(key, reason)
            if not taken:
                return False
        self._wanters[key] = self._wanters.get(key, 0) + 1
        want.held[key] = None
        return True


def _urgency(want: _Want, now_s: float) -> tuple[bool, float, float]:
    patient = now_s - want.since_s < _PATIENCE_S
    return (patient, want.remaining if patient else -math.inf, want.since_s)
