# SPDX-License-Identifier: Apache-2.0
"""What is said at start of how this engine runs: one log line, and the labels of `config_info`."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.manager.adoption import Capacity
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.protocol import RankHello
from vllm_nvmeof_offload.units import format_bytes

__all__ = ["config_of", "start_line"]


def start_line(hellos: Sequence[RankHello], core: ManagerCore, tokens_per_chunk: int) -> str:
    """Of all ranks together; what differs between them is named with its ranks."""
    first, ranks, capacity = hellos[0], len(hellos), core.capacity
    adopted = core.counters["adopted"]
    size = capacity.slot_bytes
    pinned = sum((hello.cache_slots + hello.stream_slots) * hello.slot_bytes for hello in hellos)
    replica = f"replica {first.replica}: " if first.replica is not None else ""
    tier = (
        f"{replica}CPU tier of {capacity.cache_slots * tokens_per_chunk:,} tokens "
        f"({capacity.cache_slots} cache slots of {format_bytes(size)}) and {first.stream_slots} "
        f"stream slots in {format_bytes(pinned)} of pinned memory on {_ranks(ranks)}"
    )
    parts = [
        tier,
        _pool(first, capacity, tokens_per_chunk, ranks),
        f"engine {_each(hellos, [hello.io_engine for hello in hellos])}",
        f"copies by {_each(hellos, [hello.copy_engine for hello in hellos])}",
        f"evicts by {core.config.eviction_policy}",
        f"{adopted} chunks adopted ({adopted * tokens_per_chunk:,} tokens)",
        f"keyspace {first.keyspace}",
    ]
    lines = {line: None for hello in hellos for line in hello.fallbacks}
    parts += [f"FALLBACK {line}" for line in lines]
    reasons = {reason: None for hello in hellos for reason in hello.volatile}
    if reasons:
        parts.append(f"NOTHING IS ADOPTED: {'; '.join(reasons)}")
    return "; ".join(parts)


def config_of(hellos: Sequence[RankHello], policies: CoreConfig) -> dict[str, str]:
    """As on rank 0; the others run alike, or the start line says what differs."""
    first = hellos[0]
    return {
        "version": __version__,
        "io_engine": first.io_engine,
        "copy_engine": first.copy_engine,
        "eviction_policy": policies.eviction_policy,
        "write_policy": policies.write_policy.value,
        "admission": "auto" if policies.admission.automatic else "always",
        "keyspace": first.keyspace,
        "engine_index": str(first.engine_index),
        "adopts": "no" if any(hello.volatile for hello in hellos) else "yes",
    }


def _pool(first: RankHello, capacity: Capacity, tokens_per_chunk: int, ranks: int) -> str:
    if not capacity.pool_slots:
        return "no pool: what leaves the CPU tier is gone"
    size = format_bytes(capacity.pool_slots * capacity.slot_bytes * ranks)
    return (
        f"pool of {capacity.pool_slots * tokens_per_chunk:,} tokens ({capacity.pool_slots} slots, "
        f"{size} over all ranks) in engine-{first.engine_index} on {', '.join(first.targets)}"
    )


def _each(hellos: Sequence[RankHello], values: Sequence[str]) -> str:
    """What all ranks have in common, or what each has."""
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(
        f"{value} on rank {hello.rank}" for hello, value in zip(hellos, values, strict=True)
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
