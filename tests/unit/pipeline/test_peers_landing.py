# SPDX-License-Identifier: Apache-2.0
"""Loads that land in cache slots, of which peers bring a part: through stream slots, so that no
pull ever writes into a cache slot."""

from __future__ import annotations

import errno

from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.errors import CANCELLED, OK, STALE, io_error
from vllm_nvmeof_offload.peers.base import NO_PEER, PeerRead, PeerState

from .bench import READ_S, STRIDE, Bench

FAST = PeerState(usable=True, credits=8, bytes_per_s=0.0, queued_bytes=0)
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


def _own(bench: Bench) -> list[int]:
    return [bench.number(op) for op in bench.io.started]


def _slot(address: int) -> int:
    return address // STRIDE


def _bring(bench: Bench) -> None:
    """Let the peers end well what they were asked for."""
    for token in list(bench.peers.reads):
        bench.peers.end(token)
    bench.pipeline.step()


def _finish_own(bench: Bench) -> None:
    while bench.turn():
        pass


def _finish(bench: Bench) -> None:
    _finish_own(bench)
    while bench.peers.reads:
        _bring(bench)
        _finish_own(bench)


def test_equal_lanes_share_a_load_that_lands() -> None:
    bench = _landing()
    assert _own(bench) == [0, 2, 4, 6]
    assert [_slot(op.address) for op in bench.io.started] == [0, 2, 4, 6], "straight into the cache"
    assert [read.place.slot for _, read in bench.peers.asked] == [1, 3, 5, 7]
    assert all(_slot(read.address) >= CACHE for read in _reads(bench))
    _finish(bench)
    assert bench.finished() == [(1, ())]
    assert bench.idle()


def test_a_chunk_is_copied_to_the_gpu_once_it_has_landed() -> None:
    bench = _landing()
    pulled = {_slot(read.address) for read in _reads(bench)}
    _bring(bench)
    assert not bench.copy.submitted, "their cache slots do not hold them yet"
    ((ticket, direction, sources, fence),) = bench.landing.submitted
    assert direction is Direction.LOAD
    assert fence is None
    assert {_slot(source) for source in sources} == pulled
    bench.landing.finish(ticket)
    bench.pipeline.step()
    ((_, _, staged, _),) = bench.copy.submitted
    assert {_slot(address) for address in staged} == {1, 3, 5, 7}
    _finish(bench)
    bench.load(2, 3, 3, None)  # it stays there
    assert len(bench.copy.submitted) > 1
    _finish(bench)
    assert [failures for _, failures in bench.finished()] == [(), ()]
    assert bench.idle()


def test_the_own_lane_takes_what_lands_as_late_as_what_does_not() -> None:
    """A chunk that is given to the own lane early cannot go to the peer any more."""
    bench = Bench(stream_slots=4, cache_slots=CACHE, peers=[FAST._replace(credits=1)])
    bench.pipeline.step()
    bench.load_chunks(1, [(n, n, n) for n in range(8)])
    bench.pipeline.step()
    assert len(_own(bench)) == 2, "its share of the slots"
    bench.io_done()
    assert len(_own(bench)) == 3
    _finish(bench)
    assert bench.finished() == [(1, ())]
    assert bench.idle()


def test_what_a_peer_fails_at_is_read_into_its_cache_slot() -> None:
    bench = _landing()
    for read in _reads(bench):
        bench.peers.end(read.token, STALE)
    bench.pipeline.step()
    assert sorted(_own(bench)) == list(range(8))
    assert sorted(_slot(op.address) for op in bench.io.started) == list(range(8))
    _finish(bench)
    assert bench.finished() == [(1, ())]
    assert not bench.landing.submitted
    assert bench.idle()


def test_a_pull_that_may_go_on_holds_its_stream_slot_and_no_cache_slot() -> None:
    bench = _landing()
    held = _reads(bench)
    for read in held:
        bench.peers.end(read.token, io_error(errno.EIO), released=False)
    bench.pipeline.step()
    assert sorted(_slot(op.address) for op in bench.io.started) == list(range(8))
    _finish_own(bench)
    assert bench.finished() == [(1, ())]
    assert not bench.idle()
    for read in held:
        bench.peers.end(read.token, CANCELLED)
    bench.pipeline.step()
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
    _finish(bench)
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
    _finish(bench)
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
    _finish(bench)
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
