# SPDX-License-Identifier: Apache-2.0
"""DMA or kernel, for each transfer: by a table of what each took on this GPU."""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.units import KIB

__all__ = ["COUNTS", "FRAGMENT_BYTES", "Backend", "Cell", "Selector", "dump_cells", "parse_cells"]

#: The table's grid: powers of two, so that the nearest one is a rounding away.
FRAGMENT_BYTES = tuple(KIB << k for k in range(2, 9))  # 4 KiB … 256 KiB
COUNTS = (4, 16, 64, 256, 1024)
_SIZE_LOG2_MIN, _SIZE_LOG2_MAX = 12, 18
_WORD_BYTES = 16


class Backend(enum.Enum):
    """What moves the bytes."""

    DMA = "dma"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Cell:
    """What `count` fragments of `fragment_bytes` took, in µs from submit to the end."""

    direction: Direction
    fragment_bytes: int
    count: int
    dma_us: float
    kernel_us: float


class Selector:
    """Without cells it always says DMA.

    What was not measured, for time or memory, goes as fewer fragments of that size did: that is
    nearer than any other size.
    """

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        known = {(c.direction, c.fragment_bytes, c.count): c.kernel_us < c.dma_us for c in cells}
        self._kernel_wins = set[tuple[Direction, int, int]]()
        for direction, size in itertools.product(Direction, FRAGMENT_BYTES):
            wins = False
            for count in COUNTS:
                wins = known.get((direction, size, count), wins)
                if wins:
                    self._kernel_wins.add((direction, size, count))

    def choose(self, direction: Direction, pieces: Descriptors) -> Backend:
        """Pieces as they are submitted: coalesced."""
        if not self._kernel_wins:
            return Backend.DMA
        count = len(pieces)
        log2 = round(math.log2(max(1, int(pieces[:, 2].sum()) // count)))
        if log2 > _SIZE_LOG2_MAX:
            return Backend.DMA
        nearest = 4 ** round(math.log(count, 4))
        nearest = min(max(nearest, COUNTS[0]), COUNTS[-1])
        cell = (direction, 1 << max(log2, _SIZE_LOG2_MIN), nearest)
        if cell not in self._kernel_wins:
            return Backend.DMA
        # What is not aligned goes word by word, or byte by byte: that was not measured.
        if int(np.bitwise_or.reduce(pieces, axis=None)) % _WORD_BYTES:
            return Backend.DMA
        return Backend.KERNEL


def dump_cells(cells: Iterable[Cell]) -> bytes:
    """As JSON."""
    rows = [asdict(cell) | {"direction": cell.direction.value} for cell in cells]
    return json.dumps({"cells": rows}, indent=1).encode()


def parse_cells(content: bytes) -> list[Cell]:
    """Raises: ValueError: this is not what `dump_cells` made, or of another grid."""
    try:
        rows = json.loads(content)["cells"]
        cells = [Cell(**(row | {"direction": Direction(row["direction"])})) for row in rows]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a table of cells: {error!r}") from None
    if {(c.fragment_bytes, c.count) for c in cells} - {
        (size, count) for size in FRAGMENT_BYTES for count in COUNTS
    }:
        raise ValueError("a table of another grid")
    return cells
