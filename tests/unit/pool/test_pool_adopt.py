# SPDX-License-Identifier: Apache-2.0
"""Opening, adopting and resetting a pool, over all the ways in which it may have been left."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.resets import reset
from tests.slots import read_slot, table_at, write_slot
from vllm_nvmeof_offload.errors import OK, STALE, PoolError, io_error
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.pool.format import (
    Keyspace,
    Stamp,
    StoredGroup,
    Superblock,
    encode_entry,
)
from vllm_nvmeof_offload.protocol import RankHello, SlotIdentity, place_of

from .kit import (
    OTHER_TAG,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    STORED,
    TAG,
    OpenPool,
    by_number,
    entries,
    fill,
    get,
    name,
    put,
)


def test_a_new_pool_is_empty_and_has_the_geometry_asked_for(open_pool: OpenPool) -> None:
    pool = open_pool(2)
    assert (pool.slots, pool.target_count, pool.slot_bytes) == (16, 2, SLOT_BYTES)
    assert (pool.payload_bytes, pool.engine_index) == (PAYLOAD_BYTES, 0)
    assert pool.fallbacks == ()
    assert entries(pool) == {}
    assert len({fd for target in (0, 1) for fd in pool.files(target)}) == 6


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_stored_entries_are_adopted_after_close(open_pool: OpenPool, targets: int) -> None:
    stored = fill(open_pool(targets))
    assert entries(open_pool(targets)) == stored
    assert entries(open_pool(targets)) == stored


def test_adoption_can_be_refused_and_then_nothing_old_comes_back(open_pool: OpenPool) -> None:
    fill(open_pool())
    pool = open_pool(adopt=False)
    assert entries(pool) == {}
    put(pool, 5, name(99))
    assert entries(open_pool()) == {5: name(99)}


def test_what_no_superblock_names_is_not_adopted(open_pool: OpenPool) -> None:
    pool = open_pool(named=False)
    fill(pool)
    assert pool.stamp.epoch != pool.superblocks[0].epoch
    assert pool.stamp.tag == pool.superblocks[0].tag != TAG
    pool = open_pool()
    assert pool.stamp == Stamp(pool.superblocks[0].epoch, TAG)
    assert entries(pool) == {}
    put(pool, 5, name(99))
    assert entries(open_pool()) == {5: name(99)}
    assert entries(open_pool(named=False)) == {}
    assert entries(open_pool()) == {}


def test_entries_of_another_epoch_are_skipped_one_by_one(open_pool: OpenPool) -> None:
    pool = open_pool()
    put(pool, 1, name(1))
    put(pool, 2, name(2), Stamp(pool.stamp.epoch ^ 1, TAG))
    put(pool, 3, name(3), Stamp(0, TAG))
    assert entries(open_pool()) == {1: name(1)}
    os.truncate(pool.directories[0] / "table", 0)
    assert entries(open_pool()) == {1: name(1)}


def test_a_chunk_of_other_weights_is_never_served_nor_recovered(open_pool: OpenPool) -> None:
    pool = open_pool()
    put(pool, 1, name(1))
    put(pool, 2, name(2), Stamp(pool.stamp.epoch, OTHER_TAG))
    pool = open_pool()
    assert by_number(pool.adopt(), 1) == {1: name(1), 2: name(2)}
    assert get(pool, 2, name(2)) is None
    os.truncate(pool.directories[0] / "table", 0)
    assert entries(open_pool()) == {1: name(1)}


def groups(*payloads: int, set_size: int = 1) -> tuple[RankGroup, ...]:
    """Groups with the ids 5, 6, …, of these payloads. set_size: of the first one."""
    return tuple(
        RankGroup(
            Group(5 + number, GroupKind.WINDOW, 16, reach_chunks=2),
            payload,
            1 if number else set_size,
        )
        for number, payload in enumerate(payloads)
    )


def of_group(group_id: int, number: int) -> SlotIdentity:
    return SlotIdentity(b"key-" + number.to_bytes(28, "little") + group_id.to_bytes(4, "big"), 1)


@pytest.mark.parametrize("lost", [False, True])
def test_a_chunk_has_the_length_of_its_group(open_pool: OpenPool, lost: bool) -> None:
    """Group 6 is the shorter one, and 7 is not the pool's."""
    spec = {"groups": groups(PAYLOAD_BYTES, 600)}
    pool = open_pool(**spec)
    lengths = [(5, PAYLOAD_BYTES), (6, 600), (5, 600), (6, PAYLOAD_BYTES), (7, PAYLOAD_BYTES)]
    identities = [of_group(group_id, slot) for slot, (group_id, _) in enumerate(lengths)]
    for slot, (identity, (_, length)) in enumerate(zip(identities, lengths, strict=True)):
        view = memoryview(bytearray(pool.slot_bytes))
        assert write_slot(pool, view, slot, identity, payload_bytes=length) == OK
    assert Superblock.decode((pool.directories[0] / "superblock").read_bytes()).groups == (
        StoredGroup(5, GroupKind.WINDOW, PAYLOAD_BYTES, 1, PAYLOAD_BYTES),
        StoredGroup(6, GroupKind.WINDOW, 600, 1, 600),
    )
    if lost:
        os.truncate(pool.directories[0] / "table", 0)
    pool = open_pool(**spec)
    # A table has no lengths: those are known at the read.
    wanted = (0, 1) if lost else (0, 1, 2, 3)
    assert by_number(pool.adopt(), 1) == {slot: identities[slot] for slot in wanted}
    for slot, (identity, (group_id, length)) in enumerate(zip(identities, lengths, strict=True)):
        asked = {5: PAYLOAD_BYTES, 6: 600, 7: PAYLOAD_BYTES}[group_id]
        view = memoryview(bytearray(pool.slot_bytes))
        found = read_slot(pool, view, slot, identity, TAG, asked)
        assert found == (OK if asked == length else STALE)


