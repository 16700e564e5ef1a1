# SPDX-License-Identifier: Apache-2.0
"""Peers with a share secret have sessions only with those that have the same one."""

from __future__ import annotations

import logging
import mmap
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.contract.rig import Rig
from tests.process import wait_until
from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.peers import clients
from vllm_nvmeof_offload.peers.base import Common, SlotMemory
from vllm_nvmeof_offload.peers.clients import PeerClients
from vllm_nvmeof_offload.peers.server import CONNECTIONS_MAX
from vllm_nvmeof_offload.peers.session import MESSAGE_BYTES_MAX, VERSION, Channel, Hello, key_pair

from .fakes import SLOT_BYTES, TAG, Asker, Desk, FakePeer
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


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(secret=OURS)
    yield desk
    desk.close()


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=20.0)


@pytest.mark.parametrize("transport", ["messages"], indirect=True)
def test_peers_with_one_secret_serve(
    store: Rig, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chunk is larger than any other message, as with a real model: the frame that it comes in is
    # a slot's bytes, and what encryption adds.
    monkeypatch.setattr(clients, "MESSAGE_BYTES_MAX", 1)
    serving = Serving(store, tmp_path / "d", transport, secret=OURS.hex())
    puller = Puller(store, serving.address, by_nixl=False, secret=OURS)
    puller.wait_usable()
    assert puller.run(puller.read(0), puller.read(1)) == [OK, OK]
    assert puller.clients.counts.other_secret == 0
    puller.close()
    assert serving.close()["other_secret"] == 0


@pytest.mark.parametrize(
    ("d_secret", "p_secret"), [(OURS, THEIRS), (OURS, b""), (b"", OURS)], ids=["other", "d", "p"]
)
def test_any_other_secret_is_refused_counted_and_said_once(
    d_secret: bytes, p_secret: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(secret=d_secret)
    caplog.set_level(logging.INFO, logger.name)
    with clients_of(desk.server.address, p_secret) as clients:
        wait_until("two refusals at P", lambda: clients.counts.other_secret >= 2)
        wait_until("two refusals at D", lambda: desk.server.counts.other_secret >= 2)
        assert not clients.state(0).usable
        assert (clients.counts.lost, desk.server.counts.sessions) == (0, 0)
        assert desk.server.counts.malformed == 0
    why = "its share secret differs"
    lines = [one.getMessage() for one in caplog.records if why in one.getMessage()]
    assert [line.split(":")[0] for line in sorted(lines)] == ["a peer is refused", "peer tcp"]
    assert all("give all servers the same share_secret_file" in line for line in lines)
    assert not any(secret.decode() in line for line in lines for secret in (OURS, THEIRS))
    desk.close()


def test_p_asks_nothing_of_a_peer_that_proves_nothing() -> None:
    peer = FakePeer()
    with clients_of(peer.address, OURS) as clients:
        wait_until("a refusal", lambda: clients.counts.other_secret >= 1)
        assert not clients.state(0).usable
    assert not peer.has_heard()
    peer.close()


def test_who_knows_the_key_of_d_alone_is_refused(desk: Desk) -> None:
    """The keys of P are asked for too: the proof does not rest on a public key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.curve_serverkey, _ = key_pair(OURS, serves=True)
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(desk.server.address)
        common = {"keyspace": "k", "rank": 0, "world_size": 1, "slot_bytes": SLOT_BYTES}
        stranger.send(Channel().encode(Hello(version=VERSION, tag=TAG, **common)))  # type: ignore[arg-type]
        desk.until(lambda: desk.server.counts.other_secret)
        assert (desk.server.counts.sessions, desk.server.counts.malformed) == (0, 0)


class Relay:
    """One connection with D, whose bytes from P are kept."""

    def __init__(self, address: str) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.said = bytearray()
        self._d = connected(address)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._p, _ = self._listening.accept()
        back = threading.Thread(target=self._pass, args=(self._d, self._p, bytearray()))
        back.start()
        self._pass(self._p, self._d, self.said)
        back.join()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while raw := source.recv(65536):
                kept += raw
                sink.sendall(raw)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.join()
        for one in (self._listening, self._p, self._d):
            one.close()


def test_nothing_that_was_said_before_proves_anything(desk: Desk) -> None:
    relay = Relay(desk.server.address)
    asker = Asker(relay.address, OURS)
    desk.until(lambda: desk.server.counts.sessions == 1)
    asker.close()
    relay.close()
    desk.until(lambda: desk.server.counts.sessions == 0)
    with connected(desk.server.address) as again:
        again.sendall(relay.said)
        desk.until(lambda: desk.server.counts.other_secret)
    assert (desk.server.counts.sessions, desk.server.counts.malformed) == (0, 0)
    assert TAG not in relay.said, "it was encrypted"


#: What ZMTP begins with: signature, version, mechanism; and a frame of the largest length.
SIGNED = b"\xff" + bytes(8) + b"\x7f"
FRAME = b"\x03" + struct.pack(">Q", MESSAGE_BYTES_MAX) + bytes(MESSAGE_BYTES_MAX)


@pytest.mark.parametrize(
    "greeting",
    [
        SIGNED + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32),
        SIGNED + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32),
        SIGNED + b"\x01\x05\x00\x00",
        SIGNED + b"\x00\x05\x00\x00",
        b"\x01\x00",
    ],
    ids=["no secret", "a key that is none", "version 2", "version 1", "version 0"],
)
def test_a_message_that_never_ends_is_cut_off_before_any_proof(desk: Desk, greeting: bytes) -> None:
    sent = 0
    with connected(desk.server.address) as stranger, suppress(ConnectionError):
        stranger.sendall(greeting)
        while sent < 64 * len(FRAME):
            stranger.sendall(FRAME)
            sent += len(FRAME)
    assert sent < 64 * len(FRAME), "it takes all in"
    assert (desk.server.counts.sessions, desk.server.counts.malformed) == (0, 0)


def test_who_says_nothing_is_cut_off(desk: Desk) -> None:
    with connected(desk.server.address) as stranger:
        while stranger.recv(100):
            pass  # D greets


def test_connections_are_bounded_and_a_session_outlives_those_that_are_too_many(
    desk: Desk,
) -> None:
    asker = desk.asker()
    desk.until(lambda: desk.server.counts.sessions == 1)
    many = [connected(desk.server.address) for _ in range(CONNECTIONS_MAX + 30)]
    for one in many:
        one.setblocking(False)

    def is_open(one: socket.socket) -> bool:
        try:
            while raw := one.recv(4096):
                assert raw
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    desk.until(lambda: sum(map(is_open, many)) < CONNECTIONS_MAX)
    asker.read(0)
    desk.until(lambda: desk.port.started == [0])
    for one in many:
        one.close()
    desk.asker()
    desk.until(lambda: desk.server.counts.sessions == 2)


@pytest.mark.parametrize("transport", ["messages"], indirect=True)
def test_a_process_without_descriptors_listens_again_later(
    store: Rig, transport: str, tmp_path: Path
) -> None:
    """In between it refuses, in place of trying to accept all the time."""
    serving = Serving(store, tmp_path / "d", transport, secret=OURS.hex())
    serving.leave_descriptors(20)
    many: list[socket.socket] = []

    def is_refused() -> bool:
        try:
            many.append(connected(serving.address))
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            pass  # it was not accepted yet when the listening socket was closed
        return False

    wait_until("a refusal", is_refused)
    for one in many:
        one.close()
    puller = Puller(store, serving.address, by_nixl=False, secret=OURS)
    puller.wait_usable()
    assert puller.run(puller.read(0)) == [OK]
    puller.close()
    assert serving.close()["closed"]


def test_a_secret_is_in_no_text() -> None:
    assert OURS.decode() not in repr(Common("k", 0, 1, SLOT_BYTES, OURS))
