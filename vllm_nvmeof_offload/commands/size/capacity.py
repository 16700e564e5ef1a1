# SPDX-License-Identifier: Apache-2.0
"""What fits where: sessions in GPU memory, in the CPU tier, in the pool."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes

__all__ = ["CpuRoom", "GpuRoom", "PoolRoom", "cpu_room", "gpu_room", "pool_room"]


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """GPU memory. free_bytes: for KV on one GPU (below 0: the weights do not fit)."""

    weights_bytes: int
    free_bytes: int
    session_bytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class CpuRoom:
    """Pinned memory of all engines: cache slots of one rank, and sessions over all engines."""

    cache_bytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """The pool on `drives` drives."""

    pool_bytes: int
    session_bytes: int
    sessions_per_drive: int
    sessions: int


def gpu_room(sizes: KvSizes, deployment: Deployment) -> GpuRoom | None:
    """None where nobody knows what the weights weigh. Weights are taken as evenly spread."""
    total = sizes.model.weights.total_bytes
    if total is None:
        return None
    weights = -(-total // sizes.layout.ranks)
    taken = int(deployment.gpu_memory_bytes * deployment.gpu_memory_utilization)
    free = taken - deployment.gpu_reserve_bytes - weights
    session = sizes.session_rank_bytes(deployment.context_tokens)
    each = max(0, free) // session if session else 0
    return GpuRoom(weights, free, session, each * deployment.engines)


def cpu_room(sizes: KvSizes, deployment: Deployment) -> CpuRoom:
    """Cache slots are what is left of the staging after the stream slots.

    Stream slots take at most a quarter, as in the server.
    """
    slots = sizes.session_slots(deployment.context_tokens)
    stride = max((s.stride_bytes for s in slots), default=0)
    session = sizes.staged_rank_bytes(deployment.context_tokens)
    if not stride or not session:
        return CpuRoom(0, 0)
    total = deployment.staging_bytes // sizes.layout.ranks // stride
    streams = max(1, min(deployment.stream_slots, total // 4))
    cache = max(0, total - streams) * stride
    return CpuRoom(cache, cache // session * deployment.engines)


def pool_room(sizes: KvSizes, deployment: Deployment, drives: int) -> PoolRoom:
    """A session's chunks may lie on several drives, so that no drive's rest is lost."""
    each = int(deployment.drive_bytes * deployment.drive_fill)
    session = sizes.pooled_bytes(deployment.context_tokens)
    if not session:
        return PoolRoom(each * drives, 0, 0, 0)
    return PoolRoom(each * drives, session, each // session, each * drives // session)
