# SPDX-License-Identifier: Apache-2.0
"""Chooses DMA, DMA with a hint, or the kernel, by a table of the times measured on this GPU."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from vllm_nvmeof_offload.copy.base import Backend, Descriptors, Direction
from vllm_nvmeof_offload.units import KIB

#: The table's grid: powers of two, so that the nearest one is a rounding away.
FRAGMENT_BYTES = tuple(KIB << k for k in range(2, 9))  # 4 KiB … 256 KiB
COUNTS = (4, 16, 64, 256, 1024)
_SIZE_LOG2_MIN, _SIZE_LOG2_MAX = 12, 18
_WORD_BYTES = 16
#: The table comes from an idle GPU. Beside a model the kernel takes multiprocessors from it, and
#: the copy engines take none: the kernel must be this many times as fast.
KERNEL_MARGIN = 1.5
#: RMM and cuDF set the hint only up to here; for larger copies others saw it do harm.
OVERLAP_BYTES_MAX = 128 * KIB


@dataclass(frozen=True, slots=True)
class Cell:
    """Median times of `count` fragments of `fragment_bytes`, in µs from submit to the end.

    overlap_us: None: not tried. spread: (slowest round - fastest) / median of the way that varied
    most.
    """

    direction: Direction
    fragment_bytes: int
    count: int
    dma_us: float
    kernel_us: float
    overlap_us: float | None = None
    spread: float = 0.0


def best_of(cell: Cell) -> Backend:
    """DMA unless another way is clearly faster: the hint by more than the spread, the kernel by
    `KERNEL_MARGIN` over the better kind of DMA.
    """
    backend, took_us = Backend.DMA, cell.dma_us
    if cell.overlap_us is not None and cell.overlap_us * (1 + cell.spread) < took_us:
        backend, took_us = Backend.OVERLAP, cell.overlap_us
    return Backend.KERNEL if cell.kernel_us * KERNEL_MARGIN <= took_us else backend


class Selector:
    """Chooses by measured cells; without cells always DMA.

    For a count that was not measured, for lack of time or memory, the result of fewer fragments of
    that size holds: that is nearer than any other size.
    """

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        known = {(c.direction, c.fragment_bytes, c.count): best_of(c) for c in cells}
        self._table: dict[tuple[Direction, int, int], Backend] = {}
        for direction, size in itertools.product(Direction, FRAGMENT_BYTES):
            best = Backend.DMA
            for count in COUNTS:
                best = known.get((direction, size, count), best)
                if best is not Backend.DMA:
                    self._table[direction, size, count] = best

    def choose(self, direction: Direction, pieces: Descriptors) -> Backend:
        """Choose for pieces as they are submitted: coalesced."""
        if not self._table:
            return Backend.DMA
        count = len(pieces)
        log2 = round(math.log2(max(1, int(pieces[:, 2].sum()) // count)))
        if log2 > _SIZE_LOG2_MAX:
            return Backend.DMA
        nearest = 4 ** round(math.log(count, 4))
        nearest = min(max(nearest, COUNTS[0]), COUNTS[-1])
        cell = (direction, 1 << max(log2, _SIZE_LOG2_MIN), nearest)
        best = self._table.get(cell, Backend.DMA)
        # The kernel copies unaligned pieces by words or bytes, which was not measured.
        if best is Backend.KERNEL and int(np.bitwise_or.reduce(pieces, axis=None)) % _WORD_BYTES:
            return Backend.DMA
        if best is Backend.OVERLAP and int(pieces[:, 2].max()) > OVERLAP_BYTES_MAX:
            return Backend.DMA
        return best


def grid(size: int) -> list[tuple[int, int]]:
    """Return (bytes, count) of the fragments to measure within `size` bytes, smallest first."""
    cells = [cell for cell in itertools.product(FRAGMENT_BYTES, COUNTS) if math.prod(cell) <= size]
    return sorted(cells, key=math.prod)


def dump_cells(cells: Iterable[Cell]) -> bytes:
    """Return the cells as JSON."""
    rows = [asdict(cell) | {"direction": cell.direction.value} for cell in cells]
    return json.dumps({"cells": rows}, indent=1).encode()


def parse_cells(content: bytes, size: int) -> list[Cell]:
    """Read cells from JSON. Raises: ValueError: not cells, or a cell of `grid(size)` is missing."""
    try:
        rows = json.loads(content)["cells"]
        cells = [Cell(**(row | {"direction": Direction(row["direction"])})) for row in rows]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a table of cells: {error!r}") from None
    if not all(map(_is_measurement, cells)):
        raise ValueError("not a table of cells: a number is missing or makes no sense")
    if missing_cells(cells, size):
        raise ValueError("a table with cells missing")
    return cells


def _is_measurement(cell: Cell) -> bool:
    times = [cell.dma_us, cell.kernel_us, cell.spread]
    times += [] if cell.overlap_us is None else [cell.overlap_us]
    return all(type(one) is int for one in (cell.fragment_bytes, cell.count)) and all(
        type(one) in (int, float) and 0 <= one < math.inf for one in times
    )


def missing_cells(cells: Iterable[Cell], size: int) -> int:
    """Count the cells of `grid(size)`, in both directions, that are not among `cells`."""
    wanted = {(direction, *cell) for direction in Direction for cell in grid(size)}
    return len(wanted - {(c.direction, c.fragment_bytes, c.count) for c in cells})
