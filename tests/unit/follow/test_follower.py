# SPDX-License-Identifier: Apache-2.0
"""The follower: its scans, and its process, which ends with its server and survives a hanging
target."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.owners import reset
from tests.process import companions, wait_until
from tests.slots import table_at
from tests.unit.follow.kit import (
    COMPLETE,
    DEAD,
    KEYSPACE,
    NONE,
    OURS,
    SCANNING,
    Following,
    row,
    stop_clock_of,
)
from tests.unit.pool.kit import OTHER_TAG, TAG, fill, name, put
from vllm_nvmeof_offload.follow import follower
from vllm_nvmeof_offload.follow.follower import Scope, start_follower
from vllm_nvmeof_offload.native import ForeignReader
from vllm_nvmeof_offload.pool.format import Stamp, encode_entry
from vllm_nvmeof_offload.pool.lease import NOBODY, TAKEOVER_S, LeasePage, lease_of
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.takeover import Takeover
from vllm_nvmeof_offload.protocol import SlotIdentity, place_of

OpenEngine = Callable[..., Pool]


@pytest.fixture
def start(file: int) -> Iterator[Callable[..., ForeignReader]]:
    """Start a follower of these targets; it ends with the test."""
    with contextlib.ExitStack() as running:

        def start_one(*targets: Path) -> ForeignReader:
            follower = start_follower(Scope(targets, KEYSPACE, OURS, 1), file, follow_ms=20)
            running.callback(follower.stop)
            return ForeignReader(file)

        yield start_one


def followers_of(target: Path) -> list[int]:
    """The processes that follow this target."""
    return companions(b"follow.follower\0", bytes(target))


def test_a_chunk_is_seen_and_its_server_s_end_too(
    start: Callable[..., ForeignReader], engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    put(pool, 3, name(1, 5))
    reader = start(tmp_path)
    wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
    assert reader.rows_of(name(1).key) == [row(1, 3, 5)]
    put(pool, 4, name(2, 6))
    wait_until("its chunk", lambda: reader.rows_of(name(2).key) == [row(1, 4, 6)])
    scanned = reader.scanned_ns
    wait_until("a scan", lambda: scanned < reader.scanned_ns <= time.monotonic_ns())
    pool.close()
    wait_until("its end", lambda: reader.owner(1).state == DEAD)


def test_a_killed_follower_has_a_successor(
    file: int, engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_nvmeof_offload.follow.follower._RESTART_S", 0.05)
    pool = engine(1, tmp_path)
    put(pool, 3, name(1, 5))
    follower = start_follower(Scope((tmp_path,), KEYSPACE, OURS, 1), file)
    reader = ForeignReader(file)
    wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
    (first,) = followers_of(tmp_path)
    os.kill(first, signal.SIGKILL)
    put(pool, 4, name(2, 6))
    wait_until("its successor", lambda: followers_of(tmp_path) not in ([], [first]))
    # It goes on with the table and with the owner's number, and finds no chunk twice.
    wait_until("its successor's row", lambda: reader.rows_of(name(2).key) == [row(1, 4, 6)])
    # An owner is complete after its rows are there.
    wait_until("its record", lambda: reader.owner(1).state == COMPLETE)
    assert reader.rows_of(name(1).key) == [row(1, 3, 5)]
    assert reader.owner(2).state == NONE
    follower.stop()
    wait_until("its end", lambda: followers_of(tmp_path) == [])


#: A server that follows a target; prints a line when it has found an owner.
SERVER = """
import os, sys
from pathlib import Path
from tests.unit.follow.kit import COMPLETE, KEYSPACE, OURS
from tests.process import companions, wait_until
from vllm_nvmeof_offload.follow.follower import Scope, start_follower
from vllm_nvmeof_offload.native import ForeignReader
fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
follower = start_follower(Scope((Path(sys.argv[1]),), KEYSPACE, OURS, 1), fd)
reader = ForeignReader(fd)
wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
print("followed", flush=True)
sys.stdin.read()
"""


def test_the_follower_is_not_a_child_of_the_server_and_ends_with_it(
    engine: OpenEngine, tmp_path: Path
) -> None:
    """vLLM kills all descendants of an engine, and hangs if one has gone before its turn."""
    engine(1, tmp_path)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"followed\n"
    assert len(followers_of(tmp_path)) == 1
    children = Path(f"/proc/{server.pid}/task").glob("*/children")
    assert "".join(one.read_text() for one in children) == ""
    server.kill()
    server.communicate()
    wait_until("its end", lambda: followers_of(tmp_path) == [])


def test_it_opens_nothing_for_writing(
    start: Callable[..., ForeignReader], engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    reader = start(tmp_path)
    wait_until("its owner", lambda: reader.owner(1).state == COMPLETE)
    (follower,) = followers_of(tmp_path)
    table = pool.directories[0] / "table"
    wait_until("its table", lambda: table in opened_by(follower))
    for path, flags in opened_by(follower).items():
        if path.is_relative_to(tmp_path):
            assert flags & os.O_ACCMODE == os.O_RDONLY, path


def opened_by(pid: int) -> dict[Path, int]:
    """The flags of a process's open files."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            facts = (Path(f"/proc/{pid}/fdinfo") / link.name).read_text()
            found[link.readlink()] = int(facts.split("flags:")[1].split()[0], 8)
    return found


