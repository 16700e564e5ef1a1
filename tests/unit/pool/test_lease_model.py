# SPDX-License-Identifier: Apache-2.0
"""Claims and renewals on one lease page whose reads and writes are late, in virtual time.

Each claimant runs the product's code on a thread of its own; one runs at a time, and the next event
in virtual time decides which.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from vllm_nvmeof_offload.pool.keeper import Keeper
from vllm_nvmeof_offload.pool.lease import (
    Lease,
    Leasing,
    Permit,
    Takeover,
    UnsettledError,
    read_lease,
)

TAKEOVER_S, SETTLE_S = 30.0, 2.0
CLAIMANTS, RUN_S = 4, 400.0


class EndedError(Exception):
    """The run is over: the thread ends."""


class World:
    """Virtual time, and who sleeps until when."""

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
        self.world.run([lambda p=p: self._claimant(p) for p in self._permits], self._look)

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


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Each claim logs what it waits for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


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
