# SPDX-License-Identifier: Apache-2.0
"""Chunks that are kept, and brought up from the pool, for requests that wait. Pure.

`ReloadScheduler` decides which, for two kinds of requests:

* preempted ones. Their cached chunks are held and the others fetched, within `reload_cache_share`:
  shortest remaining first, so that most requests are ready soonest; but a request that has waited
  for `_PATIENCE_S` precedes all that have not.
* new ones in vLLM's queue. Their chunks in the pool are fetched in queue order, within
  `prefetch_cache_share`.

A request leaves when it starts, when its load is planned, or when it ends. Chunks that no other
request wants are then released, and fetches under way are cancelled. Work per step is bounded.

`Holds` carries it out. A held chunk has one more user of its cache slot, so it is not evicted. The
entry of a cancelled fetch is only in the pool again at once, and its cache slot comes back when
every rank has released it.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_nvmeof_offload.manager.handshake import Capacity, CoreConfig
from vllm_nvmeof_offload.manager.ledger import Op
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.protocol import CancelCommand, Command

#: What `Tiers.lookup` answers.
_CPU, _POOL, _SHARED = 1, 2, 3

#: Share of the slots that always stays evictable: new chunks must find room.
_ROOM_SHARE = 0.125


class Reason(enum.IntEnum):
    """Why a chunk is held or fetched; `Tiers` keeps the fetches that were not sent by it."""

    RELOAD = 0  # for a preempted request
    QUEUE = 1  # for a request that waits in vLLM's queue
    PROBE = 2  # to measure the pool, where admission loads nothing from it


@dataclass(slots=True, eq=False)
class _Held:
    """One held chunk. op: its fetch, from when that is sent until it has its outcome.

    fetching: it was fetched, and the fetch has no outcome. used: a load has taken the chunk.
    """

    row: int
    generation: int
    slot: int
    reason: Reason
    fetched: bool = False
    fetching: bool = False
    op: Op | None = None
    index: int = 0  # of its row in `op`
    used: bool = False


class Holds:
    """The held chunks."""

    def __init__(self, tiers: Tiers, unsent: list[Command], counters: Counts) -> None:
        self.fetching = 0  # fetches under way that are still wanted
        self.counts = dict.fromkeys(Reason, 0)  # held, by reason
        self.held: dict[bytes, _Held] = {}  # by key
        self._tiers = tiers
        self._unsent = unsent
        self._counters = counters
        self._room_min = max(1, int(_ROOM_SHARE * tiers.cache_slots))

    def source(self, key: bytes) -> int:
        """Where `key` is: `CPU`, a cache slot; `POOL`, only there, on a usable target; `SHARED`,
        only in another engine's pool; 0."""
        return self._tiers.lookup(key)

    def hold(self, key: bytes, reason: Reason) -> bool:
        """Keep a chunk, which has a cache slot, from eviction; False if there is no room to."""
        if not self._has_room():
            return False
        row = self._tiers.hold(key)
        assert row is not None, "its look-up found it in a cache slot"
        self._keep(key, _Held(*row, reason))
        return True

    def fetch(self, key: bytes, reason: Reason) -> bool:
        """Begin to read a chunk that is only in a pool into a cache slot, and hold it."""
        fetch = self._tiers.begin_fetch(key, reason) if self._has_room() else None
        if fetch is None:
            return False
        self._tiers.hold(key)
        self.fetching += 1
        self._counters["prefetches", reason.name.lower()] += 1
        held = _Held(*fetch, reason)
        held.fetched = held.fetching = True
        self._keep(key, held)
        return True

    def sent(self, op: Op) -> None:
        """These fetches go to the ranks."""
        assert op.batch is not None
        for index in range(len(op.batch)):
            held = self.held.get(op.batch.key(index))
            if held is not None and held.fetching:  # otherwise only a load waits for it
                held.op, held.index = op, index

    def used(self, keys: Sequence[bytes]) -> None:
        """A load takes these chunks, from their cache slots where they have one."""
        for key in self.held.keys() & set(keys) if self.held else ():
            self.held[key].used = True

    def drop(self, key: bytes) -> None:
        """No request wants `key` any more; a key that is not held is ignored."""
        held = self.held.get(key)
        if held is None:
            return
        how = "used" if held.used else "wasted"
        # The slot's users are this hold, its fetch, and loads that wait for this very fetch.
        if held.fetching and not held.used and self._tiers.cache_users(held.slot) == 2:
            how = "cancelled"
            self._cancel(held)
        self._release(key, held, how)

    def ended(self, op: Op, rows: Sequence[int]) -> None:
        """These rows of a fetch have their outcome on every rank."""
        batch = op.batch
        assert batch is not None
        for index in rows:
            key = batch.key(index)
            held = self.held.get(key)
            if held is None or held.op is not op:
                continue
            if op.probe:
                self._release(key, held, "probe")
            else:
                held.op, held.fetching = None, False
                self.fetching -= 1

    def lost(self, op: Op, rows: Sequence[int]) -> None:
        """The chunks of these rows of an op are not in their cache slots any more."""
        assert op.batch is not None
        for index in rows if self.held else ():
            key = op.batch.key(index)
            held = self.held.get(key)
            if held is not None and held.generation == op.batch.generation(index):
                self._release(key, held, "used" if held.used and not held.fetching else "failed")

    def reset(self) -> None:
        """Every entry was doomed, and no fetch that was not sent will be."""
        for key, held in list(self.held.items()):
            self._release(key, held, "used" if held.used else "failed")

    def _has_room(self) -> bool:
        """Whether enough stays evictable with one more held."""
        return self._tiers.evictable_cache_slots > self._room_min

    def _keep(self, key: bytes, held: _Held) -> None:
        self.held[key] = held
        self.counts[held.reason] += 1

    def _release(self, key: bytes, held: _Held, how: str) -> None:
        """Hold this chunk no more. how: how its fetch ended, if it was fetched."""
        del self.held[key]
        self.fetching -= held.fetching
        self.counts[held.reason] -= 1
        if held.fetched:
            self._counters["prefetches_ended", how] += 1
        self._tiers.release_hold(held.slot, held.row, held.generation)

    def _cancel(self, held: _Held) -> None:
        """Take the entry off its fetch: every later look-up finds the entry in the pool."""
        if held.op is None:
            self._tiers.drop_fetch(held.reason, held.row)
            return
        assert held.op.batch is not None
        self._tiers.detach(held.op.batch, held.index)
        self._unsent.append(CancelCommand(held.op.number, np.array([held.index], np.uint32)))