# The chunks of other engines' pools that a scan offers, and their withdrawal.


def write_entry(pool: Pool, slot: int, entry: bytes) -> None:
    fd, offset = table_at(pool, place_of(0, slot))
    os.pwrite(fd, entry, offset)


def test_a_reset_withdraws_everything_from_before(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    stored = fill(pool)
    before = pool.stamp
    following.scan()
    assert following.reader.rows == len(stored)
    reset(pool, OTHER_TAG, named=True)
    # A write that the reset overtook names the epoch of before.
    put(pool, 8, name(8), before)
    put(pool, 9, name(9, 4))
    following.scan(0.1)
    assert following.state(1) == COMPLETE
    assert following.owner(1).tag == OTHER_TAG
    assert following.reader.rows == 1
    assert following.rows(name(9).key) == {row(1, 9, 4)}
    reset(pool, OTHER_TAG, named=False)
    put(pool, 10, name(10))
    following.scan(0.1)
    assert following.reader.rows == 0, "no superblock names what is written now"


def test_an_entry_that_came_before_its_superblock_is_offered_with_it(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    superblock = pool.directories[0] / "superblock"
    old = superblock.read_bytes()
    following.scan()
    reset(pool, TAG, named=True)
    new = superblock.read_bytes()
    superblock.write_bytes(old)
    put(pool, 2, name(2, 7))
    following.scan(0.1)
    assert following.reader.rows == 0
    superblock.write_bytes(new)
    following.scan(0.1)
    assert following.rows(name(2).key) == {row(1, 2, 7)}


def test_a_pool_that_was_made_again_is_another_owner(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    fill(pool)
    following.scan()
    pool.close()
    shutil.rmtree(pool.directories[0].parent)
    following.scan()
    assert following.state(1) == NONE
    assert following.reader.rows == 0
    pool = engine(1, tmp_path)
    put(pool, 1, name(1, 3))
    following.scan()
    assert following.state(1) == NONE
    assert following.state(2) == COMPLETE
    assert following.rows(name(1).key) == {row(2, 1, 3)}
    # Removed and made again between two scans.
    pool.close()
    shutil.rmtree(pool.directories[0].parent)
    pool = engine(1, tmp_path)
    put(pool, 1, name(1, 4))
    following.scan(0.1)
    assert following.state(2) == NONE
    assert following.state(3) == COMPLETE
    assert following.rows(name(1).key) == {row(3, 1, 4)}


def test_damage_is_not_offered_until_it_is_repaired(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    identity = name(1, 5)
    entry = encode_entry(3, identity, pool.stamp.epoch)
    # Its first 16 bytes are whole, and the key is not there yet.
    write_entry(pool, 3, entry[:16] + bytes(48))
    write_entry(pool, 4, entry)  # of another slot
    other_group = SlotIdentity(bytes(32) + b"\0\0\0\1", 5)
    write_entry(pool, 5, encode_entry(5, other_group, pool.stamp.epoch))
    following.scan()
    assert following.state(1) == COMPLETE
    assert following.reader.rows == 0
    write_entry(pool, 3, entry)
    following.scan(0.1)
    assert following.rows(identity.key) == {row(1, 3, 5)}
    (pool.directories[0] / "superblock").write_bytes(b"damaged")
    following.scan(0.1)
    assert (following.state(1), following.reader.rows) == (NONE, 0)


def test_a_table_that_is_cut_off_loses_its_rows(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    pool = engine(1, tmp_path)
    put(pool, 2, name(2))
    put(pool, 6, name(6))
    following.scan()
    os.truncate(pool.directories[0] / "table", 4 * 64)
    following.scan(0.1)
    assert following.rows(name(2).key) and not following.rows(name(6).key)


def test_what_cannot_be_read_holds_up_nothing_else(
    following: Following, engine: OpenEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = engine(1, tmp_path), engine(2, tmp_path)
    put(two, 2, name(2))
    table = one.directories[0] / "table"
    table.rename(tmp_path / "table")
    table.mkdir()
    following.scan()
    owners = {following.owner(number).engine_index: number for number in (1, 2)}
    assert following.state(owners[1]) == SCANNING
    assert following.state(owners[2]) == COMPLETE
    assert following.reader.rows == 1
    following.scan()
    assert capfd.readouterr().err == f"share: {one.directories[0]}: not a regular file\n"
    table.rmdir()
    (tmp_path / "table").rename(table)
    put(one, 3, name(3))
    following.scan()
    assert following.state(owners[1]) == COMPLETE
    assert following.reader.rows == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_keyspace_in_the_place_of_ours_is_not_followed(
    following: Following, engine: OpenEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = engine(1, tmp_path)
    put(pool, 1, name(1))
    following.scan()
    assert following.rows(name(1).key)
    space = tmp_path / KEYSPACE
    shutil.copytree(space, tmp_path / "theirs")
    space.rename(tmp_path / "ours")
    (tmp_path / "theirs").rename(space)
    for path in (space, *space.rglob("*")):
        os.chown(path, 54321, 54321)
    following.scan()
    assert (following.state(1), following.reader.rows) == (NONE, 0)
    assert f"share: {space}: belongs to uid 54321" in capfd.readouterr().err
    shutil.rmtree(space)
    (tmp_path / "ours").rename(space)
    following.scan()
    assert following.state(1) == COMPLETE
    assert following.rows(name(1).key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["rank-0", "superblock", "table", "lock", "lease"])
def test_what_another_user_has_in_a_keyspace_is_not_followed(
    following: Following, engine: OpenEngine, tmp_path: Path, what: str
) -> None:
    pool = engine(1, tmp_path)
    put(pool, 1, name(1))
    directory = pool.directories[0]
    os.chown(directory if what == "rank-0" else directory / what, 54321, 54321)
    following.scan()
    assert following.reader.rows == 0


def test_a_pipe_in_the_place_of_a_file_holds_up_nothing(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    for index, what in enumerate(("superblock", "table", "lock", "log", "lease"), 1):
        directory = engine(index, tmp_path).directories[0]
        (directory / what).unlink(missing_ok=True)
        os.mkfifo(directory / what, 0o600)
    pool = engine(6, tmp_path)
    put(pool, 1, name(1))
    following.scan()
    assert following.rows(name(1).key)


def test_a_lease_that_is_not_renewed_names_a_dead_owner(
    following: Following, engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock says nothing: the owner may be on another host. Its chunks are offered as before."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(follower, "Takeover", partial(Takeover, clock=lambda: clock.now_s))
    pool = engine(1, tmp_path)
    put(pool, 1, name(1))
    io = lease_of(pool.directories[0])
    page = LeasePage(bytes(range(16)), 1, 1, 1000, 1, "elsewhere", 4711, "b")

    def state_after(seconds: float, page: LeasePage) -> int:
        io.write(page.encode())
        clock.now_s += seconds
        following.scan(2)
        assert following.reader.rows == 1
        return following.state(1)

    assert state_after(0, page) == COMPLETE
    assert state_after(TAKEOVER_S - 1, page) == COMPLETE
    assert state_after(2, page) == DEAD
    assert state_after(1, replace(page, beat=2)) == COMPLETE
    assert state_after(1, replace(page, owner=NOBODY)) == DEAD


def test_a_quiet_table_is_read_only_now_and_then(
    following: Following, engine: OpenEngine, tmp_path: Path
) -> None:
    """A change that its file's time does not show is found later, and any other one at once."""
    pool = engine(1, tmp_path)
    table = pool.directories[0] / "table"
    put(pool, 1, name(1))
    stop_clock_of(table)
    following.scan()
    assert following.reader.rows == 1
    put(pool, 2, name(2))
    stop_clock_of(table)
    following.scan(4.9)
    assert following.reader.rows == 1
    following.scan(0.2)
    assert following.reader.rows == 2
    put(pool, 3, name(3))
    following.scan(0.1)
    assert following.reader.rows == 3
    put(pool, 4, name(4))
    os.utime(table, (1, 2))  # another time, as long ago
    following.scan(0.1)
    assert following.reader.rows == 4


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_on_disk_whatever_engines_do(
    following: Following, engine: OpenEngine, tmp_path: Path, seed: int
) -> None:
    """Puts, resets, ends, starts and removals of three engines, in a random order."""
    random_ = random.Random(seed)
    pools: dict[int, Pool] = {}
    written: dict[int, dict[int, SlotIdentity]] = {index: {} for index in (1, 2, 3)}
    directories: dict[int, Path] = {}
    for generation in range(150):
        index = random_.choice([1, 2, 3])
        act = random_.choice(["put"] * 8 + ["reset", "late", "close", "remove"])
        if index not in pools:
            pools[index] = engine(index, tmp_path)
            directories[index] = pools[index].directories[0].parent
        pool, slots = pools[index], written[index]
        if act == "put":
            slot = random_.randrange(16)
            slots[slot] = name(random_.randrange(40), generation)
            put(pool, slot, slots[slot])
        elif act == "reset":
            reset(pool, TAG, named=True)
            slots.clear()
        elif act == "late":  # a write that an earlier reset overtook
            slot = random_.randrange(16)
            slots.pop(slot, None)
            put(pool, slot, name(slot, generation), Stamp(pool.stamp.epoch ^ 1, TAG))
        else:
            pools.pop(index).close()
            if act == "remove":
                shutil.rmtree(directories.pop(index))
                slots.clear()
        if random_.random() < 0.5:
            following.scan(random_.choice([0.1, 1.0]))
    following.scan()
    found = {
        (name(number).key, following.owner(place >> 48).engine_index, place & 0xFFFFFFFF, g)
        for number in range(40)
        for place, g in following.rows(name(number).key)
    }
    wanted = {
        (identity.key, index, slot, identity.generation)
        for index, slots in written.items()
        for slot, identity in slots.items()
    }
    assert found == wanted
    assert following.reader.rows == len(wanted)


@pytest.mark.parametrize(
    ("entries", "pause_s"), [(1000, 0.1), (100_000, 0.1), (1_000_000, 0.83), (10_000_000, 8.3)]
)
def test_scans_of_a_large_table_slow_down_by_themselves(entries: int, pause_s: float) -> None:
    """A scan of a million entries takes 16.6 ms; all scans may take 2 % of a core."""
    found = follower.pause_s(0.1, follower._CPU_SHARE_MAX, 16.6e-9 * entries)
    assert found == pytest.approx(pause_s)
