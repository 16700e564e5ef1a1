# SPDX-License-Identifier: Apache-2.0
"""The copy kernel by its number of thread blocks: how fast, and what it costs the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_nvmeof_bench.gpu.loops import copying, matrix_step, steps_per_s
from vllm_nvmeof_bench.gpu.samples import Sample
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.select import Backend

__all__ = ["measure_sweep"]


def measure_sweep(
    world: World,
    settings: Settings,
    torch: Any | None,
    tell: Callable[[int, int, str], None] = lambda *at: None,
) -> list[Sample]:
    """GB/s alone, and with torch the steps/s of a bf16 matrix product beside copies both ways."""
    if Backend.KERNEL.value in world.failed:
        return []
    step = matrix_step(torch) if torch is not None else None
    samples = []
    for number in range(-1, settings.rounds):  # the first one warms up
        tell(number + 1, settings.rounds + 1, f"thread blocks, round {max(0, number) + 1}")
        for blocks in settings.sweep_blocks:
            with world.kernel_of(blocks) as arm:
                found = _rates(world, settings, arm, number)
                if number == 0 and step is not None and arm in world.arms:
                    with copying(world, settings, arm):
                        rate = steps_per_s(step, settings.loop_s, torch)
                    found.append(_steps(arm, rate))
            samples += found if number >= 0 else []
        if number == 0 and step is not None:
            samples.append(_steps("alone", steps_per_s(step, settings.loop_s, torch)))
    return [one for one in samples if one.arm not in world.failed]


def _rates(world: World, settings: Settings, arm: str, number: int) -> list[Sample]:
    samples = []
    for size in settings.sweep_sizes:
        count = settings.count_of(size)
        for direction in Direction:
            work = {direction: world.pieces(size, count, number + 1)}
            took_s = world.attempt(arm, functools.partial(world.seconds_of, arm, work))
            if took_s is None:
                continue
            rate = round(size * count / took_s / 1e9, 3)
            samples.append(Sample("sweep", arm, direction.value, size, count, number, rate))
    return samples


def _steps(arm: str, rate: float) -> Sample:
    return Sample("sweep_matrix", arm, "both", 0, 0, 0, round(rate, 3))
