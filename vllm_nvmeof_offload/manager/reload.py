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
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_nvmeof_offload.manager.plan import Source
from vllm_nvmeof_offload.manager.shelf import Reason

__all__ = ["InGpu", "Order", "ReloadScheduler", "Shelves"]

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
