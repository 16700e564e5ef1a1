# SPDX-License-Identifier: Apache-2.0
"""A process that serves peers: `python -m tests.faults.peers.serving JSON`.

Prints its address, serves until its stdin ends, and prints its counts. Its I/O engine has a small
pool of its own, and reads the regions of the other side's.
"""

from __future__ import annotations

import collections
import json
import os
import random
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.servers.faults import FaultyIoEngine

from tests.contract.rig import ENGINES, STAGING_SLOTS, Rig, content, name
from tests.faults.peers.stand_in import install
from vllm_nvmeof_offload.errors import CANCELLED
from vllm_nvmeof_offload.io.base import ForeignSlab, IoEngine, IoOp, Waker
from vllm_nvmeof_offload.peers.base import Common, Levels, PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.peers.server import PeerServer
from vllm_nvmeof_offload.peers.session import BusyRate
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.protocol import OpKind, Urgency, owned_by, place_of
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes


class EnginePort:
    """Implements `base.ServePort`. The serve slots are in the engine's memory."""

    def __init__(self, engine: IoEngine, regions: Mapping[bytes, tuple[int, int]]) -> None:
        """regions: by uuid, the owner and the target by which the engine reads a region."""
        self._engine, self._regions = engine, regions
        self._waiting: collections.deque[PeerRead] = collections.deque()
        self._reading: dict[int, PeerRead] = {}
        self._ended: list[Served] = []
        self._queued_bytes = 0
        self._rate = BusyRate()
        self._waker = Waker()
        self._epoll = select.epoll()
        for fd in (engine.fileno(), self._waker.fd):
            self._epoll.register(fd, select.EPOLLIN)

    def serve(self, reads: Sequence[PeerRead]) -> None:
        for read in reads:
            if read.place.region_uuid in self._regions:
                self._waiting.append(read)
                self._queued_bytes += slot_stride_bytes(read.payload_bytes)
            else:
                self._end(Served(read.token, None))
        self._submit()

    def cancel(self, tokens: Sequence[int]) -> None:
        for token in self._engine.cancel([one for one in tokens if one in self._reading]):
            self._queued_bytes -= slot_stride_bytes(self._reading.pop(token).payload_bytes)
            self._end(Served(token, CANCELLED))
        for read in [one for one in self._waiting if one.token in tokens]:
            self._waiting.remove(read)
            self._queued_bytes -= slot_stride_bytes(read.payload_bytes)
            self._end(Served(read.token, CANCELLED))

    def poll(self) -> list[Served]:
        self._waker.clear()
        for one in self._engine.poll():
            size_bytes = slot_stride_bytes(self._reading.pop(one.token).payload_bytes)
            self._queued_bytes -= size_bytes
            if one.outcome.ok:
                self._rate.moved(size_bytes, time.monotonic(), more=bool(self._reading))
            self._ended.append(Served(one.token, one.outcome))
        if not self._reading:
            self._rate.stop()
        self._submit()
        ended, self._ended = self._ended, []
        return ended

    def levels(self) -> Levels:
        return Levels(self._queued_bytes, self._rate.bytes_per_s)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def _submit(self) -> None:
        reads = [self._waiting.popleft() for _ in range(self._room())]
        for read in reads:
            self._reading[read.token] = read
        if reads:
            self._rate.moves(time.monotonic())
            self._engine.submit([self._op_of(read) for read in reads])

    def _room(self) -> int:
        return min(len(self._waiting), self._engine.room().reads)

    def _op_of(self, read: PeerRead) -> IoOp:
        owner, target = self._regions[read.place.region_uuid]
        return IoOp(
            read.token,
            OpKind.LOAD,
            Urgency.DEMAND,
            owned_by(owner, place_of(target, read.place.slot)),
            read.address,
            read.identity,
            read.payload_bytes,
            Stamp(0, read.tag),
        )

    def _end(self, served: Served) -> None:
        self._ended.append(served)
        self._waker.wake()


#: The share tag that this process writes and serves under.
OWNER = 3


