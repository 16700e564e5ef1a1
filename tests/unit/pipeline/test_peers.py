# SPDX-License-Identifier: Apache-2.0
"""Reads by peers: the choice of chunks, copies into cache slots, and pauses of peers."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from vllm_nvmeof_offload.copy import geometry
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    DEADLINE,
    OK,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.native import _tiers_mutants as tests_build
from vllm_nvmeof_offload.peers.base import NO_PEER, PeerRead, PeerState
from vllm_nvmeof_offload.worker import pipeline

from .bench import READ_S, Bench

# -- which chunks they get, and what becomes of them when a peer fails ----------------

FAST = PeerState(usable=True, credits=8, bytes_per_s=0.0, queued_bytes=0)


def _asked(bench: Bench) -> list[int]:
    return [read.place.slot for _, read in bench.peers.asked]


def _own(bench: Bench) -> list[int]:
    return [bench.number(op) for op in bench.io.started]


def _finish(bench: Bench) -> None:
    """End everything well, peers' reads too."""
    while True:
        for token in list(bench.peers.reads):
            bench.peers.end(token)
        if not bench.turn():
            return


def test_equal_lanes_share_a_load() -> None:
    bench = Bench(stream_slots=8, peers=[FAST])
    bench.stream(1, range(8))
    bench.pipeline.step()
    assert _own(bench) == [0, 2, 4, 6]
    assert _asked(bench) == [1, 3, 5, 7]
    assert len({read.address for _, read in bench.peers.asked}) == 4
    _finish(bench)
    assert bench.finished() == [(1, ())]
    assert bench.idle()


def test_only_the_helpers_that_a_request_named_read_for_it() -> None:
    bench = Bench(stream_slots=12, peers=[FAST, FAST])
    bench.stream(1, range(4), helpers=0b10)
    bench.stream(2, range(4, 8), helpers=0)
    bench.pipeline.step()
    assert {lane for lane, _ in bench.peers.asked} == {1}
    assert max(_asked(bench)) < 4, "nobody reads for the second load"
    bench.stream(3, range(8, 12))
    _finish(bench)
    assert {lane for lane, read in bench.peers.asked if read.place.slot >= 8} == {0, 1}
    assert sorted(bench.finished()) == [(1, ()), (2, ()), (3, ())]


def test_what_a_peer_fails_at_goes_home_once_with_its_retry_and_its_deadline() -> None:
    bench = Bench(stream_slots=12, peers=[FAST, FAST])
    bench.stream(1, range(4))
    bench.pipeline.step()
    first = dict(bench.peers.reads)
    bench.now_s = 1.0
    for token in first:
        bench.peers.end(token, STALE)
    bench.pipeline.step()
    assert len(bench.peers.asked) == len(first), "no other peer is asked"
    assert sorted(_own(bench)) == [0, 1, 2, 3]
    home = bench.io_of(next(iter(first.values())).place.slot)
    bench.io.complete(home, io_error(errno.EIO))
    bench.pipeline.step()
    assert len(_own(bench)) == 5, "the retry"
    bench.hang(READ_S - 1.0)
    assert len(bench.io.cancelled) == 4, "the deadline is that of the first hand-over"
    assert [{code for _, code in rows} for _, rows in bench.finished()] == [{DEADLINE}]


def test_a_peers_try_ends_at_half_of_the_deadline() -> None:
    bench = Bench(stream_slots=8, peers=[FAST])
    bench.stream(1, range(4))
    bench.pipeline.step()
    (token, silent), *_ = bench.peers.reads.items()
    assert silent.deadline_s == READ_S / 2
    assert bench.pipeline.deadline_in_s() == READ_S / 2
    bench.now_s = READ_S / 2
    bench.pipeline.step()
    assert sorted(bench.peers.cancelled) == sorted(bench.peers.reads)
    again = bench.io.ops[bench.io_of(silent.place.slot)]
    assert again.address not in {read.address for read in bench.peers.reads.values()}
    while bench.turn():
        pass
    assert bench.finished() == [(1, ())]
    assert not bench.idle(), "a pull may still write into the slots"
    for token in list(bench.peers.reads):
        bench.peers.end(token, CANCELLED)
    bench.pipeline.step()
    assert bench.idle()


def test_peers_cannot_take_the_slots_of_the_targets() -> None:
    bench = Bench(stream_slots=4, peers=[FAST])
    bench.stream(1, range(40))
    for _ in range(6):
        bench.pipeline.step()
        for token in list(bench.peers.reads):
            if token not in bench.peers.cancelled:
                bench.peers.end(token, DEADLINE, released=False)
    bench.pipeline.step()
    assert len(bench.peers.reads) <= 2
    while bench.turn():
        pass
    assert bench.finished() == [(1, ())]


def test_a_cancelled_load_stops_asking() -> None:
    bench = Bench(stream_slots=8, peers=[FAST])
    bench.stream(1, range(4))
    bench.pipeline.step()
    bench.cancel(1)
    bench.pipeline.step()
    assert sorted(bench.peers.cancelled) == sorted(bench.peers.reads)
    assert [len(rows) for _, rows in bench.finished()] == [4]
    for token in list(bench.peers.reads):
        bench.peers.end(token, OK)
    for token in list(bench.io.ops):
        bench.io.complete(token)
    bench.pipeline.step()
    assert bench.idle()
    assert not bench.copy.submitted


# -- loads that land in cache slots: no pull ever writes into a cache slot ------------

CACHE = 8


