# SPDX-License-Identifier: Apache-2.0
"""A trace as the manager sees it: whole chunks, in the order of time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from vllm_nvmeof_bench.traces.model import Trace
from vllm_nvmeof_bench.traces.schedule import Pace, virtual

__all__ = ["Ask", "asks_of"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Chunks of the prompt by the id of their last block, which stands for all
    before it. Chunks that the answer fills have negative numbers of their own: which of them
    comes back in a later prompt no trace says, so none does."""

    at_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def asks_of(trace: Trace, pace: Pace, blocks_per_chunk: int) -> list[Ask]:
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
