# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: each has layers of one kind, and its own offload keys for its chunks.

A chunk is one group's blocks for one range of tokens. A *group position* is the group's index in
`RankHello.groups` and appears in `ChunkBatch.groups`. A *group id* is vLLM's number for the group,
the last part of each of its offload keys. The two differ if vLLM does not offload every group.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: The size of the big-endian group id at the end of an offload key.
GROUP_ID_BYTES = 4
#: The maximum number of ranks in a set of ranks that hold equal bytes.
SET_SIZE_MAX = 64


class GroupKind(enum.IntEnum):
    """The kind of a group, which determines the tokens that are kept. Pools store the numbers."""

    FULL = 0  # all tokens
    WINDOW = 1  # the last tokens before any position
    LOCAL = 2  # the tokens since the last multiple of an attention chunk
    STATE = 3  # one state per boundary


@dataclass(frozen=True, slots=True)
class Group:
    """A group, the same on all ranks.

    `reach_chunks` is the number of consecutive chunks before a boundary that are needed to resume
    there: None for all, as with full attention; 1 for a state. `reach_tokens` is the number of
    tokens that a window needs before a boundary or, for LOCAL, the length of an attention chunk.
    """

    group_id: int
    kind: GroupKind
    tokens_per_chunk: int
    blocks_per_chunk: int = 1
    reach_chunks: int | None = None
    reach_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group on one rank.

    `block_bytes` is the size of one block over the group's layers on this rank; 0 if it has none.
    `set_size` is the number of consecutive ranks that hold equal bytes of the group and together
    store one copy. Rank r is member r % set_size of set r // set_size.
    """

    group: Group
    block_bytes: int
    set_size: int = 1

    @property
    def payload_bytes(self) -> int:
        blocks = 1 if self.group.kind is GroupKind.STATE else self.group.blocks_per_chunk
        return self.block_bytes * blocks


def group_id_of(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_ID_BYTES:], "big")


def group_ids_of(keys: bytes, count: int) -> npt.NDArray[np.uint32]:
    """Return the group ids in `count` joined offload keys, at least one."""
    rows = np.frombuffer(keys, np.uint8).reshape(count, -1)
    ids: npt.NDArray[np.uint32] = rows[:, -GROUP_ID_BYTES:].view(">u4")[:, 0]
    return ids


def leading(groups: tuple[Group, ...]) -> int:
    """Return the position of the group that determines a request's length. This is the first group
    with full attention or, without one, the group with the longest reach."""
    for position, group in enumerate(groups):
        if group.kind is GroupKind.FULL:
            return position
    return max(range(len(groups)), key=lambda at: groups[at].reach_chunks or 0)
