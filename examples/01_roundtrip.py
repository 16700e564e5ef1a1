# SPDX-License-Identifier: Apache-2.0
"""Use the pool without vLLM: write chunks, reopen the pool, read them, and detect damage.

    python examples/01_roundtrip.py [DIRECTORY]

DIRECTORY holds the pool, ideally on the disk that you will use. Default: a temporary directory.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.io.base import IoOp
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency, place_of
from vllm_nvmeof_offload.units import HEADER_BYTES, MIB, format_bytes

CHUNKS, PAYLOAD_BYTES = 16, 2 * MIB
GROUP = bytes(4)


def open_pool(target: Path) -> Pool:
    """Open a pool. A pool that is reopened with the same keyspace has its earlier chunks."""
    keyspace = Keyspace.of({"model": "example", "dtype": "float16"})
    return Pool.open(PoolSpec((target,), 64 * MIB, PAYLOAD_BYTES, keyspace))


class Staging:
    """One slot of page-aligned memory, and the engine that moves it to and from the pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool, memory = pool, memoryview(mmap.mmap(-1, pool.slot_bytes))
        self.payload = memory[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
        self.address = np.frombuffer(memory, np.uint8).ctypes.data
        self.engine, _ = choose_io_engine("auto", pool, memory, self.address, TUNING)

    def move(self, kind: OpKind, slot: int, name: SlotIdentity) -> Outcome:
        """Write the slot, or read and verify it. A server keeps hundreds of these in flight."""
        urgency = Urgency.WRITE if kind is OpKind.WRITE else Urgency.DEMAND
        what = place_of(0, slot), self.address, name, PAYLOAD_BYTES, self.engine.stamp
        self.engine.submit([IoOp(1, kind, urgency, *what)])
        while not (ended := self.engine.poll()):
            select.select([self.engine.fileno()], [], [])
        return ended[0].outcome

    def close(self) -> None:
        self.engine.close()
        self.pool.close()


def main(target: Path) -> None:
    # An offload key ends with the 4-byte number of its KV cache group.
    keys = [b"chunk %02d" % i + GROUP for i in range(CHUNKS)]
    names = [SlotIdentity(key, generation=100 + i) for i, key in enumerate(keys)]
    contents = [os.urandom(PAYLOAD_BYTES) for _ in names]

    staging = Staging(open_pool(target))
    began = time.perf_counter()
    for slot, (name, content) in enumerate(zip(names, contents, strict=True)):
        staging.payload[:] = content
        assert staging.move(OpKind.WRITE, slot, name).ok
    seconds = time.perf_counter() - began
    print(f"wrote {CHUNKS} chunks of {format_bytes(PAYLOAD_BYTES)} in {seconds * 1000:.0f} ms")
    staging.close()

    staging = Staging(open_pool(target))
    found = staging.pool.adopt()
    print(f"reopened: {len(found)} chunks adopted")
    for slot, (name, content) in enumerate(zip(names, contents, strict=True)):
        staging.payload[:] = bytes(PAYLOAD_BYTES)
        assert staging.move(OpKind.LOAD, slot, name).ok
        assert staging.payload == content
    print("read back: every byte is correct")

    (slab,) = target.rglob("slab")
    with slab.open("r+b") as file:
        file.seek(3 * staging.pool.slot_bytes + HEADER_BYTES + 12345)
        file.write(b"?!")
    outcome = staging.move(OpKind.LOAD, 3, names[3])
    print(f"two bytes changed on disk: {outcome.kind.name}")
    outcome = staging.move(OpKind.LOAD, 4, names[3])
    assert outcome.kind.name == "STALE", "another chunk's slot"
    staging.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
