# SPDX-License-Identifier: Apache-2.0
"""Peers with a share secret have sessions only with those that have the same one."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.contract.rig import Rig
from tests.wait import wait_until
from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.peers.base import Common, SlotMemory
from vllm_nvmeof_offload.peers.clients import PeerClients
from vllm_nvmeof_offload.peers.messages import (
    VERSION,
    AnyMessage,
    Beat,
    Challenge,
    Channel,
    Greeting,
    Hello,
    Proof,
    Read,
    Refused,
    Welcome,
    new_nonce,
)

from .fakes import SLOT_BYTES, TAG, WAIT_MS, Desk, FakePeer
from .kit import Puller, Serving

OURS, THEIRS = b"a secret of this test", b"a secret of another test"


@contextmanager
def clients_of(address: str, secret: bytes) -> Iterator[PeerClients]:
    memory = mmap.mmap(-1, SLOT_BYTES)
    slots = SlotMemory(np.frombuffer(memory, np.uint8).ctypes.data, SLOT_BYTES, 1)
    common = Common("k", 0, 1, SLOT_BYTES, secret)
    clients = PeerClients([address], common, TAG, slots, memoryview(memory), by_nixl=False)
    yield clients
    assert clients.close()


class Greeter:
    """P: a socket that greets by hand. heard, said: the frames that went either way."""

    def __init__(self, desk: Desk) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._socket.connect(desk.server.address)
        self._ours, self._theirs = Channel(), Channel()
        self.said: list[bytes] = []
        self.heard: list[bytes] = []

    def say(self, message: AnyMessage) -> None:
        self.say_raw(self._ours.encode(message))

    def say_raw(self, raw: bytes) -> None:
        self.said.append(raw)
        self._socket.send(raw)

    def hear(self) -> AnyMessage:
        self.heard.append(self._socket.recv())
        return self._theirs.decode(self.heard[-1])

    def greet(self, secret: bytes) -> AnyMessage:
        """Say hello; return the answer."""
        common = {"keyspace": "k", "rank": 0, "world_size": 1, "slot_bytes": SLOT_BYTES}
        hello = Hello(version=VERSION, tag=TAG, nonce=new_nonce(secret), **common)  # type: ignore[arg-type]
        self.say(hello)
        return self.hear()

    def prove(self, secret: bytes, challenge: AnyMessage) -> AnyMessage:
        assert isinstance(challenge, Challenge)
        self.say(Proof(proof=Greeting(secret, self.said[0], challenge.nonce).of_p()))
        return self.hear()

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(secret=OURS)
    yield desk
    desk.close()


@pytest.fixture
def greeter(desk: Desk) -> Iterator[Callable[[], Greeter]]:
    made: list[Greeter] = []

    def make() -> Greeter:
        made.append(Greeter(desk))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("transport", ["messages"], indirect=True)
def test_peers_with_one_secret_serve(store: Rig, transport: str, tmp_path: Path) -> None:
    serving = Serving(store, tmp_path / "d", transport, secret=OURS.hex())
    puller = Puller(store, serving.address, by_nixl=False, secret=OURS)
    puller.wait_usable()
    assert puller.run(puller.read(0), puller.read(1)) == [OK, OK]
    assert puller.clients.counts.other_secret == 0
    puller.close()
    assert serving.close()["other_secret"] == 0


@pytest.mark.parametrize(
    ("d_secret", "p_secret", "why"),
    [
        (OURS, THEIRS, "another share secret"),
        (OURS, b"", "it has no share secret"),
        (b"", OURS, "it has a share secret"),
    ],
)
def test_any_other_secret_is_refused_counted_and_said_once(
    d_secret: bytes, p_secret: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(secret=d_secret)
    caplog.set_level(logging.INFO, logger.name)
    with clients_of(desk.server.address, p_secret) as clients:
        wait_until("two refusals", lambda: clients.counts.other_secret >= 2)
        assert desk.server.counts.other_secret >= 2
        assert not clients.state(0).usable
        assert (clients.counts.lost, desk.server.counts.sessions) == (0, 0)
        assert desk.server.counts.malformed == 0
    lines = [one.getMessage() for one in caplog.records if why in one.getMessage()]
    assert [line.split(":")[0] for line in sorted(lines)] == ["a peer is refused", "peer tcp"]
    assert all("give both the same share_secret_file" in line for line in lines)
    assert not any(secret.decode() in line for line in lines for secret in (OURS, THEIRS))
    desk.close()


def test_nothing_that_was_said_before_proves_anything(
    desk: Desk, greeter: Callable[[], Greeter]
) -> None:
    first = greeter()
    assert isinstance(first.prove(OURS, first.greet(OURS)), Welcome)
    again = greeter()
    again.say_raw(first.said[0])
    assert isinstance(again.hear(), Challenge)
    again.say_raw(first.said[1])
    refused = again.hear()
    assert isinstance(refused, Refused)
    assert refused.about_secret
    assert (desk.server.counts.sessions, desk.server.counts.other_secret) == (1, 1)

    # Nor does what D has said to another P.
    peer = FakePeer()
    with clients_of(peer.address, OURS) as clients:
        peer.take_hello()
        for raw in first.heard:
            peer.send_raw(raw)
        wait_until("a refusal", lambda: clients.counts.other_secret == 1)
        assert not clients.state(0).usable
    peer.close()


def test_p_asks_nothing_of_a_peer_that_proves_nothing() -> None:
    peer = FakePeer()
    with clients_of(peer.address, OURS) as clients:
        peer.welcome()
        wait_until("a refusal", lambda: clients.counts.other_secret == 1)
        assert not clients.state(0).usable
    peer.close()


def test_a_welcome_with_other_values_than_were_proven_is_refused() -> None:
    """Whoever sits between the two cannot say where D's memory is."""
    peer = FakePeer()
    with clients_of(peer.address, OURS) as clients:
        hello = peer.take_hello()
        nonce = b"n" * 16
        peer.send(Challenge(nonce=nonce))
        assert isinstance(peer.take(Proof), Proof)
        greeting = Greeting(OURS, Channel().encode(hello), nonce)
        more = {"metadata": b"", "pid": 0, "probe_address": 0, "probe": bytes(16)}
        welcome = Welcome(has_rdma=False, address=0, slots=8, credits=8, **more)  # type: ignore[arg-type]
        welcome.proof = greeting.of_d(welcome)
        welcome.address = 4096
        peer.send(welcome)
        wait_until("a refusal", lambda: clients.counts.other_secret == 1)
    peer.close()


