# SPDX-License-Identifier: Apache-2.0
"""Measures DMA against the kernel on this GPU, at start, within a budget of time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.dma import DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.kernel import KernelCopier, Table
from vllm_nvmeof_offload.copy.select import COUNTS, FRAGMENT_BYTES, Cell
from vllm_nvmeof_offload.units import MIB

__all__ = ["CALIBRATION_BYTES_MAX", "calibrate"]

#: GPU memory taken meanwhile, and staging overwritten.
CALIBRATION_BYTES_MAX = 64 * MIB
_ROUNDS = 3


def calibrate(
    cuda: Cuda,
    dma: DmaCopier,
    kernel: KernelCopier,
    staging: tuple[int, int],
    budget_s: float = 1.5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Cell]:
    """Measure the grid of `select`, small transfers first, as far as the budget reaches.

    staging: address and bytes of registered memory that nobody uses; its contents are lost.
    Raises: CudaError: such as no GPU memory to spare.
    """
    size = min(CALIBRATION_BYTES_MAX, staging[1])
    cells: list[Cell] = []
    started_s = clock()
    stream = cuda.create_stream()
    memory = 0
    try:
        memory = cuda.allocate(size)
        grid = sorted(itertools.product(FRAGMENT_BYTES, COUNTS), key=lambda c: c[0] * c[1])
        for (fragment_bytes, count), direction in itertools.product(grid, Direction):
            if clock() - started_s > budget_s:
                break
            if fragment_bytes * count > size:
                continue
            pieces = _scattered(memory, staging[0], fragment_bytes, count)
            took = _measure(cuda, dma, kernel, direction, pieces, stream, clock)
            cells.append(Cell(direction, fragment_bytes, count, *took))
    finally:
        cuda.synchronize_stream(stream)
        if memory:
            cuda.free(memory)
        cuda.destroy_stream(stream)
    return cells


def _scattered(memory: int, staging: int, fragment_bytes: int, count: int) -> Descriptors:
    """In order in staging, anywhere in GPU memory, as blocks of a paged cache are."""
    pieces = np.empty((count, 3), np.uint64)
    places = np.arange(count, dtype=np.uint64) * np.uint64(fragment_bytes)
    pieces[:, 0] = np.uint64(memory) + np.random.default_rng(0).permutation(places)
    pieces[:, 1] = np.uint64(staging) + places
    pieces[:, 2] = fragment_bytes
    return pieces


def _measure(
    cuda: Cuda,
    dma: DmaCopier,
    kernel: KernelCopier,
    direction: Direction,
    pieces: Descriptors,
    stream: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Medians in µs, DMA and kernel in turn; the first round warms up."""
    used: list[Table] = []
    ways: tuple[Callable[[], object], ...] = (
        lambda: dma.copy(direction, pieces, stream),
        lambda: kernel.copy(direction, pieces, stream, used),
    )
    took: tuple[list[float], list[float]] = ([], [])
    for _, (copy, samples) in itertools.product(range(1 + _ROUNDS), zip(ways, took, strict=True)):
        start_s = clock()
        copy()
        cuda.synchronize_stream(stream)
        samples.append(1e6 * (clock() - start_s))
        while used:
            used.pop().give_back()
    return statistics.median(took[0][1:]), statistics.median(took[1][1:])
