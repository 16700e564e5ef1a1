# SPDX-License-Identifier: Apache-2.0
"""Leases of real directories: pages, claims, the keeper, what a new owner adopts; and a model of
claims in virtual time."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.logs import Log
from tests.process import wait_until
from vllm_nvmeof_offload.commands.pool import offline
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.pool import lease as leases
from vllm_nvmeof_offload.pool import ownership
from vllm_nvmeof_offload.pool.format import LEASED, read_superblock, write_superblock
from vllm_nvmeof_offload.pool.keeper import Keeper
from vllm_nvmeof_offload.pool.lease import (
    NOBODY,
    Lease,
    LeasePage,
    Leasing,
    PageFile,
    Permit,
    Permits,
    lease_of,
    read_lease,
)
from vllm_nvmeof_offload.pool.log import newest_head
from vllm_nvmeof_offload.pool.ownership import Claim, PoolSpec
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.survey import find
from vllm_nvmeof_offload.pool.takeover import Takeover, UnsettledError
from vllm_nvmeof_offload.targets.prober import ProbeRequest, probe

from .kit import STORED, fill, make_spec

PAGE = LeasePage(
    bytes(range(16)), 7, 9, 1000, 5, "höst", 4711, "server a", False, bytes(range(1, 17)), "é/1"
)
OTHER = replace(PAGE, owner=bytes(15) + b"\1", name="server b")
#: `impatient` claims wait so long for a sign of life.
SHORT_S = 0.3
#: It renews often, and a start waits longer than a busy machine delays that.
BEATING = Leasing("a", takeover_s=15.0, settle_s=0.01)
#: A permit lasts 20 s: nothing runs out while a test runs.
LONG = Leasing("a", takeover_s=60.0, settle_s=0.01)


def put(path: Path, page: bytes) -> None:
    path.touch(0o600)
    PageFile(path).write(page)


def page_in(directory: Path) -> LeasePage:
    page = read_lease(lease_of(directory))
    assert page is not None
    return page


# -- the page -------------------------------------------------------------------------


def test_a_page_comes_back_as_it_was_written(tmp_path: Path) -> None:
    io = lease_of(tmp_path)
    assert read_lease(io) is None, "nobody has claimed it"
    put(io.path, PAGE.encode())
    assert read_lease(io) == PAGE
    assert io.path.stat().st_size == 4096


def test_a_name_that_is_too_long_is_cut_between_two_characters() -> None:
    page = LeasePage.decode(replace(PAGE, host="ü" * 40, name="n" * 99, engine="e" * 130).encode())
    assert page is not None
    assert (page.host, page.name, page.engine) == ("ü" * 32, "n" * 64, "e" * 128)


@pytest.mark.parametrize("at", [0, 8, 33, 100, 4095])
def test_a_damaged_page_has_an_owner_that_nobody_is(tmp_path: Path, at: int) -> None:
    damaged = bytearray(PAGE.encode())
    damaged[at] ^= 1
    put(tmp_path / "lease", bytes(damaged))
    page = page_in(tmp_path)
    assert not page.is_intact
    assert not page.is_free
    assert page.owner not in (PAGE.owner, NOBODY)
    assert page_in(tmp_path) == page, "its silence can be watched"


def test_a_torn_page_is_read_again(tmp_path: Path) -> None:
    pages = iter([PAGE.encode()[:512].ljust(4096, b"\1"), PAGE.encode()])

    class Torn:
        def read(self) -> bytes:
            return next(pages)

        def write(self, page: bytes) -> None:
            raise AssertionError

    assert read_lease(Torn()) == PAGE


# -- the keeper -----------------------------------------------------------------------


class Kept:
    """A lease with a clock of its own. Pages are in memory; `delay_s`: of the next write."""

    def __init__(self) -> None:
        self.now_s, self.delay_s = 100.0, 0.0
        self.content = PAGE.encode()
        self.permit = Permit(ctypes.c_uint64())
        self.permit.grant(int(110e9))
        self.keeper = Keeper(PAGE.owner, 30.0, self.permit, lambda: int(self.now_s * 1e9))

    def read(self) -> bytes:
        return self.content

    def write(self, page: bytes) -> None:
        self.now_s += self.delay_s
        self.content = page

    @property
    def until_s(self) -> float:
        return self.permit.until_ns / 1e9

    @property
    def page(self) -> LeasePage:
        page = LeasePage.decode(self.content)
        assert page is not None
        return page

    def run(self, seconds: float) -> float:
        """Renew each second; return the end of the permit."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            self.keeper.renew(self, epoch=6)
        return self.until_s


