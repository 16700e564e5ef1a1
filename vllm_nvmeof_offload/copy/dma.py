# SPDX-License-Identifier: Apache-2.0
"""Copies by the GPU's copy engines: one driver call for many pieces, where the driver has it."""

from __future__ import annotations

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.descriptors import DESCRIPTORS_MAX, address_of, sides
from vllm_nvmeof_offload.copy.driver import ORDER_ANY, ORDER_STREAM, Cuda

__all__ = ["DmaCopier"]


class DmaCopier:
    """Has no state of its own."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def copy(
        self, direction: Direction, pieces: Descriptors, stream: int, *, overlap: bool = False
    ) -> None:
        """Submit to `stream`; pieces as of `coalesce`.

        overlap: set CUDA 13.1's hint that copies should overlap with compute; a driver without
        the batch call has none.

        A store reads what the model's kernels write: the source in the stream's order, after
        the fence. A load reads staging, which no kernel writes, and which the host has seen
        complete (protocol rule 3): the driver may read it at once.
        """
        destinations, sources, sizes = sides(direction, pieces)
        if not self._cuda.has_batch:
            for one in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self._cuda.copy(*one, stream)
            return
        order = ORDER_STREAM if direction is Direction.STORE else ORDER_ANY
        tables = [address_of(column) for column in (destinations, sources, sizes)]
        for start in range(0, len(sizes), DESCRIPTORS_MAX):
            count = min(DESCRIPTORS_MAX, len(sizes) - start)
            first, second, third = (table + start * sizes.itemsize for table in tables)
            self._cuda.copy_batch((first, second, third), count, stream, order, overlap)
