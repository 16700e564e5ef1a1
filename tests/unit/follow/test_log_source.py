# SPDX-License-Identifier: Apache-2.0
"""The changes that a follower reads from a region's log, and its new scans of the whole table."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.logs import CountedRegion, Log
from tests.owners import reset
from tests.process import wait_until
from tests.unit.follow.kit import COMPLETE, DEAD, NONE, Following, row, stop_clock_of
from tests.unit.pool.kit import SLOT_BYTES, TAG, name, put
from vllm_nvmeof_offload.follow import follower
from vllm_nvmeof_offload.follow.follower import RESCAN_S, SYNCED_S
from vllm_nvmeof_offload.native import ForeignRegion, ForeignWriter
from vllm_nvmeof_offload.pool.format import Stamp, decode_table
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.log import RECORDS_PER_PAGE, LogFile
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import PAGE_BYTES

OpenEngine = Callable[..., Pool]
PAGES, SLOTS = 4, 32
LOGGED = {"slots": SLOTS, "pool_bytes": SLOTS * (SLOT_BYTES + 64) + PAGES * PAGE_BYTES}


class Owner:
    """An engine that logs what it writes, by hand."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.directory = pool.directories[0]
        self.log = Log(pool.log(0))

    def put(self, slot: int, identity: SlotIdentity, stamp: Stamp | None = None) -> None:
        """Write a chunk and log it; the table's file looks as if it was not written."""
        put(self.pool, slot, identity, stamp)
        stop_clock_of(self.directory / "table")
        epoch = (stamp or self.pool.stamp).epoch
        self.log.put(slot, identity, epoch)

    def reset(self) -> None:
        reset(self.pool, TAG, named=True)
        self.log.reset(self.pool.superblocks[0].epoch)


@pytest.fixture(autouse=True)
def _overruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedRegion, "overruns", 0)
    monkeypatch.setattr(follower, "ForeignRegion", CountedRegion)


@pytest.fixture
def owner(engine: OpenEngine, tmp_path: Path) -> Iterator[Owner]:
    made = Owner(engine(1, tmp_path, log_pages=PAGES, **LOGGED))
    yield made
    made.log.close()


def test_what_is_logged_is_seen_without_a_scan(following: Following, owner: Owner) -> None:
    owner.put(1, name(1, 10))
    following.scan()
    assert following.state(1) == COMPLETE
    assert following.rows(name(1).key) == {row(1, 1, 10)}
    owner.put(2, name(2, 11))
    owner.put(1, name(3, 12))
    following.scan(0.1)
    assert following.rows(name(1).key) == set(), "its slot was written"
    assert following.rows(name(2).key) == {row(1, 2, 11)}
    assert following.rows(name(3).key) == {row(1, 1, 12)}
    put(owner.pool, 5, name(5))  # not logged
    stop_clock_of(owner.directory / "table")
    following.scan(0.1)
    assert following.rows(name(5).key) == set()
    assert following.reader.rows == 2
    assert CountedRegion.overruns == 0


@pytest.fixture
def leased(engine: OpenEngine, tmp_path: Path) -> Iterator[Owner]:
    """Its table's file has what it has synced, which is what other hosts see."""
    leasing = Leasing("a", settle_s=0.01)
    made = Owner(engine(1, tmp_path, log_pages=PAGES, leasing=leasing, **LOGGED))
    yield made
    made.log.close()


def test_a_leased_table_is_scanned_once_more_when_its_owner_has_synced_it(
    following: Following, leased: Owner
) -> None:
    following.scan()
    put(leased.pool, 5, name(5, 9))  # logged before the log's end was found, and synced after that
    following.scan(0.1)
    assert following.rows(name(5).key) == set()
    following.scan(SYNCED_S)
    assert following.rows(name(5).key) == {row(1, 5, 9)}


@contextmanager
def unsynced(owner: Owner) -> Iterator[None]:
    """What is written within is not in the table's file as others see it at the end."""
    table = owner.directory / "table"
    seen = table.read_bytes()
    yield
    table.write_bytes(seen)


