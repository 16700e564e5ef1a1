# SPDX-License-Identifier: Apache-2.0
"""Claims and renewals on one lease page whose reads and writes are late, in virtual time.

Each claimant runs the product's code on a thread of its own; one runs at a time, and the next event
in virtual time decides which.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from vllm_nvmeof_offload.pool.lease import Keeper, Lease, Leasing, Permit, read_lease
from vllm_nvmeof_offload.pool.silence import Silence, UnsettledError

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


class LatePage:
    """A page that all see. delay_s: of one read or write; it happens somewhere on the way."""

    content = b""

    def __init__(self, world: World, rng: random.Random, delay_s: Callable[[], float]) -> None:
        self._world, self._rng, self._delay_s = world, rng, delay_s

    def _late(self) -> tuple[float, float]:
        whole = self._delay_s()
        there = whole * self._rng.random()
        return there, whole - there

    def read(self) -> bytes:
        there, back = self._late()
        self._world.sleep(there)
        found = self.content
        self._world.sleep(back)
        return found

    def write(self, page: bytes) -> None:
        there, back = self._late()
        self._world.sleep(there)
        self.content = page
        self._world.sleep(back)


class Runs:
    """What happened in one run. doubles: the seconds for which two could write, each time."""

    def __init__(self, seed: int, slow_s: float, stalls: float, settle_s: float = SETTLE_S) -> None:
        self.world = World()
        self._rng = random.Random(seed)
        self._leasing = Leasing("server", TAKEOVER_S, settle_s)
        self._permits = [Permit(ctypes.c_uint64()) for _ in range(CLAIMANTS)]
        self.acquired = 0
        self.doubles: list[float] = []
        self._double_since_s: float | None = None

        def delay_s() -> float:
            if self._rng.random() < stalls:
                return 60 * self._rng.random()
            return slow_s * self._rng.random()

        self._page = LatePage(self.world, self._rng, delay_s)
        self.world.run([lambda p=p: self._claimant(p) for p in self._permits], self._look)

    def _claimant(self, permit: Permit) -> None:
        world, rng = self.world, self._rng
        world.sleep(rng.random())
        while True:
            silence = Silence(TAKEOVER_S, lambda: world.now_s)
            while True:
                page = read_lease(self._page)
                try:
                    if page is None or page.is_free or silence.is_dead("page", page, page):  # type: ignore[arg-type]
                        break
                except UnsettledError:
                    pass
                world.sleep(0.2 + rng.random())
            lease = Lease.claim(self._page, self._leasing, permit, page, world.clock_ns)
            world.sleep(max(0.0, lease.settles_ns - world.clock_ns()) / 1e9 + 1e-6)
            if lease.is_ours():
                self.acquired += 1
                self._keep(lease, permit)
            world.sleep(5 * rng.random())

    def _keep(self, lease: Lease, permit: Permit) -> None:
        """Live for a while; then end in order, or be killed."""
        owner = lease.page.owner
        keeper = Keeper(self._page, owner, TAKEOVER_S, permit, self.world.clock_ns)
        end_s = self.world.now_s + 60 * self._rng.random()
        while self.world.now_s < end_s and not permit.is_lost:
            self.world.sleep(self._leasing.beat_s)
            keeper.renew(epoch=1)
        if self._rng.random() < 0.5:
            lease.release()
        permit.lose()

    def _look(self) -> None:
        now_s, now_ns = self.world.now_s, self.world.clock_ns()
        double = sum(permit.until_ns > now_ns for permit in self._permits) > 1
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
