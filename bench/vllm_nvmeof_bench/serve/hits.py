# SPDX-License-Identifier: Apache-2.0
"""Where the KV of prompts came from, out of vLLM's `/metrics`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Self

from vllm_nvmeof_bench.servers.client import Metrics

__all__ = ["Hits"]

_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_GPU = "vllm:prefix_cache_hits_total"
_EXTERNAL = "vllm:external_prefix_cache_hits_total"
_OURS = "vllm:nvmeof_loaded_tokens_total"
_PROMPT = "vllm:prompt_tokens_total"
_PEER_READ = "vllm:kv_offload_tiering_read_bytes_total"


@dataclass(frozen=True)
class Hits:
    """Tokens, as counters; differences of two readings.

    prompt: of all prompts. gpu, cpu, pool: found there (of vLLM's tiering, pool is its second
    tier). other: found outside of the GPU, the server does not say where. tier_read_bytes: what
    vLLM's tiering read from its second tier.
    """

    prompt: int = 0
    gpu: int = 0
    cpu: int = 0
    pool: int = 0
    other: int = 0
    tier_read_bytes: int = 0

    @classmethod
    def of(cls, found: Metrics) -> Self:
        """Of one reading; our own counters before vLLM's, which older versions lack."""
        external = int(found.value(_EXTERNAL))
        if found.has(_OURS):
            cpu = int(found.value(_OURS, source="cpu"))
            pool = int(found.value(_OURS, source="pool"))
        else:
            cpu = int(found.value(_BY_SOURCE, source="host"))
            pool = int(found.value(_BY_SOURCE, source="disk"))
        return cls(
            prompt=int(found.value(_PROMPT)),
            gpu=int(found.value(_GPU)),
            cpu=cpu,
            pool=pool,
            other=max(0, external - cpu - pool),
            tier_read_bytes=int(found.value(_PEER_READ)),
        )

    def __sub__(self, before: Hits) -> Hits:
        mine, theirs = asdict(self), asdict(before)
        return Hits(**{one.name: mine[one.name] - theirs[one.name] for one in fields(Hits)})

    def __add__(self, other: Hits) -> Hits:
        mine, theirs = asdict(self), asdict(other)
        return Hits(**{one.name: mine[one.name] + theirs[one.name] for one in fields(Hits)})

    @property
    def found(self) -> int:
        """Tokens that were in any cache."""
        return self.gpu + self.cpu + self.pool + self.other