def test_a_renewal_permits_writes_for_a_third_of_the_takeover_from_its_begin() -> None:
    kept = Kept()
    kept.now_s, kept.delay_s = 105.0, 3.0
    kept.keeper.renew(kept, epoch=6)
    assert kept.until_s == 115
    page = LeasePage.decode(kept.content)
    assert page == replace(PAGE, beat=PAGE.beat + 1, epoch=6)


def test_a_renewal_that_ends_late_permits_nothing_for_half_a_takeover() -> None:
    kept = Kept()
    kept.delay_s = 25.0
    kept.keeper.renew(kept, epoch=6)
    assert kept.until_s == 110 < kept.now_s, "it began 25 s ago"
    kept.delay_s = 0.0
    assert kept.run(14.0) == 110, "the page that it wrote may have replaced another one"
    assert kept.run(3.0) > kept.now_s
    assert kept.page.generation == PAGE.generation


def test_an_outage_suspends_writes_and_the_lease_is_claimed_again() -> None:
    """The page's storage gives no answer for longer than the takeover."""
    kept = Kept()
    kept.delay_s = 40.0
    kept.keeper.renew(kept, epoch=6)
    assert (kept.until_s, kept.permit.is_lost) == (110, False)
    before, kept.delay_s = kept.page, 0.0
    kept.run(14.0)
    assert kept.page == before, "an owner that lives may put its page back"
    kept.run(4.0)
    assert kept.page.generation == before.generation + 1
    assert kept.run(12.0) == 110, "the other one's permit may be open"
    assert kept.run(5.0) > kept.now_s
    assert (kept.page.owner, kept.page.epoch) == (PAGE.owner, 6)


def test_a_late_owner_that_finds_another_one_has_lost_whatever_its_generation() -> None:
    for generation in (1, PAGE.generation, 9):
        kept = Kept()
        kept.delay_s = 40.0
        kept.keeper.renew(kept, epoch=6)
        kept.content = theirs = replace(OTHER, generation=generation).encode()
        kept.keeper.renew(kept, epoch=6)
        assert kept.permit.is_lost
        assert kept.content == theirs


def test_a_claim_that_another_one_replaces_permits_nothing() -> None:
    kept = Kept()
    kept.delay_s = 40.0
    kept.keeper.renew(kept, epoch=6)
    kept.delay_s = 0.0
    kept.run(18.0)
    assert kept.page.generation == PAGE.generation + 1
    kept.content = replace(OTHER, generation=PAGE.generation + 1).encode()
    assert kept.run(3.4) == 0
    assert kept.permit.is_lost


def test_another_owner_in_the_page_ends_the_lease_for_good() -> None:
    for generation in (PAGE.generation, PAGE.generation + 1):
        kept = Kept()
        kept.keeper.renew(kept, epoch=6)
        kept.content = theirs = replace(OTHER, generation=generation).encode()
        kept.keeper.renew(kept, epoch=6)
        assert kept.permit.is_lost
        assert kept.content == theirs
        kept.content = PAGE.encode()
        kept.keeper.renew(kept, epoch=6)
        assert kept.permit.is_lost


@pytest.mark.parametrize(
    "wrong",
    [
        PAGE.encode()[:512].ljust(4096, b"\0"),
        bytes(4096),
        replace(OTHER, generation=PAGE.generation - 1).encode(),
        replace(PAGE, generation=PAGE.generation - 1).encode(),
    ],
    ids=["torn", "zeros", "late write of a former owner", "late write of our own"],
)
def test_a_wrong_page_is_replaced_and_nothing_is_lost(wrong: bytes) -> None:
    kept = Kept()
    kept.keeper.renew(kept, epoch=6)
    kept.content, until_s = wrong, kept.until_s
    kept.now_s += 3.0
    kept.keeper.renew(kept, epoch=6)
    assert (kept.page.owner, kept.page.generation) == (PAGE.owner, PAGE.generation)
    assert kept.until_s == until_s, "only a page with our name permits anything"
    assert kept.run(3.0) == kept.now_s + 10.0


