# SPDX-License-Identifier: Apache-2.0
"""Sets of ranks with equal KV, which store one copy of a chunk together.

Here the ranks of a set run in one process. They share the words by which they wait for each other.
In some runs the ranks are not equal, although they were taken to be.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from tests.chunks import cache_member, row_of
from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.native import set_words_bytes
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    member_of,
    owner_of,
    slot_of,
    target_of,
)
from vllm_nvmeof_offload.staging import SetMap

from .base import STAGING_BASE, Knobs
from .memory import Memory, Tag

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
