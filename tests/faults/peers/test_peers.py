# SPDX-License-Identifier: Apache-2.0
"""Reads through a peer in another process, over real files, and through faulty and killed peers."""

from __future__ import annotations

import errno
import random
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
import zmq

from tests.contract.rig import Rig, name
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, STALE, io_error
from vllm_nvmeof_offload.peers.base import SILENT_S
from vllm_nvmeof_offload.peers.session import VERSION, Channel, Hello, Refused
from vllm_nvmeof_offload.protocol import SlotIdentity

from . import kit
from .conftest import MakePair
from .kit import D_SLOTS, P_SLOTS, TRANSPORTS, Puller, Serving


def test_what_a_peer_brings_is_what_the_owner_stored(make_pair: MakePair) -> None:
    serving, puller = make_pair()
    assert puller.wait_usable().credits == D_SLOTS
    for _ in range(5):
        for first in (0, 8):
            tokens = [puller.read(number) for number in range(first, first + 8)]
            assert puller.run(*tokens) == [OK] * 8
    assert puller.clients.counts.pulled_bytes == 80 * 24_000
    counts = serving.ask()
    assert counts["served_bytes"] == 80 * 24_000
    assert (counts["failed"], counts["busy"], counts["malformed"]) == (0, 0, 0)
    puller.until(lambda: serving.ask()["free"] == D_SLOTS)


def test_the_rate_of_a_peer_is_known_after_some_reads(make_pair: MakePair) -> None:
    _, puller = make_pair()
    assert puller.wait_usable().bytes_per_s == 0
    for _ in range(500):
        assert puller.run(*[puller.read(number) for number in range(D_SLOTS)]) == [OK] * D_SLOTS
        if puller.clients.state(0).bytes_per_s:
            break
    assert 1e5 < puller.clients.state(0).bytes_per_s < 1e12


def test_a_peer_reports_the_bytes_of_others_that_it_reads_first(
    store: Rig, transport: str, tmp_path: Path
) -> None:
    knobs = {"read_delay_ms": 700}
    serving = Serving(store, tmp_path / "d", transport, engine="faulty-uring", knobs=knobs)
    busy, idle = (Puller(store, serving.address, by_nixl=TRANSPORTS[transport]) for _ in "12")
    busy.wait_usable()
    idle.wait_usable()
    share = D_SLOTS // 2  # of each of two sessions
    busy.until(lambda: busy.clients.state(0).credits == share)
    tokens = [busy.read(number) for number in range(share)]
    busy.ask(*tokens)
    idle.until(lambda: idle.clients.state(0).queued_bytes == share * store.pool.slot_bytes)
    assert busy.clients.state(0).queued_bytes == 0, "its own reads it counts itself"
    busy.until(lambda: len(busy.free) == P_SLOTS)
    idle.until(lambda: idle.clients.state(0).queued_bytes == 0)
    for puller in (busy, idle):
        puller.close()
        puller.at_rest()
    serving.close()


@pytest.mark.parametrize("other", [name(3), name(2, generation=2)], ids=["key", "generation"])
def test_a_chunk_that_is_another_one_by_now_is_stale(
    make_pair: MakePair, other: SlotIdentity
) -> None:
    _, puller = make_pair()
    puller.wait_usable()
    assert puller.run(puller.read(2, other)) == [STALE]
    assert puller.run(puller.read(2)) == [OK]


def test_a_region_that_the_peer_has_not_opened_lets_its_lane_rest(
    store: Rig, make_pair: MakePair, tmp_path: Path
) -> None:
    """The peer has the region of the first target alone."""
    place = store.pool.superblocks[0].place(0)
    slab = str(store.pool.directories[0] / "slab")
    region = {"slab": slab, "uuid": place.region_uuid.hex(), "rank": place.rank}
    _, puller = make_pair(regions=[region])
    puller.wait_usable()
    assert puller.run(puller.read(1)) == [io_error(errno.EBADF)]
    puller.until(lambda: not puller.clients.state(0).usable)
    puller.wait_usable()
    assert puller.run(puller.read(2)) == [OK]


def test_more_reads_than_credits_are_not_asked_for(make_pair: MakePair) -> None:
    serving, puller = make_pair()
    puller.wait_usable()
    outcomes = puller.run(*[puller.read(number % 16) for number in range(D_SLOTS + 3)])
    assert outcomes == [OK] * D_SLOTS + [io_error(errno.EAGAIN)] * 3
    assert serving.ask()["busy"] == 0


