# SPDX-License-Identifier: Apache-2.0
"""The contract of another engine's region: it is read with its own files and place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

import pytest

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, Outcome, io_error
from vllm_nvmeof_offload.io.base import ForeignSlab
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import SlotIdentity

from .rig import Rig, content, name
from .test_io_engine_place import put_whole_slot, whole_slot

MakeRig = Callable[..., Rig]
TARGETS, OWNER = 2, 7
OURS_SLOTS, THEIR_SLOTS = 8, 64
#: Beyond the end of our own slabs, on the second target.
SLOT = 41
NO_FILES = io_error(errno.EBADF)


def region_of(pool: Pool, target: int, direct: bool) -> ForeignSlab:
    """Open a region of theirs, on the target of this number, for reading."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    place = pool.superblocks[target].place(0)
    fd = os.open(pool.directories[target] / "slab", flags)
    return ForeignSlab(fd, place.region_uuid, place.rank)


class Neighbours:
    """Two engines, each with a pool on the same targets. We read theirs."""

    def __init__(self, make_rig: MakeRig) -> None:
        self.theirs = make_rig(targets=TARGETS, slots=THEIR_SLOTS)
        self.ours = make_rig(targets=TARGETS, slots=OURS_SLOTS)
        self.regions = [
            region_of(self.theirs.pool, target, self.ours.pool.is_direct[target])
            for target in range(TARGETS)
        ]
        for target, region in enumerate(self.regions):
            self.ours.engine.attach_region(OWNER, target, region)

    def borrow(self, slot: int, identity: SlotIdentity, owner: int = OWNER) -> Outcome:
        self.ours.zero(1)
        return self.ours.run(self.ours.read(slot, 1, identity, owner=owner))[0].outcome

    def close(self) -> None:
        for region in self.regions:
            os.close(region.fd)


@pytest.fixture
def neighbours(make_rig: MakeRig) -> Iterator[Neighbours]:
    both = Neighbours(make_rig)
    yield both
    both.close()


def test_their_slots_and_ours_of_the_same_number_are_read_apart(neighbours: Neighbours) -> None:
    for slot in (2, 3):
        neighbours.theirs.store(slot, name(slot))
        neighbours.ours.store(slot, name(100 + slot))
    neighbours.theirs.store(SLOT, name(SLOT))
    for slot in (2, 3, SLOT):
        assert neighbours.borrow(slot, name(slot)) == OK
        assert neighbours.ours.payload(1) == content(name(slot))
    for slot in (2, 3):
        ours = neighbours.ours.read(slot, 2, name(100 + slot))
        assert neighbours.ours.run(ours)[0].outcome == OK
        assert neighbours.ours.payload(2) == content(name(100 + slot))


@pytest.mark.parametrize("what", ["key", "generation", "slot", "region", "tag"])
def test_what_is_not_the_chunk_that_was_asked_for_is_stale(
    neighbours: Neighbours, what: str
) -> None:
    neighbours.theirs.store(SLOT, name(1))
    assert neighbours.borrow(SLOT, name(1)) == OK
    identity, slot = name(1), SLOT
    match what:
        case "key":
            identity = name(2)
        case "generation":
            identity = name(1, generation=2)
        case "slot":
            slot = SLOT + TARGETS
            put_whole_slot(neighbours.theirs.pool, slot, whole_slot(neighbours.theirs.pool, SLOT))
        case "region":  # a chunk of ours, in their file
            slot = 3
            neighbours.ours.store(slot, identity)
            put_whole_slot(neighbours.theirs.pool, slot, whole_slot(neighbours.ours.pool, slot))
        case "tag":  # of other weights
            neighbours.theirs.reset(bytes(range(16)))
            neighbours.theirs.store(SLOT, name(1))
    assert neighbours.borrow(slot, identity) == STALE


def test_damaged_bytes_are_a_checksum_mismatch(neighbours: Neighbours) -> None:
    neighbours.theirs.store(SLOT, name(1))
    slot = bytearray(whole_slot(neighbours.theirs.pool, SLOT))
    slot[5000] ^= 1
    put_whole_slot(neighbours.theirs.pool, SLOT, bytes(slot))
    assert neighbours.borrow(SLOT, name(1)) == CHECKSUM_MISMATCH
    assert neighbours.borrow(SLOT + TARGETS, name(1)) == CHECKSUM_MISMATCH, "never written"


def test_without_files_a_read_fails_alone(neighbours: Neighbours) -> None:
    neighbours.theirs.store(SLOT, name(1))
    neighbours.theirs.store(0, name(2))
    neighbours.ours.store(SLOT % TARGETS, name(3))
    assert neighbours.borrow(SLOT, name(1), owner=OWNER + 1) == NO_FILES
    neighbours.ours.engine.detach_region(OWNER, SLOT % TARGETS)
    assert neighbours.borrow(SLOT, name(1)) == NO_FILES
    assert neighbours.borrow(0, name(2)) == OK, "the other target's files are there"
    ours = neighbours.ours.read(SLOT % TARGETS, 2, name(3))
    assert neighbours.ours.run(ours)[0].outcome == OK
    neighbours.ours.engine.attach_region(OWNER, 1, neighbours.regions[1])
    assert neighbours.borrow(SLOT, name(1)) == OK


def test_a_slab_that_was_cut_short_moves_no_bytes(neighbours: Neighbours) -> None:
    neighbours.theirs.store(SLOT, name(1))
    os.truncate(neighbours.theirs.pool.directories[SLOT % TARGETS] / "slab", 0)
    assert neighbours.borrow(SLOT, name(1)) == io_error(0)


def test_a_read_keeps_the_files_of_its_submission(neighbours: Neighbours) -> None:
    theirs, ours = neighbours.theirs, neighbours.ours
    slots = range(1, 2 * 12, TARGETS)
    for slot in slots:
        theirs.store(slot, name(slot))
    reads = [ours.read(slot, slot // TARGETS, name(slot), owner=OWNER) for slot in slots]
    ours.gate.shut(slots, OWNER)
    ours.submit(*reads)
    ours.engine.attach_region(OWNER, 1, ForeignSlab(-1, bytes(16), 0))
    ours.gate.open_all()
    found = ours.wait(lambda done: len(done) == len(reads))
    assert {one.outcome for one in found} == {OK}
    for slot in slots:
        assert ours.payload(slot // TARGETS) == content(name(slot))
    assert neighbours.borrow(slots[0], name(slots[0])) == NO_FILES


def test_their_region_is_never_written(neighbours: Neighbours) -> None:
    write = neighbours.ours.write(SLOT % TARGETS, 1, name(1), owner=OWNER)
    with pytest.raises(AssertionError):
        neighbours.ours.engine.submit([write])
    assert not any((neighbours.theirs.pool.directories[1] / "slab").read_bytes())
