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
from typing import Any, NamedTuple, Self

import numpy as np

from tests.fabric.network_fs import become
from tests.unit.pool.kit import PAYLOAD_BYTES, SLOT_BYTES, TAG, make_spec, name, payload
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.io.base import IoOp
from vllm_nvmeof_offload.io.engine import NativeIoEngine
from vllm_nvmeof_offload.pool.lease import Leasing
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency, place_of
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

SLOTS, PAGES, KEYS = 64, 4, 50
TAKEOVER_S = 9.0
ANSWER_S_MAX = 300.0
POLL_S = 0.001
#: A burst ends after so many refused writes.
REFUSED = 20
_FORK = multiprocessing.get_context("fork")


class Burst(NamedTuple):
    """What became of writes. last_s: when the last one began that succeeded."""

    written: int
    refused: int
    last_s: float


class Owner:
    """The caller's side of it."""

    def __init__(
        self, place: Path, client: int, server: str = "server", log_pages: int = PAGES
    ) -> None:
        """place: where that client has mounted the target. server: its name; another one adopts
        nothing. log_pages: 0: no log. Returns when the region is held.
        """
        self._pipe, far = _FORK.Pipe()
        shape = {"log_pages": log_pages, "leasing": Leasing(server, TAKEOVER_S, settle_s=1.0)}
        self.process = _FORK.Process(target=_own, args=(place, client, shape, far), daemon=True)
        self.process.start()
        far.close()
        self.adopted, self.generation_of_lease = self._answer()

    def put(self, slot: int, generation: int) -> tuple[str, float]:
        """Write a chunk; return its outcome, and when that came."""
        self._pipe.send(("put", slot, generation))
        return self._answer()  # type: ignore[return-value]

    def put_all(self, first: int) -> set[tuple[int, SlotIdentity]]:
        """Write every slot, with generations from `first` on; return what there is now."""
        for slot in range(SLOTS):
            assert self.put(slot, first + slot)[0] == "ok"
        return {(slot, chunk_of(slot, first + slot)) for slot in range(SLOTS)}

    def begin_burst(self, first: int) -> None:
        """Write random slots until `end_burst`, with generations from `first` on."""
        self._pipe.send(("burst", first))

    def end_burst(self) -> Burst:
        self._pipe.send(("end",))
        return Burst(*self._answer())

    def refused_burst(self) -> Burst:
        """End the burst when the owner has seen for a while that its writes are refused."""
        burst = Burst(*self._answer())
        self._pipe.send(("end",))
        return burst

    def stop(self) -> None:
        """Send SIGSTOP; return when it runs no more."""
        self._send(signal.SIGSTOP)
        assert self.process.pid is not None
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

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
        if self.process.exitcode is None:
            self._send(signal.SIGKILL)
            self.process.join(ANSWER_S_MAX)

    def _send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def _answer(self) -> tuple[object, ...]:
        assert self._pipe.poll(ANSWER_S_MAX), "the owner does not answer"
        return self._pipe.recv()  # type: ignore[no-any-return]


class _Writer:
    """Writes one chunk at a time."""

    def __init__(self, pool: Pool) -> None:
        self._memory = mmap.mmap(-1, pool.slot_bytes)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        view = memoryview(self._memory)
        self.engine = NativeIoEngine(pool, view, self._address, TUNING)
        self._token = 0

    def put(self, slot: int, identity: SlotIdentity) -> str:
        self._memory[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload(identity)
        where = place_of(0, slot), self._address, identity, PAYLOAD_BYTES, self.engine.stamp
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


def _own(place: Path, client: int, shape: dict[str, Any], pipe: Connection) -> None:
    become(client)
    size = SLOTS * (SLOT_BYTES + 64) + shape["log_pages"] * PAGE_BYTES
    same = {"slots": SLOTS, "pool_bytes": size, "engine_index": 1, "o_direct": "on"}
    pool = Pool.open(make_spec(place, **same, **shape))
    adopted = len(pool.adopt().generations)
    writer, dice = _Writer(pool), np.random.default_rng(client)
    pipe.send((adopted, pool.superblocks[0].lease_generation))
    while True:
        match pipe.recv():
            case ("put", slot, generation):
                pipe.send((writer.put(slot, chunk_of(slot, generation)), time.monotonic()))
            case ("burst", first):
                pipe.send(_burst(writer, dice, first, pipe))
                assert pipe.recv() == ("end",)
            case ("reset",):
                assert writer.reset() == "ok"
                pipe.send(())


def _burst(writer: _Writer, dice: np.random.Generator, first: int, pipe: Connection) -> Burst:
    generation, refused, last_s = first, 0, 0.0
    while refused < REFUSED and not pipe.poll():
        began_s, slot = time.monotonic(), int(dice.integers(SLOTS))
        if writer.put(slot, chunk_of(slot, generation)) == "ok":
            last_s = began_s
        else:
            refused += 1
        generation += 1
    return Burst(generation - first - refused, refused, last_s)