#: A preempted request that has waited this long is not overtaken by shorter ones any more.
_PATIENCE_S = 5.0
#: Time between two looks whether a preempted request's chunks are still in GPU memory.
_LOOK_AGAIN_S = 0.05
#: Chunks that one `turn` looks at: about 100 µs.
_LOOKS_MAX = 256
#: Chunks of one preempted request, still in GPU memory, that one `turn` looks at.
_LOCAL_LOOKS_MAX = 64
#: Bytes of fetches under way: enough for a fast target between two steps.
_FETCH_BYTES_MAX = 256 << 20
_FETCHES_MIN = 4
_PROBES_MAX = 4

#: A request's place in vLLM's queue; lower goes first.
Order = tuple[float, ...]
#: Whether the n-th of a request's followed chunks is still in GPU memory.
InGpu = Callable[[int], bool]


@dataclass(slots=True, eq=False)
class _Want:
    """One waiting request."""

    request_id: str
    keys: Sequence[bytes]  # its chunks: full prefix, then windows and states
    in_gpu: InGpu
    order: Order | None  # None: it was preempted
    arrival: int
    since_s: float
    next: int = 0  # the chunks before this one are done
    local: int | None = None  # chunks at its front in GPU memory, once vLLM has looked
    skipped: int | None = None  # the first chunk passed over because it was in GPU memory,
    skipped_last: int = 0  # and the last one
    held: dict[bytes, None] = field(default_factory=dict)
    in_heap: bool = False  # of new requests
    done_s: float = 0.0  # when every chunk had been looked at

    def is_local(self, chunk: int) -> bool:
        return self.in_gpu(chunk) if self.local is None else chunk < self.local

    def is_due(self, now_s: float) -> bool:
        """Whether chunks are left, or were passed over and may have left GPU memory since."""
        passed_over = self.skipped is not None and now_s - self.done_s >= _LOOK_AGAIN_S
        return self.next < len(self.keys) or passed_over

    def look_again(self) -> None:
        """Go back to the first chunk that was passed over."""
        assert self.skipped is not None
        self.next, self.skipped = self.skipped, None


