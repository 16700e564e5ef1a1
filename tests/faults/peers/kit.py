# SPDX-License-Identifier: Apache-2.0
"""The loading server in tests of peers: chunks in a pool, a serving process, and its answers."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.chunks import place_in
from tests.contract.rig import ENGINES, PAYLOAD_BYTES, Rig, content, name
from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.peers.base import Common, PeerEnd, PeerRead, PeerState, SlotMemory
from vllm_nvmeof_offload.peers.clients import PeerClients
from vllm_nvmeof_offload.pool.format import SLAB_FILE
from vllm_nvmeof_offload.protocol import SlotIdentity

ROOT = Path(__file__).parents[3]
#: How the bytes come: they are pulled, by NIXL's stand-in, or sent in messages. In the guest
#: tests/fabric/pulls.py adds "verbs": pulled by NIXL itself.
TRANSPORTS = {"pulls": True, "messages": False}
WAIT_S = 60.0
#: A read may take so much longer than its own time.
LATE_S = 0.6
#: How many times as long everything takes here as on an ordinary processor.
PACE = 1.0
P_SLOTS, D_SLOTS = 32, 8


def start(asked: str) -> Any:
    """Start a serving process; return its `subprocess.Popen`, or what has its methods."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.peers.serving", asked],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Serving:
    """The other process. transport: of `TRANSPORTS`."""

    start = staticmethod(start)

    def __init__(self, rig: Rig, path: Path, transport: str, **more: Any) -> None:
        asked = {
            "path": str(path),
            "engine": "uring-direct" if rig.pool.direct else "uring-buffered",
            "regions": [
                {
                    "slab": str(rig.pool.directories[target] / SLAB_FILE),
                    "uuid": one.place(0).region_uuid.hex(),
                    "rank": one.rank,
                }
                for target, one in enumerate(rig.pool.superblocks)
            ],
            "keyspace": "k",
            "rank": rig.pool.superblocks[0].rank,
            "tag": rig.engine.stamp.tag.hex(),
            "slots": D_SLOTS,
            "address": "tcp://127.0.0.1:0",
            "how": "",
            "knobs": {},
            "secret": "",
            "by_nixl": TRANSPORTS[transport],
        } | more
        self._process = self.start(json.dumps(asked))
        self.address = self._answer()["address"]

    def ask(self, line: str = "counts") -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def leave_descriptors(self, count: int) -> None:
        """Let it open so many more files."""
        used = max(int(one) for one in os.listdir(f"/proc/{self._process.pid}/fd"))
        limit = used + 1 + count
        resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, (limit, limit))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def close(self) -> dict[str, Any]:
        """End it; return its counts."""
        if self._process.poll() is not None:
            return {}
        self.signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            counts = self._answer()
            assert self._process.wait(WAIT_S) == 0
        finally:
            self.kill()
        return counts

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the serving process has ended")


class Puller:
    """P: chunks 0 to 15 are in its pool. A slot of staging is free when its read is released."""

    def __init__(
        self,
        rig: Rig,
        *addresses: str,
        keyspace: str = "k",
        rank: int | None = None,
        by_nixl: bool = True,
        secret: bytes = b"",
    ) -> None:
        self.rig = rig
        self._mapping = mmap.mmap(-1, P_SLOTS * rig.pool.slot_bytes)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self.slots = SlotMemory(self.memory.ctypes.data, rig.pool.slot_bytes, P_SLOTS)
        place = rig.pool.superblocks[0].place(0)
        known = place.rank if rank is None else rank, 2, rig.pool.slot_bytes, secret
        common = Common(keyspace, *known)
        view = memoryview(self._mapping)
        tag = rig.engine.stamp.tag
        self.clients = PeerClients(addresses, common, tag, self.slots, view, by_nixl=by_nixl)
        self.free = list(range(P_SLOTS))
        self._tokens = 0
        self._slot_of: dict[int, int] = {}
        self.wanted: dict[int, SlotIdentity] = {}
        self.begun: dict[int, PeerRead] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.took_s: dict[int, float] = {}  # beyond the read's deadline, if above 0

    def wait_usable(self, lane: int = 0) -> PeerState:
        self.until(lambda: self.clients.state(lane).usable)
        return self.clients.state(lane)

    def until(self, done: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        end_s = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < end_s, "it does not come"
            self.pause()

    def pause(self) -> None:
        """Wait a moment for an end."""
        select.select([self.clients.fileno()], [], [], 0.01)
        self.take()

    def read(
        self, number: int, identity: SlotIdentity | None = None, within_s: float = 10.0
    ) -> int:
        """Begin to read a pool slot; return the token."""
        self._tokens += 1
        token, slot = self._tokens, self.free.pop()
        start = slot * self.slots.slot_bytes
        self.memory[start : start + self.slots.slot_bytes] = 0
        self._slot_of[token], self.wanted[token] = slot, identity or name(number)
        self.begun[token] = PeerRead(
            token,
            self.slots.address_of(slot),
            PAYLOAD_BYTES,
            self.wanted[token],
            self.rig.pool.slot_place(place_in(number, self.rig.pool.target_count)),
            self.rig.engine.stamp.tag,
            time.monotonic() + within_s,
        )
        return token

    def buffer(self, token: int) -> NDArray[np.uint8]:
        """The slot of staging that a read has, or had."""
        start = self.begun[token].address - self.slots.address
        return self.memory[start : start + self.slots.slot_bytes]

    def ask(self, *tokens: int, lane: int = 0) -> None:
        self.clients.submit(lane, [self.begun[token] for token in tokens])

    def take(self) -> list[PeerEnd]:
        """Take in the ends: each read has one outcome and one release, and OK means its bytes."""
        ends = self.clients.poll()
        for end in ends:
            read = self.begun[end.token]
            if end.token not in self.outcomes:
                self.outcomes[end.token] = end.outcome
                self.took_s[end.token] = time.monotonic() - read.deadline_s
            else:
                assert end.released
            if end.outcome.ok and end.released and self.outcomes[end.token].ok:
                start = read.address - self.slots.address + 4096
                got = self.memory[start : start + PAYLOAD_BYTES].tobytes()
                assert got == content(self.wanted[end.token]), "wrong bytes were accepted"
            if end.released:
                self.free.append(self._slot_of.pop(end.token))
        return ends

    def run(self, *tokens: int, lane: int = 0) -> list[Outcome]:
        """Ask, and wait until all have an outcome and are released."""
        self.ask(*tokens, lane=lane)
        self.until(lambda: not any(token in self._slot_of for token in tokens))
        return [self.outcomes[token] for token in tokens]

    def kinds(self) -> Counter[str]:
        return Counter(outcome.kind.value for outcome in self.outcomes.values())

    def at_rest(self) -> None:
        """All slots are free, and nothing has taken longer than it may."""
        self.until(lambda: len(self.free) == P_SLOTS)
        assert sorted(self.free) == list(range(P_SLOTS)), "a buffer is leaked"
        assert set(self.outcomes) == set(self.begun)
        assert max(self.took_s.values(), default=0.0) <= LATE_S * PACE

    def close(self) -> None:
        assert self.clients.close(20.0)
        self.take()


def make_store(path: Path, targets: int = 1) -> Rig:
    """A pool with chunk n in slot n."""
    rig = ENGINES["uring-direct"](path, targets=targets, slots=16)
    for number in range(16):
        rig.store(number, name(number))
    return rig
