# SPDX-License-Identifier: Apache-2.0
"""Loops of compute, alone and beside copies in both directions at full rate; needs torch."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_nvmeof_bench.gpu.samples import Sample
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.units import MIB

__all__ = ["copying", "matrix_step", "measure_loops", "steps_per_s"]

_ARMS = ("alone", "dma", "dma_overlap", "kernel")
_STEPS = 10
_BLOCK_BYTES = 2 * MIB


def measure_loops(
    world: World,
    settings: Settings,
    torch: Any,
    tell: Callable[[int, int, str], None] = lambda *at: None,
) -> list[Sample]:
    """Steps/s of a bf16 matrix product and of adding large arrays, each with each arm."""
    large = torch.zeros(256 * MIB, dtype=torch.float32, device="cuda")
    loops: dict[str, Callable[[], object]] = {
        "matrix": matrix_step(torch),
        "memory": lambda: large.add_(1.0),
    }
    samples = []
    for number in range(settings.rounds):
        tell(number, settings.rounds, f"loops of compute, round {number + 1}")
        for name, step in loops.items():
            for arm in _ARMS:
                if arm != "alone" and arm not in world.arms:
                    continue
                with copying(world, settings, arm):
                    rate = steps_per_s(step, settings.loop_s, torch)
                if arm in world.failed:
                    continue  # its copies ended before the loop did
                samples.append(Sample(f"loop_{name}", arm, "both", 0, 0, number, round(rate, 3)))
    return [one for one in samples if one.arm not in world.failed]


def matrix_step(torch: Any) -> Callable[[], object]:
    """One bf16 matrix product."""
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(square)
    return lambda: torch.mm(square, square, out=product)


def steps_per_s(step: Callable[[], object], seconds: float, torch: Any) -> float:
    """Steps on the current stream."""
    step()
    torch.cuda.synchronize()
    done, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        for _ in range(_STEPS):
            step()
        # Only this stream: waiting for the device would be waiting for the copies as well.
        torch.cuda.current_stream().synchronize()
        done += _STEPS
    return done / (time.perf_counter() - start_s)


@contextmanager
def copying(world: World, settings: Settings, arm: str) -> Iterator[None]:
    """Copies both ways, one transfer after the other, until left, or until the arm fails."""
    if arm == "alone":
        yield
        return
    count = max(1, min(256, settings.bytes_max // _BLOCK_BYTES // 2))
    work = {
        Direction.STORE: world.pieces(_BLOCK_BYTES, count),
        Direction.LOAD: world.pieces(_BLOCK_BYTES, count, first=_BLOCK_BYTES * count),
    }
    stopping = threading.Event()

    def run() -> None:
        world.cuda.make_current()
        transfer = functools.partial(world.seconds_of, arm, work)
        while not stopping.is_set() and world.attempt(arm, transfer) is not None:
            pass

    thread = threading.Thread(target=run, name="copies")
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
