# SPDX-License-Identifier: Apache-2.0
"""Copies by a kernel on a few multiprocessors, for fragments too small for the copy engines."""

from __future__ import annotations

import ctypes
from collections import deque

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.descriptors import DESCRIPTORS_MAX, sides
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.units import KIB, MIB

__all__ = ["BLOCKS_MAX", "LAUNCH_BYTES_MAX", "PART_BYTES_MAX", "KernelCopier", "Table", "cut"]

_THREADS = 512
_LANES = 32
#: What one warp copies in one go; a multiple of 16, so that parts are aligned as their piece is.
PART_BYTES_MAX = 16 * KIB
#: Of one launch. Its blocks stay where they are until it ends, and what the model launches for
#: their multiprocessors waits: 8 MiB take 0.15 ms at 55 GB/s.
LAUNCH_BYTES_MAX = 8 * MIB
#: Thread blocks of one launch: `bench copy --parts sweep` says what more or fewer would do.
BLOCKS_MAX = 8
_TABLES = 16
_ROW_BYTES = 3 * 8
_TABLE_BYTES = DESCRIPTORS_MAX * _ROW_BYTES


class Table:
    """Room for 4096 parts, in pinned memory that the kernel reads; one launch or several."""

    def __init__(self, address: int, idle: deque[Table]) -> None:
        self.address = address
        self._idle = idle
        memory = (ctypes.c_uint64 * (DESCRIPTORS_MAX * 3)).from_address(address)
        self.rows = np.ctypeslib.as_array(memory).reshape(DESCRIPTORS_MAX, 3)

    def give_back(self) -> None:
        """Only when the kernel has finished."""
        self._idle.append(self)


class KernelCopier:
    """blocks_max: thread blocks of one launch. Few, so that the model keeps the others.

    tables: of 4096 parts each; a transfer takes as many as it needs, at least one.
    """

    def __init__(
        self, cuda: Cuda, kernel: int, blocks_max: int = BLOCKS_MAX, tables: int = _TABLES
    ) -> None:
        self._cuda = cuda
        self._kernel = kernel
        self._blocks_max = blocks_max
        self._memory = cuda.allocate_host(tables * _TABLE_BYTES)
        self._idle: deque[Table] = deque()
        for number in range(tables):
            self._idle.append(Table(self._memory + number * _TABLE_BYTES, self._idle))

    def copy(
        self, direction: Direction, pieces: Descriptors, stream: int, used: list[Table]
    ) -> bool:
        """Submit to `stream`; False, and nothing done, if not enough tables are left.

        Puts the tables that it uses into `used`, before the kernel sees them, also if it raises;
        the caller gives them back when the stream has passed this point.
        """
        parts = cut(*sides(direction, pieces))
        if -(-len(parts) // DESCRIPTORS_MAX) > len(self._idle):
            return False
        for start in range(0, len(parts), DESCRIPTORS_MAX):
            rows = parts[start : start + DESCRIPTORS_MAX]
            table = self._idle.popleft()
            used.append(table)
            table.rows[: len(rows)] = rows
            self._launch(table.address, rows[:, 2], stream)
        return True

    def close(self) -> None:
        """Only when nothing is under way."""
        self._idle.clear()
        self._cuda.free_host(self._memory)

    def _launch(self, table: int, sizes: npt.NDArray[np.uint64], stream: int) -> None:
        ends = np.cumsum(sizes)
        first, done = 0, 0
        while first < len(ends):
            last = int(np.searchsorted(ends, np.uint64(done + LAUNCH_BYTES_MAX), side="right"))
            count = last - first
            blocks = min(self._blocks_max, -(-count * _LANES // _THREADS))
            row = table + first * _ROW_BYTES
            self._cuda.launch(self._kernel, blocks, _THREADS, stream, (row, count))
            first, done = last, int(ends[last - 1])


def cut(
    destinations: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """uint64[n, 3], (destination, source, bytes) of parts of at most `PART_BYTES_MAX`, in order."""
    if int(sizes.max(initial=1)) <= PART_BYTES_MAX:
        rows = np.empty((len(sizes), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = destinations, sources, sizes
        return rows
    counts = (sizes + np.uint64(PART_BYTES_MAX - 1)) // np.uint64(PART_BYTES_MAX)
    repeats = counts.astype(np.intp)
    ends = np.cumsum(repeats)
    numbers = np.arange(ends[-1]) - np.repeat(ends - repeats, repeats)
    offsets = numbers.astype(np.uint64) * np.uint64(PART_BYTES_MAX)
    rows = np.empty((len(offsets), 3), np.uint64)
    rows[:, 0] = np.repeat(destinations, repeats) + offsets
    rows[:, 1] = np.repeat(sources, repeats) + offsets
    rows[:, 2] = np.minimum(np.repeat(sizes, repeats) - offsets, np.uint64(PART_BYTES_MAX))
    return rows