def test_a_page_that_cannot_be_read_leaves_the_permit_to_run_out() -> None:
    kept = Kept()
    for content in (b"", b"\1" * 4096):
        kept.content = content
        with pytest.raises(OSError, match=r"no owner.*damaged"):
            kept.keeper.renew(kept, epoch=6)
        assert kept.until_s == 110


# -- pools ----------------------------------------------------------------------------


@contextmanager
def opened(target: Path, leasing: Leasing = LONG, **changes: object) -> Iterator[Pool]:
    pool = Pool.open(make_spec(target, leasing=leasing, **changes))
    yield pool
    pool.close()


def test_a_pool_of_no_group_has_a_page_that_permits_writes_until_it_is_lost(
    tmp_path: Path,
) -> None:
    pool = Pool.open(make_spec(tmp_path))
    (permit,) = pool.permits
    permit.grant(1)  # a group's would have run out
    assert permit.is_open
    assert permit.address == 0, "the I/O engine does not look"
    page = page_in(pool.directories[0])
    assert (page.in_group, page.died_here, page.beat_ms) == (False, True, 5000)
    assert (pool.superblocks[0].shared, pool.superblocks[0].lease_generation) == (0, 0)
    pool.close()
    assert permit.is_lost and not permit.is_open


def test_a_leased_region_says_so_and_its_log_passes_the_page_cache_by(tmp_path: Path) -> None:
    with opened(tmp_path, o_direct="on", log_pages=4) as pool:
        (found,) = pool.superblocks
        assert (found.shared, found.lease_generation) == (LEASED, 1)
        assert read_superblock(pool.directories[0]) == found
        assert fcntl.fcntl(pool.files(0)[2], fcntl.F_GETFL) & os.O_DIRECT
        Log(pool.log(0)).reset(7)
        head = newest_head(pool.files(0)[2], 4)
        assert head is not None and (head.epoch, head.lease_generation) == (7, 1)
    with opened(tmp_path) as pool:
        assert pool.superblocks[0].lease_generation == 2
        assert pool.superblocks[0].epoch == found.epoch, "it is the same pool"
    page = page_in(pool.directories[0])
    put(pool.directories[0] / "lease", replace(page, generation=9).encode())
    with opened(tmp_path) as pool:
        assert pool.log(0)[3] == 10, "records carry the generation of the lease"


def test_a_start_whose_lease_is_lost_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Claim.make

    def make(spec: PoolSpec) -> Claim:
        claim = real(spec)
        for permit in claim.permits:
            permit.lose()
        return claim

    monkeypatch.setattr(Claim, "make", make)
    with pytest.raises(PoolError, match=r"its lease for .* s, lost it"):
        Pool.open(make_spec(tmp_path, leasing=LONG))
    assert not [*tmp_path.rglob("superblock*")]


