# SPDX-License-Identifier: Apache-2.0
"""KV cache groups of simulated models: which tokens each keeps, and the bytes of a block. Sets of
ranks with equal KV, which store one copy of a chunk together."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.chunks import cache_member, row_of
from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind
from vllm_nvmeof_offload.manager.boundary import unit_tokens
from vllm_nvmeof_offload.native import set_words_bytes
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, member_of, owner_of, slot_of, target_of
from vllm_nvmeof_offload.staging import SetMap

from .base import STAGING_BASE, Knobs, Memory, Tag

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


SET_SIZE = 2
#: From one member's staging to the next one's.
APART = 1 << 30
#: Added to the prefixes that a rank's blocks hold, by member, where the ranks are not equal.
_DIALECT = 1 << 70


def with_sets(knobs: Knobs, seed: int, sets: int | None) -> Knobs:
    """`knobs` with so many sets of two ranks; 0: ranks share nothing. None: the seed chooses."""
    rng = random.Random(f"sets of {seed}")
    if sets is None:
        sets = rng.choice((0, 0, 0, 1, 2))
    if not sets:
        return knobs
    pages = [knobs.pages[rank // SET_SIZE * SET_SIZE] for rank in range(len(knobs.pages))]
    return replace(
        knobs,
        ranks=sets * SET_SIZE,
        set_size=SET_SIZE,
        pages=tuple(pages),
        equal_min=rng.choice((1, 2, 4)),
        sample_every=rng.choice((3, 10, 1000)),
        unequal=rng.random() < 0.15,
    )


def set_sizes(knobs: Knobs) -> tuple[int, ...]:
    """By group. Ranks have states of their own."""
    return tuple(set_size_of(group, knobs) for group in knobs.groups)


def set_size_of(group: Group, knobs: Knobs) -> int:
    return 1 if group.kind is GroupKind.STATE else knobs.set_size


def holds(rank: int, member: int, knobs: Knobs) -> bool:
    """Whether a rank has what a place or cache slot with this member names."""
    return member in (EVERY_MEMBER, rank % knobs.set_size)


def own(tag: Tag, rank: int, knobs: Knobs) -> Tag:
    """What a rank computes where equal ranks compute `tag`."""
    if not knobs.unequal:
        return tag
    epoch, prefix, group = tag
    return epoch, prefix + rank % knobs.set_size * _DIALECT, group


def split_cache(slot: int) -> tuple[int, int]:
    """Row and member of a cache slot."""
    return row_of(slot), cache_member(slot)


def split_place(place: int) -> tuple[tuple[int, int, int], int]:
    """Row (owner, target and slot) and member of a place."""
    return (owner_of(place), target_of(place), slot_of(place)), member_of(place)


def overlap(one: tuple[object, int], other: tuple[object, int]) -> bool:
    """Whether two slots, as rows and members, share memory on some rank."""
    same = one[1] == other[1] or EVERY_MEMBER in (one[1], other[1])
    return one[0] == other[0] and same


class RankSet:
    """The memory that the members of a set share."""

    def __init__(self, knobs: Knobs) -> None:
        self.memories: list[Memory] = []  # by member
        self._sizes = set_sizes(knobs)
        words = set_words_bytes(knobs.set_size, knobs.cache_slots, knobs.stream_slots)
        self._words = np.zeros(words + 64, np.uint8)

    @staticmethod
    def base_address(member: int) -> int:
        return STAGING_BASE + member * APART

    def join(self, memory: Memory) -> SetMap:
        """The next member's map of the set."""
        member = len(self.memories)
        self.memories.append(memory)
        address = self._words.ctypes.data
        addresses = tuple(map(self.base_address, range(SET_SIZE)))
        return SetMap(address + -address % 64, member, addresses, self._sizes)
