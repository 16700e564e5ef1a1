# SPDX-License-Identifier: Apache-2.0
"""Measures DMA, DMA with the overlap hint and the kernel on this GPU, within a budget of time."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.dma import DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.kernel import KernelCopier, Table
from vllm_nvmeof_offload.copy.select import OVERLAP_BYTES_MAX, Backend, Cell, grid
from vllm_nvmeof_offload.units import MIB

__all__ = ["CALIBRATION_BYTES_MAX", "calibrate"]

#: GPU memory taken meanwhile, and staging overwritten.
CALIBRATION_BYTES_MAX = 64 * MIB
_ROUNDS = 3

_Way = Callable[[int, list[Table]], None]


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
        for (fragment_bytes, count), direction in itertools.product(grid(size), Direction):
            if clock() - started_s > budget_s:
                break
            pieces = _scattered(memory, staging[0], fragment_bytes, count)
            took = _measure(_ways(cuda, dma, kernel, direction, pieces), cuda, stream, clock)
            cells.append(_cell(direction, fragment_bytes, count, took))
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


def _ways(
    cuda: Cuda, dma: DmaCopier, kernel: KernelCopier, direction: Direction, pieces: Descriptors
) -> dict[Backend, _Way]:
    """What may carry these pieces."""

    def by_kernel(stream: int, used: list[Table]) -> None:
        kernel.copy(direction, pieces, stream, used)

    def by_dma(stream: int, _: list[Table], *, overlap: bool = False) -> None:
        dma.copy(direction, pieces, stream, overlap=overlap)

    ways: dict[Backend, _Way] = {Backend.DMA: by_dma, Backend.KERNEL: by_kernel}
    if cuda.has_batch and int(pieces[0, 2]) <= OVERLAP_BYTES_MAX:
        ways[Backend.OVERLAP] = functools.partial(by_dma, overlap=True)
    return ways


def _measure(
    ways: dict[Backend, _Way], cuda: Cuda, stream: int, clock: Callable[[], float]
) -> dict[Backend, list[float]]:
    """Sorted times in µs, the ways in turn; the first round only warms up."""
    used: list[Table] = []
    took: dict[Backend, list[float]] = {way: [] for way in ways}
    for number, way in itertools.product(range(1 + _ROUNDS), ways):
        start_s = clock()
        ways[way](stream, used)
        cuda.synchronize_stream(stream)
        if number:
            took[way].append(1e6 * (clock() - start_s))
        while used:
            used.pop().give_back()
    return {way: sorted(times) for way, times in took.items()}


def _cell(
    direction: Direction, fragment_bytes: int, count: int, took: dict[Backend, list[float]]
) -> Cell:
    medians = {way: statistics.median(times) for way, times in took.items()}
    spreads = [(times[-1] - times[0]) / medians[way] for way, times in took.items()]
    return Cell(
        direction,
        fragment_bytes,
        count,
        medians[Backend.DMA],
        medians[Backend.KERNEL],
        medians.get(Backend.OVERLAP),
        round(max(spreads), 3),
    )
