# SPDX-License-Identifier: Apache-2.0
"""What is replayed against whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.replay.prompts import Vocabulary
from vllm_nvmeof_bench.traces.schedule import Pace

__all__ = ["ARMS_DEFAULT", "Settings"]

ARMS_DEFAULT = ("none", "cpu", "pool")


@dataclass(frozen=True)
class Settings:
    """arms: names of `serve.arms.ARMS`; base_urls: servers that run already, instead of them.

    block_tokens: what a block of the trace is replayed with; None: as many as it stands for.
    context_tokens_max: a session ends before its first longer request, after scaling.
    sessions: how many of the trace, in the order of the seed; None: all. gpu_tokens,
    third_tokens (whose KV a CPU tier "that holds a third" holds; None: a third of the whole
    trace's), target_mb_per_s: of servers that are started here.
    """

    arms: tuple[str, ...] = ARMS_DEFAULT
    base_urls: tuple[str, ...] = ()
    pace: Pace = field(default_factory=Pace)
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    duration_s: float = 300.0
    block_tokens: int | None = None
    context_tokens_max: int = 131_072
    sessions: int | None = None
    gpu_tokens: int = 8192
    third_tokens: int | None = None
    target_mb_per_s: int = 200

    def __post_init__(self) -> None:
        if self.duration_s <= 0:
            raise BenchError(f"a duration of {self.duration_s:g} s measures nothing")
        if self.block_tokens is not None and self.block_tokens < 1:
            raise BenchError(f"{self.block_tokens} tokens a block: give at least 1")