@pytest.mark.parametrize("lost", [False, True])
def test_a_single_copy_is_adopted_as_its_ranks_member(open_pool: OpenPool, lost: bool) -> None:
    """Of a group of which ranks share copies; the table's flag is recovered too."""
    shape = {"rank": 3, "world_size": 4}
    spec = {**shape, "groups": groups(PAYLOAD_BYTES, PAYLOAD_BYTES, set_size=2)}
    pool = open_pool(**spec)
    for slot, (group_id, single) in enumerate([(5, True), (5, False), (6, True)]):
        view = memoryview(bytearray(pool.slot_bytes))
        assert write_slot(pool, view, slot, of_group(group_id, slot), single_copy=single) == OK
    if lost:
        os.truncate(pool.directories[0] / "table", 0)
    single, whole = place_of(0, 0, 1), place_of(0, 1)
    for _ in range(2):
        assert open_pool(**spec).adopt().places.tolist() == [single, whole]
    apart = {**shape, "groups": groups(PAYLOAD_BYTES, PAYLOAD_BYTES)}
    assert open_pool(**apart).adopt().places.tolist() == [whole], "ranks share no copies now"
    pool = open_pool(**spec)
    assert pool.adopt().places.tolist() == [single, whole]
    assert pool.superblocks[0].groups[0].set_size == 2


def test_a_pool_of_other_groups_starts_empty(open_pool: OpenPool) -> None:
    fill(open_pool())
    assert entries(open_pool(groups=groups(PAYLOAD_BYTES))) == {}
    assert entries(open_pool()) == {}


def test_reset_voids_everything_before_it(open_pool: OpenPool) -> None:
    pool = open_pool(2)
    fill(pool)
    epochs, sequence = {pool.stamp.epoch}, pool.superblocks[0].sequence
    assert reset(pool, OTHER_TAG, named=False).ok
    assert pool.stamp.tag == OTHER_TAG
    epochs |= {pool.stamp.epoch, *(one.epoch for one in pool.superblocks)}
    assert len(epochs) == 3, "the epoch of the superblocks and that of the writes are new"
    put(pool, 6, name(60))
    assert reset(pool, TAG).ok
    assert {Stamp(one.epoch, one.tag) for one in pool.superblocks} == {pool.stamp}
    assert {one.sequence for one in pool.superblocks} == {sequence + 2}
    assert pool.stamp.epoch not in epochs
    put(pool, 7, name(70))
    assert entries(open_pool(2)) == {7: name(70)}
    # The others' headers are intact, and still void when the tables are lost.
    for target in open_pool(2).directories:
        os.truncate(target / "table", 0)
    assert entries(open_pool(2)) == {7: name(70)}


def test_what_follows_a_reset_of_an_unnamed_pool_is_not_adopted(open_pool: OpenPool) -> None:
    pool = open_pool(named=False)
    assert reset(pool, TAG).ok
    fill(pool)
    assert entries(open_pool()) == {}


