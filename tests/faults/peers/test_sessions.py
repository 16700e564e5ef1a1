# SPDX-License-Identifier: Apache-2.0
"""Each end of a session against a fake that is silent or sends what the real one never sends."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from tests.contract.rig import PAYLOAD_BYTES, Rig, name
from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    OK,
    STALE,
    io_error,
)
from vllm_nvmeof_offload.io.base import ALLOWED_CPUS
from vllm_nvmeof_offload.peers.base import NO_PEER, SILENT_S, STALLED_S
from vllm_nvmeof_offload.peers.session import (
    AnyMessage,
    Beat,
    Bye,
    Cancel,
    Channel,
    Done,
    Failed,
    FailedRead,
    Hello,
    Lent,
    Read,
    Ready,
    Reason,
    Refused,
    Sent,
    Welcome,
)
from vllm_nvmeof_offload.units import slot_stride_bytes

from .fakes import TAG, Desk, FakePeer
from .kit import LATE_S, P_SLOTS, Puller
from .stand_in import Agent, install

LOST = io_error(errno.ENOTCONN)
SIZE_BYTES = slot_stride_bytes(PAYLOAD_BYTES)
#: How much later than its time something may end on a machine that does other work too.
BUSY_S = 5.0
#: Of the first read.
TOKEN = 1


@pytest.fixture
def peer() -> Iterator[FakePeer]:
    peer = FakePeer()
    yield peer
    peer.close()


@pytest.fixture
def puller(store: Rig, peer: FakePeer) -> Iterator[Puller]:
    """It has a session with the peer."""
    puller = Puller(store, peer.address, by_nixl=False)
    peer.welcome()
    puller.wait_usable()
    yield puller
    puller.close()
    puller.at_rest()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def _slot(store: Rig, number: int) -> bytes:
    """The slot as it is in the pool."""
    store.zero(0)
    assert store.run(store.read(number, 0, name(number)))[0].outcome.ok
    return store.memory[:SIZE_BYTES]


# P


@pytest.mark.parametrize(
    "answer",
    [
        (Ready(lent=[Lent(TOKEN, 0)]),),
        (Ready(lent=[Lent(TOKEN, 99)]),),
        (Ready(lent=[Lent(12, 0)]),),
        (Failed(failed=[FailedRead(12, Reason.STALE)]),),
        (Sent(token=12), bytes(SIZE_BYTES)),
        (Sent(token=TOKEN), bytes(SIZE_BYTES - 1)),
        (Sent(token=TOKEN), bytes(SIZE_BYTES + 4096)),
        (Sent(token=TOKEN),),
        (Ready(lent=[]), b"another frame"),
        (Done(tokens=[TOKEN]),),
        (Read(inline=True, reads=[]),),
        (Refused(text="too late"),),
    ],
    ids=lambda answer: type(answer[0]).__name__,
)
def test_an_answer_that_cannot_be_ends_the_session_and_its_reads(
    peer: FakePeer, puller: Puller, answer: tuple[AnyMessage, *tuple[bytes, ...]]
) -> None:
    token = puller.read(0)
    assert token == TOKEN
    puller.ask(token)
    peer.take(Read)
    peer.send(*answer)
    begun_s = time.monotonic()
    puller.until(lambda: puller.outcomes)
    assert puller.outcomes == {token: LOST}
    assert time.monotonic() - begun_s < STALLED_S, "because of the answer"
    assert puller.clients.counts.malformed == 1
    assert not puller.clients.state(0).usable


def test_a_chunk_that_comes_in_a_message_is_proven_and_confirmed(
    store: Rig, peer: FakePeer, puller: Puller
) -> None:
    slot, other = bytearray(_slot(store, 0)), _slot(store, 1)
    answers = {bytes(slot): OK, other: STALE, bytes(SIZE_BYTES): CHECKSUM_MISMATCH}
    slot[5000] ^= 1
    answers[bytes(slot)] = CHECKSUM_MISMATCH
    for raw, outcome in answers.items():
        token = puller.read(0)
        puller.ask(token)
        peer.take(Read)
        peer.send(Sent(token=token), raw)
        puller.until(lambda token=token: token in puller.outcomes)  # type: ignore[misc]
        assert puller.outcomes[token] == outcome
        assert peer.take(Done).tokens == [token]  # type: ignore[union-attr]


def test_what_comes_for_a_read_that_was_given_up_is_not_written(
    store: Rig, peer: FakePeer, puller: Puller
) -> None:
    token = puller.read(0)
    start = puller.begun[token].address - puller.slots.address
    puller.ask(token)
    peer.take(Read)
    puller.clients.cancel([token])
    puller.until(lambda: puller.outcomes == {token: CANCELLED})
    assert len(puller.free) == P_SLOTS, "nothing touches it"
    assert puller.clients.state(0).credits == 7, "the peer owes an answer"
    assert peer.take(Cancel).tokens == [token]  # type: ignore[union-attr]
    peer.send(Sent(token=token), _slot(store, 0))
    puller.until(lambda: puller.clients.state(0).credits == 8)
    assert not puller.memory[start : start + SIZE_BYTES].any()


def test_a_peer_that_stalls_loses_its_reads_and_keeps_its_session(
    store: Rig, peer: FakePeer, puller: Puller
) -> None:
    tokens = [puller.read(number) for number in range(8)]
    begun_s = time.monotonic()
    assert puller.run(*tokens) == [LOST] * 8
    assert STALLED_S <= time.monotonic() - begun_s <= STALLED_S + BUSY_S
    puller.until(lambda: not puller.clients.state(0).usable)
    assert puller.run(puller.read(0)) == [LOST], "it is asked for nothing more"
    for token in tokens:
        peer.send(Sent(token=token), _slot(store, 0))  # what it still owes
    puller.until(lambda: puller.clients.state(0).credits == 8)
    assert puller.clients.state(0).usable
    token = puller.read(1)
    puller.ask(token)
    peer.send(Sent(token=token), _slot(store, 1))
    puller.until(lambda: token in puller.outcomes)
    assert puller.outcomes[token] == OK
    assert puller.clients.counts.lost == 0


def test_a_peer_that_stays_silent_loses_its_session(peer: FakePeer, puller: Puller) -> None:
    begun_s = time.monotonic()
    assert puller.run(puller.read(0)) == [LOST]
    puller.until(lambda: puller.clients.counts.lost == 1)
    assert SILENT_S - LATE_S <= time.monotonic() - begun_s <= SILENT_S + BUSY_S
    assert puller.clients.state(0) == NO_PEER._replace(lost=1), "the stall before is not counted"


def test_stalls_are_counted_for_who_judges_the_peer(peer: FakePeer, puller: Puller) -> None:
    for stalls in range(1, 4):
        assert puller.run(puller.read(0)) == [LOST]
        puller.until(lambda stalls=stalls: puller.clients.state(0).lost == stalls)  # type: ignore[misc]
        peer.send(Beat())
        puller.wait_usable()


def test_time_in_which_this_side_does_not_run_says_nothing_of_the_peer(
    store: Rig, peer: FakePeer, puller: Puller
) -> None:
    token = puller.read(0)
    puller.ask(token)
    peer.take(Read)
    _hold_the_interpreter(2 * STALLED_S)
    end_s = time.monotonic() + STALLED_S / 2
    while time.monotonic() < end_s:
        puller.pause()
    assert not puller.outcomes
    peer.send(Sent(token=token), _slot(store, 0))
    puller.until(lambda: puller.outcomes)
    assert puller.outcomes == {token: OK}


def _hold_the_interpreter(seconds: float) -> None:
    """No other thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def test_lost_sessions_are_counted_for_who_judges_the_peer(peer: FakePeer, puller: Puller) -> None:
    for lost in range(1, 4):
        peer.send(Bye(text="again"))
        puller.until(lambda lost=lost: puller.clients.counts.lost == lost)  # type: ignore[misc]
        assert puller.clients.state(0) == NO_PEER._replace(lost=lost)
        assert puller.run(puller.read(0)) == [LOST]
        peer.welcome()
        assert puller.wait_usable().lost == lost