def test_a_proof_of_d_is_none_of_p(desk: Desk, greeter: Callable[[], Greeter]) -> None:
    one = greeter()
    challenge = one.greet(OURS)
    assert isinstance(challenge, Challenge)
    more = {"metadata": b"", "pid": 0, "probe_address": 0, "probe": bytes(16)}
    welcome = Welcome(has_rdma=False, address=0, slots=8, credits=8, **more)  # type: ignore[arg-type]
    one.say(Proof(proof=Greeting(OURS, one.said[0], challenge.nonce).of_d(welcome)))
    assert isinstance(one.hear(), Refused)
    assert desk.server.counts.other_secret == 1


@pytest.mark.parametrize("message", [Beat(), Read(inline=True, reads=[])], ids=["beat", "read"])
def test_what_is_no_proof_is_malformed(
    desk: Desk, greeter: Callable[[], Greeter], message: AnyMessage
) -> None:
    one = greeter()
    assert isinstance(one.greet(OURS), Challenge)
    one.say(message)
    desk.until(lambda: desk.server.counts.malformed == 1)
    assert not desk.port.started
    another = greeter()
    assert isinstance(another.prove(OURS, another.greet(OURS)), Welcome)


def test_a_proof_of_no_length_is_refused(desk: Desk, greeter: Callable[[], Greeter]) -> None:
    one = greeter()
    one.greet(OURS)
    one.say(Proof(proof=b""))
    assert isinstance(one.hear(), Refused)


def test_a_stranger_learns_nothing_but_that_there_is_a_secret(
    greeter: Callable[[], Greeter],
) -> None:
    answer = greeter().greet(b"")
    assert isinstance(answer, Refused)
    assert answer.about_secret
    assert "keyspace" not in answer.text


def test_many_who_prove_nothing_keep_nobody_out(desk: Desk, greeter: Callable[[], Greeter]) -> None:
    for _ in range(200):
        assert isinstance(greeter().greet(OURS), Challenge)
    one = greeter()
    assert isinstance(one.prove(OURS, one.greet(OURS)), Welcome)


def test_a_secret_is_in_no_text() -> None:
    assert OURS.decode() not in repr(Common("k", 0, 1, SLOT_BYTES, OURS))
