# SPDX-License-Identifier: Apache-2.0
"""One rank's simulated pool: the durable content of its targets. It survives crashes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    TAG_BYTES,
    AdoptedEntries,
    SlotIdentity,
    place_of,
)

from .base import Tag

#: A table's entry: what it names, the epoch of its write, whether other ranks have no copy.
Entry = tuple[SlotIdentity, int, bool]
#: The share tag of every start: that of the weights on disk.
START_TAG = b"weights on disk.".ljust(TAG_BYTES)
#: Versions of the weights that operators name, here and elsewhere.
VERSIONS = 2
#: The number of the weights of version 0.
NAMED_WEIGHTS = 2_000_000


def tag_of_version(version: int) -> bytes:
    """The share tag of weights that the operator has named."""
    return (b"weights named %d" % version).ljust(TAG_BYTES)


class Claim(NamedTuple):
    """What a slot's header names: the chunk, the weights that computed it, its length."""

    identity: SlotIdentity
    tag: bytes
    payload_bytes: int


@dataclass(frozen=True)
class Record:
    """A pool slot's bytes. `intact`: the CRCs of header and payload match.

    signed: where only the payload is damaged, that whose CRC the header names.
    """

    claim: Claim
    payload: tuple[Tag | None, ...]
    intact: bool = True
    signed: tuple[Tag | None, ...] | None = None

    def damaged(self, *, header: bool) -> Record:
        """With other bytes in place of its payload. header: and of its header."""
        signed = self.payload if self.intact else self.signed
        return replace(
            self,
            payload=(None,) * len(self.payload),
            intact=False,
            signed=None if header else signed,
        )

    @property
    def as_signed(self) -> Record:
        """What whoever reads only its header takes it for."""
        if self.signed is None:
            return self
        return replace(self, payload=self.signed, intact=True, signed=None)


@dataclass(frozen=True)
class Superblock:
    """One target's superblock. That with the highest sequence of a rank names what is adopted."""

    epoch: int
    sequence: int = 1
    tag: bytes = START_TAG


class RankStore:
    """Slots, table and one superblock per target."""

    def __init__(self, targets: int, seed: int) -> None:
        self.data: dict[int, Record] = {}
        self.table: dict[int, Entry] = {}  # by pool slot
        self._epochs = random.Random(seed)
        first = Superblock(self.new_epoch())
        self.superblocks = [first] * targets
        #: Of what is written to a target that has the newest superblock.
        self.stamp = Stamp(first.epoch, first.tag)
        #: The newest superblock, whether or not any target has it.
        self.newest_drawn = first
        #: Every generation up to this one is void, since a reset that has succeeded.
        self.void_limit = 0
        #: The file of retained sessions, which is replaced atomically.
        self.sessions = b""
        self._undo: list[Callable[[], None]] = []

    def new_epoch(self) -> int:
        return self._epochs.getrandbits(32)

    def put_data(self, slot: int, record: Record) -> None:
        self._remember(self.data, slot)
        self.data[slot] = record

    def put_table(self, slot: int, entry: Entry) -> None:
        self._remember(self.table, slot)
        self.table[slot] = entry

    def put_superblock(self, target: int, superblock: Superblock) -> None:
        """Make the superblock durable at once; an older one never replaces a newer one."""
        if superblock.sequence > self.superblocks[target].sequence:
            self.superblocks[target] = superblock

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        """As `Pool.begin_reset`."""
        superblock = Superblock(self.new_epoch(), self.newest_drawn.sequence + 1, tag)
        self.newest_drawn = superblock
        unnamed = Stamp(self.new_epoch(), tag)
        self.stamp = Stamp(superblock.epoch, tag) if named else unnamed
        return self.stamp, unnamed

    def power_cut(self, rng: random.Random) -> None:
        """Lose any combination of the last writes."""
        for undo in reversed(self._undo):
            if rng.random() < 0.4:
                undo()
        self._undo.clear()

    def lose(self, what: str, rng: random.Random) -> None:
        """Damage only this rank: lose its superblocks, some entries, or the slab's end."""
        self._undo.clear()
        if what == "superblock":
            self.data.clear()
            self.table.clear()
        elif what == "entries":
            for slot in [slot for slot in sorted(self.table) if rng.random() < 0.3]:
                del self.table[slot]
                self.data.pop(slot, None)
        else:
            cut = rng.randint(0, max(self.data, default=0))
            for slot in [slot for slot in self.data if slot >= cut]:
                del self.data[slot]

    def adopt(self, member: int) -> AdoptedEntries:
        """The entries that a start reads from the table. member: this rank, of its set."""
        newest = self.newest()
        if not self.is_of_this_start(newest):
            newest = Superblock(self.new_epoch(), newest.sequence + 1)
        self.superblocks = [newest] * len(self.superblocks)
        self.newest_drawn, self.stamp = newest, Stamp(newest.epoch, START_TAG)
        entries = sorted(self.table.items())
        slots = [slot for slot, (_, epoch, _) in entries if epoch == newest.epoch]
        targets = len(self.superblocks)
        members = [member if self.table[slot][2] else EVERY_MEMBER for slot in slots]
        places = [
            place_of(slot % targets, slot // targets, of)
            for slot, of in zip(slots, members, strict=True)
        ]
        return AdoptedEntries(
            np.array(places, np.int64),
            np.array([self.table[s][0].generation for s in slots], np.uint64),
            b"".join(self.table[s][0].key for s in slots),
        )

    def newest(self) -> Superblock:
        return max(self.superblocks, key=lambda superblock: superblock.sequence)

    def is_of_this_start(self, superblock: Superblock) -> bool:
        return superblock.tag == START_TAG

    def _remember(self, where: dict, slot: int) -> None:  # type: ignore[type-arg]
        old = where.get(slot)

        def undo() -> None:
            if old is None:
                where.pop(slot, None)
            else:
                where[slot] = old

        self._undo.append(undo)
        del self._undo[:-6]