def test_a_peer_that_talks_nonsense_has_no_session(store: Rig, peer: FakePeer) -> None:
    puller = Puller(store, peer.address, by_nixl=False)
    peer.take_hello()
    peer.send_raw(b"nonsense")
    puller.until(lambda: puller.clients.counts.malformed == 1)
    peer.take_hello()
    peer.send(Beat())  # before any Welcome
    puller.until(lambda: puller.clients.counts.malformed == 2)
    assert not puller.clients.state(0).usable
    puller.close()


@pytest.mark.parametrize("message", [Refused, Bye], ids=["refused", "bye"])
def test_what_a_peer_says_is_one_line_of_the_log(
    store: Rig, peer: FakePeer, message: type[Refused | Bye], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger.name)
    puller = Puller(store, peer.address, by_nixl=False)
    peer.take_hello()
    peer.send(message(text="no\nCRITICAL [engine.py:1] the GPU is gone\x1b[2J"))
    puller.until(lambda: "GPU is gone" in caplog.text)
    (said,) = [one.getMessage() for one in caplog.records if "GPU" in one.getMessage()]
    assert said.isprintable()
    puller.close()


# D


@pytest.mark.parametrize(
    "frames",
    [
        [b"nonsense"],
        [b""],
        [b"\x81\xa4type\xa4bye\x00"],
        [Channel().encode(Beat()), b"another frame"],
        [b"\x93" * 100_000],
    ],
    ids=["no message", "empty", "not whole", "two frames", "deep"],
)
def test_what_is_malformed_is_counted_and_hurts_nobody_else(
    desk: Desk, frames: list[bytes]
) -> None:
    asker = desk.asker()
    desk.until(lambda: desk.server.counts.sessions == 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(desk.server.address)
        stranger.send_multipart(frames)
        desk.until(lambda: desk.server.counts.malformed == 1)
    asker.read(0)
    desk.until(lambda: desk.port.started == [0])
    assert desk.server.counts.sessions == 1


def test_more_reads_than_slots_are_busy_and_counted(desk: Desk) -> None:
    asker = desk.asker()
    asker.read(*range(6))
    desk.until(lambda: desk.server.counts.busy == 2 and len(desk.port.started) == 4)
    desk.until(lambda: len(asker.failed) == 2)
    assert isinstance(asker.got[0], Welcome)
    assert asker.got[0].credits == 4
    assert asker.failed == [FailedRead(token, Reason.BUSY) for token in (4, 5)]


def test_a_lent_slot_is_free_a_second_after_the_deadline(desk: Desk) -> None:
    """The peer lives, and never says that it is done."""
    asker = desk.asker()
    asker.read(7, within_ms=300)
    desk.until(lambda: desk.port.started == [7])
    desk.port.end(7)
    desk.until(lambda: asker.lent == [7])
    assert desk.server.counts.free == 3
    assert 0.5 < desk.until(lambda: desk.server.counts.free == 4) < 3.0
    asker.send(Done(tokens=[7]))  # too late, and no fault of its
    asker.read(8)
    desk.until(lambda: desk.port.started == [7, 8])
    assert desk.server.counts.malformed == 0


def test_copies_that_a_peer_does_not_confirm_cost_its_credits(desk: Desk) -> None:
    asker = desk.asker()
    asker.read(0, 1, 2, 3, inline=True)
    desk.until(lambda: len(desk.port.started) == 4)
    desk.port.end()
    desk.until(lambda: desk.server.counts.free == 4)
    asker.read(4, inline=True)
    desk.until(lambda: desk.server.counts.busy == 1)
    asker.send(Done(tokens=[0]))
    asker.read(5, inline=True)
    desk.until(lambda: desk.port.started == [0, 1, 2, 3, 5])


def test_a_peer_that_is_gone_leaves_its_slots(desk: Desk) -> None:
    """At once what was lent; what the storage still reads into, when that has ended."""
    asker = desk.asker()
    asker.read(0, 1)
    desk.until(lambda: len(desk.port.started) == 2)
    desk.port.end(0)
    desk.until(lambda: asker.lent == [0])
    asker.lives = False
    took_s = desk.until(lambda: desk.server.counts.sessions == 0)
    assert took_s < SILENT_S + BUSY_S
    assert desk.server.counts.lost == 1
    assert desk.port.cancelled == [1]
    assert desk.server.counts.free == 3
    desk.port.end(1)
    desk.until(lambda: desk.server.counts.free == 4)


def test_a_cancelled_read_that_has_not_begun_never_does(desk: Desk) -> None:
    asker = desk.asker()
    asker.read(0, 1, 2, 3)
    desk.until(lambda: len(desk.port.started) == 4)
    other = desk.asker()
    other.read(4, 5)
    desk.until(lambda: other.got)
    other.send(Cancel(tokens=[4]))
    desk.until(lambda: other.failed)
    desk.port.end()
    desk.until(lambda: len(asker.lent) == 4)
    asker.send(Done(tokens=[0, 1, 2, 3]))
    desk.until(lambda: len(desk.port.started) == 5)
    assert desk.port.started[4] == 5
    other.send(Cancel(tokens=[5]))  # the storage is asked, and its end is awaited
    desk.until(lambda: desk.port.cancelled == [5])
    desk.port.end(5)
    desk.until(lambda: len(other.failed) == 2)
    assert other.failed == [FailedRead(4, Reason.CANCELLED), FailedRead(5, Reason.CANCELLED)]


def test_peers_take_turns_for_slots() -> None:
    desk = Desk(slots=6)
    first = desk.asker()
    first.read(*range(6))
    desk.until(lambda: len(desk.port.started) == 6)
    second = desk.asker()
    second.read(20, 21)
    third = desk.asker()
    third.read(30, 31)
    desk.until(lambda: third.got)
    desk.port.end()
    desk.until(lambda: len(first.lent) == 6)
    first.send(Done(tokens=list(range(6))))
    desk.until(lambda: len(desk.port.started) == 10)
    order = desk.port.started[6:]
    assert sorted(order) == [20, 21, 30, 31]
    assert all(a // 10 != b // 10 for a, b in itertools.pairwise(order))
    desk.close()


def test_sessions_have_equal_shares_of_the_slots(desk: Desk) -> None:
    first = desk.asker()
    desk.until(lambda: first.got)
    second = desk.asker()
    desk.until(lambda: second.got)
    assert [one.got[0].credits for one in (first, second)] == [4, 2]  # type: ignore[union-attr]
    first.read(0, 1, 2, 3)
    desk.until(lambda: desk.port.started)
    second.read(20, 21)
    desk.until(lambda: len(desk.port.started) == 4)
    assert sorted(desk.port.started) == [0, 1, 20, 21]
    desk.port.end()
    desk.until(lambda: first.lent)
    ready = next(one for one in first.got if isinstance(one, Ready))
    assert ready.credits == 2, "what it may ask for from now on"


def test_a_peer_that_asks_for_an_eternity_gets_this_servers_own_deadline() -> None:
    desk = Desk(read_deadline_s=0.3)
    asker = desk.asker()
    asker.read(0, 1, 2, 3, within_ms=(1 << 32) - 1)
    desk.until(lambda: len(desk.port.started) == 4)
    desk.port.end()
    desk.until(lambda: len(asker.lent) == 4)
    desk.until(lambda: desk.server.counts.free == 4)
    desk.close()


def test_the_thread_sleeps_while_slots_are_lent_and_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", sys)  # which is taken back
    install()
    turns = itertools.count()
    monkeypatch.setattr(Agent, "get_new_notifs", lambda _: next(turns))
    desk = Desk(by_nixl=True)
    asker = desk.asker()
    asker.read(0)
    desk.until(lambda: desk.port.started)
    desk.port.end()
    desk.until(lambda: asker.lent)
    asker.lives = False
    before, end_s = next(turns), time.monotonic() + 1.0
    desk.until(lambda: time.monotonic() > end_s)
    assert next(turns) - before < 200, "5000 if it never slept"
    desk.close()


def test_a_server_that_stops_does_not_wait_for_what_its_storage_reads(desk: Desk) -> None:
    asker = desk.asker()
    asker.read(0)
    desk.until(lambda: desk.port.started)
    assert desk.server.close()
    assert set(desk.port.cancelled) == {0}


def test_new_weights_end_sessions_before_anything_more_is_read(desk: Desk) -> None:
    asker = desk.asker()
    desk.until(lambda: desk.server.counts.sessions == 1)
    desk.server.set_tag(b"n" * 16)
    asker.read(0)
    desk.until(lambda: desk.server.counts.sessions == 0)
    desk.until(lambda: len(asker.got) == 2)
    assert isinstance(asker.got[1], Bye)
    assert "weights" in asker.got[1].text
    assert desk.port.started == []
    again = desk.asker()
    desk.until(lambda: again.got)
    assert isinstance(again.got[0], Refused)


@pytest.mark.parametrize(
    "message",
    [
        Done(tokens=[0]),
        Read(inline=False, reads=[]),
        Hello(version=1, keyspace="k", tag=TAG, rank=0, world_size=1, slot_bytes=1),
        Ready(lent=[]),
        Sent(token=0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_p_may_not_say_ends_its_session(desk: Desk, message: AnyMessage) -> None:
    """Before its read has ended; a `Read` that asks for the same again."""
    asker = desk.asker()
    asker.read(0)
    desk.until(lambda: desk.port.started == [0])
    if isinstance(message, Read):
        asker.read(0)
    else:
        asker.send(message)
    desk.until(lambda: desk.server.counts.malformed == 1)
    desk.until(lambda: desk.server.counts.sessions == 0)
    assert desk.port.cancelled == [0]


def test_a_session_too_many_is_refused(desk: Desk) -> None:
    askers = [desk.asker() for _ in range(65)]
    desk.until(lambda: all(one.got for one in askers))
    kinds = [type(one.got[0]) for one in askers]
    assert kinds.count(Welcome) == 64
    assert kinds.count(Refused) == 1


def test_an_asker_has_its_own_numbers(desk: Desk) -> None:
    """Two peers may use the same tokens."""
    first, second = desk.asker(), desk.asker()
    first.read(3)
    desk.until(lambda: desk.port.started == [3])
    second.read(3)
    desk.until(lambda: desk.port.started == [3, 3])
    assert desk.server.counts.malformed == 0


@pytest.mark.skipif(len(ALLOWED_CPUS) < 2, reason="one CPU")
def test_no_thread_of_either_side_is_bound_as_its_maker(store: Rig) -> None:
    """vLLM binds the thread of the model to CPUs that its own work keeps busy."""
    before = set(os.listdir("/proc/self/task"))

    def affinities() -> list[set[int]]:
        new = set(os.listdir("/proc/self/task")) - before - {str(threading.get_native_id())}
        return [os.sched_getaffinity(int(thread)) for thread in new]

    def make() -> list[set[int]]:
        os.sched_setaffinity(0, {min(ALLOWED_CPUS)})
        desk = Desk()
        puller = Puller(store, desk.server.address, by_nixl=False)
        puller.until(lambda: len(affinities()) >= 6)  # both, and the library's two of each
        found = affinities()
        puller.close()
        desk.close()
        return found

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(make).result()
    assert found
    assert all(one == set(ALLOWED_CPUS) for one in found)