def test_a_deadline_and_a_cancellation_end_reads_that_the_peer_holds(make_pair: MakePair) -> None:
    """The peer still owes their answers, so that its lane has fewer credits."""
    serving, puller = make_pair(how="silent")
    puller.wait_usable()
    late, given_up, waiting = puller.read(0, within_s=0.5), puller.read(1), puller.read(2)
    puller.ask(late, given_up, waiting)
    puller.until(lambda: serving.ask()["free"] == D_SLOTS - 3)  # its storage has them
    puller.clients.cancel([given_up, 12345])
    puller.until(lambda: len(puller.outcomes) == 2)
    assert (puller.outcomes[late], puller.outcomes[given_up]) == (DEADLINE, CANCELLED)
    assert len(puller.free) == P_SLOTS - 1
    puller.until(lambda: puller.clients.state(0).credits == D_SLOTS - 2)
    puller.clients.cancel([waiting])
    puller.until(lambda: len(puller.free) == P_SLOTS)
    assert puller.outcomes[waiting] == CANCELLED


def test_a_slow_peer_answers_what_is_given_up_and_gets_its_credits_back(
    make_pair: MakePair,
) -> None:
    serving, puller = make_pair(engine="faulty-uring", knobs={"read_delay_ms": 300})
    puller.wait_usable()
    tokens = [puller.read(number, within_s=0.1) for number in range(D_SLOTS)]
    assert puller.run(*tokens) == [DEADLINE] * D_SLOTS
    puller.until(lambda: puller.clients.state(0).credits == D_SLOTS)
    outcomes = puller.run(*[puller.read(n, within_s=kit.WAIT_S) for n in range(D_SLOTS)])
    assert outcomes == [OK] * D_SLOTS, outcomes
    puller.until(lambda: serving.ask()["free"] == D_SLOTS)


@pytest.mark.parametrize("transport", ["messages"], indirect=True)
@pytest.mark.parametrize("what", ["keyspace", "rank", "tag"])
def test_who_has_something_else_is_refused(
    store: Rig, transport: str, tmp_path: Path, what: str
) -> None:
    serving = Serving(
        store, tmp_path / "d", transport, **({"tag": "ab" * 16} if what == "tag" else {})
    )
    more = {"keyspace": {"keyspace": "another"}, "rank": {"rank": 1}, "tag": {}}[what]
    puller = Puller(store, serving.address, **more)  # type: ignore[arg-type]
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(serving.address)
    hello = Hello(
        version=VERSION, keyspace="k", tag=b"x" * 16, rank=9, world_size=2, slot_bytes=28672
    )
    channel = Channel()
    dealer.send(channel.encode(hello))
    answer = channel.decode(dealer.recv())
    assert isinstance(answer, Refused)
    assert "rank" in answer.text
    context.destroy(0)
    assert not puller.clients.state(0).usable
    (outcome,) = puller.run(puller.read(0))
    assert outcome == io_error(errno.ENOTCONN)
    assert serving.ask()["sessions"] == 0
    puller.close()
    serving.close()


@pytest.mark.parametrize("transport", ["messages"], indirect=True)
def test_new_weights_end_the_sessions_of_the_old_ones(make_pair: MakePair) -> None:
    serving, puller = make_pair()
    puller.wait_usable()
    old, new = puller.rig.engine.stamp.tag, b"n" * 16
    serving.ask("tag " + new.hex())
    puller.until(lambda: not puller.clients.state(0).usable)
    puller.clients.set_tag(new)
    puller.wait_usable()
    assert puller.run(puller.read(0)) == [STALE], "the chunk is of the old weights"
    puller.clients.set_tag(old)
    serving.ask("tag " + old.hex())
    puller.wait_usable()
    assert puller.run(puller.read(0)) == [OK]
    assert puller.clients.counts.malformed == 0


