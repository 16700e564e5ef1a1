# SPDX-License-Identifier: Apache-2.0
"""A trace as the manager sees it, in whole chunks; and models that policies are compared with.

`s3_fifo` is Yang et al. (SOSP '23): a small queue of a tenth, a main queue, a ghost queue as long
as the tier, counts up to 3; a chunk counts once per request, because the look-up and the store of
one request would be two uses. `best` is Belady's: it evicts the chunk that is needed last, which
requires knowing the future.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_nvmeof_bench.traces import Pace, Trace, virtual

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


class Tier(ABC):
    """A model of one tier of so many chunks, which knows all requests. counts: under `cpu` the
    chunks of prompts that were there so far, each behind those before it."""

    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        self.counts: Counter[str] = Counter()
        self._slots = slots
        self._now = -1  # the number of the request that asks
        self._asked: dict[int, int] = {}  # by chunk of the tier: the last request that used it

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The next request, from its look-up to its end."""
        self._now += 1
        there = itertools.takewhile(self._asked.__contains__, prompt)
        self.counts["cpu"] += sum(1 for _ in there)
        chunks = (*prompt, *answer)
        for chunk in reversed(chunks):
            if chunk in self._asked:
                self._use(chunk)
        for chunk in chunks:
            if chunk not in self._asked and not self._insert(chunk):
                break

    @abstractmethod
    def _use(self, chunk: int) -> None:
        """A chunk of the tier is used."""

    @abstractmethod
    def _insert(self, chunk: int) -> bool:
        """Add a chunk; if necessary evict one that this request did not use. False: none is."""


class _S3Fifo(Tier):
    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        super().__init__(slots, asks)
        self._small_max = max(1, int(_SMALL * slots))
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._count: dict[int, int] = {}

    def _use(self, chunk: int) -> None:
        if self._asked[chunk] != self._now:
            self._count[chunk] = min(_COUNT_MAX, self._count[chunk] + 1)
            self._asked[chunk] = self._now

    def _insert(self, chunk: int) -> bool:
        if len(self._asked) >= self._slots and not self._evict():
            return False
        if chunk in self._ghost:
            del self._ghost[chunk]
            self._main[chunk] = None
        else:
            self._small[chunk] = None
        self._count[chunk] = 0
        self._asked[chunk] = self._now
        return True

    def _evict(self) -> bool:
        for _ in range((_COUNT_MAX + 2) * self._slots):
            small = len(self._small) > self._small_max or not self._main
            queue = self._small if small else self._main
            chunk, _none = queue.popitem(last=False)
            if self._count[chunk] > 0:
                self._count[chunk] = 0 if small else self._count[chunk] - 1
                self._main[chunk] = None
            elif self._asked[chunk] == self._now:
                queue[chunk] = None
            else:
                del self._count[chunk], self._asked[chunk]
                if small:
                    self._ghost[chunk] = None
                    if len(self._ghost) > self._slots:
                        self._ghost.popitem(last=False)
                return True
        return False


class _Best(Tier):
    def __init__(self, slots: int, asks: Sequence[Ask]) -> None:
        super().__init__(slots, asks)
        self._uses: dict[int, list[int]] = {}
        for now, ask in enumerate(asks):
            for chunk in ask.prompt:
                self._uses.setdefault(chunk, []).append(now)
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def _use(self, chunk: int) -> None:
        uses = self._uses.get(chunk, [])
        at = bisect_right(uses, self._now)
        self._next[chunk] = uses[at] if at < len(uses) else _NEVER
        self._asked[chunk] = self._now
        heapq.heappush(self._heap, (-self._next[chunk], chunk))

    def _insert(self, chunk: int) -> bool:
        while len(self._asked) >= self._slots:
            negative, victim = self._heap[0]
            if victim in self._asked and self._next[victim] == -negative:
                if self._asked[victim] == self._now:
                    return False
                del self._asked[victim]
            heapq.heappop(self._heap)
        self._use(chunk)
        return True


MODELS: dict[str, type[Tier]] = {"s3_fifo": _S3Fifo, "best": _Best}
