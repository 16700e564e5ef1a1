# SPDX-License-Identifier: Apache-2.0
"""The chunks that are held in the CPU tier, or fetched from the pool, for waiting requests. Pure.

`ReloadScheduler` chooses the chunks for two kinds of requests:

* Preempted requests: cached chunks are held and the others fetched, within `reload_cache_share`.
  Requests with the fewest remaining chunks are served first, because they are ready soonest, but
  requests that have waited for `_PATIENCE_S` precede all others.
* New requests in vLLM's queue: their chunks in the pool are fetched in queue order, within
  `prefetch_cache_share`.

A request is dropped when it starts, when its load is planned, or when it ends. Chunks that no other
request wants are then released, and their fetches cancelled. The work per step is bounded.

Native code (native/tiers/holds.h) iterates over a request's chunks. Python only asks which leading
chunks are in GPU memory: vLLM's look-up there ends at the first missing chunk, so later ones are
loaded.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.manager.handshake import Capacity, CoreConfig
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Holds, Tiers, Wanted


class Reason(enum.IntEnum):
    """The reason for holding or fetching a chunk. `Tiers` keeps unsent fetches by reason."""

    RELOAD = 0  # for a preempted request
    QUEUE = 1  # for a request that is waiting in vLLM's queue
    PROBE = 2  # to measure the pool while admission declines it


#: The ways in which a fetch ends: values of the metric's `how` label, in the order in holds.h.
_ENDS = ("used", "wasted", "cancelled", "failed", "probe")
ROOM_SHARE = 0.125  # the share of slots that stays evictable, so that new chunks find room
_PATIENCE_S = 5.0  # shorter requests do not overtake a preempted request that has waited this long
_LOOK_AGAIN_S = 0.05  # the interval between checks for chunks in GPU memory
#: The maximum number of chunks examined per `turn`, which takes about 1 ms. The limit on bytes
#: stops fetches earlier.
LOOKS_MAX = 4096
#: The maximum number of queries to vLLM about chunks in GPU memory, per `turn` and per request.
_QUESTIONS_MAX, _QUESTIONS_OF_ONE_MAX = 256, 64
_FETCH_BYTES_MAX = 256 << 20  # bytes in progress: enough for a fast target between two steps
_FETCHES_MIN = 4
_PROBES_MAX = 4

Order = tuple[float, ...]  # a request's place in vLLM's queue; the lowest is served first
InGpu = Callable[[int], bool]  # whether the n-th followed chunk is still in GPU memory
Cancel = Callable[[int, Sequence[int]], None]  # cancels rows of a fetch, given by number


def count_fetches(holds: Holds, counters: Counts) -> None:
    """Count the fetches that began and ended since the last call."""
    begun, ends = holds.take_counts()
    for reason in filter(begun.__getitem__, Reason):
        counters["prefetches", reason.name.lower()] += begun[reason]
    for at in filter(ends.__getitem__, range(len(_ENDS))):
        counters["prefetches_ended", _ENDS[at]] += ends[at]


@dataclass(slots=True, eq=False)
class _Want:
    request_id: str
    count: int  # the number of chunks: full prefix, then windows and states
    wanted: Wanted
    in_gpu: InGpu
    order: Order | None  # None if it was preempted
    arrival: int
    since_s: float
    next: int = 0  # the chunks before this one are done
    local: int = 0  # leading chunks known to be in GPU memory
    local_ends: bool = False  # whether `local` is final
    skipped: int | None = None  # the first chunk skipped because it was in GPU memory
    skipped_last: int = 0  # the last skipped chunk
    in_heap: bool = False  # whether it is in the heap of new requests
    done_s: float = 0.0  # when every chunk had been examined

    def ask(self, questions: int) -> int:
        """Ask which leading chunks are in GPU memory. Return the number of questions left."""
        while not self.local_ends and questions:
            questions -= 1
            self.local_ends = self.local == self.count or not self.in_gpu(self.local)
            self.local += not self.local_ends
        return questions

    def is_due(self, now_s: float) -> bool:
        """Return whether chunks are left, or skipped chunks may have left GPU memory."""
        passed_over = self.skipped is not None and now_s - self.done_s >= _LOOK_AGAIN_S
        return self.next < self.count or passed_over

    def look_again(self) -> None:
        """Return to the first skipped chunk, to ask again whether it is in GPU memory."""
        assert self.skipped is not None
        self.next = self.local = self.skipped
        self.local_ends, self.skipped = False, None


class ReloadScheduler:
    """The scheduler that this module describes. A share of 0 disables the part that it limits."""

    def __init__(
        self,
        config: CoreConfig,
        capacity: Capacity,
        tiers: Tiers,
        holds: Holds,
        cancel: Cancel,
        clock: Callable[[], float],
    ) -> None:
        self._limits = {
            Reason.RELOAD: int(config.reload_cache_share * capacity.cache_slots),
            Reason.QUEUE: int(config.prefetch_cache_share * capacity.cache_slots),
        }
        self._fetches_max = max(_FETCHES_MIN, _FETCH_BYTES_MAX // max(1, capacity.slot_bytes))
        self._tiers, self._holds, self._cancel = tiers, holds, cancel
        self._clock = clock
        self._wants: dict[str, _Want] = {}
        self._preempted: dict[str, _Want] = {}
        self._queue: list[tuple[Order, int, _Want]] = []  # a heap of new requests
        self._arrivals = 0
        self._questions = _QUESTIONS_MAX  # left in this turn

    def __len__(self) -> int:
        return len(self._wants)

    def follow(
        self, request_id: str, keys: Sequence[bytes], in_gpu: InGpu, order: Order | None = None
    ) -> None:
        """Follow a waiting request. `keys` are the chunks that a load could need: full attention in
        prefix order from the first chunk, then windows and states. `order` is the request's place
        in the queue, or None if it was preempted; equal orders keep their order of arrival."""
        self.left(request_id)
        if keys and self._limits[Reason.RELOAD if order is None else Reason.QUEUE]:
            self._arrivals += 1
            # Native code keeps pointers into the tuple.
            chunks = len(keys), self._holds.wanted(self._tiers, tuple(keys))
            want = _Want(request_id, *chunks, in_gpu, order, self._arrivals, self._clock())
            self._wants[request_id] = want
            self._queue_up(want)

    def looked_up(self, request_id: str, local_chunks: int) -> None:
        """Record that vLLM's look-up found the request's first `local_chunks` chunks in GPU memory.
        If any skipped chunk is not among these, re-examine all chunks from the first skipped one
        on."""
        want = self._wants.get(request_id)
        if want is None or want.skipped is None or local_chunks > want.skipped_last:
            return
        want.look_again()
        want.local, want.local_ends = local_chunks, True
        self._queue_up(want)

    def left(self, request_id: str) -> None:
        """Stop following a request that is running, has ended, or whose load has been planned."""
        want = self._wants.pop(request_id, None)
        if want is None:
            return
        self._preempted.pop(request_id, None)
        cancelled: dict[int, list[int]] = {}
        for fetch, row in self._holds.leave(want.wanted):
            cancelled.setdefault(fetch, []).append(row)
        for fetch, rows in cancelled.items():
            self._cancel(fetch, rows)

    def reset(self) -> None:
        """Start over after a reset, when no chunk is valid or held."""
        self._wants.clear()
        self._preempted.clear()
        self._queue.clear()

    def probe(self, keys: Sequence[bytes]) -> None:
        """Read some of these pool-only chunks in the background, unless a probe is in progress."""
        if not self._holds.held(Reason.PROBE):
            for key in keys[:_PROBES_MAX]:
                self._holds.probe(self._tiers, key)

    def turn(self) -> None:
        """Hold and fetch as many chunks as the shares allow. Call once per step."""
        looks, self._questions = LOOKS_MAX, _QUESTIONS_MAX
        now_s = self._clock()
        due = [want for want in self._preempted.values() if want.is_due(now_s)]
        for want in due:
            if want.next == want.count:
                want.look_again()
        for want in sorted(due, key=lambda w: _urgency(w, now_s)):
            looks, finished = self._advance(want, Reason.RELOAD, looks)
            full = self._holds.held(Reason.RELOAD) >= self._limits[Reason.RELOAD]
            if not looks or (full and not finished):
                break
            if finished:  # otherwise continue: the next request may need only holds
                want.done_s = now_s
        if len(self._queue) > 2 * len(self._wants):  # drop requests that have left
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
        return self._wants.get(want.request_id) is want

    def _queue_up(self, want: _Want) -> None:
        if want.order is None:
            self._preempted[want.request_id] = want
        elif not want.in_heap:
            want.in_heap = True
            heapq.heappush(self._queue, (want.order, want.arrival, want))

    def _advance(self, want: _Want, reason: Reason, looks: int) -> tuple[int, bool]:
        """Continue with one request. Return the remaining looks, and whether it is done."""
        most = _QUESTIONS_OF_ONE_MAX if reason is Reason.RELOAD else _QUESTIONS_MAX
        questions = min(self._questions, most)
        self._questions -= questions - want.ask(questions)
        # Reloads get twice the limit, so that fetches for the queue cannot delay reloads.
        most = self._fetches_max * (2 if reason is Reason.RELOAD else 1)
        chunks = want.next, want.count if want.local_ends else want.local, want.local
        # Chunks in GPU memory (before `local`) are skipped unless the CPU tier has them. If no tier
        # has a chunk, all later ones count as done, because a load would end there.
        want.next, looks, first, last = self._holds.advance(
            want.wanted, *chunks, looks, reason, self._limits[reason], most
        )
        if first >= 0:
            want.skipped = first if want.skipped is None else want.skipped
            want.skipped_last = last
        return looks, want.next == want.count


def _urgency(want: _Want, now_s: float) -> tuple[bool, float, float]:
    patient = now_s - want.since_s < _PATIENCE_S
    remaining = want.count - want.next
    return (patient, remaining if patient else -math.inf, want.since_s)
