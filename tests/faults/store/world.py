# SPDX-License-Identifier: Apache-2.0
"""One seed of the store's simulation: fill, read, evict, reset, crash and reopen, several times.

The real pool runs over real small files. The model records for each pool slot the bytes of the
last acknowledged write, and for each generation when it was written. It checks

* never wrong: every load serves the one right content of the requested identity, or a miss;
* never revived: no chunk is adopted that was written before an acknowledged reset, under an epoch
  that no superblock names, or that was never written to that slot; none of other weights is served;
* never lost: an acknowledged chunk whose bytes the crash left whole is found and served.

Chunks that storage misdirects between slots, targets, ranks and servers must not be served
either, so the pool has neighbours (`Neighbours`).
"""

from __future__ import annotations

import errno
import logging
import os
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests import slots
from tests.chunks import place_in
from tests.owners import reset
from tests.slots import write_slot
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup, group_id_of
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    Keyspace,
    Stamp,
    decode_table,
    encode_entry,
    share_tag,
)
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import TAG_BYTES, SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

from ..kit import adopted
from .disk import Crash, Damage, Disk

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


KEYS = 20
LIVES = 8
STEPS = 16


class World:
    def __init__(self, root: Path, seed: int, lies: bool = False) -> None:
        self.dice = random.Random(seed)
        self.disk = Disk(root, lies)
        self.counts: Counter[str] = Counter()
        self.spec = PoolSpec(
            targets=(root / "a", root / "b")[: self.dice.choice([1, 2])],
            pool_bytes=1,
            payload_bytes=max(LENGTHS),
            keyspace=KEYSPACE,
            groups=GROUPS,
            world_size=2,
            o_direct="off",
        )
        self.generation = 0
        #: generation → (resets acknowledged before it, whether it may be adopted)
        self.born: dict[int, tuple[int, bool]] = {}
        #: generation → its share tag
        self.tags: dict[int, bytes] = {}
        self.resets = 0
        #: The chunks that must be found unless a crash damages them.
        self.written: dict[int, Written] = {}
        #: The identities that a manager would look up.
        self.known: dict[int, SlotIdentity] = {}
        #: All earlier identities of a slot, which must never be served with wrong bytes.
        self.past: dict[int, list[SlotIdentity]] = {slot: [] for slot in range(SLOTS)}
        #: Whether this life's superblocks name what it writes, as it was opened and now.
        self.opened_named = self.named = True
        #: A reset has failed: the entries that the next start finds are undefined until then.
        self.unclear = False
        self.pool: Pool | None = None
        self.neighbours: Neighbours | None = None

    def play(self) -> None:
        self.neighbours = Neighbours(self.spec)
        self.disk.sync()
        for _ in range(LIVES):
            if self.dice.random() < 0.25:
                self.disk.crash_after = self.dice.randrange(60)
            try:
                self._start()
                for _ in range(self.dice.randrange(STEPS)):
                    self._step()
            except Crash:
                self.counts["crash inside"] += 1
            self._end()
        self._start()
        self.close()

    # ---- start and end of a life ----------------------------------------------------------

    def _start(self) -> None:
        slots = self.dice.choice([SLOTS, SLOTS, SLOTS, SLOTS // 2])
        spec = replace(
            self.spec,
            pool_bytes=slots * (self.spec.slot_bytes + ENTRY_BYTES),
            adopt=self.dice.random() > 0.05,
            named=self.dice.random() > 0.05,
        )
        adopts = spec.adopt and spec.named
        must = self._must(slots) if adopts else {}
        if not adopts:
            self.written.clear()
        self.pool = Pool.open(spec)
        if not adopts:
            self.resets += 1
        self.opened_named = self.named = spec.named
        self.stamps = [self.pool.stamp] * self.pool.target_count
        self._check_adopted(must)
        self.unclear = False

    def _must(self, slots: int) -> dict[int, Written]:
        """The acknowledged chunks that are whole on the disk now."""
        blocks = [Damage.superblock(directory) for directory in self._directories()]
        intact = [one for at, one in enumerate(blocks) if one and one.target_index == at]
        if len({block.uuid for block in intact}) != 1 or self.unclear:
            return {}
        newest = max(intact, key=lambda block: block.sequence)
        same = {block.epoch for block in intact if block.sequence == newest.sequence}
        if newest.tag != TAG or len(same) > 1:
            return {}
        kept = {}
        for number, written in self.written.items():
            index, target = divmod(number, len(self.spec.targets))
            block = blocks[target]
            if block is None or block.target_index != target or number >= slots:
                continue
            voided = newest.epoch != written.epoch
            if not voided and index < block.slots and self._is_whole(number, written):
                kept[number] = written
        return kept

    def _is_whole(self, number: int, written: Written) -> bool:
        index, target = divmod(number, len(self.spec.targets))
        directory = self._directories()[target]
        slab = self.disk.file(directory / "slab").fd
        slot = os.pread(slab, len(written.slot), index * self.spec.slot_bytes)
        if slot != written.slot:
            return False
        table = self.disk.file(directory / "table").fd
        entry = os.pread(table, ENTRY_BYTES, index * ENTRY_BYTES)
        if len(entry) < ENTRY_BYTES:
            return True  # the table ends before this entry: the header decides
        if entry == written.entry:
            return True
        # For a damaged entry the header decides; an old or an empty entry is believed.
        return any(entry) and not is_intact(entry, index)

    def _check_adopted(self, must: dict[int, Written]) -> None:
        assert self.pool is not None
        found = adopted(self.pool)
        self.known = {}
        for slot, identity in found.items():
            resets, named = self.born.get(identity.generation, (-1, False))
            assert resets == self.resets, f"slot {slot}: adopted from before a reset: {identity}"
            assert named, f"slot {slot}: adopted although nothing names it: {identity}"
            # An entry proves its number in a region, not the region, which its header does.
            first, count = slot // self.pool.target_count * self.pool.target_count, len(self.past)
            same = range(first, min(first + self.pool.target_count, count))
            elsewhere = f"slot {slot}: adopted from elsewhere: {identity}"
            assert any(identity in self.past[one] for one in same), elsewhere
            if self.load(slot, identity):
                assert identity in self.past[slot], f"slot {slot}: served from elsewhere"
                self.known[slot] = identity
        for slot, written in must.items():
            assert self.load(slot, written.identity), f"slot {slot} is lost: {written.identity}"
            assert found.get(slot) == written.identity, f"slot {slot} is not adopted"
            self.counts["found again"] += 1
        self.written = {slot: one for slot, one in must.items() if slot in self.known}

    def _end(self) -> None:
        """End cleanly, by a kill that the page cache survives, or by a crash; then damage files."""
        self._close()
        killed = self.disk.dead and self.dice.random() < 0.4
        if not killed and (self.disk.dead or self.dice.random() < 0.7):
            damage = Damage(self.disk, self.dice, self.spec.slot_bytes, self._directories())
            self.disk.crash(damage.survive)
            damage.rot()
            self.counts.update(damage.counts)
        else:
            self.disk.dead, self.disk.crash_after, self.disk.fail = False, None, None
            self.counts["killed" if killed else "clean end"] += 1

    def _close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def close(self) -> None:
        self._close()
        if self.neighbours is not None:
            self.neighbours.close()

    def _directories(self) -> tuple[Path, ...]:
        place = Path(self.spec.keyspace.digest) / "engine-0" / "rank-0"
        return tuple(target / place for target in self.spec.targets)

    # ---- one step -------------------------------------------------------------------------

    def _step(self) -> None:
        assert self.pool is not None
        steps = {self._store: 60, self._load: 15, self._load_past: 10, self._sync: 8}
        steps |= {self._fail_a_write: 4, self._reset: 2, self._fail_a_reset: 1}
        steps |= {self._load_elsewhere: 5, self._load_as_another_group: 3}
        self.dice.choices(list(steps), list(steps.values()))[0]()

    def _store(self) -> None:
        """Store into a free slot or an evicted one, whose number then belongs to the new key."""
        assert self.pool is not None
        slot = self.dice.randrange(self.pool.slots)
        self.generation += 1
        identity = SlotIdentity(key(self.dice.randrange(KEYS)), self.generation)
        stamp = self.stamps[slot % self.pool.target_count]
        # A target without the superblock of the last reset gets what no superblock names.
        named = self.named and stamp == self.pool.stamp
        self.born[self.generation] = (self.resets, named)
        self.tags[self.generation] = stamp.tag
        self.known.pop(slot, None)
        self.written.pop(slot, None)
        self.past[slot].append(identity)
        sealed = store(self.pool, slot, identity, stamp)
        if sealed is None:
            self.counts["write failed"] += 1
            return
        self.known[slot] = identity
        if named:
            entry = encode_entry(slot // self.pool.target_count, identity, stamp.epoch)
            self.written[slot] = Written(identity, stamp.epoch, sealed, entry)
        assert self.neighbours is not None
        self.neighbours.store(slot, identity, stamp)

    def _load(self) -> None:
        if self.known:
            slot = self.dice.choice(sorted(self.known))
            assert self.load(slot, self.known[slot]), f"slot {slot} was lost while running"

    def _load_past(self) -> None:
        """Load an earlier identity of a slot, as a stale index would."""
        assert self.pool is not None
        slot = self.dice.randrange(self.pool.slots)
        if self.past[slot]:
            identity = self.dice.choice(self.past[slot])
            self.load(slot, identity)

    def _load_elsewhere(self) -> None:
        """A misdirected read: from another slot or target, or another rank's or server's file."""
        assert self.pool is not None
        if self.known:
            slot = self.dice.choice(sorted(self.known))
            assert self.neighbours is not None
            other = self.dice.choice([self.pool, *self.neighbours.pools])
            at = self.dice.choice([slot, self.dice.randrange(self.pool.slots)])
            self.load(
                slot, self.known[slot], slots.slab_at(other, place_in(at, other.target_count))
            )
            self.counts["misdirected read"] += 1

    def _load_as_another_group(self) -> None:
        """A read that asks for another group's length."""
        if self.known:
            slot = self.dice.choice(sorted(self.known))
            identity = self.known[slot]
            other = sum(LENGTHS) - length_of(identity)
            assert not self.load(slot, identity, payload_bytes=other), "another length was served"
            self.counts["read of another length"] += 1

    def load(
        self,
        slot: int,
        identity: SlotIdentity,
        place: tuple[int, int] | None = None,
        payload_bytes: int | None = None,
    ) -> bool:
        """True if the chunk was served, with the right bytes. place: where the storage reads."""
        assert self.pool is not None
        memory = bytearray(self.pool.slot_bytes)
        size, tag = payload_bytes or length_of(identity), self.stamps[0].tag
        what = memoryview(memory), slot, identity, tag, size, place
        if not slots.read_slot(self.pool, *what).ok:
            self.counts["miss"] += 1
            return False
        served = memory[HEADER_BYTES : HEADER_BYTES + size]
        assert served == content(identity), f"slot {slot}: wrong bytes for {identity}"
        assert self.tags[identity.generation] == tag, f"slot {slot}: of other weights: {identity}"
        self.counts["served"] += 1
        return True

    def _sync(self) -> None:
        """Flush the page cache to the disk, as the kernel does at any moment."""
        self.disk.sync()

    def _fail_a_write(self) -> None:
        number = self.dice.choice([errno.EIO, errno.ENOSPC])
        self.disk.fail = (self.dice.choice(["slab", "table"]), number)
        self.disk.fail_count = 1
        self._store()
        self.disk.fail = None

    def _reset(self, fails: bool = False) -> None:
        assert self.pool is not None
        tag = TAG if self.dice.random() < 0.7 else self.dice.randbytes(TAG_BYTES)
        named = self.dice.random() < 0.9
        self.written.clear()
        self.known.clear()
        self.unclear = True
        found = reset(self.pool, tag, named)
        self.stamps = found.stamps
        self.named = named and self.opened_named and tag == TAG
        reached = sum(outcome.ok for outcome in found.outcomes)
        assert fails or reached == self.pool.target_count
        if not found.ok:
            self.counts["reset failed"] += 1
            return
        self.resets += 1
        self.unclear = False
        self.counts["reset" if reached == self.pool.target_count else "reset in part"] += 1

    def _fail_a_reset(self) -> None:
        """Fail a reset on one target, or on all of them: the disk has no record of it then."""
        self.disk.fail = (self.dice.choice(["superblock", "sync"]), errno.EIO)
        self.disk.fail_count = self.dice.choice([1, 2])
        self._reset(fails=True)
        self.disk.fail = None


# -- playing seeds, in memory if possible: a seed does the I/O of hundreds of small files

_MEMORY = Path("/dev/shm")


def play(seed: int, root: Path, lies: bool = False) -> Counter[str]:
    """Play one seed in the empty directory `root`; return what happened, counted."""
    world = World(root.resolve(), seed, lies)
    with world.disk.active():
        try:
            world.play()
        except AssertionError as error:
            command = f"python -m tests.faults.store --seed {seed}"
            raise AssertionError(f"{error} (replay: {command})") from error
        finally:
            world.disk.dead = True
            world.close()
    return world.counts


def play_in_memory(seed: int, lies: bool = False) -> Counter[str]:
    """Play one seed.

    Raises:
        AssertionError: a rule was broken; the message has the replay command.
    """
    # The package warns about every damage, and these tests damage files all the time.
    logger = logging.getLogger(LOGGER_NAME)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(prefix="vnvme-store-", dir=place) as root:
            return play(seed, Path(root), lies)
    finally:
        logger.setLevel(level)
