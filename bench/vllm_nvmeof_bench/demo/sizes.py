# SPDX-License-Identifier: Apache-2.0
"""How large model and caches are, so that a plan's conversations leave them when they should."""

from __future__ import annotations

import math
from pathlib import Path

from vllm_nvmeof_bench.demo.workload import Plan
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import ModelShape
from vllm_nvmeof_bench.servers.server import OffloadSpec, ServerSpec
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes

__all__ = ["BLOCK_TOKENS", "model_shape", "offload_spec", "server_spec"]

BLOCK_TOKENS = 32
_CHUNK_BYTES = 512 * KIB
_STREAM_SLOTS = 16
_POOL_BYTES = 512 * MIB
#: Fifteen times what two cores get, and no more KV: else a GPU computes a prompt at once.
_ON_A_GPU = ModelShape(hidden=4096, intermediate=14336, heads=32)


def model_shape() -> ModelShape:
    """For the engine of the vLLM that is installed."""
    return ModelShape() if has_cpu_engine() else _ON_A_GPU


def server_spec(plan: Plan, model: Path) -> ServerSpec:
    """Return a server without offloading whose GPU cache holds `plan.gpu_tokens`."""
    length = -(-(plan.conversation_tokens_max + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    return ServerSpec(
        model=model,
        max_model_len=length,
        gpu_blocks=plan.gpu_tokens // BLOCK_TOKENS + 1,
        block_size=BLOCK_TOKENS,
        cores_reserved=0,
    )


def offload_spec(
    plan: Plan, shape: ModelShape, target: Path, chunk_bytes: int = _CHUNK_BYTES
) -> OffloadSpec:
    """Size the CPU tier to hold `plan.cpu_tier_conversations`, and stream slots beside it.

    target: the pool's directory. chunk_bytes: payload bytes of a chunk.
    """
    chunk_tokens = chunk_bytes // shape.kv_bytes_per_token
    tokens = plan.cpu_tier_conversations * plan.conversation_tokens_max
    slots = math.ceil(tokens / chunk_tokens) + _STREAM_SLOTS
    extra = {
        "targets": [str(target)],
        "pool_bytes": _POOL_BYTES,
        "chunk_bytes_min": chunk_bytes,
        "stream_slots": _STREAM_SLOTS,
    }
    return OffloadSpec(size_gib=slots * slot_stride_bytes(chunk_bytes) / GIB, extra=extra)
