# SPDX-License-Identifier: Apache-2.0
"""Chunks of several KV cache groups: their order by position, and the tokens that they bring. Pure.

A boundary is of use only with the whole prefix before it and with the windows and states that end
there. So chunks are kept, and given up, by the token that each ends with, and at the same token a
chunk of full attention outlives the others: the tails of the last boundary go first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind


def prefix_order(
    keys: Sequence[bytes], ends: npt.NDArray[np.int64], groups: Sequence[Group]
) -> npt.NDArray[np.uint32]:
    """The keys' indexes, sorted. ends: of each key, the number of tokens up to its chunk's end."""
    full = [group.group_id for group in groups if group.kind is GroupKind.FULL]
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    ids = np.ascontiguousarray(rows[:, -GROUP_ID_BYTES:]).view(">u4").ravel()
    order: npt.NDArray[np.intp] = np.lexsort((~np.isin(ids, full), ends))
    return order.astype(np.uint32)


def tokens_by_source(
    tokens: range,
    ends: npt.NDArray[np.int64],
    from_pool: npt.NDArray[np.bool_],
    positions: npt.NDArray[np.uint8],
    groups: Sequence[Group],
) -> tuple[int, int]:
    """How many of `tokens` a load takes from the CPU tier, and how many from the pool.

    ends, from_pool, positions (of groups): by chunk of the load. A token that chunks of both tiers
    bring counts for the pool. A state brings all tokens before it. Windows may leave some out.
    """
    sizes = np.array([group.tokens_per_chunk for group in groups], np.int64)[positions]
    is_state = np.array([group.kind is GroupKind.STATE for group in groups])[positions]
    starts = np.maximum(np.where(is_state, 0, (ends - 1) // sizes * sizes), tokens.start)
    ends = np.minimum(ends, tokens.stop)
    pool = _covered(starts[from_pool], ends[from_pool])
    return _covered(starts, ends) - pool, pool


def _covered(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> int:
    """The length of the union of these ranges."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    before = np.maximum.accumulate(ends)[:-1]  # of each range but the first: where those before end
    starts[1:] = np.maximum(starts[1:], before)
    return int(np.maximum(ends - starts, 0).sum())
