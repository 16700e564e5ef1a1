# SPDX-License-Identifier: Apache-2.0
"""The addresses of a chunk's bytes in the KV cache, and their offsets in a slot.

A slot's payload holds the chunk's blocks in order; a block holds its page of every KV cache tensor
in order. If all layers of a block are contiguous there is one tensor, and a block is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import Descriptors, Pieces


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """Block b's page: `page_bytes` at `address + b * stride_bytes`."""

    address: int
    stride_bytes: int
    page_bytes: int
    block_count: int


class ChunkGeometry:
    """Descriptors of chunks of `blocks_per_chunk` blocks over `tensors`."""

    def __init__(self, tensors: Sequence[CacheTensor], blocks_per_chunk: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.block_bytes = sum(t.page_bytes for t in tensors)
        self.payload_bytes = self.block_bytes * blocks_per_chunk
        self._block_count = min(t.block_count for t in tensors)
        self._address = np.array([t.address for t in tensors], np.uint64)
        self._stride = np.array([t.stride_bytes for t in tensors], np.uint64)
        self._page = np.array([t.page_bytes for t in tensors], np.uint64)
        self._page_offset = np.cumsum(self._page) - self._page

    @property
    def starts(self) -> npt.NDArray[np.uint64]:
        """Addresses of the tensors: no descriptor may cross from one into the next."""
        return self._address

    def pieces(self, block_ids: npt.NDArray[np.int32], first_position: int) -> Descriptors:
        """Return the pieces of consecutive blocks of one chunk from `first_position` in it.

        block_ids: int32[n], n ≤ blocks_per_chunk - first_position.
        Returns uint64[n × tensors, 3]: (KV cache address, offset in the payload, bytes).
        """
        return self.pieces_by_chunk(block_ids, first_position, 1).rows

    def pieces_by_chunk(
        self, block_ids: npt.NDArray[np.int32], first_position: int, chunk_count: int
    ) -> Pieces:
        """Return the pieces of the blocks of consecutive chunks: those of each part of `split`."""
        bounds = self._bounds(len(block_ids), first_position, chunk_count)
        first = bounds.astype(np.uint32) * np.uint32(len(self._page))
        return Pieces(self._pieces(block_ids, first_position).reshape(-1, 3), first)

    def split(
        self, block_ids: npt.NDArray[np.int32], first_position: int, chunk_count: int
    ) -> list[npt.NDArray[np.int32]]:
        """Cut the blocks of consecutive chunks at chunk boundaries.

        first_position: the first block's position in the first chunk. Returns one array per
        chunk; the first and the last may cover only a part of their chunk.
        """
        bounds = self._bounds(len(block_ids), first_position, chunk_count)
        return np.split(block_ids, bounds[1:-1])

    def _bounds(
        self, block_count: int, first_position: int, chunk_count: int
    ) -> npt.NDArray[np.int64]:
        """Return int64[n+1]: chunk i has the blocks from `bounds[i]` to before `bounds[i + 1]`."""
        cuts = np.arange(self.blocks_per_chunk - first_position, block_count, self.blocks_per_chunk)
        bounds = np.concatenate([[0], cuts, [block_count]])
        assert len(bounds) == chunk_count + 1, f"{block_count} blocks over {chunk_count} chunks"
        return bounds

    def _pieces(self, block_ids: npt.NDArray[np.int32], first_position: int) -> Descriptors:
        """Return uint64[n, tensors, 3]; the blocks may continue into the next chunks."""
        count = len(block_ids)
        assert int(block_ids.min()) >= 0 and int(block_ids.max()) < self._block_count
        blocks = block_ids.astype(np.uint64)[:, None]
        positions = np.arange(first_position, first_position + count, dtype=np.uint64)
        positions = (positions % np.uint64(self.blocks_per_chunk))[:, None]
        pieces = np.empty((count, len(self._page), 3), np.uint64)
        pieces[:, :, 0] = self._address + blocks * self._stride
        pieces[:, :, 1] = positions * np.uint64(self.block_bytes) + self._page_offset
        pieces[:, :, 2] = self._page
        return pieces
