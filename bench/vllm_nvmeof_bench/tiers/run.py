# SPDX-License-Identifier: Apache-2.0
"""Every shape of the sweeps in turn, over the same requests; no server, no disk, no clock."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.tiers.candidates import Make, candidates, hit_rate
from vllm_nvmeof_bench.tiers.chunks import Ask, asks_of
from vllm_nvmeof_bench.tiers.samples import Sample
from vllm_nvmeof_bench.tiers.settings import Settings
from vllm_nvmeof_bench.tiers.world import Shape, World
from vllm_nvmeof_bench.traces.model import Trace
from vllm_nvmeof_bench.traces.read import read_trace
from vllm_nvmeof_offload import __version__

__all__ = ["run"]


def run(
    settings: Settings,
    trace_path: Path,
    on_progress: OnProgress = lambda done, total, what: None,
) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples and the conditions.

    Raises:
        BenchError: the trace cannot be read, or nothing of it is left.
    """
    on_progress(0, 0, "reading the trace")
    trace = read_trace(trace_path).capped(settings.context_tokens_max)
    per_chunk = max(1, settings.chunk_tokens // trace.block_tokens)
    chunk_tokens = per_chunk * trace.block_tokens
    asks = asks_of(trace, settings.pace, per_chunk)
    before = _predecessors(asks)
    if not before:
        raise BenchError(f"{trace_path}: no request of a chunk or more under the context cap")
    shapes = list(settings.shapes(len(before)))
    orders = candidates(settings.policies)
    total = len(shapes) + len(settings.alone) * len(orders)
    samples: list[Sample] = []
    for sweep, shape in shapes:
        on_progress(len(samples), total, f"{sweep} · {shape.policy}")
        samples.append(_tiers(sweep, shape, asks, chunk_tokens, before))
    for share in settings.alone:
        for name, make in orders.items():
            on_progress(len(samples), total, f"one tier · {name}")
            slots = max(8, int(share * len(before)))
            samples.append(_alone(name, make, slots, asks, chunk_tokens))
    on_progress(total, total, "done")
    return samples, _conditions(settings, trace, asks, chunk_tokens, len(before))


def _predecessors(asks: Sequence[Ask]) -> dict[int, int | None]:
    """Of each chunk of a prompt, the one before it."""
    before: dict[int, int | None] = {}
    for ask in asks:
        before.update(zip(ask.prompt, (None, *ask.prompt), strict=False))
    return before


def _tiers(
    sweep: str,
    shape: Shape,
    asks: Sequence[Ask],
    chunk_tokens: int,
    before: dict[int, int | None],
) -> Sample:
    world = World(shape)
    for ask in asks:
        world.serve(ask.prompt, ask.answer)
    counts = world.counts
    there = world.chunks()
    lost = sum(before.get(one) is not None and before[one] not in there for one in there)
    return Sample(
        sweep=sweep,
        policy=shape.policy,
        write_policy=shape.write_policy,
        store_threshold=shape.store_threshold,
        gpu_tokens=shape.gpu * chunk_tokens,
        cpu_tokens=shape.cache * chunk_tokens,
        pool_tokens=shape.pool * chunk_tokens,
        prompt_tokens=sum(counts[one] for one in ("gpu", "cpu", "pool", "miss")) * chunk_tokens,
        hit_gpu=counts["gpu"] * chunk_tokens,
        hit_cpu=counts["cpu"] * chunk_tokens,
        hit_pool=counts["pool"] * chunk_tokens,
        stored=counts["stored"] * chunk_tokens,
        written=counts["written"] * chunk_tokens,
        stranded=lost / len(there) if there else 0.0,
    )


def _alone(name: str, make: Make, slots: int, asks: Sequence[Ask], chunk_tokens: int) -> Sample:
    asked = sum(len(ask.prompt) for ask in asks)
    found = round(hit_rate(make, slots, asks) * asked)
    return Sample(
        sweep="alone",
        policy=name,
        write_policy="",
        store_threshold=1,
        gpu_tokens=0,
        cpu_tokens=0,
        pool_tokens=slots * chunk_tokens,
        prompt_tokens=asked * chunk_tokens,
        hit_gpu=0,
        hit_cpu=0,
        hit_pool=found * chunk_tokens,
        stored=0,
        written=0,
        stranded=0.0,
    )


def _conditions(
    settings: Settings, trace: Trace, asks: Sequence[Ask], chunk_tokens: int, unique: int
) -> dict[str, Any]:
    asked = sum(len(ask.prompt) for ask in asks)
    return {
        "versions": {"vllm-nvmeof-offload": __version__, "python": platform.python_version()},
        "trace": trace.name,
        "settings": asdict(settings),
        "sessions": len(trace.sessions),
        "requests": len(asks),
        "chunk_tokens": chunk_tokens,
        "prompt_tokens": asked * chunk_tokens,
        "working_set_tokens": unique * chunk_tokens,
        "reusable": 1 - unique / asked,
        "virtual_seconds": asks[-1].at_s,
        "simulated": "requests one after the other, copies and I/O take no time; manager real",
    }