@pytest.mark.parametrize("reached", [0, 1])
def test_the_highest_sequence_decides(open_pool: OpenPool, reached: int) -> None:
    """A reset reached one of two targets; what it has of the new epoch is found."""
    pool = open_pool(2)
    fill(pool)
    other = pool.directories[1 - reached] / "superblock"
    old = other.read_bytes()
    assert reset(pool, TAG).ok
    put(pool, 4, name(40))
    put(pool, 5, name(50))
    other.write_bytes(old)
    assert entries(open_pool(2)) == {4: name(40), 5: name(50)}


def test_servers_that_each_had_one_of_the_targets_void_each_other(open_pool: OpenPool) -> None:
    """Each reset its part: the sequences are equal, and the epochs are not."""
    pool = open_pool(2)
    old = pool.superblocks[1].encode()
    assert reset(pool, TAG).ok
    put(pool, 0, name(1))
    newer = Superblock.decode((pool.directories[0] / "superblock").read_bytes())
    fork = replace(Superblock.decode(old), sequence=newer.sequence, epoch=newer.epoch ^ 1)
    (pool.directories[1] / "superblock").write_bytes(fork.encode())
    pool = open_pool(2)
    assert entries(pool) == {}
    assert pool.superblocks[0].sequence == newer.sequence + 1
    put(pool, 0, name(2))
    assert entries(open_pool(2)) == {0: name(2)}


def test_a_pool_of_an_unknown_format_is_refused_by_its_number(open_pool: OpenPool) -> None:
    pool = open_pool(2)
    fill(pool)
    path = pool.directories[1] / "superblock"
    page = path.read_bytes()
    later = page[:8] + b"\3" + page[9:-4]
    path.write_bytes(later + crc32c(later).to_bytes(4, "little"))
    pool.close()
    with pytest.raises(PoolError, match=r"format version 3, this program writes 2; .*pool rm"):
        open_pool(2)
    path.write_bytes(page)
    assert entries(open_pool(2)) == STORED, "nothing was wiped"


def test_a_reset_that_reached_one_target_only_voids_all(open_pool: OpenPool) -> None:
    pool = open_pool(2)
    fill(pool)
    old = (pool.directories[1] / "superblock").read_bytes()
    assert reset(pool, TAG).ok
    (pool.directories[1] / "superblock").write_bytes(old)
    pool = open_pool(2)
    assert entries(pool) == {}


def test_a_reset_that_cannot_be_written_fails_and_begins_an_epoch(
    open_pool: OpenPool,
) -> None:
    pool = open_pool()
    epoch = pool.stamp.epoch
    blocker = pool.directories[0] / "superblock.new"
    blocker.mkdir()
    found = reset(pool, TAG)
    assert found.outcomes == [io_error(errno.EISDIR)]
    assert found.stamps[0].epoch not in (epoch, pool.superblocks[0].epoch)
    put(pool, 3, name(3), found.stamps[0])
    blocker.rmdir()
    assert entries(open_pool()) == {}, "nothing names the epoch of what was written since"


def test_a_key_in_two_slots_keeps_the_lower_slot(open_pool: OpenPool) -> None:
    pool = open_pool(2)
    put(pool, 9, name(1, 5))
    put(pool, 4, name(1, 6))
    put(pool, 5, name(2, 7))
    adopted = open_pool(2).adopt()
    assert by_number(adopted, 2) == {4: name(1, 6), 5: name(2, 7), 9: name(1, 5)}
    hello = RankHello(
        0, 0, "k", cache_slots=1, pool_slots=16, target_count=2, slot_bytes=SLOT_BYTES
    )
    agreement = agree([replace(hello, adopted=adopted)])
    core = ManagerCore(CoreConfig(key_bytes=adopted.key_bytes), agreement)
    kept = {(entry.key, entry.generation, entry.place) for entry in core.entries()}
    assert kept == {(name(1).key, 6, place_of(0, 2)), (name(2).key, 7, place_of(1, 2))}
    assert core.counters["adoption_chunks", "adopted"] == 2
    assert core.counters["adoption_chunks", "incomplete"] == 1


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("left", [None, 0, 64, 64 * 3 + 17], ids=str)
def test_a_lost_or_short_table_is_rebuilt_from_headers(
    open_pool: OpenPool, targets: int, left: int | None
) -> None:
    pool = open_pool(targets)
    stored = fill(pool)
    table = pool.directories[0] / "table"
    pool.close()
    if left is None:
        table.unlink()
    else:
        os.truncate(table, left)
    progress: list[tuple[int, int]] = []
    pool = open_pool(targets, on_progress=lambda done, total: progress.append((done, total)))
    assert entries(pool) == stored
    assert progress
    assert progress[-1][0] == progress[-1][1] > 0
    # The table was written back: the next start does not read headers again.
    progress.clear()
    pool = open_pool(targets, on_progress=lambda done, total: progress.append((done, total)))
    assert entries(pool) == stored
    assert progress == []


