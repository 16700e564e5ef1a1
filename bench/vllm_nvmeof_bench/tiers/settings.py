# SPDX-License-Identifier: Apache-2.0
"""What is simulated: sizes, policies, and who asks. Sizes are shares of the trace's working set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.tiers.world import Shape
from vllm_nvmeof_bench.traces.schedule import Pace
from vllm_nvmeof_offload.manager.eviction import POLICIES, choose_policy

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """gpu, cpu, pools, …: shares of the chunks that the trace's prompts have in all.

    chunk_tokens: of the manager's chunks, at least a block of the trace. context_tokens_max: a
    session ends before its first longer request. kv_bytes_per_token: to say tokens in bytes;
    128 KiB is Llama 3.1 8B in 16 bits. policies: values of the configuration key
    `eviction_policy`.

    Raises (when made):
        BenchError: a number that cannot be.
        ConfigError: a policy that there is not, or that is none.
    """

    pace: Pace = field(default_factory=Pace)
    chunk_tokens: int = 512
    context_tokens_max: int = 131_072
    gpu: float = 0.02
    cpu: float = 0.05
    pool: float = 0.1
    pools: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.4, 0.8)
    cpus: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    alone: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.4, 0.8)
    kv_bytes_per_token: int = 131_072
    policies: tuple[str, ...] = tuple(sorted(POLICIES, reverse=True))

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "context_tokens_max", "kv_bytes_per_token"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name} {getattr(self, name)} is not positive")
        shares = (self.gpu, self.cpu, self.pool, *self.pools, *self.cpus, *self.alone)
        if any(not 0 <= share <= 10 for share in shares):
            raise BenchError("sizes are shares of the working set, from 0 to 10")
        for policy in self.policies:
            choose_policy(policy)

    def shapes(self, unique: int) -> Iterator[tuple[str, Shape]]:
        """(which sweep, shape) of every run; `unique` chunks are the working set."""

        def chunks(share: float) -> int:
            return max(8, int(share * unique)) if share else 0

        middle = Shape(chunks(self.gpu), chunks(self.cpu), chunks(self.pool))
        for policy in self.policies:
            base = replace(middle, policy=policy)
            for share in self.pools:
                yield "pool", replace(base, pool=chunks(share))
            for share in self.cpus:
                yield "cpu", replace(base, cache=chunks(share))
            for write_policy in ("through", "on_eviction"):
                for threshold in (1, 2):
                    yield (
                        "writes",
                        replace(base, write_policy=write_policy, store_threshold=threshold),
                    )
