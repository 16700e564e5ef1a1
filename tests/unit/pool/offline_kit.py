# SPDX-License-Identifier: Apache-2.0
"""Pools on disk for tests of the offline commands: written by the I/O engine, then closed."""

from __future__ import annotations

import ctypes
import mmap
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.chunks import place_in
from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.io.base import IoOp
from vllm_nvmeof_offload.io.native import How, NativeIoEngine
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.units import HEADER_BYTES

from .kit import PAYLOAD_BYTES, SLOT_BYTES, STORED, by_number, make_spec, payload

KEYSPACE = Keyspace.of({"model": "tiny-model", "dtype": "bfloat16"})
WAIT_S = 120.0

HOLDER = """
import sys, pathlib
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
targets = tuple(map(pathlib.Path, sys.argv[2:]))
spec = PoolSpec(targets, 16 * (12288 + 64), 5000, Keyspace(sys.argv[1]), o_direct="off")
pool = Pool.open(spec)
print("open", flush=True)
sys.stdin.read()
"""


def write_pool(
    *targets: Path, stored: dict[int, SlotIdentity] = STORED, **changes: object
) -> tuple[Path, ...]:
    """Write `stored` with an engine; return the rank's directories."""
    spec = replace(make_spec(*targets), keyspace=KEYSPACE, **changes)  # type: ignore[arg-type]
    pool = Pool.open(spec)
    memory = mmap.mmap(-1, SLOT_BYTES * max(1, len(stored)))
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine = NativeIoEngine(pool, memoryview(memory), base, Tuning(io_threads=2), How.THREADS)
    ops = []
    for number, (slot, identity) in enumerate(stored.items()):
        start = number * SLOT_BYTES + HEADER_BYTES
        memory[start : start + PAYLOAD_BYTES] = payload(identity)
        address = base + number * SLOT_BYTES
        what = (
            OpKind.WRITE,
            Urgency.WRITE,
            place_in(slot, len(targets)),
            address,
            identity,
            PAYLOAD_BYTES,
        )
        ops.append(IoOp(number, *what, stamp=pool.stamp))
    engine.submit(ops)
    done = 0
    while done < len(ops):
        assert select.select([engine.fileno()], [], [], WAIT_S)[0]
        for completion in engine.poll():
            assert completion.outcome is not None
            assert completion.outcome.ok
            done += 1
    assert engine.close()
    pool.close()
    return pool.directories


@contextmanager
def server(*targets: Path) -> Iterator[subprocess.Popen[str]]:
    """A live process that holds the pool on `targets`."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, KEYSPACE.canonical, *map(str, targets)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at `at`."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def flip_payload(directory: Path, index: int) -> None:
    flip(directory / "slab", index * SLOT_BYTES + HEADER_BYTES + 77)


def flip_header(directory: Path, index: int) -> None:
    flip(directory / "slab", index * SLOT_BYTES + 40)


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file under `root` but leases, which a claim rewrites."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lease"
    }


def adopted(*targets: Path) -> dict[int, SlotIdentity]:
    """The entries that the next start adopts."""
    pool = Pool.open(replace(make_spec(*targets), keyspace=KEYSPACE))
    try:
        return by_number(pool.adopt(), len(targets))
    finally:
        pool.close()
