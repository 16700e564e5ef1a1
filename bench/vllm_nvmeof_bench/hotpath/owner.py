# SPDX-License-Identifier: Apache-2.0
"""A writer that stores chunks at random times: `python -m vllm_nvmeof_bench.hotpath.owner PLAN`.

It uses the product's pool and I/O engine, whose table thread writes the table and the log. The
process prints a line when its pool is open, begins when it receives a line, and prints the time at
which each write completed. It keeps the pool open until its stdin ends.
"""

from __future__ import annotations

import json
import mmap
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.io.base import IoEngine, IoOp
from vllm_nvmeof_offload.io.native import choose_io_engine
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency, place_of
from vllm_nvmeof_offload.units import KIB, PAGE_BYTES

KEYSPACE = Keyspace.of({"model": "bench hotpath follow"})
PAYLOAD_BYTES = 4 * KIB
_CLOSE_S_MAX = 30.0


@dataclass(frozen=True)
class Plan:
    """puts: chunks to store, at random times, puts_per_s on average. slots: slots of the pool.

    log_pages: 0: no log, so that others must scan the table.
    """

    target: str
    seed: int
    slots: int
    log_pages: int
    puts: int
    puts_per_s: float

    def key(self, number: int) -> bytes:
        """Return the key of the chunk with this number."""
        return random.Random(f"{self.seed} {number}").randbytes(32) + bytes(4)

    @property
    def disk_bytes(self) -> int:
        return self._spec().pool_bytes

    def open(self) -> Pool:
        """Open the pool in the first free directory on the target."""
        return Pool.open(self._spec())

    def _spec(self) -> PoolSpec:
        targets, size = (Path(self.target),), PAYLOAD_BYTES
        spec = PoolSpec(targets, 1, size, KEYSPACE, log_pages=self.log_pages)
        slots_bytes = self.slots * (spec.slot_bytes + ENTRY_BYTES)
        return replace(spec, pool_bytes=slots_bytes + self.log_pages * PAGE_BYTES)


class Owner:
    """A handle for a writer's process. Created by `owner`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait_ready(self) -> None:
        """Wait until the pool is open; raise BenchError if the process exits."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise BenchError("a server that stores chunks has exited")

    def begin(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def completed_s(self) -> list[float]:
        """Return the times by `time.monotonic` at which the writes completed; end the process."""
        written: list[float] = json.loads(self._process.communicate()[0] or "[]")
        return written


@contextmanager
def owner(plan: Plan) -> Iterator[Owner]:
    """Run a writer in a process of its own; kill it at the end."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(plan))]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        yield Owner(process)
    finally:
        process.kill()
        process.wait()


def _write(plan: Plan, engine: IoEngine, address: int) -> Iterator[float]:
    dice = random.Random(plan.seed)
    for number in range(plan.puts):
        time.sleep(2 * dice.random() / plan.puts_per_s)
        what = SlotIdentity(plan.key(number), number + 1), PAYLOAD_BYTES, engine.stamp
        kind = OpKind.WRITE, Urgency.WRITE
        place = place_of(0, number % plan.slots)
        engine.submit([IoOp(number + 1, *kind, place, address, *what)])
        while not (ended := engine.poll()):
            select.select([engine.fileno()], [], [], 1.0)
        yield time.monotonic()
        assert ended[0].outcome == OK, ended[0].outcome


def main(plan: Plan) -> None:
    pool = plan.open()
    memory = mmap.mmap(-1, pool.slot_bytes)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    engine, _ = choose_io_engine("auto", pool, memoryview(memory), address, TUNING)
    print("ready", flush=True)
    if sys.stdin.readline():
        print(json.dumps(list(_write(plan, engine, address))), flush=True)
        sys.stdin.read()
    engine.close(_CLOSE_S_MAX)
    pool.close()


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