def test_damaged_table_entries_are_recovered_from_their_headers(open_pool: OpenPool) -> None:
    pool = open_pool()
    stored = fill(pool)
    with (pool.directories[0] / "table").open("r+b") as table:
        for at in (5, 64 + 20, 3 * 64, 5 * 64 + 1):  # slot 5 was never written
            table.seek(at)
            byte = table.read(1)[0]
            table.seek(at)
            table.write(bytes([byte ^ 0x81]))
    assert entries(open_pool()) == stored


def test_a_wrong_table_is_corrected_by_the_headers(open_pool: OpenPool) -> None:
    pool = open_pool()
    put(pool, 3, name(3))
    fd, offset = table_at(pool, place_of(0, 3))
    os.pwrite(fd, encode_entry(3, name(4), pool.stamp.epoch), offset)
    pool = open_pool()
    assert pool.adopt().keys == name(4).key
    assert get(pool, 3, name(4)) is None


@pytest.mark.parametrize("slots", [4, 8, 40])
def test_a_pool_of_another_size_keeps_entries_that_fit(open_pool: OpenPool, slots: int) -> None:
    stored = fill(open_pool())
    pool = open_pool(slots=slots)
    assert pool.slots == slots
    fitting = {slot: identity for slot, identity in stored.items() if slot < slots}
    assert entries(pool) == fitting
    # Entries that were cut off do not return when the pool grows again.
    assert entries(open_pool(slots=64)) == fitting


@pytest.mark.parametrize(
    "change",
    [{"payload_bytes": 9000}, {"world_size": 2}],
    ids=["payload", "world size"],
)
def test_a_pool_of_another_shape_starts_empty(
    open_pool: OpenPool, change: dict[str, object]
) -> None:
    fill(open_pool())
    assert entries(open_pool(pool_bytes=1 << 20, **change)) == {}
    assert entries(open_pool()) == {}


def test_other_targets_start_empty(open_pool: OpenPool, tmp_path: Path) -> None:
    fill(open_pool(2))
    assert entries(open_pool(1)) == {}
    fill(open_pool(2))
    open_pool(1)
    (tmp_path / "t0").rename(tmp_path / "t")
    (tmp_path / "t1").rename(tmp_path / "t0")
    (tmp_path / "t").rename(tmp_path / "t1")
    assert entries(open_pool(2)) == {}


def test_a_target_that_was_replaced_loses_only_its_own_slots(
    open_pool: OpenPool, tmp_path: Path
) -> None:
    stored = fill(open_pool(2))
    open_pool(2).close()
    subprocess.run(["rm", "-r", str(tmp_path / "t1")], check=True)
    kept = {slot: identity for slot, identity in stored.items() if slot % 2 == 0}
    assert entries(open_pool(2)) == kept
    put(open_pool(2), 1, name(1))
    assert entries(open_pool(2)) == {**kept, 1: name(1)}


def test_a_target_of_another_pool_starts_empty(open_pool: OpenPool, tmp_path: Path) -> None:
    fill(open_pool(2))
    open_pool(2).close()
    for target in ("t0", "t1"):
        (tmp_path / target).rename(tmp_path / f"other-{target}")
    stored = fill(open_pool(2))
    open_pool(2).close()
    (tmp_path / "t1").rename(tmp_path / "spare-t1")
    (tmp_path / "other-t1").rename(tmp_path / "t1")
    kept = {slot: identity for slot, identity in stored.items() if slot % 2 == 0}
    assert entries(open_pool(2)) == kept


def test_another_keyspace_is_stored_beside(open_pool: OpenPool) -> None:
    stored = fill(open_pool())
    assert entries(open_pool(keyspace=Keyspace.of({"model": "other"}))) == {}
    assert entries(open_pool()) == stored


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_without_its_superblock_a_directory_is_empty(open_pool: OpenPool, damage: str) -> None:
    pool = open_pool()
    fill(pool)
    superblock = pool.directories[0] / "superblock"
    page = superblock.read_bytes()
    if damage == "flip":
        superblock.write_bytes(page[:50] + bytes([page[50] ^ 1]) + page[51:])
    elif damage == "cut":
        superblock.write_bytes(page[:512])
    else:
        superblock.unlink()
    assert entries(open_pool()) == {}
    os.truncate(pool.directories[0] / "table", 0)
    assert entries(open_pool()) == {}, "old headers must be gone"
