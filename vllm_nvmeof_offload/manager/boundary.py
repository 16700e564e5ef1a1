# SPDX-License-Identifier: Apache-2.0
"""The boundary that a load can reach in a request with several KV cache groups, and the distance
between the boundaries that are kept. Pure. vLLM's own look-up finds the boundary key by key, with
side effects on the request. `plan` applies the same rule with one query per group, so that
prefetching fetches what the look-up will find."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup, group_id_of, group_ids_of

Has = Callable[[Sequence[bytes]], bytes]  # returns one byte per key: 1 if the key is present
_HIT = b"\1"
SPARSE = (GroupKind.WINDOW, GroupKind.STATE)  # kinds with chunks useful only at boundaries
#: The maximum size of a boundary's windows and states, as a share of all bytes stored since the
#: previous boundary.
_COST_SHARE = 0.5
_BOUNDARY_TOKENS_MIN = 1024


def plan(
    groups: Sequence[Group],
    keys_by_group: Sequence[Sequence[bytes]],
    local: int,
    limit: int,
    has: Has,
) -> tuple[int, list[bytes]]:
    """Return the boundary in tokens and the keys for a load up to it, or (local, []) for no load.
    `local` is the number of tokens in GPU memory, a multiple of every group's block size. `limit`
    is the last token that a load may reach, at most the request's length."""
    boundary = _boundary(groups, keys_by_group, local, limit, has)
    return boundary, wanted(groups, keys_by_group, local, boundary)


