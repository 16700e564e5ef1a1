# SPDX-License-Identifier: Apache-2.0
"""Peers that rest: they make loads slower, bring nothing, or are lost again and again."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from vllm_nvmeof_offload.errors import (
    CHECKSUM_MISMATCH,
    DEADLINE,
    OK,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.native import _tiers_mutants as tests_build  # type: ignore[attr-defined]
from vllm_nvmeof_offload.peers.base import PeerState
from vllm_nvmeof_offload.worker import pipeline

from .bench import Bench

FAST = PeerState(usable=True, credits=8, bytes_per_s=0.0, queued_bytes=0)
READ_S = 0.1  # of each chunk that a target here reads
#: Of a load of four chunks, a peer and the target here read two each, and the target all four.
SHARED_S, ALONE_S = 2 * READ_S, 4 * READ_S
IN_TIME_S, LATE_S = 0.95 * ALONE_S, 1.15 * ALONE_S
LATE_MAX, REST_S = 8, 10.0
FAULT_REST_S = 30.0
LOST = io_error(errno.ENOTCONN)


class Loads:
    """Loads one after the other, by a target that takes `READ_S` for each chunk, and by peers."""

    def __init__(self, *peers: PeerState) -> None:
        self.bench = Bench(stream_slots=16, peers=peers or [FAST], reads_in_flight_max=1)
        self._op = 0
        for _ in range(3):  # the target's rate is known from here on
            self.begin(3)
            self.read_here()

    def begin(self, chunks: int = 4) -> int:
        self._op += 1
        self.bench.stream(self._op, range(chunks))
        self.bench.pipeline.step()
        return self._op

    def read_here(self) -> None:
        bench = self.bench
        while bench.io.ops:
            bench.now_s += READ_S
            bench.turn()

    def peers_end(self, outcome: Outcome = OK, lanes: tuple[int, ...] = (0, 1)) -> None:
        lane_of = {read.token: lane for lane, read in self.bench.peers.asked}
        for token in [one for one in self.bench.peers.reads if lane_of[one] in lanes]:
            self.bench.peers.end(token, outcome)
        self.bench.pipeline.step()

    def end(self, *ops: int) -> None:
        while self.bench.turn():
            pass
        assert {(op, ()) for op in ops} <= set(self.bench.finished())

    def load(self, seconds: float) -> None:
        """One that peers end so long after its begin."""
        op, begin_s = self.begin(), self.bench.now_s
        self.read_here()
        self.bench.now_s = begin_s + seconds
        self.peers_end()
        self.end(op)

    def asks(self) -> set[int]:
        """The peers that are asked for chunks of the next load."""
        known = len(self.bench.peers.asked)
        self.load(SHARED_S)
        return {lane for lane, _ in self.bench.peers.asked[known:]}

    @property
    def rests(self) -> int:
        return self.bench.pipeline.counters["peer_events", "rest"]


def test_the_share_of_a_peer_and_the_time_without_it() -> None:
    loads = Loads()
    begin_s = loads.bench.now_s
    loads.load(SHARED_S)
    assert len(loads.bench.peers.asked) == 2
    loads.begin(3)
    loads.read_here()
    assert loads.bench.now_s - begin_s == pytest.approx(SHARED_S + 3 * READ_S)


def test_one_that_is_late_eight_times_in_a_row_rests() -> None:
    loads = Loads()
    for _ in range(LATE_MAX - 1):
        loads.load(LATE_S)
    assert loads.asks() == {0}, "that one was not late"
    for _ in range(LATE_MAX):
        loads.load(LATE_S)
    until_s = loads.bench.now_s + REST_S
    assert not loads.asks()
    assert loads.rests == 1
    loads.bench.now_s = until_s - 0.01
    loads.begin(3)
    assert not loads.asks()
    loads.bench.now_s = until_s
    assert loads.asks() == {0}
    for _ in range(LATE_MAX - 1):
        loads.load(LATE_S)
    assert loads.asks() == {0}, "it begins at nothing"
    assert loads.rests == 1


def test_one_whose_chunks_come_last_and_in_time_does_not_rest() -> None:
    loads = Loads()
    for _ in range(3 * LATE_MAX):
        loads.load(IN_TIME_S)
    assert loads.asks() == {0}
    assert not loads.rests


def test_nobody_is_late_while_the_target_here_is_busy() -> None:
    loads = Loads()
    for _ in range(LATE_MAX):
        split, *others = loads.begin(), *(loads.begin(3) for _ in range(4))
        loads.read_here()
        loads.peers_end()
        loads.end(split, *others)
    assert loads.asks() == {0}


def test_a_chunk_that_came_home_is_still_the_peers() -> None:
    loads = Loads()
    for _ in range(LATE_MAX):
        op = loads.begin()
        loads.read_here()
        loads.bench.now_s += LATE_S
        loads.peers_end(LOST)
        loads.read_here()
        loads.end(op)
    assert not loads.asks()


def test_chunks_that_come_home_in_time_are_not_held_against_it() -> None:
    loads = Loads()
    for _ in range(LATE_MAX):
        op = loads.begin()
        loads.peers_end(LOST)
        loads.read_here()
        loads.end(op)
    assert loads.asks() == {0}


def test_of_two_the_one_rests_whose_chunks_come_last() -> None:
    loads = Loads(FAST, FAST)
    for _ in range(LATE_MAX):
        op = loads.begin(6)
        loads.read_here()
        loads.peers_end(lanes=(1,))
        loads.bench.now_s += 8 * READ_S
        loads.peers_end()
        loads.end(op)
    assert loads.asks() == {1}


def test_cancelled_loads_are_not_judged() -> None:
    loads = Loads()
    for _ in range(LATE_MAX):
        op = loads.begin()
        loads.read_here()
        loads.bench.now_s += LATE_S
        loads.bench.cancel(op)
        loads.bench.pipeline.step()
        loads.peers_end()
        loads.bench.finished()
    assert loads.asks() == {0}


def _bring_nothing(loads: Loads, outcome: Outcome, reads: int = 8) -> None:
    """reads: of a peer that reads two chunks of each load."""
    for _ in range(reads // 2):
        op = loads.begin()
        loads.peers_end(outcome)
        loads.read_here()
        loads.end(op)


@pytest.mark.parametrize("outcome", [STALE, CHECKSUM_MISMATCH, io_error(errno.EIO)])
def test_one_of_which_eight_reads_in_a_row_bring_nothing_rests(outcome: Outcome) -> None:
    loads = Loads()
    _bring_nothing(loads, outcome, 6)
    assert loads.asks() == {0}, "one that brings something"
    _bring_nothing(loads, outcome)
    until_s = loads.bench.now_s + FAULT_REST_S
    assert not loads.asks()
    assert loads.rests == 1
    loads.bench.now_s = until_s
    assert loads.asks() == {0}


def test_what_it_had_when_its_rest_began_does_not_lengthen_it() -> None:
    loads = Loads()
    ops = [loads.begin() for _ in range(8)]
    asked = len(loads.bench.peers.asked)
    loads.peers_end(STALE)
    until_s = loads.bench.now_s + FAULT_REST_S
    assert len(loads.bench.peers.asked) == asked + 8, "in the step in which its rest began"
    loads.peers_end(STALE)
    loads.read_here()
    loads.end(*ops)
    loads.bench.now_s = until_s
    assert loads.asks() == {0}


@pytest.mark.parametrize("outcome", [LOST, io_error(errno.EBADF), DEADLINE])
def test_what_is_no_fault_of_a_read_brings_no_rest(outcome: Outcome) -> None:
    loads = Loads()
    _bring_nothing(loads, outcome, 16)
    assert loads.asks() == {0}


def _lose(loads: Loads, *after_s: float) -> None:
    """Let the peer's session be lost so long after the last time, each time."""
    for seconds in after_s:
        loads.bench.now_s += seconds
        lane = loads.bench.peers.lanes[0]
        loads.bench.peers.lanes[0] = lane._replace(lost=lane.lost + 1)
        loads.bench.pipeline.step()