def _landing(chunks: int = 8, peers: tuple[PeerState, ...] = (FAST,)) -> Bench:
    """A load of so many chunks, each into the cache slot of its number."""
    bench = Bench(stream_slots=8, cache_slots=CACHE, peers=peers)
    bench.pipeline.step()  # it gets to know its peers
    bench.load_chunks(1, [(n, n, n) for n in range(chunks)])
    bench.pipeline.step()
    return bench


def _reads(bench: Bench) -> list[PeerRead]:
    return list(bench.peers.reads.values())


def _bring(bench: Bench) -> None:
    """Let the peers end well what they were asked for."""
    for token in list(bench.peers.reads):
        bench.peers.end(token)
    bench.pipeline.step()


def _finish_own(bench: Bench) -> None:
    while bench.turn():
        pass


def _finish_in_turn(bench: Bench) -> None:
    _finish_own(bench)
    while bench.peers.reads:
        _bring(bench)
        _finish_own(bench)


def test_the_own_lane_takes_what_lands_as_late_as_what_does_not() -> None:
    """A chunk that is given to the own lane early cannot go to the peer any more."""
    bench = Bench(stream_slots=4, cache_slots=CACHE, peers=[FAST._replace(credits=1)])
    bench.pipeline.step()
    bench.load_chunks(1, [(n, n, n) for n in range(8)])
    bench.pipeline.step()
    assert len(_own(bench)) == 2, "its share of the slots"
    bench.io_done()
    assert len(_own(bench)) == 3
    _finish_in_turn(bench)
    assert bench.finished() == [(1, ())]
    assert bench.idle()


def test_a_silent_peers_chunks_are_read_here_with_the_deadline_that_they_had() -> None:
    bench = _landing()
    silent = _reads(bench)
    bench.hang(READ_S / 2)
    assert sorted(bench.peers.cancelled) == [read.token for read in silent]
    assert sorted(_own(bench)) == list(range(8))
    bench.hang(READ_S / 2)
    (finished,) = bench.finished()
    assert {row for row, _ in finished[1]} >= {1, 3, 5, 7}


def test_a_cancelled_load_leaves_its_cache_slots_and_not_the_pulls_buffers() -> None:
    bench = _landing()
    held = _reads(bench)
    bench.cancel(1)
    bench.pipeline.step()
    assert sorted(bench.peers.cancelled) == [read.token for read in held]
    for token in list(bench.io.ops):
        bench.io.complete(token, CANCELLED)
    bench.pipeline.step()
    bench.reports()
    bench.store(2, 1, 77)  # a slot that a peer's chunk was to land in
    assert bench.copy.submitted, "nothing writes there any more"
    _finish_own(bench)
    assert not bench.idle()
    _bring(bench)
    assert not bench.landing.submitted
    assert bench.idle()


def test_a_cancelled_loads_chunks_land_if_another_load_waits_for_them() -> None:
    bench = _landing()
    bench.load_chunks(2, [(n, n, None) for n in range(8)])
    bench.cancel(1)
    bench.pipeline.step()
    assert not bench.peers.cancelled
    _finish_in_turn(bench)
    assert sorted(failures == () for _, failures in bench.finished()) == [False, True]
    assert len(bench.landing.submitted) == 1
    assert bench.idle()


def test_a_cancelled_loads_chunk_that_a_peer_fails_at_is_read_for_those_who_wait() -> None:
    bench = _landing()
    bench.load_chunks(2, [(n, n, None) for n in range(8)])
    bench.cancel(1)
    bench.pipeline.step()
    for read in _reads(bench):
        bench.peers.end(read.token, STALE)
    bench.pipeline.step()
    _finish_in_turn(bench)
    assert sorted(_own(bench)) == list(range(8))
    assert (2, ()) in bench.finished()
    assert bench.idle()


def test_what_waits_for_its_lane_is_read_here_if_the_peer_is_lost() -> None:
    bench = Bench(stream_slots=2, cache_slots=CACHE, peers=[FAST])
    bench.pipeline.step()
    bench.load_chunks(1, [(n, n, n) for n in range(8)])
    bench.pipeline.step()
    bench.peers.lanes[0] = NO_PEER
    for token in list(bench.peers.reads):
        bench.peers.end(token, io_error(errno.ENOTCONN))
    bench.pipeline.step()
    _finish_in_turn(bench)
    assert sorted(_own(bench)) == list(range(8))
    assert bench.finished() == [(1, ())]
    assert bench.idle()


def test_a_cancelled_load_gives_up_what_waits_for_its_lane() -> None:
    bench = Bench(stream_slots=2, cache_slots=CACHE, peers=[FAST._replace(credits=1)])
    bench.pipeline.step()
    bench.load_chunks(1, [(n, n, n) for n in range(8)])
    bench.pipeline.step()
    bench.cancel(1)
    bench.pipeline.step()
    bench.io.complete(next(iter(bench.io.ops)), OK)
    _bring(bench)
    assert len(_own(bench)) == 1
    assert bench.idle()


# -- peers that rest ------------------------------------------------------------------

CHUNK_S = 0.1  # of each chunk that a target here reads
#: Of a load of four chunks, a peer and the target here read two each, and the target all four.
SHARED_S, ALONE_S = 2 * CHUNK_S, 4 * CHUNK_S
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
            bench.now_s += CHUNK_S
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
    monkeypatch.setattr(geometry, "NativeGeometry", tests_build.CacheGeometry)
    test()
    tests_build.set_mutant(mutant)
    try:
        with pytest.raises(AssertionError):
            test()
    finally:
        tests_build.set_mutant("")