def test_a_target_that_comes_back_is_taken_only_with_our_lease(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        (ours,), (directory,) = pool.superblocks, pool.directories
        page = page_in(directory)
    put(directory / "lease", page.encode())
    what = str(directory), ours.encode().hex(), False
    request = ProbeRequest(*what, page.owner.hex(), None, in_group=True)
    for found in (ours, replace(ours, sequence=ours.sequence - 1, lease_generation=0, shared=0)):
        write_superblock(directory, found)
        answer, fds = probe(request)
        assert not answer.failure
        assert read_superblock(directory) == ours
        for fd in set(fds):  # slab and buffered slab are one
            os.close(fd)
    write_superblock(directory, replace(ours, lease_generation=2))
    with pytest.raises(PoolError, match="another server has used the pool"):
        probe(request)
    write_superblock(directory, ours)
    for theirs, why in ((OTHER, "held by pid 4711"), (replace(page, owner=NOBODY), "has used")):
        put(directory / "lease", theirs.encode())
        with pytest.raises(PoolError, match=why):
            probe(request)


def test_a_process_of_its_own_renews_and_a_close_leaves_no_owner(tmp_path: Path) -> None:
    with opened(tmp_path, replace(LONG, takeover_s=3.0)) as pool:
        (permit,), (directory,) = pool.permits, pool.directories
        assert permit.is_open
        first = page_in(directory)
        assert (first.pid, first.name, first.generation) == (os.getpid(), "a", 1)
        wait_until("a renewal", lambda: page_in(directory).beat > first.beat + 2)
        assert page_in(directory).epoch == pool.superblocks[0].epoch
    assert permit.is_lost
    assert page_in(directory).is_free
    with opened(tmp_path) as pool:
        assert page_in(directory).generation == 2
        assert pool.directories[0] == directory


def test_an_owner_that_lives_is_not_taken_over(tmp_path: Path) -> None:
    """Where flock does not reach: the page alone tells."""
    with opened(tmp_path, BEATING) as first:
        (directory,) = first.directories
        wait_until("a renewal", lambda: page_in(directory).beat > 0)
        (directory / "lock").unlink()  # another host's kernel has no lock on it
        with opened(tmp_path, replace(BEATING, name="b")) as second:
            assert second.engine_index == 1
        with pytest.raises(Exception, match="which is still running"):
            Pool.open(make_spec(tmp_path, leasing=BEATING, engine_index=0))
        assert page_in(directory).owner != NOBODY


def left_behind(target: Path, name: str) -> Path:
    """A pool with chunks whose owner is gone without a release."""
    with opened(target, replace(LONG, name=name)) as pool:
        (directory,) = pool.directories
        fill(pool)
        page = page_in(directory)
    put(directory / "lease", page.encode())
    return directory


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims wait for `SHORT_S`, while what they claim lasts: it may take long to open a pool."""
    monkeypatch.setattr(ownership, "Takeover", lambda _: Takeover(SHORT_S))


@pytest.mark.usefixtures("impatient")
def test_a_server_waits_for_its_own_last_region_and_adopts_it(tmp_path: Path) -> None:
    directory = left_behind(tmp_path, "a")
    begun_s = time.monotonic()
    with opened(tmp_path) as pool:
        assert time.monotonic() - begun_s >= SHORT_S
        assert pool.directories[0] == directory
        assert len(pool.adopt()) == len(STORED)
        assert page_in(directory).generation == 2


@pytest.mark.usefixtures("impatient")
def test_another_server_begins_a_new_epoch_in_a_region_that_it_takes_over(tmp_path: Path) -> None:
    directory = left_behind(tmp_path, "a")
    before = read_superblock(directory)
    assert before is not None
    with opened(tmp_path, replace(LONG, name="b"), engine_index=0) as pool:
        assert len(pool.adopt()) == 0
        after = read_superblock(directory)
        assert after is not None
        assert (after.epoch != before.epoch, after.sequence) == (True, before.sequence + 1)


def test_free_regions_come_before_those_of_dead_servers(tmp_path: Path) -> None:
    left_behind(tmp_path, "a")
    with opened(tmp_path, replace(LONG, name="b")) as pool:
        assert pool.engine_index == 1


def test_a_claim_that_another_one_overwrites_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two claimants find the region free at the same time; the other one writes last."""
    real = Lease.is_ours
    asked: list[Path] = []

    def is_ours(self: Lease) -> bool:
        if not asked:
            put(self.path, replace(PAGE, in_group=True).encode())
        asked.append(self.path)
        return real(self)

    monkeypatch.setattr(Lease, "is_ours", is_ours)
    with opened(tmp_path) as pool:
        assert pool.engine_index == 1
    assert page_in(asked[0].parent) == replace(PAGE, in_group=True), "the loser writes nothing more"


def test_a_repair_keeps_the_name_of_the_last_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = left_behind(tmp_path, "a")
    put(directory / "lease", replace(page_in(directory), owner=NOBODY).encode())
    monkeypatch.setattr(leases, "_BEATS_PER_PERMIT", 100)
    with ownership.hold([directory]):
        page = page_in(directory)
        assert not page.is_free
        wait_until("a renewal", lambda: page_in(directory).beat > page.beat)
    assert page_in(directory).is_free
    with opened(tmp_path) as pool:
        assert len(pool.adopt()) == len(STORED)


def test_a_repair_that_has_lost_its_lease_changes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flock does not keep a server out, so a command that was stopped must look."""
    directory = left_behind(tmp_path, "a")
    put(directory / "lease", replace(page_in(directory), owner=NOBODY).encode())
    monkeypatch.setattr(leases, "_BEATS_PER_PERMIT", 100)
    (found,) = find([tmp_path])
    permits: list[Permits] = []
    new, real = Permits.new, offline.disk_bytes

    def remembered(count: int) -> Permits:
        permits.append(new(count))
        return permits[0]

    def taken_over(*arguments: Any) -> int:
        put(directory / "lease", PAGE.encode())
        wait_until("the loss", lambda: permits[0].word(0).is_lost)
        return real(*arguments)

    monkeypatch.setattr(Permits, "new", staticmethod(remembered))
    monkeypatch.setattr(offline, "disk_bytes", taken_over)
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
    with pytest.raises(PoolLockedError, match="now belongs to another process"):
        offline.remove([found])
    after = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
    assert after == before | {"lease": PAGE.encode()}


#: A server with a lease, which prints its directory.
SERVER = """
import sys
from pathlib import Path
from tests.unit.pool.kit import make_spec
from tests.process import wait_until
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.pool import Pool
pool = Pool.open(make_spec(Path(sys.argv[1]), leasing=Leasing("other", 10.0, 0.01)))
print(pool.directories[0], flush=True)
wait_until("the loss", lambda: pool.permits[0].is_lost)
print("lost", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("reached", [True, False])
def test_a_stopped_server_loses_its_region_to_another_one(tmp_path: Path, reached: bool) -> None:
    """It keeps its flock, which other hosts may see or not; and it finds out when it goes on."""
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        directory = Path(child.stdout.readline().strip())
        child.send_signal(signal.SIGSTOP)
        if not reached:
            (directory / "lock").unlink()
        theirs = page_in(directory)
        with opened(tmp_path, Leasing("b", 6.0, 0.01), engine_index=0) as pool:
            assert page_in(directory).owner != theirs.owner
            assert page_in(directory).generation == theirs.generation + 1
            child.send_signal(signal.SIGCONT)
            wait_until("beats", lambda: page_in(directory).beat > 3)
            assert child.stdout.readline() == "lost\n"
            (permit,) = pool.permits
            assert not permit.is_lost, "and does not take it back"
    finally:
        child.kill()
        child.communicate()


def test_what_another_host_calls_itself_is_one_line_of_a_log() -> None:
    name = "a\n[ERROR] forged\x1b[2J ü"
    shown = r"a\n[ERROR] forged\x1b[2J ü"
    page = LeasePage(bytes(range(16)), 1, 1, 0, 7, name, 3, "")
    assert str(page) == f"pid 3 on host {shown}"


# -- claims and renewals on one page whose reads and writes are late ------------------

TAKEOVER_S, SETTLE_S = 30.0, 2.0
CLAIMANTS, RUN_S = 4, 400.0


class EndedError(Exception):
    """The run is over: the thread ends."""


class World:
    """Virtual time, and who sleeps until when.

    Each claimant runs the product's code on a thread of its own; one runs at a time, and the next
    event in virtual time decides which.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._numbers = itertools.count()
        self._turn = threading.Event()
        self.ended = False

    def sleep(self, seconds: float) -> None:
        mine = threading.Event()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._numbers), mine))
        self._turn.set()
        mine.wait()
        if self.ended:
            raise EndedError

    @staticmethod
    def _play(act: Callable[[], None]) -> None:
        with contextlib.suppress(EndedError):
            act()

    def clock_ns(self) -> int:
        return round(1e9 * (self.now_s + 1000))

    def run(self, actors: list[Callable[[], None]], after_each: Callable[[], None]) -> None:
        threads = []
        for act in actors:
            self._turn.clear()
            threads.append(threading.Thread(target=self._play, args=[act]))
            threads[-1].start()
            self._turn.wait()
        while self._sleepers:
            at_s, _, who = heapq.heappop(self._sleepers)
            self.ended = self.ended or at_s > RUN_S
            self.now_s = at_s
            self._turn.clear()
            who.set()
            if self.ended:
                continue
            self._turn.wait()
            after_each()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Faults:
    """What befalls the page and its owners. sleeps: how many renewals in one an owner's machine
    sleeps through; counts_sleep: whether its clock goes on meanwhile. life_s: the longest of one.
    """

    outages: tuple[tuple[float, float], ...] = ()
    torn: float = 0.0
    sleeps: float = 0.0
    counts_sleep: bool = True
    claimants: int = CLAIMANTS
    life_s: float = 60.0


class LatePage:
    """A page that all see. delay_s: of one read or write; it happens somewhere on the way.

    faults: the outages, in which nothing happens, and how many writes in one are torn.
    """

    content = b""

    def __init__(
        self, world: World, rng: random.Random, delay_s: Callable[[], float], faults: Faults
    ) -> None:
        self._world, self._rng, self._delay_s, self._faults = world, rng, delay_s, faults

    def _go_there(self) -> float:
        """Returns the time for the way back."""
        whole = self._delay_s()
        there = whole * self._rng.random()
        self._world.sleep(there)
        for begin_s, end_s in self._faults.outages:
            if begin_s <= self._world.now_s < end_s:
                self._world.sleep(end_s - self._world.now_s + self._rng.random())
        return whole - there

    def read(self) -> bytes:
        back = self._go_there()
        found = self.content
        self._world.sleep(back)
        return found

    def write(self, page: bytes) -> None:
        back = self._go_there()
        if self._rng.random() < self._faults.torn:
            self.content = page[:512] + self.content[512:].ljust(len(page) - 512, b"\0")
            raise OSError(errno.EIO, "the test has torn it")
        self.content = page
        self._world.sleep(back)


class Runs:
    """What happened in one run. doubles: the seconds for which two could write, each time. lost:
    the leases that were lost. writable_s: the times at which somebody could write."""

    def __init__(
        self,
        seed: int,
        slow_s: float,
        stalls: float,
        settle_s: float = SETTLE_S,
        faults: Faults = Faults(),
    ) -> None:
        self.world = World()
        self._rng = random.Random(seed)
        self._leasing = Leasing("server", TAKEOVER_S, settle_s)
        self._faults = faults
        self._permits = [Permit(ctypes.c_uint64()) for _ in range(faults.claimants)]
        self._slept_s = dict.fromkeys(self._permits, 0.0)
        self.acquired = self.lost = 0
        self.writable_s: list[float] = []
        self.doubles: list[float] = []
        self._double_since_s: float | None = None

        def delay_s() -> float:
            if self._rng.random() < stalls:
                return 60 * self._rng.random()
            return slow_s * self._rng.random()

        self._page = LatePage(self.world, self._rng, delay_s, faults)
        logging.disable(logging.CRITICAL)  # each claim logs what it waits for
        try:
            self.world.run([lambda p=p: self._claimant(p) for p in self._permits], self._look)
        finally:
            logging.disable(logging.NOTSET)

    def _clock_ns(self, permit: Permit) -> int:
        """The clock that the owner of this permit reads."""
        slept_s = 0.0 if self._faults.counts_sleep else self._slept_s[permit]
        return self.world.clock_ns() - round(1e9 * slept_s)

    def _claimant(self, permit: Permit) -> None:
        self.world.sleep(self._rng.random())
        while True:
            with contextlib.suppress(OSError):
                self._claim(permit)

    def _claim(self, permit: Permit) -> None:
        world, rng = self.world, self._rng
        clock = partial(self._clock_ns, permit)
        takeover = Takeover(TAKEOVER_S, lambda: world.now_s)
        while True:
            page = read_lease(self._page)
            try:
                if page is None or page.is_free or takeover.is_dead("page", page):  # type: ignore[arg-type]
                    break
            except UnsettledError:
                pass
            world.sleep(0.2 + rng.random())
        lease = Lease.claim(self._page, self._leasing, permit, page, clock)
        world.sleep(max(0.0, lease.settles_ns - clock()) / 1e9 + 1e-6)
        if lease.is_ours():
            self.acquired += 1
            self._keep(lease, permit)
        world.sleep(5 * rng.random())

    def _keep(self, lease: Lease, permit: Permit) -> None:
        """Live for a while; then end in order, or be killed."""
        owner = lease.page.owner
        keeper = Keeper(owner, TAKEOVER_S, permit, partial(self._clock_ns, permit))
        end_s = self.world.now_s + self._faults.life_s * self._rng.random()
        while self.world.now_s < end_s and not permit.is_lost:
            self.world.sleep(self._leasing.beat_s)
            if self._rng.random() < self._faults.sleeps:
                self._slept_s[permit] += (slept_s := 200 * self._rng.random())
                self.world.sleep(slept_s)
            with contextlib.suppress(OSError):
                keeper.renew(self._page, epoch=1)
        self.lost += permit.is_lost
        if self._rng.random() < 0.5:
            lease.release()
        permit.lose()

    def _look(self) -> None:
        now_s = self.world.now_s
        writers = sum(permit.until_ns > self._clock_ns(permit) for permit in self._permits)
        double = writers > 1
        if writers:
            self.writable_s.append(now_s)
        if double and self._double_since_s is None:
            self._double_since_s = now_s
        elif not double and self._double_since_s is not None:
            self.doubles.append(now_s - self._double_since_s)
            self._double_since_s = None


def test_no_two_own_a_region_while_writes_are_not_slower_than_half_the_wait() -> None:
    runs = [Runs(seed, slow_s=SETTLE_S / 2, stalls=0.0) for seed in range(20)]
    assert sum(run.acquired for run in runs) > 100
    assert [run.doubles for run in runs if run.doubles] == []


def test_when_writes_stall_two_owners_end_within_the_takeover() -> None:
    runs = [Runs(seed, slow_s=SETTLE_S / 2, stalls=0.02) for seed in range(40)]
    doubles = [seconds for run in runs for seconds in run.doubles]
    print(f"{sum(run.acquired for run in runs)} acquisitions, doubles {doubles}")
    assert all(seconds <= TAKEOVER_S for seconds in doubles)


def test_a_wait_that_is_too_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each claimant reads the page back at once."""
    monkeypatch.setattr(Lease, "settles_ns", 0)
    runs = [Runs(seed, slow_s=SETTLE_S / 2, stalls=0.0) for seed in range(20)]
    assert any(run.doubles for run in runs)


OUTAGES = ((90.0, 130.0), (200.0, 215.0), (300.0, 370.0))
#: Whatever was late has claimed again by then.
BACK_S = 40.0


@pytest.mark.parametrize(
    "faults",
    [
        Faults(OUTAGES, life_s=400.0),
        Faults(torn=0.05, life_s=200.0),
        Faults(sleeps=0.05, life_s=400.0),
        Faults(OUTAGES, torn=0.02, sleeps=0.02, life_s=400.0),
    ],
    ids=["outages", "torn pages", "sleep", "all"],
)
def test_no_two_own_a_region_whatever_befalls_it(faults: Faults) -> None:
    runs = [Runs(seed, slow_s=SETTLE_S / 2, stalls=0.0, faults=faults) for seed in range(10)]
    assert sum(run.acquired for run in runs) > 20
    assert [run.doubles for run in runs if run.doubles] == []


@pytest.mark.parametrize("torn", [0.0, 0.05])
def test_a_region_that_nobody_else_wants_is_never_lost(torn: float) -> None:
    faults = Faults(OUTAGES, torn=torn, sleeps=0.02, claimants=1, life_s=4000.0)
    runs = [Runs(seed, slow_s=SETTLE_S / 2, stalls=0.0, faults=faults) for seed in range(6)]
    assert [run.lost for run in runs] == [0] * 6


def test_an_outage_ends_by_itself() -> None:
    faults = Faults(OUTAGES, claimants=1, life_s=1e6)
    for seed in range(6):
        times = Runs(seed, slow_s=SETTLE_S / 2, stalls=0.0, faults=faults).writable_s
        assert not any(115.0 < at_s < 130.0 for at_s in times), "writes are suspended"
        assert any(130.0 + BACK_S - 5.0 < at_s < 130.0 + BACK_S + 5.0 for at_s in times)


def test_a_clock_that_stands_still_while_the_machine_sleeps_is_noticed() -> None:
    """The control: CLOCK_MONOTONIC."""
    faults = Faults(sleeps=0.05, counts_sleep=False, life_s=400.0)
    runs = [Runs(seed, slow_s=SETTLE_S / 2, stalls=0.0, faults=faults) for seed in range(6)]
    assert any(run.doubles for run in runs)