def test_a_scan_of_a_leased_table_hides_nothing_that_the_log_has_said(
    following: Following, leased: Owner
) -> None:
    """Its owner writes while the table is scanned again, and syncs it after that."""
    leased.put(1, name(1, 10))
    leased.put(2, name(2, 11))
    following.scan()
    with unsynced(leased):
        leased.put(1, name(3, 12))  # over another chunk
        leased.put(4, name(4, 13))
    following.scan(SYNCED_S)  # takes the records, and then scans
    assert following.rows(name(1).key) == set(), "its slot was written"
    assert following.rows(name(2).key) == {row(1, 2, 11)}
    assert following.rows(name(3).key) == {row(1, 1, 12)}
    assert following.rows(name(4).key) == {row(1, 4, 13)}
    put(leased.pool, 1, name(1, 14))  # its record was lost
    following.scan(RESCAN_S)
    assert following.rows(name(1).key) == {row(1, 1, 14)}, "the log has said nothing since"
    assert following.reader.rows == 2


def test_a_leased_superblock_is_opened_anew_with_each_discovery(
    following: Following, leased: Owner
) -> None:
    """Its attributes may be cached; and each opening is a question to another host."""
    leased.put(1, name(1, 5))
    following.scan()
    reset(leased.pool, TAG, named=True)  # nothing is logged of it
    following.scan(0.1)
    assert following.reader.rows == 1
    following.scan()
    assert following.reader.rows == 0
    leased.put(1, name(1, 6))
    leased.reset()
    following.scan(0.1)
    assert following.reader.rows == 0, "the log names it at once"


def test_the_table_is_scanned_now_and_then_all_the_same(following: Following, owner: Owner) -> None:
    following.scan()
    put(owner.pool, 5, name(5, 9))  # its record was lost
    following.scan(0.1)
    assert following.rows(name(5).key) == set()
    following.scan(RESCAN_S)
    assert following.rows(name(5).key) == {row(1, 5, 9)}


@pytest.mark.parametrize("behind", [0, 1, PAGES - 1])
def test_a_follower_that_is_not_a_lap_late_needs_no_scan(
    following: Following, owner: Owner, behind: int
) -> None:
    following.scan()
    last: dict[int, SlotIdentity] = {}
    for generation in range(behind * RECORDS_PER_PAGE + 5):
        slot = generation % SLOTS
        last[slot] = name(generation % 50, 100 + generation)
        owner.put(slot, last[slot])
    following.scan(0.1)
    for slot, identity in last.items():
        assert row(1, slot, identity.generation) in following.rows(identity.key)
    assert following.reader.rows == len(last)
    assert CountedRegion.overruns == 0


