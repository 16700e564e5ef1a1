# SPDX-License-Identifier: Apache-2.0
"""What is measured: arms, cases, sizes. Everything here is fixed before a run starts.

Arms, each a `vllm serve` of its own:

    none               without offloading
    ours               with it, by default settings: the chunks of prompts and of what is
                       generated are stored in the CPU tier and written through to a pool
    ours_prompt_only   the same with `offload_prompt_only: true`
    ours_cpu_only      the same with `pool_bytes: 0`: stored, written nowhere

Cases, with prompts that no server has seen before:

    single   one request: a prompt of many chunks, few generated tokens
    batch    requests at once with short prompts, so that decode steps make up nearly all

The model keeps 32 KiB of KV a token, so that a chunk is one block of 32 tokens, 1 MiB: near
what a model of 8 B parameters has on a GPU, and the many chunks that offloading's cost goes by.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.servers.model import ModelShape
from vllm_nvmeof_offload.units import GIB

__all__ = ["ARMS", "ARMS_DEFAULT", "BASE", "CASES", "CPU_ONLY", "OURS", "PROMPT_ONLY", "Settings"]

BASE, OURS, PROMPT_ONLY, CPU_ONLY = "none", "ours", "ours_prompt_only", "ours_cpu_only"
ARMS = (BASE, OURS, PROMPT_ONLY, CPU_ONLY)
ARMS_DEFAULT = (BASE, OURS, PROMPT_ONLY)
CASES = ("single", "batch")

BLOCK_TOKENS = 32
#: The GPU cache holds this many times what is asked for at once.
_ROOM = 4
_MODEL_BYTES = GIB // 2


@dataclass(frozen=True)
class Settings:
    """One run.

    pairs: rounds, each with every arm and case once. warm_ups: rounds before, not kept: what
    only first requests cost. staging_gib, pool_bytes: of each server that offloads; far below
    the defaults, which several servers on one machine could not have together.
    idle_s: how long all servers are left alone to see what an idle one uses.
    """

    arms: tuple[str, ...] = ARMS_DEFAULT
    pairs: int = 20
    seed: int = 1
    warm_ups: int = 2
    single_prompt_tokens: int = 1024
    single_answer_tokens: int = 16
    batch_requests: int = 8
    batch_prompt_tokens: int = 64
    batch_answer_tokens: int = 96
    staging_gib: float = 1.0
    pool_bytes: int = 2 * GIB
    idle_s: float = 5.0
    shape: ModelShape = field(default_factory=lambda: ModelShape(kv_heads=8))

    def __post_init__(self) -> None:
        for name in self.arms:
            if name not in ARMS:
                raise BenchError(f"no arm {name!r}; there are {', '.join(ARMS)}")
        if BASE not in self.arms or len(set(self.arms)) < 2:
            raise BenchError(f"nothing to compare: give {BASE} and at least one other arm")
        if self.pairs < 1:
            raise BenchError("pairs is at least 1")

    @property
    def tokens_at_once(self) -> int:
        """The most tokens that requests hold at the same time."""
        batch = self.batch_requests * (self.batch_prompt_tokens + self.batch_answer_tokens)
        return max(batch, self.single_prompt_tokens + self.single_answer_tokens)

    @property
    def model_len(self) -> int:
        longest = max(
            self.single_prompt_tokens + self.single_answer_tokens,
            self.batch_prompt_tokens + self.batch_answer_tokens,
        )
        return -(-(longest + 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def gpu_blocks(self) -> int:
        return _ROOM * -(-self.tokens_at_once // BLOCK_TOKENS) + 1

    @property
    def disk_bytes_max(self) -> int:
        """The most that lies on the disk at any time: the model and the pools."""
        pools = sum(name in (OURS, PROMPT_ONLY) for name in self.arms)
        return _MODEL_BYTES + pools * self.pool_bytes
