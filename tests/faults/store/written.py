# SPDX-License-Identifier: Apache-2.0
"""The chunks written into slots by the pool under test and by its neighbours.

The neighbours are another rank and another server. They write the same identities into the same
slots of separate pools, as ranks do, with other bytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from tests.slots import write_slot
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup, group_id_of
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    Keyspace,
    Stamp,
    decode_table,
    share_tag,
)
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

#: By group.
LENGTHS = (5000, 3000)
GROUPS = tuple(
    RankGroup(Group(group_id, GroupKind.WINDOW, 16, reach_chunks=1), length)
    for group_id, length in enumerate(LENGTHS)
)
KEYSPACE = Keyspace.of({"m": 1})
#: The share tag of a start that is named.
TAG = share_tag(KEYSPACE.digest)
SLOTS = 16  # over all targets


@dataclass(frozen=True)
class Written:
    """An acknowledged write: the bytes that must be on the disk for the chunk to be found."""

    identity: SlotIdentity
    epoch: int
    slot: bytes
    entry: bytes


class Neighbours:
    """Open pools on the same targets, from the first start to the end of a seed."""

    def __init__(self, spec: PoolSpec) -> None:
        spec = replace(spec, pool_bytes=SLOTS * (spec.slot_bytes + ENTRY_BYTES))
        self.pools = [Pool.open(replace(spec, rank=1, engine_index=0))]
        self.pools.append(Pool.open(replace(spec, rank=0, engine_index=1)))

    def store(self, slot: int, identity: SlotIdentity, stamp: Stamp) -> None:
        """Seal with the epoch of the pool under test, so that no epoch distinguishes the pools."""
        for number, pool in enumerate(self.pools, 1):
            store(pool, slot, identity, stamp, neighbour=number)

    def close(self) -> None:
        while self.pools:
            self.pools.pop().close()


def key(number: int) -> bytes:
    """Even numbers are keys of group 0, odd ones of group 1."""
    return f"key {number:03}".encode() + (number % 2).to_bytes(4, "big")


def length_of(identity: SlotIdentity) -> int:
    return LENGTHS[group_id_of(identity.key)]


def store(
    pool: Pool, slot: int, identity: SlotIdentity, stamp: Stamp, neighbour: int = 0
) -> bytes | None:
    """Write the content of `identity`; return header page and payload, None if that failed."""
    memory = bytearray(pool.slot_bytes)
    size = length_of(identity)
    memory[HEADER_BYTES : HEADER_BYTES + size] = content(identity, neighbour)
    outcome = write_slot(pool, memoryview(memory), slot, identity, stamp, size)
    return bytes(memory[: HEADER_BYTES + size]) if outcome.ok else None


def content(identity: SlotIdentity, neighbour: int = 0) -> bytes:
    """The one right payload of an identity in the pool under test (0) or in a neighbour's."""
    dice = random.Random(repr((identity.key, identity.generation, neighbour)))
    return dice.randbytes(length_of(identity))


def is_intact(entry: bytes, slot: int) -> bool:
    """Whether the table entry is intact and belongs to this slot."""
    table = decode_table(np.frombuffer(entry, np.uint8), np.array([slot]))
    return bool(table.valid[0])
