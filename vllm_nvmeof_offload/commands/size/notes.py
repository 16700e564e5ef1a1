# SPDX-License-Identifier: Apache-2.0
"""What a sizing takes for granted, and what the reader should know about this one."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_nvmeof_offload.commands.size.bandwidth import Reload
from vllm_nvmeof_offload.commands.size.capacity import GpuRoom
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.human import human_bytes
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import LayerKind

__all__ = ["assumptions", "notes"]


def assumptions(sizes: KvSizes, deployment: Deployment) -> list[str]:
    """What was not given and cannot be computed: each with the option that replaces it."""
    reserve = human_bytes(deployment.gpu_reserve_bytes)
    gpu = (
        f"{deployment.gpu_memory_utilization:g} of GPU memory for vLLM, of that {reserve} for "
        "activations and CUDA graphs (--gpu-utilization, --gpu-reserve)"
    )
    worst = (
        "worst case: all sessions come back at once, with all of their KV in the pool alone; the "
        "whole TTFT is for loading, computing what was not stored comes on top"
    )
    weights = sizes.model.weights
    known = [f"weights: {weights.source} (--weights-bytes)"] if weights.total_bytes else []
    return [
        *known,
        gpu,
        f"the pool takes {deployment.drive_fill:g} of a drive (--drive-fill)",
        f"{deployment.link_efficiency:g} of a link's rate is payload (--link-efficiency)",
        worst,
        "sessions share no prefix; chunks lie evenly over drives, links and GPUs",
    ]


def notes(sizes: KvSizes, deployment: Deployment, room: GpuRoom | None, back: Reload) -> list[str]:
    """What is special about this model or this deployment; empty for a plain one."""
    return [*sizes.model.notes, *_of_model(sizes), *_of_deployment(sizes, deployment, room, back)]


def _of_model(sizes: KvSizes) -> Iterator[str]:
    kinds = {group.kind for group in sizes.model.groups}
    layout = sizes.layout
    refused = [
        name
        for name, found in (
            ("sliding windows", LayerKind.WINDOW in kinds),
            ("recurrent state", LayerKind.STATE in kinds),
            ("a second KV cache (the indexer's)", LayerKind.INDEXER in kinds),
            ("pipeline parallelism", layout.pipeline_parallel > 1),
        )
        if found
    ]
    if refused:
        yield f"this version of the offload refuses {' and '.join(refused)}: a plan, not a promise"
    if LayerKind.WINDOW in kinds:
        yield "of windowed layers the pool is counted with what a load reads: the last window"
    if LayerKind.STATE in kinds:
        yield "layers with recurrent state have no KV per token: one state a session is counted"
    if any(g.kind is LayerKind.STATE and g.state is None for g in sizes.model.groups):
        yield "the size of this family's recurrent state is not known here: counted as nothing"
    copies = sizes.copies()
    if copies > 1:
        yield (
            f"{copies:.3g} copies: each rank stores what it holds, so that "
            f"--tp {layout.tensor_parallel} costs {copies:.3g} times the pool and its bandwidth"
        )


def _of_deployment(
    sizes: KvSizes, deployment: Deployment, room: GpuRoom | None, back: Reload
) -> Iterator[str]:
    limit = sizes.model.context_tokens_max
    if limit is not None and deployment.context_tokens > limit:
        yield f"--context {deployment.context_tokens} is beyond the model's {limit} tokens"
    if deployment.context_tokens < sizes.chunk_tokens:
        yield (
            f"--context {deployment.context_tokens} is less than a chunk of {sizes.chunk_tokens} "
            "tokens: nothing is stored of it"
        )
    if room is None:
        yield f"GPU memory is left out: {sizes.model.weights.source}"
    elif room.free_bytes <= 0:
        yield "the weights do not fit into GPU memory: more --tp, or more --gpu-memory"
    elif room.sessions == 0:
        yield "not one session of this context fits into GPU memory: vLLM would refuse it"
    if back.seconds > deployment.ttft_seconds:
        hop = back.bottleneck
        yield (
            f"the {hop.name} are in the way: {hop.bytes_per_s / 1e9:.2f} of "
            f"{back.needed_bytes_per_s / 1e9:.2f} GB/s; {hop.needed} would do, or "
            f"{back.sessions_in_time} sessions at once"
        )
