# SPDX-License-Identifier: Apache-2.0
"""A process that serves peers: `python -m tests.faults.peers.serving JSON`.

Prints its address, serves until its stdin ends, and prints its counts. Its I/O engine has a small
pool of its own, and reads the regions of the other side's.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.servers.faults import FaultyIoEngine

from tests.contract.rig import ENGINES, STAGING_SLOTS, Rig, content, name
from tests.faults.peers.engine_port import EnginePort
from tests.faults.peers.stand_in import install
from vllm_nvmeof_offload.errors import STALE
from vllm_nvmeof_offload.io.base import ForeignSlab
from vllm_nvmeof_offload.peers.base import Common, Levels, PeerRead, Served, SlotMemory
from vllm_nvmeof_offload.peers.server import PeerServer
from vllm_nvmeof_offload.units import HEADER_BYTES

#: The share tag that this process writes and serves under.
OWNER = 3


class BadPort:
    """A port that does wrong, in one way.

    another: gives the whole slot of another chunk. flipped: gives one wrong byte. silent: never
    answers. stale: says that each chunk is another one by now. hasty: a thread writes other chunks
    into all slots all the time.
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
        if self._how == "stale":
            return Served(one.token, STALE)
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


def main() -> None:
    asked = json.loads(sys.argv[1])
    install()
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
    main()
