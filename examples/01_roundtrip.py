# SPDX-License-Identifier: Apache-2.0
"""Only the pool, without vLLM: write chunks, open the pool again, read them, detect damage.

    python examples/01_roundtrip.py [DIRECTORY]

DIRECTORY: where to create the pool, best on the disk that you will use; default: a temporary one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from vllm_nvmeof_offload.io.threads import SlotFiles, read_slot, write_slot
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES, MIB, format_bytes

CHUNKS, PAYLOAD_BYTES = 16, 2 * MIB
GROUP = bytes(4)


def open_pool(target: Path) -> Pool:
    """Open a pool. A later open with the same keyspace finds its chunks."""
    keyspace = Keyspace.of({"model": "example", "dtype": "float16"})
    # Buffered, because O_DIRECT needs page-aligned memory, as a server's staging is.
    return Pool.open(PoolSpec((target,), 64 * MIB, PAYLOAD_BYTES, keyspace, o_direct="off"))


def main(target: Path) -> None:
    # An offload key ends with its KV cache group, which has 4 bytes.
    keys = [b"chunk %02d" % i + GROUP for i in range(CHUNKS)]
    names = [SlotIdentity(key, generation=100 + i) for i, key in enumerate(keys)]
    contents = [os.urandom(PAYLOAD_BYTES) for _ in names]

    pool = open_pool(target)
    buffer = memoryview(bytearray(pool.slot_bytes))
    payload = slice(HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES)
    began = time.perf_counter()
    for slot, (name, content) in enumerate(zip(names, contents, strict=True)):
        buffer[payload] = content
        assert write_slot(pool, buffer, SlotFiles.of(pool, slot), name, pool.stamp, lambda: True).ok
    seconds = time.perf_counter() - began
    print(f"wrote {CHUNKS} chunks of {format_bytes(PAYLOAD_BYTES)} in {seconds * 1000:.0f} ms")
    pool.close()

    pool = open_pool(target)
    found = pool.adopt()
    print(f"opened again: {len(found)} chunks adopted")
    for slot, (name, content) in enumerate(zip(names, contents, strict=True)):
        buffer[:] = bytes(len(buffer))
        assert read_slot(pool, buffer, SlotFiles.of(pool, slot), name, pool.stamp.tag).ok
        assert buffer[payload] == content
    print("read back: every byte is right")

    (slab,) = target.rglob("slab")
    with slab.open("r+b") as file:
        file.seek(3 * pool.slot_bytes + HEADER_BYTES + 12345)
        file.write(b"?!")
    outcome = read_slot(pool, buffer, SlotFiles.of(pool, 3), names[3], pool.stamp.tag)
    print(f"two bytes changed behind its back: {outcome.kind.name}")
    outcome = read_slot(pool, buffer, SlotFiles.of(pool, 4), names[3], pool.stamp.tag)
    assert outcome.kind.name == "STALE", "another chunk's slot"
    pool.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory))
