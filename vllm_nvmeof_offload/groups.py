# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: layers of one kind, with separate offload keys for their chunks.

A chunk is one group's blocks for one range of tokens. A *group position* is the group's index in
`RankHello.groups`, as used in `ChunkBatch.groups`; a *group id* is vLLM's number for the group, at
the end of each of the group's offload keys. The two differ if vLLM does not offload every group.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: The number of bytes at the end of an offload key that hold the group id, big endian.
GROUP_ID_BYTES = 4
#: The largest number of ranks in a set of equal ranks.
SET_SIZE_MAX = 64


class GroupKind(enum.IntEnum):
    """The kind of a group, by the tokens of a request that it keeps. Pools store the numbers."""

    FULL = 0  # all tokens
    WINDOW = 1  # the last tokens before any position
    LOCAL = 2  # the tokens since the last multiple of an attention chunk
    STATE = 3  # one state per boundary


@dataclass(frozen=True, slots=True)
class Group:
    """A group, the same on all ranks. `reach_chunks` is the number of consecutive chunks before a
    boundary that are needed to resume there: None for all of them, as in a full-attention group, or
    1 for a state. `reach_tokens` is the number of tokens before a boundary that a window needs to
    resume or, for local chunks, the length of one attention chunk."""

    group_id: int
    kind: GroupKind
    tokens_per_chunk: int
    blocks_per_chunk: int = 1
    reach_chunks: int | None = None
    reach_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group on one rank.

    `block_bytes` is the size of one block in all of this rank's layers of the group, or 0 if the
    rank has no such layer. `set_size` is the number of consecutive ranks with equal bytes of the
    group, which together store one copy. Rank r is member r % set_size of set r // set_size.
    """

    group: Group
    block_bytes: int
    set_size: int = 1

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of one chunk. A state is one block."""
        blocks = 1 if self.group.kind is GroupKind.STATE else self.group.blocks_per_chunk
        return self.block_bytes * blocks


def group_id_of(key: bytes) -> int:
    """Return the group id in an offload key."""
    return int.from_bytes(key[-GROUP_ID_BYTES:], "big")


def group_ids_of(keys: bytes, count: int) -> npt.NDArray[np.uint32]:
    """Return the group ids in `count` joined offload keys, at least one."""
    rows = np.frombuffer(keys, np.uint8).reshape(count, -1)
    ids: npt.NDArray[np.uint32] = rows[:, -GROUP_ID_BYTES:].view(">u4")[:, 0]
    return ids


def leading(groups: tuple[Group, ...]) -> int:
    """Return the position of the group that determines a request's length: the first one with full
    attention, else the one with the longest reach."""
    for position, group in enumerate(groups):
        if group.kind is GroupKind.FULL:
            return position
    return max(range(len(groups)), key=lambda at: groups[at].reach_chunks or 0)


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A group's blocks, before a number of blocks per chunk is chosen for all groups.

    `span_tokens` is the length of a window or of an attention chunk, in tokens.
    """

    kind: GroupKind
    block_tokens: int
    span_tokens: int | None = None

    def fits(self, blocks_per_chunk: int) -> bool:
        """Return whether vLLM still has all of a chunk's blocks when it computes the last one.

        A chunk that exceeds the window or spans two attention chunks loses its first blocks before
        its last one is computed.
        """
        tokens = self.block_tokens * blocks_per_chunk
        if self.span_tokens is None or blocks_per_chunk == 1:
            return True
        if self.kind is GroupKind.LOCAL:
            return self.span_tokens % tokens == 0
        return tokens <= self.span_tokens


def why_one_block(groups: Sequence[GroupBlocks]) -> str:
    """Return why a chunk of these groups must be one block; empty if it may have more."""
    if any(group.kind is GroupKind.STATE for group in groups):
        return "this model has states, each of which is one block"
    if len({group.block_tokens for group in groups}) > 1:
        return "the blocks of this model's KV cache groups have different numbers of tokens"
    return ""


def blocks_that_fit(groups: Sequence[GroupBlocks], wanted: int) -> int:
    """Return the largest number of blocks per chunk up to `wanted` that suits all groups."""
    if why_one_block(groups):
        return 1
    fitting = (n for n in range(wanted, 1, -1) if all(group.fits(n) for group in groups))
    return next(fitting, 1)
