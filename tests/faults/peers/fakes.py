# SPDX-License-Identifier: Apache-2.0
"""Fakes of both ends of a session, for messages that the real ones never send."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from vllm_nvmeof_offload.errors import CANCELLED, OK, Outcome
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.peers.base import Common, Levels, PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.peers.server import PeerServer
from vllm_nvmeof_offload.peers.session import (
    VERSION,
    AnyMessage,
    Beat,
    Channel,
    Failed,
    FailedRead,
    Hello,
    Read,
    Ready,
    WantedRead,
    Welcome,
    lock,
)

WAIT_MS = 20_000
TAG = b"t" * 16
SLOT_BYTES = 8192


class FakePeer:
    """D: a socket that a `PeerClients` greets."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._ours, self._theirs = Channel(), Channel()
        self._route = b""

    def take_hello(self) -> Hello:
        """Await P's first message, or that of its next session."""
        self._ours, self._theirs = Channel(), Channel()
        while True:
            route, raw = self._socket.recv_multipart()
            if route != self._route:
                self._route = route
                hello = self._theirs.decode(raw)
                assert isinstance(hello, Hello)
                return hello

    def welcome(self) -> None:
        """Take P's hello, and give it 8 credits; chunks come in messages."""
        self.take_hello()
        self.send(Welcome(metadata=b"", address=0, slots=8, credits=8))

    def take(self, kind: type[AnyMessage]) -> AnyMessage:
        """Await P's next message of this kind; beats go by."""
        while True:
            route, raw = self._socket.recv_multipart()
            if route == self._route:
                message = self._theirs.decode(raw)
                if isinstance(message, kind):
                    return message
                assert isinstance(message, Beat), message

    def has_heard(self) -> bool:
        return bool(self._socket.poll(0))

    def send(self, message: AnyMessage, *more: bytes) -> None:
        self.send_raw(self._ours.encode(message), *more)

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._route, *frames])

    def close(self) -> None:
        self._context.destroy(0)


class FakePort:
    """D's storage, which ends a read when the test says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waker = Waker()
        self._reads: dict[int, PeerRead] = {}
        self._ended: list[Served] = []
        self.started: list[int] = []  # pool slots
        self.cancelled: list[int] = []

    def serve(self, reads: Sequence[PeerRead]) -> None:
        with self._lock:
            self._reads |= {read.token: read for read in reads}
            self.started += [read.place.slot for read in reads]

    def cancel(self, tokens: Sequence[int]) -> None:
        with self._lock:
            known = [self._reads[token] for token in tokens if token in self._reads]
            self.cancelled += [read.place.slot for read in known]

    def poll(self) -> list[Served]:
        self._waker.clear()
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def levels(self) -> Levels:
        return Levels(0, 0.0)

    def fileno(self) -> int:
        return self._waker.fd

    def end(self, *numbers: int, outcome: Outcome = OK) -> None:
        """End the reads of these slots; without any: all."""
        with self._lock:
            for token, read in list(self._reads.items()):
                if read.place.slot in numbers or not numbers:
                    del self._reads[token]
                    self._ended.append(Served(token, outcome))
        self._waker.wake()


class Desk:
    """D: a real `PeerServer` over a `FakePort`."""

    def __init__(
        self,
        slots: int = 4,
        address: str = "tcp://127.0.0.1:0",
        secret: bytes = b"",
        *,
        by_nixl: bool = False,
        read_deadline_s: float = 60.0,
    ) -> None:
        self._memory = mmap.mmap(-1, slots * SLOT_BYTES)
        memory = SlotMemory(np.frombuffer(self._memory, np.uint8).ctypes.data, SLOT_BYTES, slots)
        self.port, self._secret = FakePort(), secret
        view = memoryview(self._memory)
        common = Common("k", 0, 1, SLOT_BYTES, secret)
        place = address, common, TAG, memory, view, self.port
        self.server = PeerServer(*place, by_nixl=by_nixl, read_deadline_s=read_deadline_s)
        self._askers: list[Asker] = []

    def asker(self) -> Asker:
        """A session."""
        self._askers.append(Asker(self.server.address, self._secret))
        return self._askers[-1]

    def until(self, done: Callable[[], object], timeout_s: float = WAIT_MS / 1000) -> float:
        """Wait, while all whose beats are on say that they live; return for how long."""
        begun_s = time.monotonic()
        while not done():
            assert time.monotonic() < begun_s + timeout_s, "it does not come"
            for asker in self._askers:
                asker.pause()
        return time.monotonic() - begun_s

    def close(self) -> None:
        for asker in self._askers:
            asker.close()
        self.port.end(outcome=CANCELLED)
        assert self.server.close()


class Asker:
    """P: a socket with a session."""

    def __init__(self, address: str, secret: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        lock(self._socket, secret, serves=False)
        self._socket.connect(address)
        self._ours, self._theirs = Channel(), Channel()
        self.got: list[AnyMessage] = []
        self.lives = True
        common = {"keyspace": "k", "rank": 0, "world_size": 1, "slot_bytes": SLOT_BYTES}
        self.send(Hello(version=VERSION, tag=TAG, pulls=True, **common))  # type: ignore[arg-type]

    def send(self, message: AnyMessage) -> None:
        self._socket.send(self._ours.encode(message))

    def read(self, *numbers: int, within_ms: int = 60_000, inline: bool = False) -> None:
        """Ask for slots; the token of each is its number."""
        reads = [
            WantedRead(number, b"r" * 16, number, b"key", 1, 4096, within_ms) for number in numbers
        ]
        self.send(Read(inline=inline, reads=reads))

    @property
    def lent(self) -> list[int]:
        """Tokens whose slots were lent."""
        ready = (one for one in self.got if isinstance(one, Ready))
        return [lent.token for one in ready for lent in one.lent]

    @property
    def failed(self) -> list[FailedRead]:
        failed = (one for one in self.got if isinstance(one, Failed))
        return [one for message in failed for one in message.failed]

    def pause(self) -> None:
        """Take in what has come within 10 ms."""
        if self._socket.poll(10):
            raw = self._socket.recv_multipart()[0]
            message = self._theirs.decode(raw)
            if not isinstance(message, Beat):
                self.got.append(message)
        if self.lives:
            self.send(Beat())

    def close(self) -> None:
        self._context.destroy(0)
