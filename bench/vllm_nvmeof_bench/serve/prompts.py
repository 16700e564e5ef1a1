# SPDX-License-Identifier: Apache-2.0
"""Prompts of random token ids that any model of a large enough vocabulary takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["Tokens", "nudge"]

_NUDGE_TOKENS = 3


@dataclass(frozen=True)
class Tokens:
    """Ids from `low` up to, without, `high`: none of them special in the model that is asked."""

    low: int = 2
    high: int = 2048

    @classmethod
    def parse(cls, text: str) -> Tokens:
        """LOW:HIGH.

        Raises:
            BenchError: it is not that.
        """
        low, _, high = text.partition(":")
        try:
            found = cls(int(low), int(high))
        except ValueError:
            raise BenchError(f"token ids {text!r}: give LOW:HIGH, such as 1000:30000") from None
        if not 0 <= found.low < found.high - _NUDGE_TOKENS:
            raise BenchError(f"token ids {text!r}: give a larger HIGH than LOW")
        return found

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(self.low, self.high, count)]


def nudge(tokens: Tokens) -> list[int]:
    """A prompt too short to be kept, which makes a server publish its counters."""
    return [tokens.low + number for number in range(_NUDGE_TOKENS)]
