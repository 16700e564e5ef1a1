# SPDX-License-Identifier: Apache-2.0
"""Reads by peers: which chunks they get, and what becomes of them when a peer fails."""

from __future__ import annotations

import errno

from tests.chunks import Reported
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, STALE, io_error
from vllm_nvmeof_offload.peers.base import NO_PEER, PeerState
from vllm_nvmeof_offload.protocol import OpKind

from .bench import READ_S, STRIDE, Bench

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


def test_a_peer_that_ends_later_gets_nothing() -> None:
    busy = PeerState(usable=True, credits=8, bytes_per_s=0.0, queued_bytes=100 * STRIDE)
    bench = Bench(stream_slots=8, peers=[busy])
    bench.stream(1, range(4))
    bench.pipeline.step()
    assert _own(bench) == [0, 1, 2, 3]


def test_one_without_credits_gets_nothing_and_is_not_waited_for() -> None:
    none = PeerState(usable=True, credits=0, bytes_per_s=1e9, queued_bytes=0)
    bench = Bench(stream_slots=8, peers=[none, NO_PEER])
    bench.stream(1, range(4))
    bench.pipeline.step()
    assert _own(bench) == [0, 1, 2, 3]


def test_a_peer_has_no_more_than_its_credits() -> None:
    bench = Bench(stream_slots=16, peers=[FAST._replace(credits=2)])
    bench.stream(1, range(12))
    bench.pipeline.step()
    assert len(bench.peers.reads) == 2
    bench.peers.end(next(iter(bench.peers.reads)))
    bench.pipeline.step()
    assert len(bench.peers.reads) == 2
    assert len(_asked(bench)) == 3


def test_a_small_load_is_not_split() -> None:
    bench = Bench(stream_slots=8, peers=[FAST])
    bench.stream(1, range(3))
    bench.pipeline.step()
    assert _own(bench) == [0, 1, 2]


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


def test_fetches_go_to_no_peer() -> None:
    bench = Bench(stream_slots=8, cache_slots=8, peers=[FAST])
    bench.fetch_chunks(1, [(n, n, n) for n in range(4)])
    bench.pipeline.step()
    assert not bench.peers.asked


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


def test_a_failure_before_its_release_leaves_the_slot_to_the_peer() -> None:
    bench = Bench(stream_slots=4, peers=[FAST])
    bench.stream(1, range(4))
    bench.pipeline.step()
    held = list(bench.peers.reads.values())
    for read in held:
        bench.peers.end(read.token, io_error(errno.EIO), released=False)
    bench.pipeline.step()
    while bench.turn():
        pass
    assert bench.finished() == [(1, ())]
    used = {op.address for op in bench.io.started}
    assert not used & {read.address for read in held}
    for read in held:
        bench.peers.end(read.token, io_error(errno.EIO))
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


def test_a_peer_that_goes_gives_back_what_it_was_not_asked_yet() -> None:
    bench = Bench(stream_slots=8, peers=[FAST])
    bench.stream(1, range(4))
    bench.pipeline.step()
    bench.peers.lanes[0] = NO_PEER
    for token in list(bench.peers.reads):
        bench.peers.end(token, CANCELLED)
    bench.pipeline.step()
    assert sorted(_own(bench)) == [0, 1, 2, 3]
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


def test_peers_failures_say_nothing_of_a_target() -> None:
    bench = Bench(stream_slots=8, peers=[FAST])
    bench.stream(1, range(4))
    bench.pipeline.step()
    for token in list(bench.peers.reads):
        bench.peers.end(token, io_error(errno.EIO))
    _finish(bench)
    assert bench.finished() == [(1, ())]
    assert bench.reports() == [Reported(1, row) for row in range(4)], "and no verdict"
    assert all(op.kind is OpKind.LOAD for op in bench.io.started)


def test_queues_by_lane() -> None:
    known = PeerState(usable=True, credits=8, bytes_per_s=2.0 * STRIDE, queued_bytes=STRIDE)
    bench = Bench(stream_slots=4, peers=[known])
    bench.stream(1, range(8))
    bench.pipeline.step()
    own, peer = bench.pipeline.read_queues()
    asked = len(bench.peers.reads)
    assert own == ((8 - asked) * STRIDE, 0.0)
    assert peer == ((1 + asked) * STRIDE, (1 + asked) / 2)