def nowhere() -> str:
    """An address where nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def test_a_peer_that_is_killed_is_missed_at_once_and_its_next_process_is_found(
    store: Rig, transport: str, tmp_path: Path
) -> None:
    serving = Serving(store, tmp_path / "d", transport)
    puller = Puller(store, serving.address, by_nixl=TRANSPORTS[transport])
    puller.wait_usable()
    assert puller.run(puller.read(0)) == [OK]
    serving.kill()
    killed_s = time.monotonic()
    puller.until(lambda: puller.clients.counts.lost == 1)
    assert time.monotonic() - killed_s < SILENT_S / 2, "it was asked for nothing"
    assert not puller.clients.state(0).usable
    again = Serving(store, tmp_path / "again", transport, address=serving.address)
    puller.wait_usable()
    assert puller.run(puller.read(1)) == [OK]
    assert puller.clients.counts.lost == 1
    puller.close()
    puller.at_rest()
    assert again.close()["closed"]


@pytest.mark.parametrize("transport", ["messages"], indirect=True)
def test_a_peer_that_comes_later_is_found(store: Rig, transport: str, tmp_path: Path) -> None:
    address = nowhere()
    puller = Puller(store, address)
    (outcome,) = puller.run(puller.read(0))
    assert outcome == io_error(errno.ENOTCONN)
    serving = Serving(store, tmp_path / "d", transport, address=address)
    puller.wait_usable()
    assert puller.run(puller.read(0)) == [OK]
    puller.close()
    serving.close()


# -- nothing wrong is accepted, and every read ends in time ---------------------------

WITHIN_S = 1.0


@pytest.mark.parametrize(
    ("how", "kind"),
    [("another", "stale"), ("flipped", "checksum_mismatch")],
)
def test_a_peer_that_lies_is_refused(make_pair: MakePair, how: str, kind: str) -> None:
    _, puller = make_pair(how=how)
    puller.wait_usable()
    puller.run(*[puller.read(number) for number in range(D_SLOTS)])
    assert puller.kinds() == {kind: D_SLOTS}


def test_a_peer_that_uses_its_lent_slots_is_refused(make_pair: MakePair) -> None:
    """OK means the right bytes, which `Puller.take` compares."""
    _, puller = make_pair(how="hasty")
    puller.wait_usable()
    for _ in range(3):
        if puller.clients.state(0).usable:
            puller.run(*[puller.read(number) for number in range(D_SLOTS)])
    kinds = puller.kinds()
    assert kinds["stale"] + kinds["checksum_mismatch"] >= 1, kinds


class Rounds:
    """Reads all the time, while something happens to the peer."""

    def __init__(self, store: Rig, seed: int) -> None:
        self._store = store
        self.dice = random.Random(seed)
        self.kinds: Counter[str] = Counter()

    def run(self, serving: Serving, *signals: tuple[float, signal.Signals]) -> None:
        """signals: each so many seconds after the one before."""
        puller = Puller(self._store, serving.address)
        puller.wait_usable()
        waiting = list(signals)
        next_s = time.monotonic() + kit.PACE * waiting[0][0]
        while waiting or len(puller.free) < P_SLOTS:
            if waiting and time.monotonic() >= next_s:
                serving.signal(waiting.pop(0)[1])
                next_s = time.monotonic() + kit.PACE * (waiting[0][0] if waiting else 0.0)
            state = puller.clients.state(0)
            room = min(len(puller.free), state.credits - (P_SLOTS - len(puller.free)))
            if waiting and state.usable and room > 0:
                numbers = [self.dice.randrange(16) for _ in range(room)]
                within_s = kit.PACE * WITHIN_S
                puller.ask(*[puller.read(number, within_s=within_s) for number in numbers])
            assert time.monotonic() < next_s + 30.0
            puller.pause()
        puller.at_rest()
        assert puller.kinds()["stale"] == puller.kinds()["checksum_mismatch"] == 0
        self.kinds += puller.kinds()
        puller.close()


def stop_rounds(store: Rig, path: Path, transport: str, count: int, seed: int) -> None:
    """Half of the stops are so short that the session survives them."""
    serving = Serving(store, path / "d", transport)
    rounds = Rounds(store, seed)
    for _ in range(count):
        stop_s = rounds.dice.choice((rounds.dice.uniform(0.0, 0.3), rounds.dice.uniform(0.6, 2.0)))
        rounds.run(
            serving,
            (rounds.dice.uniform(0.0, 0.2), signal.SIGSTOP),
            (stop_s, signal.SIGCONT),
        )
    assert rounds.kinds["ok"] > 0
    puller = Puller(store, serving.address)
    puller.wait_usable()
    assert puller.run(*[puller.read(number) for number in range(D_SLOTS)]) == [OK] * D_SLOTS
    puller.until(lambda: serving.ask()["free"] == D_SLOTS)
    puller.close()
    serving.close()


def kill_rounds(store: Rig, path: Path, transport: str, count: int, seed: int) -> None:
    rounds = Rounds(store, seed)
    for number in range(count):
        serving = Serving(store, path / f"d{number}", transport)
        rounds.run(serving, (rounds.dice.uniform(0.0, 0.3), signal.SIGKILL))
        serving.kill()
    assert rounds.kinds["ok"] > 0


def test_every_read_ends_in_time_while_the_peer_is_stopped(
    store: Rig, tmp_path: Path, transport: str
) -> None:
    stop_rounds(store, tmp_path, transport, 3, seed=20261125)


def test_every_read_ends_in_time_when_the_peer_is_killed(
    store: Rig, tmp_path: Path, transport: str
) -> None:
    kill_rounds(store, tmp_path, transport, 2, seed=20261125)


@pytest.mark.soak
def test_every_read_ends_in_time_at_two_hundred_moments(
    store: Rig, tmp_path: Path, transport: str
) -> None:
    seed = time.monotonic_ns()
    print(f"seed {seed}")
    stop_rounds(store, tmp_path / "stop", transport, 150, seed)
    kill_rounds(store, tmp_path / "kill", transport, 50, seed)
