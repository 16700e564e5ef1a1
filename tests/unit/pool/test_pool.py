# SPDX-License-Identifier: Apache-2.0
"""Opening, adopting and resetting a pool, in every state that an earlier process may leave."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from tests.owners import Superblocks, reset
from tests.process import wait_until
from tests.slots import read_slot, table_at, write_slot
from vllm_nvmeof_offload.errors import CANCELLED, OK, STALE, PoolError, PoolLockedError, io_error
from vllm_nvmeof_offload.groups import Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.pool import pool as superblock_writer
from vllm_nvmeof_offload.pool import slab
from vllm_nvmeof_offload.pool.format import (
    Keyspace,
    Stamp,
    StoredGroup,
    Superblock,
    encode_entry,
    read_superblock,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import probe_o_direct
from vllm_nvmeof_offload.protocol import AttachCommand, RankHello, SlotIdentity, place_of
from vllm_nvmeof_offload.worker.regions import OpenRegions, RegionFiles

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
    make_spec,
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


# -- modes, space and O_DIRECT of its files -------------------------------------------


def test_files_are_private_and_wider_modes_are_tightened(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool()
    stored = fill(pool)
    directory = pool.directories[0]
    for path in [directory, directory.parent, directory.parent.parent]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for file in ("slab", "table", "superblock", "lock", "lease"):
        assert stat.S_IMODE((directory / file).stat().st_mode) == 0o600
    (directory / "slab").chmod(0o644)
    directory.parent.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert entries(open_pool()) == stored
    assert stat.S_IMODE((directory / "slab").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    assert "mode 644" in caplog.text
    assert "mode 755" in caplog.text


def test_a_link_in_place_of_the_slab_is_refused(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool()
    slab = pool.directories[0] / "slab"
    pool.close()
    slab.unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    slab.symlink_to(victim)
    with pytest.raises(PoolError, match="cannot use the pool"):
        open_pool()
    assert victim.read_text() == "precious"


def test_less_than_one_slot_is_refused(open_pool: OpenPool) -> None:
    with pytest.raises(PoolError, match="less than one slot"):
        open_pool(2, slots=1)


def test_a_target_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "t0").write_text("a file")
    with pytest.raises(PoolError, match="t0"):
        Pool.open(make_spec(tmp_path / "t0"))


def test_names_on_disk_reveal_no_key(open_pool: OpenPool, tmp_path: Path) -> None:
    fill(open_pool())
    names = {path.name for path in tmp_path.rglob("*")}
    digest = Keyspace.of({"model": "m"}).digest
    assert names == {
        *("t0", digest, "keyspace.json", "engine-0", "rank-0"),
        *("superblock", "table", "log", "slab", "lock", "lease"),
    }


def test_targets_of_unequal_size_are_used_to_the_smaller(small_disk: Path, tmp_path: Path) -> None:
    pool = Pool.open(make_spec(small_disk, tmp_path / "t0", slots=500))
    assert pool.slots < 500
    assert pool.slots % 2 == 0
    for slot in range(pool.slots):
        put(pool, slot, name(slot))
    pool.close()


def test_no_space_for_one_slot_is_refused_by_name(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - 5 * 4096))
    with pytest.raises(PoolError, match="small"):
        Pool.open(make_spec(small_disk))


def test_without_o_direct_auto_falls_back_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_directory: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(slab, "probe_o_direct", refuse)
    with pytest.raises(PoolError, match="O_DIRECT does not work"):
        Pool.open(make_spec(tmp_path / "t0", o_direct="on"))
    pool = Pool.open(make_spec(tmp_path / "t0", o_direct="auto"))
    assert not pool.direct
    assert pool.fallbacks == (f"o_direct→buffered on {pool.directories[0]}: EINVAL",)
    assert pool.fallbacks[0] in caplog.text
    pool.close()


def test_the_o_direct_probe_asks_the_file_system(tmp_path: Path) -> None:
    try:
        fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        with pytest.raises(OSError, match=os.strerror(error.errno or 0)):
            probe_o_direct(tmp_path)
    else:
        os.close(fd)
        probe_o_direct(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(OSError, match=r"Invalid argument|such|denied|supported"):
        probe_o_direct(Path("/proc/self"))


# -- retained sessions ----------------------------------------------------------------


def test_sessions_are_replaced_and_are_there_for_the_next_start(open_pool: OpenPool) -> None:
    pool = open_pool(2)
    assert pool.sessions() == b""
    for content in (b"one", b"another"):
        pool.save_sessions(content)
        assert pool.await_superblocks(120.0)
    path = pool.directories[0] / "sessions"
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"another", 0o600)
    assert not (pool.directories[1] / "sessions").exists()
    pool = open_pool(2)
    assert pool.sessions() == b"another"
    path.chmod(0o666)
    assert pool.sessions() == b"", "others may have written it"
    path.chmod(0o600)
    pool.exchange(0, None, None)()
    pool.save_sessions(b"lost with the target")
    assert pool.await_superblocks(120.0)
    assert (pool.sessions(), path.read_bytes()) == (b"", b"another")
    pool = open_pool(2, payload_bytes=PAYLOAD_BYTES + 4096)
    assert pool.sessions() == b"", "of a pool of another shape"
    pool = open_pool(2, rank=1, world_size=2)
    pool.save_sessions(b"of rank 1")
    assert pool.await_superblocks(120.0)
    assert not (pool.directories[0] / "sessions").exists()


def test_sessions_that_cannot_be_saved_are_logged_once(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool(1)
    blocker = pool.directories[0] / "sessions.new"

    def save() -> int:
        pool.save_sessions(b"content")
        assert pool.await_superblocks(120.0)
        return caplog.text.count("sessions are not saved")

    blocker.mkdir()
    assert [save(), save()] == [1, 1]
    blocker.rmdir()
    assert save() == 1
    blocker.mkdir()
    assert save() == 2


def test_sessions_that_hang_delay_no_reset_and_only_the_newest_follow(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, gate, written = open_pool(1), threading.Event(), list[bytes]()

    def replace_file(directory: Path, name: str, content: bytes) -> None:
        written.append(content)
        gate.wait()

    monkeypatch.setattr(superblock_writer, "replace_file", replace_file)
    pool.save_sessions(b"0")
    wait_until("the write that hangs", lambda: written == [b"0"])
    for number in range(1, 5):
        pool.save_sessions(b"%d" % number)
    assert reset(pool, TAG).outcomes == [OK]
    gate.set()
    assert pool.await_superblocks(120.0)
    assert written == [b"0", b"4"]


# -- a reset whose superblock one target does not take, for now or at all -------------


class Hang:
    """Makes superblock writes wait on every target whose directory is below `where`."""

    def __init__(self) -> None:
        self.where: set[str] = set()
        self.entered = 0
        self._open = threading.Event()

    def write(self, directory: Path, superblock: Superblock) -> None:
        if directory.resolve().parents[2].name in self.where:
            self.entered += 1
            self._open.wait()
        write_superblock(directory, superblock)

    def end(self) -> None:
        self._open.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang()
    monkeypatch.setattr(superblock_writer, "write_superblock", hang.write)
    yield hang
    hang.end()


def epochs(pool: Pool) -> list[int]:
    found = [read_superblock(directory) for directory in pool.directories]
    return [superblock.epoch for superblock in found if superblock is not None]


def test_a_reset_needs_no_new_thread(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = open_pool(2)
    old = pool.stamp.epoch

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert reset(pool, TAG).outcomes == [OK, OK]
    assert epochs(pool) == [pool.stamp.epoch] * 2
    assert pool.stamp.epoch != old


def test_an_older_superblock_never_follows_a_newer_one(open_pool: OpenPool, hang: Hang) -> None:
    pool = open_pool(2)
    hang.where = {"t0"}
    resets = [Superblocks(pool, TAG)]
    wait_until("the write that hangs", lambda: hang.entered == 1)
    resets += [Superblocks(pool, TAG) for _ in range(4)]
    for one in resets:
        one.wait(1)
    assert hang.entered == 1, "one thread for the target that hangs, whatever is asked of it"
    for one in resets[1:-1]:
        one.wait(0)
    assert [one.outcomes[0] for one in resets] == [None, *[CANCELLED] * 3, None]
    hang.end()
    resets[0].wait(0)
    resets[-1].wait(0)
    assert (resets[0].outcomes[0], resets[-1].outcomes[0]) == (OK, OK)
    assert hang.entered == 2, "only the newest one follows"
    assert epochs(pool) == [pool.stamp.epoch] * 2


def test_a_writer_that_hung_while_another_wrote_changes_nothing(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one may be a prober, or the region's next owner."""
    directory = open_pool(1).directories[0]
    found = read_superblock(directory)
    assert found is not None
    older, newer = (replace(found, sequence=found.sequence + n) for n in (1, 2))
    write = os.write

    def hang(fd: int, page: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        write_superblock(directory, newer)
        return write(fd, page)

    monkeypatch.setattr(os, "write", hang)
    with pytest.raises(OSError, match="has just written it") as refused:
        write_superblock(directory, older)
    assert refused.value.errno == errno.ESTALE
    assert read_superblock(directory) == newer
    write_superblock(directory, found)
    assert read_superblock(directory) == found, "the next one writes again"


def test_files_that_are_replaced_get_no_superblock_that_waits_for_the_old_ones(
    open_pool: OpenPool, hang: Hang
) -> None:
    """The new files may have a newer one by the time when the old ones return."""
    pool = open_pool(2)
    hang.where = {"t0"}
    hanging = Superblocks(pool, TAG)
    wait_until("the write that hangs", lambda: hang.entered == 1)
    waiting = Superblocks(pool, TAG)
    close = pool.exchange(0, None, None)
    waiting.wait(0)
    assert waiting.outcomes[0] == CANCELLED
    away = Superblocks(pool, TAG)
    assert away.outcomes[0] == io_error(errno.ENODEV)
    hang.end()
    hanging.wait(0)
    assert hang.entered == 1
    away.wait(1)
    close()


def test_a_closed_pool_stays_locked_while_a_superblock_hangs(
    open_pool: OpenPool, hang: Hang
) -> None:
    """A late write must not replace another owner's superblock."""
    pool = open_pool(2, engine_index=0)
    hang.where = {"t0"}
    superblocks = Superblocks(pool, TAG)
    superblocks.wait(1)
    with pytest.raises(PoolLockedError):
        open_pool(2, engine_index=0)  # closes the first one before


# -- another engine's regions beside our pool -----------------------------------------

RANKS = 2


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[list[Pool]]]:
    """By engine, the pools of its ranks, each opened as in a process of its own."""
    with ExitStack() as pools:

        def pool(engine: int, rank: int) -> Pool:
            shape = {"engine": str(engine), "rank": rank, "world_size": RANKS}
            opened = Pool.open(make_spec(tmp_path, engine_index=engine, **shape))
            pools.callback(opened.close)
            return opened

        yield [[pool(engine, rank) for rank in range(RANKS)] for engine in range(2)]


