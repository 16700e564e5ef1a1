# SPDX-License-Identifier: Apache-2.0
"""KV cache groups of simulated models: which tokens each keeps, and the bytes of a block.

A block of the largest group is `pages_per_block` pages, and any other group's has fewer of them, so
that a copy of too many bytes meets pages that are not its group's. A rank without pages of a group
is a stage of a pipeline that has no layer of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind
from vllm_nvmeof_offload.manager.boundary import unit_tokens

from .base import Knobs
from .memory import Tag

FULL = "full"
SHAPES = ("full+window", "window+full", "full+state", "window", "unlike blocks", "full+local")
_RANKS_MAX = 8


def shaped(knobs: Knobs, seed: int, shape: str | None) -> Knobs:
    """`knobs` with the groups of this shape; None: the seed chooses, full attention in half of all
    runs, how many steps are in flight, and in a third of all runs the bounds on bytes. Draws of its
    own leave the other knobs as they are."""
    knobs = _bounded(knobs, random.Random(f"bytes of {seed}"))
    rng = random.Random(f"groups of {seed}")
    if shape is None and rng.random() < 0.25:
        knobs = replace(knobs, lag=rng.choice((2, 3)))  # three or four steps in flight
    shape = shape or (FULL if rng.random() < 0.5 else rng.choice(SHAPES))
    if shape == FULL:
        only = Group(0, GroupKind.FULL, knobs.chunk_tokens, knobs.blocks_per_chunk)
        return replace(knobs, shape=shape, groups=(only,), pages=((1,),) * _RANKS_MAX)
    if shape in ("full+state", "unlike blocks"):
        knobs = replace(knobs, blocks_per_chunk=1)
    groups = _groups(shape, knobs, rng)
    pages = [rng.choice((1, 2)) for _ in groups]
    pages[rng.randrange(len(pages))] = 2
    by_rank = [list(pages) for _ in range(_RANKS_MAX)]
    if len(groups) > 1 and rng.random() < 0.3:  # stages of a pipeline
        by_rank[rng.randrange(2)][rng.randrange(len(groups))] = 0
    sparse = any(group.kind in (GroupKind.WINDOW, GroupKind.STATE) for group in groups)
    every = unit_tokens(groups) * rng.choice((0, 1, 2, 4)) if sparse else 0
    return replace(
        knobs,
        shape=shape,
        groups=groups,
        pages_per_block=2,
        pages=tuple(map(tuple, by_rank)),
        boundary_tokens=every,
        gpu_blocks=knobs.gpu_blocks * len(groups),
        drafts=0 if shape == "full+state" else knobs.drafts,
    )


def _bounded(knobs: Knobs, rng: random.Random) -> Knobs:
    if rng.random() >= 1 / 3:
        return knobs
    reads, writes = rng.choice((0.5, 1.5, 2.0, 4.0)), rng.choice((0.5, 1.5, 2.0, 4.0))
    return replace(knobs, read_slots_max=reads, write_slots_max=writes)


def _groups(shape: str, knobs: Knobs, rng: random.Random) -> tuple[Group, ...]:
    tokens, blocks = knobs.chunk_tokens, knobs.blocks_per_chunk
    first, second = rng.choice(((0, 1), (0, 2), (1, 3)))  # vLLM may offload only some groups
    full = Group(first, GroupKind.FULL, tokens, blocks)
    if shape == "full+state":
        return full, Group(second, GroupKind.STATE, tokens, blocks, reach_chunks=1)
    if shape == "full+local":
        reach = rng.choice((1, 2, 3))
        return full, Group(second, GroupKind.LOCAL, tokens, blocks, reach, reach * tokens)
    if shape == "unlike blocks":
        return full, _window(second, tokens * 2, blocks, rng)
    if shape == "window":
        return (_window(first, tokens, blocks, rng),)
    if shape == "full+window":
        return full, _window(second, tokens, blocks, rng)
    return _window(first, tokens, blocks, rng), replace(full, group_id=second)


def _window(group_id: int, tokens: int, blocks: int, rng: random.Random) -> Group:
    """A window of any length: its chunks may be longer, and are not whole then."""
    span = rng.randint(2, 3 * tokens)
    return Group(group_id, GroupKind.WINDOW, tokens, blocks, -(-span // tokens), span - 1)


def block_tokens(group: Group) -> int:
    return group.tokens_per_chunk // group.blocks_per_chunk


def needed_from(group: Group, tokens: int) -> int:
    """The first token that a model needs of this group to compute the one behind `tokens`."""
    if group.kind is GroupKind.STATE:
        return max(0, tokens - 1)
    if group.reach_tokens is None:
        return 0
    if group.kind is GroupKind.LOCAL:
        return tokens - tokens % group.reach_tokens
    return max(0, tokens - group.reach_tokens)


def unit_of_blocks(groups: Sequence[Group]) -> int:
    return math.lcm(*map(block_tokens, groups))


def key_of(prefix: int, group: Group) -> bytes:
    """The offload key. Like vLLM's, it names the tokens and not the weights."""
    return prefix.to_bytes(8, "big") + group.group_id.to_bytes(GROUP_ID_BYTES, "big")


def spread(blocks: Sequence[Tag], pages: Sequence[int]) -> list[Tag | None]:
    """The pages of a chunk's payload on a rank. blocks: their tags. pages: of a block, by group."""
    if pages == (1,):
        return list(blocks)
    return [tag for tag in blocks for _ in range(pages[tag[2]])]
