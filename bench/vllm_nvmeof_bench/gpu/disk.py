# SPDX-License-Identifier: Apache-2.0
"""GPU ⇄ CPU ⇄ disk: a load from the pool, streamed, against reading all of it first.

The rig, its checks and its arms are those of `bench tier`; here "GPU memory" is a GPU's, and
copies are by the CUDA engine as a server has it. Nothing is throttled.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.gpu.samples import Sample
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.tier import settings as tier
from vllm_nvmeof_bench.tier.load import measure_arm
from vllm_nvmeof_bench.tier.rig import Rig
from vllm_nvmeof_offload.copy.choose import choose_copy_engine
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.io.base import Waker

__all__ = ["GpuRig", "measure_disk"]

#: Ours → those of `bench tier`.
_ARMS = {"streamed": "ours", "two_phase": "two_phase", "read": "read"}


class GpuRig(Rig):
    """Blocks in GPU memory. model_stream: 0: nothing computes here."""

    def __init__(self, cuda: Cuda, directory: Path, settings: tier.Settings) -> None:
        self._cuda = cuda
        super().__init__(directory, settings)

    def _allocate(self) -> int:
        self._gpu = self._cuda.allocate(self._written.nbytes)
        self._stack.callback(lambda: self._cuda.free(self._gpu))
        self._stream = self._cuda.create_stream()
        self._stack.callback(lambda: self._cuda.destroy_stream(self._stream))
        return self._gpu

    def _numa_node(self) -> int | None:
        return self._cuda.facts.numa_node

    def _copy_engine(self, waker: Waker) -> Any:
        starts = np.array([self._gpu], np.uint64)
        return choose_copy_engine(self._cuda, "dma", self.staging, starts, lambda: 0, waker.wake)[0]

    def fill(self) -> None:
        content = np.empty_like(self._written)
        content[self._ids.ravel()] = self._written
        self._now(self._gpu, content.ctypes.data, content.nbytes)

    def zero(self, count: int) -> None:
        """All of it: also what is not loaded must not look as if it were."""
        nothing = np.zeros_like(self._written)
        self._now(self._gpu, nothing.ctypes.data, nothing.nbytes)

    def same(self, count: int) -> bool:
        found = np.empty_like(self._written)
        self._now(found.ctypes.data, self._gpu, found.nbytes)
        rows = self._ids[:count].ravel()
        return bool(np.array_equal(found[rows], self._written[: len(rows)]))

    def _now(self, destination: int, source: int, count: int) -> None:
        self._cuda.copy(destination, source, count, self._stream)
        self._cuda.synchronize_stream(self._stream)


def measure_disk(
    cuda: Cuda,
    settings: Settings,
    directory: Path,
    tell: Callable[[int, int, str], None] = lambda *at: None,
) -> list[Sample]:
    """GB/s of payload of loads, of half the CPU tier and of four times it.

    Raises:
        BenchError: no room in `directory`, or a load brought other bytes than were written.
    """
    plan = tier.Settings(
        parts=("load",),
        rounds=settings.rounds,
        throttle_mb_per_s=0,
        tier_bytes=settings.disk_tier_slots * settings.disk_chunk_bytes,
        chunk_bytes=settings.disk_chunk_bytes,
        block_bytes=settings.disk_chunk_bytes,
        sizes=(0.5, settings.disk_bytes / (settings.disk_tier_slots * settings.disk_chunk_bytes)),
    )
    samples: list[Sample] = []
    with home_in(directory, plan.disk_bytes_max) as home:
        rig = GpuRig(cuda, home / "pool", plan)
        try:
            tell(0, settings.rounds, "disk · writing the pool once")
            rig.write_all()
            for number in range(settings.rounds):
                tell(number, settings.rounds, f"disk, round {number + 1}")
                samples += _round(rig, plan, number)
        finally:
            rig.close()
    return samples


def _round(rig: GpuRig, plan: tier.Settings, number: int) -> list[Sample]:
    dice = random.Random(number)
    samples = []
    for size in plan.sizes:
        count = plan.chunks(size)
        for arm in dice.sample(sorted(_ARMS), len(_ARMS)):
            seconds, _ = measure_arm(rig, _ARMS[arm], count)
            rate = round(count * plan.chunk_bytes / seconds / 1e9, 3)
            samples.append(Sample("disk", arm, "load", plan.chunk_bytes, count, number, rate))
    return samples
