# SPDX-License-Identifier: Apache-2.0
"""A trace as the manager sees it, in whole chunks; and orders of eviction compared on one tier.

`lru` and `credited_lru` are the product's own classes; other names are what the configuration
accepts. `s3_fifo` is Yang et al. (SOSP '23): a small queue of a tenth, a main queue, a ghost queue
as long as the tier, counts up to 3; a chunk counts once per request, because the look-up and the
store of one request would be two uses. `best` is Belady's: it evicts the chunk that is needed last,
which requires knowing the future.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_nvmeof_bench.traces import Pace, Trace, virtual
from vllm_nvmeof_offload.manager.eviction import Recency, choose_policy, credit_share

_NEVER = 1 << 62
_SMALL = 0.1
_COUNT_MAX = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. prompt: its chunks by the id of their last block, which stands for all blocks
    before it. answer: the chunks that the answer fills, each with a negative number used once,
    because no trace records which of them return in a later prompt."""

    at_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def asks_of(trace: Trace, pace: Pace, blocks_per_chunk: int) -> list[Ask]:
    """Every request of the trace, in the order of time."""
    numbers = itertools.count(1)
    chunk_tokens = blocks_per_chunk * trace.block_tokens
    asks = []
    for at_s, request in virtual(trace, pace):
        whole = request.input_tokens // trace.block_tokens
        ends = request.blocks[:whole][blocks_per_chunk - 1 :: blocks_per_chunk].tolist()
        filled = (request.input_tokens + request.output_tokens) // chunk_tokens - len(ends)
        answer = tuple(-next(numbers) for _ in range(max(0, filled)))
        asks.append(Ask(at_s, tuple(ends), answer))
    return asks


def candidates(policies: Sequence[str]) -> dict[str, Make]:
    """By name: `policies`, as they are configured, and the two that they are compared with."""
    ours: dict[str, Make] = {name: partial(_Ours, name) for name in policies}
    return {**ours, "s3_fifo": _S3Fifo, "best": _Best}


def hit_rate(make: Make, slots: int, asks: Sequence[Ask]) -> float:
    """Share of the prompts' chunks that were there, each behind those before it."""
    tier = make(slots, asks)
    hits = total = 0
    for now, ask in enumerate(asks):
        hits += sum(1 for _ in itertools.takewhile(tier.__contains__, ask.prompt))
        total += len(ask.prompt)
        chunks = ask.prompt + ask.answer
        for chunk in reversed(chunks):
            if chunk in tier:
                tier.use(chunk, now)
        for chunk in chunks:
            if chunk not in tier and not tier.insert(chunk, now):
                break
        tier.ended([chunk for chunk in chunks if chunk in tier], now)
    return hits / total if total else 0.0


class _Tier:
    """A tier of so many chunks. now: the number of the request that asks."""

    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        self._slots = slots
        self._asked: dict[int, int] = {}  # by chunk of the tier: the last request that used it

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._asked

    def use(self, chunk: int, now: int) -> None:
        """A chunk of the tier is used."""
        self._asked[chunk] = now

    def insert(self, chunk: int, now: int) -> bool:
        """Add a chunk; if necessary evict one that this request did not use. False: none is."""
        raise NotImplementedError

    def ended(self, chunks: Sequence[int], now: int) -> None:
        """The request has ended; `chunks` in prefix order."""


Make = Callable[[int, Sequence[Ask]], _Tier]


class _Ours(_Tier):
    """A policy of the configuration, over the product's recency."""

    def __init__(self, name: str, slots: int, asks: Sequence[Ask]) -> None:
        super().__init__(slots, asks)
        self._recency = Recency(slots, credit_share(name))
        self._policy = choose_policy(name)(self._recency.used)
        self._slot_of: dict[int, int] = {}
        self._chunk_in = [0] * slots
        self._ticks = 0

    def use(self, chunk: int, now: int) -> None:
        self._asked[chunk] = now
        self._touch(chunk)

    def insert(self, chunk: int, now: int) -> bool:
        slot = len(self._asked)
        if slot == self._slots:
            victim = self._policy.peek()
            if victim is None or self._asked[self._chunk_in[victim]] == now:
                return False
            slot = victim
            self._policy.victim()
            self._recency.forget(slot)
            del self._asked[self._chunk_in[slot]]
        self._slot_of[chunk] = slot
        self._chunk_in[slot] = chunk
        self.use(chunk, now)
        self._policy.admit(slot)
        return True

    def ended(self, chunks: Sequence[int], now: int) -> None:
        for chunk in reversed(chunks):
            self._touch(chunk, ended=True)

    def _touch(self, chunk: int, *, ended: bool = False) -> None:
        self._ticks += 1
        self._recency.use(self._slot_of[chunk], self._ticks, ended=ended)


class _S3Fifo(_Tier):
    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        super().__init__(slots, asks)
        self._small_max = max(1, int(_SMALL * slots))
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._count: dict[int, int] = {}

    def use(self, chunk: int, now: int) -> None:
        if self._asked[chunk] != now:
            self._count[chunk] = min(_COUNT_MAX, self._count[chunk] + 1)
            self._asked[chunk] = now

    def insert(self, chunk: int, now: int) -> bool:
        if len(self._asked) >= self._slots and not self._evict(now):
            return False
        if chunk in self._ghost:
            del self._ghost[chunk]
            self._main[chunk] = None
        else:
            self._small[chunk] = None
        self._count[chunk] = 0
        self._asked[chunk] = now
        return True

    def _evict(self, now: int) -> bool:
        for _ in range((_COUNT_MAX + 2) * self._slots):
            small = len(self._small) > self._small_max or not self._main
            queue = self._small if small else self._main
            chunk, _none = queue.popitem(last=False)
            if self._count[chunk] > 0:
                self._count[chunk] = 0 if small else self._count[chunk] - 1
                self._main[chunk] = None
            elif self._asked[chunk] == now:
                queue[chunk] = None
            else:
                del self._count[chunk], self._asked[chunk]
                if small:
                    self._ghost[chunk] = None
                    if len(self._ghost) > self._slots:
                        self._ghost.popitem(last=False)
                return True
        return False


class _Best(_Tier):
    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        super().__init__(slots, asks)
        self._uses: dict[int, list[int]] = {}
        for now, ask in enumerate(asks):
            for chunk in ask.prompt:
                self._uses.setdefault(chunk, []).append(now)
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def use(self, chunk: int, now: int) -> None:
        uses = self._uses.get(chunk, [])
        at = bisect_right(uses, now)
        self._next[chunk] = uses[at] if at < len(uses) else _NEVER
        self._asked[chunk] = now
        heapq.heappush(self._heap, (-self._next[chunk], chunk))

    def insert(self, chunk: int, now: int) -> bool:
        while len(self._asked) >= self._slots:
            negative, victim = self._heap[0]
            if victim in self._asked and self._next[victim] == -negative:
                if self._asked[victim] == now:
                    return False
                del self._asked[victim]
            heapq.heappop(self._heap)
        self.use(chunk, now)
        return True