class ReloadScheduler:
    """See the module's docstring. A share of 0 switches its part off."""

    def __init__(
        self, config: CoreConfig, capacity: Capacity, holds: Holds, clock: Callable[[], float]
    ) -> None:
        self._limits = {
            Reason.RELOAD: int(config.reload_cache_share * capacity.cache_slots),
            Reason.QUEUE: int(config.prefetch_cache_share * capacity.cache_slots),
        }
        self._fetches_max = max(_FETCHES_MIN, _FETCH_BYTES_MAX // max(1, capacity.slot_bytes))
        self._holds = holds
        self._clock = clock
        self._wants: dict[str, _Want] = {}
        self._preempted: dict[str, _Want] = {}
        self._queue: list[tuple[Order, int, _Want]] = []  # new ones with chunks to look at, a heap
        self._arrivals = 0
        self._wanters: dict[bytes, int] = {}  # held key → requests that want it

    def __len__(self) -> int:
        """Number of requests that are followed."""
        return len(self._wants)

    def follow(
        self, request_id: str, keys: Sequence[bytes], in_gpu: InGpu, order: Order | None = None
    ) -> None:
        """A request waits. keys: its chunks that a load could bring: those of full attention in
        prefix order, from the first one, then those of windows and states.

        order: its place in the queue; requests of equal order keep the order of arrival. None: the
        request was preempted.
        """
        self.left(request_id)
        if keys and self._limits[Reason.RELOAD if order is None else Reason.QUEUE]:
            self._arrivals += 1
            want = _Want(request_id, keys, in_gpu, order, self._arrivals, self._clock())
            self._wants[request_id] = want
            self._queue_up(want)

    def looked_up(self, request_id: str, local_chunks: int) -> None:
        """vLLM looked the request up; its first `local_chunks` chunks are in GPU memory now.

        If it stays in the queue, chunks passed over because they were there are looked at again.
        """
        want = self._wants.get(request_id)
        if want is None or want.skipped is None or local_chunks > want.skipped_last:
            return
        want.local = local_chunks
        want.look_again()
        self._queue_up(want)

    def left(self, request_id: str) -> None:
        """The request runs, or its load was planned, or it has ended."""
        want = self._wants.pop(request_id, None)
        if want is None:
            return
        self._preempted.pop(request_id, None)
        for key in want.held:
            self._wanters[key] -= 1
            if not self._wanters[key]:
                del self._wanters[key]
                self._holds.drop(key)

    def reset(self) -> None:
        """Every chunk is void, and none is held any more."""
        self._wants.clear()
        self._preempted.clear()
        self._queue.clear()
        self._wanters.clear()

    def probe(self, keys: Sequence[bytes]) -> None:
        """Read a few of these pool-only chunks in the background, if no probe is under way."""
        if self._holds.counts[Reason.PROBE]:
            return
        for key in keys[:_PROBES_MAX]:
            if key not in self._holds.held and self._holds.source(key) in (_POOL, _SHARED):
                self._holds.fetch(key, Reason.PROBE)

    def turn(self) -> None:
        """Hold and fetch as many chunks as the shares allow. Called once per step."""
        looks = _LOOKS_MAX
        now_s = self._clock()
        due = [want for want in self._preempted.values() if want.is_due(now_s)]
        for want in due:
            if want.next == len(want.keys):
                want.look_again()
        for want in sorted(due, key=lambda w: _urgency(w, now_s)):
            looks, finished = self._advance(want, Reason.RELOAD, looks)
            full = self._holds.counts[Reason.RELOAD] >= self._limits[Reason.RELOAD]
            if not looks or (full and not finished):
                break
            if finished:  # otherwise the next one may have chunks that only need to be held
                want.done_s = now_s
        if len(self._queue) > 2 * len(self._wants):  # a head that waits keeps those that have left
            self._queue = [one for one in self._queue if self._waits(one[2])]
            heapq.heapify(self._queue)
        while self._queue:
            want = self._queue[0][2]
            if self._waits(want):
                looks, finished = self._advance(want, Reason.QUEUE, looks)
                if not finished:
                    break
            heapq.heappop(self._queue)
            want.in_heap = False

    def _waits(self, want: _Want) -> bool:
        """Whether it has not left."""
        return self._wants.get(want.request_id) is want

    def _queue_up(self, want: _Want) -> None:
        if want.order is None:
            self._preempted[want.request_id] = want
        elif not want.in_heap:
            want.in_heap = True
            heapq.heappush(self._queue, (want.order, want.arrival, want))

    def _advance(self, want: _Want, reason: Reason, looks: int) -> tuple[int, bool]:
        """Go on with one request: (looks left, whether nothing is left to do for it)."""
        passed_over = 0
        while want.next < len(want.keys):
            if not looks or (passed_over >= _LOCAL_LOOKS_MAX and reason is Reason.RELOAD):
                return looks, False
            looks -= 1
            key = want.keys[want.next]
            source = self._holds.source(key)
            if source != _CPU and want.is_local(want.next):
                if want.skipped is None:
                    want.skipped = want.next
                want.skipped_last = want.next
                passed_over += 1
            elif not source:
                want.next = len(want.keys)  # a load ends here: later chunks are of no use
                break
            elif not self._take(want, key, source, reason):
                return looks, False
            want.next += 1
        return looks, True

    def _take(self, want: _Want, key: bytes, source: int, reason: Reason) -> bool:
        """Hold or fetch one chunk for `want`; False if there is no room now."""
        holds = self._holds
        if key in want.held:
            return True
        if key not in holds.held:
            if source == _CPU and reason is Reason.QUEUE:
                return True  # it is in the right tier, and was used just now
            if holds.counts[reason] >= self._limits[reason]:
                return False
            if source == _CPU:
                taken = holds.hold(key, reason)
            else:
                # Reloads may have as many again: fetches for the queue must not delay them.
                most = self._fetches_max * (2 if reason is Reason.RELOAD else 1)
                taken = holds.fetching < most and holds.fetch(key, reason)
            if not taken:
                return False
        self._wanters[key] = self._wanters.get(key, 0) + 1
        want.held[key] = None
        return True


def _urgency(want: _Want, now_s: float) -> tuple[bool, float, float]:
    patient = now_s - want.since_s < _PATIENCE_S
    remaining = len(want.keys) - want.next
    return (patient, remaining if patient else -math.inf, want.since_s)
