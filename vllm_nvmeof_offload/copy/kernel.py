# SPDX-License-Identifier: Apache-2.0
"""Copies by a kernel on a few multiprocessors, for fragments too small for the copy engines."""

from __future__ import annotations

import ctypes
from collections import deque

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.descriptors import DESCRIPTORS_MAX
from vllm_nvmeof_offload.copy.driver import Cuda

__all__ = ["KernelCopier", "Table"]

_THREADS = 512
_LANES = 32
#: What one warp copies of a piece; a multiple of 16.
_PART_BYTES = 16 << 10
_TABLES = 16
_TABLE_BYTES = DESCRIPTORS_MAX * 3 * 8


class Table:
    """Room for the descriptors of one launch, in pinned memory that the kernel reads."""

    def __init__(self, address: int, idle: deque[Table]) -> None:
        self.address = address
        self._idle = idle
        memory = (ctypes.c_uint64 * (DESCRIPTORS_MAX * 3)).from_address(address)
        self.rows = np.ctypeslib.as_array(memory).reshape(DESCRIPTORS_MAX, 3)

    def give_back(self) -> None:
        """Only when the kernel has finished."""
        self._idle.append(self)


class KernelCopier:
    """blocks_max: thread blocks of one launch. Few, so that the model keeps the others."""

    def __init__(self, cuda: Cuda, kernel: int, blocks_max: int = 16) -> None:
        self._cuda = cuda
        self._kernel = kernel
        self._blocks_max = blocks_max
        self._memory = cuda.allocate_host(_TABLES * _TABLE_BYTES)
        self._idle: deque[Table] = deque()
        for number in range(_TABLES):
            self._idle.append(Table(self._memory + number * _TABLE_BYTES, self._idle))

    def copy(
        self, direction: Direction, pieces: Descriptors, stream: int, used: list[Table]
    ) -> bool:
        """Submit to `stream`; False, and nothing done, if no tables are left.

        Puts the tables that it uses into `used`, before the kernel sees them, also if it raises;
        the caller gives them back when the stream has passed this point.
        """
        launches = -(-len(pieces) // DESCRIPTORS_MAX)
        if launches > len(self._idle):
            return False
        for start in range(0, len(pieces), DESCRIPTORS_MAX):
            table = self._idle.popleft()
            used.append(table)
            self._launch(direction, pieces[start : start + DESCRIPTORS_MAX], stream, table)
        return True

    def close(self) -> None:
        """Only when nothing is under way."""
        self._idle.clear()
        self._cuda.free_host(self._memory)

    def _launch(self, direction: Direction, pieces: Descriptors, stream: int, table: Table) -> None:
        count = len(pieces)
        store = direction is Direction.STORE
        table.rows[:count, 0] = pieces[:, 1 if store else 0]  # destinations
        table.rows[:count, 1] = pieces[:, 0 if store else 1]  # sources
        table.rows[:count, 2] = pieces[:, 2]
        parts = -(-int(pieces[:, 2].max()) // _PART_BYTES)
        blocks = min(self._blocks_max, -(-count * parts * _LANES // _THREADS))
        arguments = (table.address, count, parts, _PART_BYTES)
        self._cuda.launch(self._kernel, blocks, _THREADS, stream, arguments)