def attach(ours: Pool, command: AttachCommand) -> OpenRegions:
    answered = threading.Event()
    files = RegionFiles(ours, answered.set)
    files.open(command, [0])
    assert answered.wait(120)
    (answer,) = files.take()
    files.end()
    return answer


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_finds_the_pool_of_its_own_rank(engines: list[list[Pool]], rank: int) -> None:
    """Ranks do not know one another's pools when they make theirs: each has another uuid."""
    ours, theirs = engines
    command = AttachCommand(1, 1, 1, theirs[0].superblocks[0].uuid)
    answer = attach(ours[rank], command)
    assert not answer.error
    place = theirs[rank].superblocks[0].place(0)
    (region,) = answer.by_target.values()
    assert (region.uuid, region.rank) == (place.region_uuid, place.rank)


def test_a_leased_region_is_read_past_the_page_cache(tmp_path: Path) -> None:
    """Its owner may be on another host, whatever this one could do with its own files."""
    shape = {"leasing": Leasing("a", settle_s=0.01), "engine": "a"}
    ours = Pool.open(make_spec(tmp_path, engine_index=0))
    theirs = Pool.open(make_spec(tmp_path, engine_index=1, **shape))
    assert not ours.is_direct[0]
    files = RegionFiles(ours, lambda: None)
    files.open(AttachCommand(1, 1, 1, theirs.superblocks[0].uuid), [0])
    (answer,) = wait_for_answers(files)
    (region,) = answer.by_target.values()
    assert fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_DIRECT
    files.end()
    theirs.close()
    ours.close()


def wait_for_answers(files: RegionFiles) -> list[OpenRegions]:
    found: list[OpenRegions] = []

    def has_answered() -> bool:
        found.extend(files.take())
        return bool(found)

    wait_until("an answer", has_answered)
    return found


def test_the_first_rank_finds_no_other_pool_than_the_follower_did(
    engines: list[list[Pool]],
) -> None:
    answer = attach(engines[0][0], AttachCommand(1, 1, 1, bytes(16)))
    assert answer.error == errno.ENOENT