def test_a_reset_in_the_log_lets_the_superblock_be_read_at_once(
    following: Following, owner: Owner
) -> None:
    """Where the superblock's file seems not to have changed, because attributes are cached."""
    owner.put(1, name(1, 5))
    following.scan()
    superblock = owner.directory / "superblock"
    old = superblock.read_bytes()
    reset(owner.pool, TAG, named=True)
    new = superblock.read_bytes()
    superblock.write_bytes(old)
    following.scan(0.1)
    (region,) = following.scans[0]._regions.values()
    seen = os.stat(superblock)
    superblock.write_bytes(new)
    os.utime(superblock, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    following.scan(0.1)
    assert following.reader.rows == 1
    owner.log.reset(owner.pool.superblocks[0].epoch)
    following.scan(0.1)
    assert region.superblock == owner.pool.superblocks[0]
    assert following.reader.rows == 0
    owner.put(1, name(1, 6))
    following.scan(0.1)
    assert following.rows(name(1).key) == {row(1, 1, 6)}


@pytest.mark.parametrize("at", [9, 64 + 40], ids=["header", "record"])
def test_a_page_that_stays_damaged_is_given_up(following: Following, owner: Owner, at: int) -> None:
    following.scan()
    owner.put(1, name(1, 5))
    log = owner.directory / "log"
    torn = bytearray(log.read_bytes())
    torn[at] ^= 1
    log.write_bytes(torn)
    for _ in range(10):
        following.scan(0.1)
    assert CountedRegion.overruns >= 1
    assert following.rows(name(1).key) == {row(1, 1, 5)}, "from the table"


def test_a_key_that_is_too_long_for_the_log_is_found_by_a_scan(
    following: Following, owner: Owner
) -> None:
    following.scan()
    identity = SlotIdentity(b"k" * 42 + bytes(4), 9)
    owner.put(3, identity)
    following.scan(0.1)
    assert following.rows(identity.key) == {row(1, 3, 9)}


def test_of_many_regions_at_rest_only_some_are_examined_at_a_time(
    following: Following, engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logs are asked each time; files and locks in turns."""
    monkeypatch.setattr(follower, "EXAMINED", 2)
    owners = [Owner(engine(1 + at, tmp_path, log_pages=PAGES, **LOGGED)) for at in range(5)]
    for _ in range(3):
        following.scan()
    numbers = {following.owner(number).engine_index: number for number in range(1, 6)}
    assert [following.state(number) for number in numbers.values()] == [COMPLETE] * 5
    for at, owner in enumerate(owners):
        owner.put(at, name(at, 10))
        following.scan(0.1)
        assert following.rows(name(at).key) == {row(numbers[1 + at], at, 10)}
    one, two, *_ = owners
    reset(one.pool, TAG, named=True)  # nothing is logged of it
    two.pool.close()
    for _ in range(3):
        following.scan()
    assert following.rows(name(0).key) == set()
    assert following.state(numbers[2]) == DEAD
    assert following.reader.rows == 4
    shutil.rmtree(two.directory.parent)
    following.scan(0.1)
    assert following.state(numbers[2]) == NONE, "its log says that it was removed"
    assert following.reader.rows == 3
    for owner in owners:
        owner.log.close()


@pytest.mark.parametrize("seed", range(6))
def test_rows_by_log_are_the_rows_by_scan(
    following: Following, owner: Owner, seed: int, file: int
) -> None:
    """Puts, resets, late writes, and followers that sleep, in a random order."""
    dice = random.Random(seed)
    for generation in range(600):
        act = dice.random()
        if act < 0.01:
            owner.reset()
        elif act < 0.05:
            late = Stamp(owner.pool.stamp.epoch ^ 1, TAG)
            owner.put(dice.randrange(SLOTS), name(generation, generation), late)
        else:
            owner.put(dice.randrange(SLOTS), name(dice.randrange(40), generation))
        if dice.random() < dice.choice([0.001, 0.1, 0.5]):
            following.scan(0.1)
    following.scan(0.1)
    raw = np.fromfile(owner.directory / "table", np.uint8)
    table = decode_table(raw, np.arange(raw.size // 64))
    wanted = np.flatnonzero(table.valid & (table.epochs == owner.pool.stamp.epoch))
    for slot in wanted.tolist():
        key = table.keys[slot, : int(table.key_bytes[slot])].tobytes()
        assert row(1, slot, int(table.generations[slot])) in following.rows(key)
    assert following.reader.rows == len(wanted)


_WRITER = """
import mmap, sys
from pathlib import Path
import numpy as np
from tests.unit.pool.kit import PAYLOAD_BYTES, make_spec, name
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.io.base import IoOp
from vllm_nvmeof_offload.io.engine import NativeIoEngine
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OpKind, Urgency, place_of
target, slots, pages, size = Path(sys.argv[1]), *map(int, sys.argv[2:])
pool = Pool.open(make_spec(target, engine_index=1, slots=slots, log_pages=pages, pool_bytes=size))
memory = mmap.mmap(-1, pool.slot_bytes)
address = np.frombuffer(memory, np.uint8).ctypes.data
engine = NativeIoEngine(pool, memoryview(memory), address, TUNING)
print("open", flush=True)
for token in range(1, 1 << 40):
    identity, kind = name(token % 50, token), (OpKind.WRITE, Urgency.WRITE)
    where = place_of(0, token * 7 % slots), address
    op = IoOp(token, *kind, *where, identity, PAYLOAD_BYTES, engine.stamp)
    engine.submit([op])
    while not engine.poll():
        pass
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["awake", "stopped for laps"])
def test_a_killed_writer_leaves_a_log_that_leads_to_its_table(
    following: Following, tmp_path: Path, is_stopped: bool
) -> None:
    """A real engine, killed at any instruction; the follower sleeps meanwhile, or does not."""
    command = [sys.executable, "-c", _WRITER, str(tmp_path), str(SLOTS), str(PAGES)]
    child = subprocess.Popen(
        [*command, str(LOGGED["pool_bytes"])],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        following.scan()
        wait_until("rows", lambda: following.scan(0.1) or following.reader.rows == SLOTS)  # type: ignore[func-returns-value]
        (log,) = tmp_path.rglob("log")
        first = log.read_bytes()
        laps = 3 if is_stopped else 1
        for _ in range(laps * 2):  # every page was written
            first = log.read_bytes()

            def is_lapped(first: bytes = first) -> bool:
                if not is_stopped:
                    following.scan(0.1)
                starts = range(0, len(first), PAGE_BYTES)
                now = log.read_bytes()
                return all(first[at : at + 16] != now[at : at + 16] for at in starts)

            wait_until("a lap", is_lapped)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    following.scan(0.1)
    assert CountedRegion.overruns >= is_stopped
    raw = np.fromfile(log.parent / "table", np.uint8)
    table = decode_table(raw, np.arange(raw.size // 64))
    assert table.valid.all()
    # The last entry may have been written, and its record not.
    missing = [
        slot
        for slot in range(SLOTS)
        if row(1, slot, int(table.generations[slot]))
        not in following.rows(table.keys[slot, : int(table.key_bytes[slot])].tobytes())
    ]
    assert len(missing) <= 1
    assert following.reader.rows == SLOTS


def followed(log: int, file: int) -> tuple[ForeignWriter, ForeignRegion, Log]:
    """Make the log empty; return who follows it and who writes it. file: of the foreign table."""
    os.ftruncate(log, PAGES * PAGE_BYTES)
    table, region = ForeignWriter(file, 10), ForeignRegion((1, 0, 0), SLOTS, [(0, 1)], 0)
    region.begin(table, 5, False)
    assert region.seek_log(log, PAGES) == 0
    return table, region, Log(LogFile(log, PAGES, PAGES))


def test_a_region_reads_pages_of_a_lap_in_order(file: int, tmp_path: Path) -> None:
    """Directly on the native region: a log that is read to the end of the ring and over it."""
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    table, region, writer = followed(log, file)
    generation = 0
    for records in [1, 62, 1, 63, 126, 100, 5, 189, 1]:
        for _ in range(records):
            generation += 1
            identity = name(generation % 40, generation)
            writer.put(generation % SLOTS, identity, 5)
        assert region.follow_log(table, log, 0) == 0, records
        assert region.rows == min(generation, SLOTS)
    writer.close()
    os.close(log)


def test_a_log_has_news_until_it_is_followed(file: int, tmp_path: Path) -> None:
    """Directly on the native region: at every length of every page, over two laps."""
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    table, region, writer = followed(log, file)

    def has_news() -> bool:
        found = ForeignRegion.with_news([(region, log), (region, log)])
        assert found in ([], [0, 1])
        return bool(found)

    for generation in range(2 * PAGES * RECORDS_PER_PAGE + 2):
        assert not has_news(), generation
        writer.put(generation % SLOTS, name(1, generation), 5)
        assert has_news(), generation
        assert region.follow_log(table, log, 0) == 0
    for _ in range(PAGES * RECORDS_PER_PAGE):
        writer.put(1, name(1, 1), 5)
    assert has_news(), "a lap later"
    assert region.follow_log(table, log, 0) == ForeignRegion.OVERRUN
    assert region.seek_log(log, PAGES) == 0
    assert not has_news()
    writer.close()
    for at in range(PAGES):
        os.pwrite(log, b"damaged", at * PAGE_BYTES)
    assert has_news()
    assert region.seek_log(log, PAGES) == 0
    os.ftruncate(log, 0)
    os.ftruncate(log, PAGES * PAGE_BYTES)
    assert not has_news(), "it is empty"
    (tmp_path / "log").unlink()
    assert has_news(), "nobody will write it again"
    os.close(log)
