# SPDX-License-Identifier: Apache-2.0
"""Prompts with the prefix structure of a trace: token ids that follow from its block ids.

Equal block ids give equal tokens, different ones different tokens, on every machine and for the
same seed; so prompts share a prefix exactly as far as the trace says. Tokens behind the
last whole block follow from that block, and are shared by prompts with the very same blocks
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.traces.model import Ids, Request

__all__ = ["Vocabulary"]

#: Where the tail's ids begin: no trace has so many blocks.
_TAIL = 1 << 50


@dataclass(frozen=True)
class Vocabulary:
    """Token ids from `low` to below `high`, which the model must have, none of them special."""

    low: int = 300
    high: int = 2000
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high - 1:
            raise BenchError(f"token ids from {self.low} to {self.high}: give at least two")

    def prompt(self, request: Request, block_tokens: int) -> list[int]:
        """The request's `input_tokens` token ids."""
        count = request.input_tokens
        blocks = -(-count // block_tokens)
        ids = request.blocks[:blocks]
        last = int(ids[-1]) if len(ids) else 0
        tail = _TAIL + last * 4096 + np.arange(max(0, blocks - len(ids)), dtype=np.int64)
        return self._tokens(np.concatenate((ids, tail)), block_tokens)[:count]

    def _tokens(self, ids: Ids, block_tokens: int) -> list[int]:
        """Of each id `block_tokens` tokens: its digits first, so that no two ids are alike, and
        then what a mixing function makes of id and place."""
        base = self.high - self.low
        places = np.arange(block_tokens, dtype=np.uint64)
        names = ids.astype(np.uint64)[:, None]
        mixed = _mix(names * np.uint64(block_tokens) + places + _mix(np.uint64(self.seed)))
        digits = mixed % np.uint64(base)
        for place in range(min(2, block_tokens)):
            digits[:, place] = names[:, 0] // np.uint64(base**place) % np.uint64(base)
        found: list[int] = (digits.ravel() + np.uint64(self.low)).tolist()
        return found


def _mix(values: np.typing.ArrayLike) -> np.typing.NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the input moves half of the output's."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(values, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