def wanted(
    groups: Sequence[Group], keys_by_group: Sequence[Sequence[bytes]], local: int, boundary: int
) -> list[bytes]:
    """Return the keys for a load from token `local` to token `boundary`, in order: the full prefix,
    the sliding windows and local chunks that are still in reach at the boundary, and the states."""
    keys: list[bytes] = []
    if boundary <= local:
        return keys
    for at in sorted(range(len(groups)), key=lambda at: groups[at].kind):
        group = groups[at]
        first = max(local, _needed_from(group, boundary)) // group.tokens_per_chunk
        keys += keys_by_group[at][first : -(-boundary // group.tokens_per_chunk)]
    return keys


def taken(
    groups: Sequence[Group],
    keys_by_group: Sequence[Sequence[bytes]],
    hits: Sequence[bytes],
    local: int,
    boundary: int,
    ends_of: Callable[[Sequence[bytes]], Sequence[int]],
) -> list[bytes]:
    """Return the keys for a load from `local` tokens to `boundary`, all of them hits in vLLM's
    look-up. The last hit may be the head of a chunk (a partial tail), which is loaded instead of
    the chunk. `ends_of` returns the request's tokens up to the end of each key's chunk."""
    keys = wanted(groups, keys_by_group, local, boundary)
    if boundary % unit_tokens(groups) == 0:
        return keys
    heads = list(set(hits).difference(*keys_by_group))
    ends = zip(heads, ends_of(heads), strict=True)
    head_of = {group_id_of(key): key for key, end in ends if end == boundary}
    hit = set(hits)
    for group, own in zip(groups, keys_by_group, strict=True):
        chunk = boundary // group.tokens_per_chunk
        if boundary % group.tokens_per_chunk == 0:
            continue
        head = head_of.get(group.group_id)
        if chunk < len(own) and own[chunk] in keys and (head or own[chunk] not in hit):
            keys.remove(own[chunk])
        if head:
            keys.append(head)
    return keys


def full_prefix(
    groups: Sequence[Group],
    keys_by_group: Sequence[Sequence[bytes]],
    start: int,
    limit: int,
    has: Has,
) -> int:
    """Return the number of tokens, at most `limit_of(limit)`, up to which all full-attention chunks
    are present. The chunks up to `start` must be present."""
    end = limit_of(groups, limit)
    for group, keys in zip(groups, keys_by_group, strict=True):
        if group.kind is GroupKind.FULL:
            first = start // group.tokens_per_chunk
            hits = has(keys[first : end // group.tokens_per_chunk])
            count = len(hits) - len(hits.lstrip(_HIT))
            end = min(end, (first + count) * group.tokens_per_chunk)
    return max(start, end)


def unit_tokens(groups: Sequence[Group]) -> int:
    """Return the smallest number of tokens that is a whole number of chunks in every group."""
    return math.lcm(*(group.tokens_per_chunk for group in groups))


def kept_every(groups: Sequence[Group], unit: int, lasting: int) -> int:
    """Return the distance in tokens between the boundaries that vLLM keeps in GPU memory so that
    they can be stored. The result is a multiple of `unit`; `lasting` is the distance between
    lasting boundaries. With windows, it is `lasting`: windows are stored while they are in GPU
    memory anyway. Without windows, vLLM keeps a state per unit: an answer's state takes no pool
    space, because it is stored only until the next state, and most answers are shorter than
    `lasting`."""
    return lasting if any(group.kind is GroupKind.WINDOW for group in groups) else unit


def automatic(groups: Sequence[RankGroup], unit: int) -> int:
    """Return the number of tokens between lasting boundaries, a multiple of `unit`; 0 for none."""
    sparse = [one for one in groups if one.group.kind in SPARSE]
    if not sparse:
        return 0
    boundary_bytes = sum(one.payload_bytes * (one.group.reach_chunks or 0) for one in sparse)
    dense_bytes = sum(
        one.payload_bytes / one.group.tokens_per_chunk for one in groups if one not in sparse
    )
    if dense_bytes:
        worth = boundary_bytes / (_COST_SHARE * dense_bytes)
    else:
        reaches = (one.group.tokens_per_chunk * (one.group.reach_chunks or 0) for one in sparse)
        worth = max(reaches) / _COST_SHARE
    # A pipeline-parallel rank might have no layer of these groups.
    interval = max(1, math.ceil(worth / unit)) * unit
    return math.ceil(_BOUNDARY_TOKENS_MIN / interval) * interval


def limit_of(groups: Sequence[Group], tokens: int) -> int:
    """Return the number of tokens that a load can reach in a request of `tokens` tokens. With
    windows or states, vLLM computes the last token; with states, it resumes only at the end of a
    chunk."""
    if all(group.kind is GroupKind.FULL for group in groups):
        return tokens
    tokens -= 1
    for group in groups:
        if group.kind is GroupKind.STATE:
            tokens -= tokens % group.tokens_per_chunk
    return tokens


def _needed_from(group: Group, boundary: int) -> int:
    """Return the group's first token that is needed to resume at `boundary`."""
    if group.kind is GroupKind.FULL:
        return 0
    reach = group.reach_tokens
    if group.kind is GroupKind.LOCAL and reach is not None:
        return boundary - boundary % reach
    if group.kind is GroupKind.WINDOW and reach is not None:
        return boundary - reach
    assert group.reach_chunks is not None, "a window or state has a reach"
    end = -(-boundary // group.tokens_per_chunk)
    return (end - group.reach_chunks) * group.tokens_per_chunk


def _boundary(
    groups: Sequence[Group],
    keys_by_group: Sequence[Sequence[bytes]],
    local: int,
    limit: int,
    has: Has,
) -> int:
    """Find the boundary by vLLM's rule: full attention first, then windows and states in order of
    decreasing reach. Each group may lower the boundary; rounds repeat until no group does."""
    full = [at for at, group in enumerate(groups) if group.reach_chunks is None]
    tails = [at for at, group in enumerate(groups) if group.reach_chunks is not None]
    tails.sort(key=lambda at: groups[at].reach_chunks or 0, reverse=True)
    boundary = limit_of(groups, limit)
    present: dict[int, bytes] = {}  # by group, from the first chunk after `local`
    todo, found = full + tails, 0
    while todo:
        last_round, todo = todo, []
        tail_seen = False
        for at in last_round:
            group, keys = groups[at], keys_by_group[at]
            tokens = group.tokens_per_chunk
            boundary = min(boundary, len(keys) * tokens)
            if boundary - local < tokens:
                return local
            first, end = local // tokens, -(-boundary // tokens)
            if at not in present:
                present[at] = has(keys[first:end])
            hits = present[at][: end - first]
            if group.reach_chunks is None:
                count = len(hits) - len(hits.lstrip(_HIT))
            else:
                count = _last_run(hits, group.reach_chunks, _reach_at(group, boundary))
            boundary = min(boundary, (first + count) * tokens)
            if not count or boundary - local < tokens:
                return local
            if boundary - local < found and tail_seen and not todo:
                todo = tails
            tail_seen |= group.reach_chunks is not None
            found = boundary - local
    return boundary


def _reach_at(group: Group, boundary: int) -> int:
    """Return how many chunks of a window or state a boundary needs. A window that ends within a
    chunk may need one more."""
    assert group.reach_chunks is not None
    if group.kind is not GroupKind.WINDOW or group.reach_tokens is None:
        return group.reach_chunks
    tokens = group.tokens_per_chunk
    return max(group.reach_chunks, -(-(group.reach_tokens + -boundary % tokens) // tokens))


def _last_run(hits: bytes, reach: int, reach_at_end: int) -> int:
    """Return the end of the last run of at least `reach` hits; a run at the very end needs
    `reach_at_end`. If there is none, return the number of hits at the start."""
    at_end = len(hits) - len(hits.rstrip(_HIT))
    if at_end >= reach_at_end:
        return len(hits)
    at = hits.rfind(_HIT * reach, 0, len(hits) - at_end)
    return at + reach if at >= 0 else len(hits) - len(hits.lstrip(_HIT))


# Chunks of several groups are evicted in the order of their last tokens, because a boundary is
# useful only with its whole prefix and with the windows and states that end at it. Among chunks
# that end at the same token, full attention is evicted last.


def prefix_order(
    keys: Sequence[bytes], ends: npt.NDArray[np.int64], groups: Sequence[Group]
) -> npt.NDArray[np.uint32]:
    """Return the indexes that sort the keys. `ends` gives the tokens up to each chunk's end."""
    full = [group.group_id for group in groups if group.kind is GroupKind.FULL]
    ids = group_ids_of(b"".join(keys), len(keys))
    order: npt.NDArray[np.intp] = np.lexsort((~np.isin(ids, full), ends))
    return order.astype(np.uint32)