class BadPort:
    """A port that does wrong, in one way.

    another: gives the whole slot of another chunk. flipped: gives one wrong byte. silent: never
    answers. hasty: a thread writes other chunks into all slots all the time.
    """

    def __init__(self, inner: EnginePort, how: str, rig: Rig, slots: list[bytes]) -> None:
        self._inner, self._how, self._rig, self._slots = inner, how, rig, slots
        self._addresses: dict[int, int] = {}
        self._dice = random.Random(5)
        if how == "hasty":
            threading.Thread(target=self._scribble, daemon=True).start()

    def serve(self, reads: Sequence[PeerRead]) -> None:
        self._addresses |= {read.token: read.address for read in reads}
        self._inner.serve(reads)

    def cancel(self, tokens: Sequence[int]) -> None:
        self._inner.cancel(tokens)

    def poll(self) -> list[Served]:
        return [self._spoiled(one) for one in self._inner.poll() if self._how != "silent"]

    def levels(self) -> Levels:
        return self._inner.levels()

    def fileno(self) -> int:
        return self._inner.fileno()

    def _spoiled(self, one: Served) -> Served:
        start = self._addresses.pop(one.token) - self._rig.base_address
        if self._how == "another":
            other = self._dice.choice(self._slots)
            self._rig.memory[start : start + len(other)] = other
        elif self._how == "flipped":
            at = start + HEADER_BYTES + self._dice.randrange(24_000)
            self._rig.memory[at] ^= 1 << self._dice.randrange(8)
        return one

    def _scribble(self) -> None:
        stride = self._rig.pool.slot_bytes
        while True:
            for slot in range(STAGING_SLOTS):
                other = self._slots[slot % len(self._slots)]
                self._rig.memory[slot * stride : slot * stride + len(other)] = other


def attach(rig: Rig, regions: list[dict[str, Any]]) -> dict[bytes, tuple[int, int]]:
    """Open the regions of the other side, one for each of our targets."""
    found = {}
    for target, one in enumerate(regions):
        fd = os.open(one["slab"], os.O_RDONLY | (os.O_DIRECT if rig.pool.direct else 0))
        uuid = bytes.fromhex(one["uuid"])
        rig.engine.attach_region(OWNER, target, ForeignSlab(fd, uuid, one["rank"]))
        found[uuid] = OWNER, target
    return found


def valid_slots(rig: Rig) -> list[bytes]:
    """Whole intact slots of chunks that nobody asks for."""
    found = []
    for number in range(1000, 1008):
        rig.fill(0, name(number))
        assert content(name(number)) == rig.payload(0)
        rig.run(rig.write(number - 1000, 0, name(number)))
        rig.zero(0)
        assert rig.run(rig.read(number - 1000, 0, name(number)))[0].outcome.ok
        found.append(rig.memory[: rig.pool.slot_bytes])
    return found


def serve(asked: dict[str, Any]) -> None:
    regions = asked["regions"]
    rig = ENGINES[asked["engine"]](Path(asked["path"]), targets=len(regions), slots=16)
    slots = valid_slots(rig)
    if isinstance(rig.engine, FaultyIoEngine):
        rig.engine.plan.set(**asked["knobs"])
    port: EnginePort | BadPort = EnginePort(rig.engine, attach(rig, regions))
    if asked["how"]:
        port = BadPort(port, asked["how"], rig, slots)
    secret = bytes.fromhex(asked["secret"])
    common = Common(asked["keyspace"], asked["rank"], 2, rig.pool.slot_bytes, secret)
    memory = SlotMemory(rig.base_address, rig.pool.slot_bytes, asked["slots"])
    tag = bytes.fromhex(asked["tag"])
    view = memoryview(rig.memory)
    server = PeerServer(asked["address"], common, tag, memory, view, port, by_nixl=asked["by_nixl"])
    print(json.dumps({"address": server.address}), flush=True)
    for line in sys.stdin:
        if line.startswith("tag "):
            server.set_tag(bytes.fromhex(line[4:]))
        print(json.dumps(asdict(server.counts)), flush=True)
    closed = server.close(20.0)
    assert rig.engine.close(20.0)
    rig.pool.close()
    print(json.dumps(asdict(server.counts) | {"closed": closed}), flush=True)


if __name__ == "__main__":
    install()
    serve(json.loads(sys.argv[1]))
