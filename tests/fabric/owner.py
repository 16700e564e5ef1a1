# SPDX-License-Identifier: Apache-2.0
"""A process that holds a leased region on an NFS client, and writes what its caller asks for.

It has the real pool, lease, keeper, log and I/O engine, and no pipeline: its caller names the slot
of each chunk, and has its outcome.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np

from tests.fabric.network_fs import become
from tests.unit.pool.kit import PAYLOAD_BYTES, SLOT_BYTES, TAG, make_spec, name, payload
from vllm_nvmeof_offload.io.base import IoLimits, IoOp
from vllm_nvmeof_offload.io.uring import UringIoEngine
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

SLOTS, PAGES, KEYS = 64, 4, 50
TAKEOVER_S = 9.0
ANSWER_S_MAX = 300.0
POLL_S = 0.001
_FORK = multiprocessing.get_context("fork")


class Owner:
    """The caller's side of it."""

    def __init__(self, place: Path, client: int) -> None:
        """place: where that client has mounted the target. Returns when the region is held."""
        self._pipe, far = _FORK.Pipe()
        self.process = _FORK.Process(target=_own, args=(place, client, far), daemon=True)
        self.process.start()
        far.close()
        self.adopted, self.generation_of_lease = self._answer()

    def put(self, slot: int, generation: int) -> tuple[str, float]:
        """Write a chunk; return its outcome, and when that came."""
        self._pipe.send(("put", slot, generation))
        return self._answer()  # type: ignore[return-value]

    def begin_burst(self, seconds: float, first: int) -> None:
        """Write random slots for so long, with generations from `first` on."""
        self._pipe.send(("burst", seconds, first))

    def end_burst(self) -> int:
        """The number of chunks that the burst wrote."""
        (written,) = self._answer()
        return int(written)

    def reset(self) -> None:
        """Begin a new epoch."""
        self._pipe.send(("reset",))
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it while its file system is there: what waits for a lost one cannot be killed."""
        self.kill()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(ANSWER_S_MAX)

    def _answer(self) -> tuple[object, ...]:
        assert self._pipe.poll(ANSWER_S_MAX), "the owner does not answer"
        return self._pipe.recv()  # type: ignore[no-any-return]


class _Writer:
    """Writes one chunk at a time."""

    def __init__(self, pool: Pool) -> None:
        self._memory = mmap.mmap(-1, pool.slot_bytes)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        view = memoryview(self._memory)
        self.engine = UringIoEngine(pool, view, self._address, IoLimits())
        self._token = 0

    def put(self, slot: int, identity: SlotIdentity) -> str:
        self._memory[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload(identity)
        where = slot, self._address, identity, PAYLOAD_BYTES, self.engine.stamp
        return self._run(OpKind.WRITE, *where)

    def reset(self) -> str:
        self.engine.begin_reset(TAG, named=True)
        return self._run(OpKind.RESET, 0, 0, None, 0)

    def _run(self, kind: OpKind, *where: Any) -> str:
        self._token += 1
        self.engine.submit([IoOp(self._token, kind, Urgency.WRITE, *where)])
        while not (ends := self.engine.poll()):
            time.sleep(POLL_S)
        (end,) = ends
        return "ok" if end.outcome.ok else f"not ok: {end.outcome}"


def chunk_of(slot: int, generation: int) -> SlotIdentity:
    """The chunk that a write of this slot has: several slots have chunks of the same key."""
    return name(slot % KEYS, generation)


def _own(place: Path, client: int, pipe: Connection) -> None:
    become(client)
    size = SLOTS * (SLOT_BYTES + 64) + PAGES * PAGE_BYTES
    leasing = Leasing("server", TAKEOVER_S, settle_s=1.0)
    shape = {"log_pages": PAGES, "leasing": leasing, "engine_index": 1, "o_direct": "on"}
    pool = Pool.open(make_spec(place, slots=SLOTS, pool_bytes=size, **shape))
    adopted = len(pool.adopt().generations)
    writer, dice = _Writer(pool), np.random.default_rng(client)
    pipe.send((adopted, pool.superblocks[0].lease_generation))
    while True:
        match pipe.recv():
            case ("put", slot, generation):
                pipe.send((writer.put(slot, chunk_of(slot, generation)), time.monotonic()))
            case ("burst", seconds, first):
                generation, end_s = first, time.monotonic() + seconds
                while time.monotonic() < end_s:
                    slot = int(dice.integers(SLOTS))
                    assert writer.put(slot, chunk_of(slot, generation)) == "ok"
                    generation += 1
                pipe.send((generation - first,))
            case ("reset",):
                assert writer.reset() == "ok"
                pipe.send(())
