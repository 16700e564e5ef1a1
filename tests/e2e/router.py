# SPDX-License-Identifier: Apache-2.0
"""A router that receives vLLM's KV events and tracks which chunks are in which tier.

It misses no event: it requests a replay of events that were published before it connected or lost.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from types import TracebackType
from typing import Self

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm_nvmeof_bench.servers.server import ReservedPort

CPU, STORAGE = "CPU", "STORAGE"
_POLL_MS = 100


class Router:
    """Binds a port on the loopback address; a server with its `arguments` connects to it."""

    def __init__(self) -> None:
        context = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        port = self._live.bind_to_random_port("tcp://127.0.0.1")
        # The server binds the replay port only after half a minute.
        self._reserved = ReservedPort()
        replay = f"tcp://127.0.0.1:{self._reserved.number}"
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{port}",
            "replay_endpoint": replay,
        }
        self.arguments = ("--kv-events-config", json.dumps(self.config))
        #: Medium → the hashes stored there; medium → the number of removed hashes.
        self.has: dict[str, set[bytes]] = {CPU: set(), STORAGE: set()}
        self.removed: Counter[str] = Counter()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0  # the number of the next batch
        self._asked = False  # a replay was requested and is not complete
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._reserved.close()

    def counts(self) -> tuple[int, int, int]:
        """The numbers of chunks in pinned memory, in the pool, and in either."""
        cpu, storage = set(self.has[CPU]), set(self.has[STORAGE])
        return len(cpu), len(storage), len(cpu | storage)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._live, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(_POLL_MS))
            if not ready:
                self._ask()
            for socket in ready:
                self._received(*socket.recv_multipart()[-2:], again=socket is self._replay)

    def _ask(self) -> None:
        """Request a replay from the next batch on."""
        if not self._asked:
            self._asked = True
            self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))

    def _received(self, number: bytes, payload: bytes, *, again: bool) -> None:
        if again and not payload:  # the end of an answer
            self._asked = False
            return
        batch = int.from_bytes(number, "big")
        if batch > self._next:
            self._ask()
        if batch != self._next:
            return
        self._next += 1
        for event in self._decoder.decode(payload).events:
            self._apply(event)

    def _apply(self, event: object) -> None:
        if isinstance(event, BlockStored) and event.medium in self.has:
            self.has[event.medium].update(map(_hash, event.block_hashes))
        elif isinstance(event, BlockRemoved) and event.medium in self.has:
            self.has[event.medium].difference_update(map(_hash, event.block_hashes))
            self.removed[event.medium] += len(event.block_hashes)


def _hash(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
