# SPDX-License-Identifier: Apache-2.0
"""The addresses of a chunk's bytes in the KV cache, and their offsets in a slot.

A slot's payload holds the chunk's blocks in order. A block holds one page from each of its group's
tensors, in order. Groups share memory, because a block belongs to one group at a time; only the
pages of that group are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.native import CacheGeometry as NativeGeometry


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A KV cache tensor. Block b's page is `page_bytes` at `address + b * stride_bytes`."""

    address: int
    stride_bytes: int
    page_bytes: int
    block_count: int


def joined(tensors: Sequence[CacheTensor]) -> list[CacheTensor]:
    """Return the tensors in order, merging those whose pages are adjacent in every block."""
    found: list[CacheTensor] = []
    for one in tensors:
        if found and one.address == found[-1].address + found[-1].page_bytes:
            both = replace(found[-1], page_bytes=found[-1].page_bytes + one.page_bytes)
            same = replace(both, address=one.address, page_bytes=one.page_bytes) == one
            if same and both.page_bytes <= both.stride_bytes:
                found[-1] = both
                continue
        found.append(one)
    return found


class ChunkGeometry:
    """The geometry of one group's chunks, each of `blocks_per_chunk` blocks over `tensors`. A
    pipeline stage with no layer of the group has no tensors, and its chunks have no pieces."""

    def __init__(self, tensors: Sequence[CacheTensor], blocks_per_chunk: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.block_bytes = sum(t.page_bytes for t in tensors)
        self.payload_bytes = self.block_bytes * blocks_per_chunk
        #: The tensors' addresses. No descriptor may cross one.
        self.starts = np.array([t.address for t in tensors], np.uint64)
        #: The group as the native `CacheGeometry` takes it.
        self.columns = (
            [(t.address, t.stride_bytes, t.page_bytes, t.block_count) for t in tensors],
            blocks_per_chunk,
        )

    def split(
        self, block_ids: npt.NDArray[np.int32], first: int, chunk_count: int
    ) -> list[npt.NDArray[np.int32]]:
        """Split the blocks of consecutive chunks into one array per chunk.

        `first` is the first block's index in its request. The first and last arrays can lack blocks
        of their chunks.
        """
        per_chunk = self.blocks_per_chunk
        cuts = np.arange(per_chunk - first % per_chunk, len(block_ids), per_chunk)
        parts = np.split(block_ids, cuts)
        assert len(parts) == chunk_count, (
            f"{len(block_ids)} blocks do not match {chunk_count} chunks"
        )
        return parts


class CacheGeometry:
    """The KV cache of one rank: a `ChunkGeometry` per group, in the order of group positions."""

    def __init__(
        self,
        groups: Sequence[tuple[Group, Sequence[CacheTensor]]],
        set_sizes: Sequence[int] = (),
    ) -> None:
        """`set_sizes` is `RankGroup.set_size` by group; empty if all are 1."""
        self.by_group = tuple(
            ChunkGeometry(joined(tensors), _blocks_per_chunk(group)) for group, tensors in groups
        )
        self.groups = tuple(
            RankGroup(group, geometry.block_bytes, size)
            for (group, _), geometry, size in zip(
                groups, self.by_group, set_sizes or [1] * len(groups), strict=True
            )
        )
        #: Bytes per chunk: by group, and in the largest group.
        self.group_bytes = tuple(one.payload_bytes for one in self.by_group)
        self.payload_bytes = max(self.group_bytes)
        self.native = NativeGeometry([one.columns for one in self.by_group])

    @property
    def starts(self) -> npt.NDArray[np.uint64]:
        """Return all tensors' addresses, sorted. No descriptor may cross one."""
        return np.unique(np.concatenate([one.starts for one in self.by_group]))


def _blocks_per_chunk(group: Group) -> int:
    return 1 if group.kind is GroupKind.STATE else group.blocks_per_chunk