def test_one_that_is_lost_three_times_in_ten_seconds_rests_and_longer_each_time() -> None:
    loads = Loads()
    _lose(loads, 0.0, 5.0)
    assert loads.asks() == {0}
    rested_s = []
    for _ in range(3):
        _lose(loads, 1.0, 1.0, 1.0)
        begin_s = loads.bench.now_s
        while not loads.asks():
            loads.bench.now_s += 0.5
        rested_s.append(round((loads.bench.now_s - begin_s) / FAULT_REST_S))
    assert rested_s == [1, 2, 4]
    loads.bench.now_s += 1000.0
    _lose(loads, 1.0, 1.0, 1.0)
    loads.bench.now_s += FAULT_REST_S
    assert loads.asks() == {0}, "it was well for longer than it had rested"


def test_one_that_is_lost_every_six_seconds_does_not_rest() -> None:
    loads = Loads()
    for _ in range(10):
        _lose(loads, 6.0)
        assert loads.asks() == {0}


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        ("a_slow_peer_is_never_late", test_one_that_is_late_eight_times_in_a_row_rests),
        ("a_late_peer_is_never_forgiven", test_one_that_is_late_eight_times_in_a_row_rests),
        (
            "what_peers_bring_takes_no_time_here",
            test_one_whose_chunks_come_last_and_in_time_does_not_rest,
        ),
        (
            "peers_are_late_while_a_target_is_busy",
            test_nobody_is_late_while_the_target_here_is_busy,
        ),
        ("a_chunk_that_comes_home_is_nobodys", test_a_chunk_that_came_home_is_still_the_peers),
    ],
)
def test_a_broken_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: str, test: Callable[[], None]
) -> None:
    for part in ("Machine", "MachineOptions"):
        monkeypatch.setattr(pipeline, part, getattr(tests_build, part))
    test()
    tests_build.set_mutant(mutant)
    try:
        with pytest.raises(AssertionError):
            test()
    finally:
        tests_build.set_mutant("")
