# SPDX-License-Identifier: Apache-2.0
"""A small pool, the chunks that a test stores in it, and pools on disk for the offline commands."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tests.chunks import number_in
from tests.faults.kit import Bench
from tests.slots import read_slot, write_slot
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.pool.format import Keyspace, Stamp, share_tag
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import AdoptedEntries, SlotIdentity, split_keys
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes

PAYLOAD_BYTES = 5000
#: The share tag that a start of a pool of `make_spec` has.
TAG = share_tag(Keyspace.of({"model": "m"}).digest)
OTHER_TAG = bytes(range(16))
SLOT_BYTES = slot_stride_bytes(PAYLOAD_BYTES)

OpenPool = Callable[..., Pool]


def make_spec(*targets: Path, slots: int = 16, **changes: object) -> PoolSpec:
    spec = PoolSpec(
        targets=targets,
        pool_bytes=slots * (SLOT_BYTES + 64),
        payload_bytes=PAYLOAD_BYTES,
        keyspace=Keyspace.of({"model": "m"}),
        o_direct="off",
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def name(number: int, generation: int = 1) -> SlotIdentity:
    return SlotIdentity(b"key-" + number.to_bytes(32, "little"), generation)


def payload(identity: SlotIdentity) -> bytes:
    return (identity.key + identity.generation.to_bytes(8, "little")).ljust(PAYLOAD_BYTES, b"\7")


def put(pool: Pool, number: int, identity: SlotIdentity, stamp: Stamp | None = None) -> None:
    slot = bytearray(pool.slot_bytes)
    slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = payload(identity)
    view = memoryview(slot)
    assert write_slot(pool, view, number, identity, stamp) == OK


def get(pool: Pool, number: int, identity: SlotIdentity) -> bytes | None:
    slot = bytearray(pool.slot_bytes)
    if not read_slot(pool, memoryview(slot), number, identity, pool.stamp.tag).ok:
        return None
    return bytes(slot[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES])


def by_number(adopted: AdoptedEntries, targets: int) -> dict[int, SlotIdentity]:
    """Adopted entries by the numbers of the slots, over all targets."""
    keys = split_keys(adopted.keys, adopted.key_bytes or 1)
    pairs = zip(keys, adopted.generations.tolist(), strict=True)
    slots = [number_in(place, targets) for place in adopted.places.tolist()]
    return dict(zip(slots, itertools.starmap(SlotIdentity, pairs), strict=True))


def entries(pool: Pool) -> dict[int, SlotIdentity]:
    """Return the entries that the pool adopts, after checking each one's content."""
    found = by_number(pool.adopt(), pool.target_count)
    for slot, identity in found.items():
        assert get(pool, slot, identity) == payload(identity)
    return found


STORED = {slot: name(slot, slot + 10) for slot in (0, 1, 2, 3, 7, 12)}


def fill(pool: Pool) -> dict[int, SlotIdentity]:
    for slot, identity in STORED.items():
        put(pool, slot, identity)
    return dict(STORED)


# -- pools that an engine wrote, and that are closed ----------------------------------

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
    *targets: Path,
    stored: dict[int, SlotIdentity] = STORED,
    clients: Mapping[int, int] = MappingProxyType({}),
    **changes: object,
) -> tuple[Path, ...]:
    """Write `stored` with an engine; return the rank's directories. clients: by slot."""
    spec = replace(make_spec(*targets), keyspace=KEYSPACE, **changes)  # type: ignore[arg-type]
    bench = Bench("threads", Pool.open(spec))
    for slot, identity in stored.items():
        write = replace(bench.write(slot, 0, identity), client=clients.get(slot, 0))
        bench.payload(0)[:] = payload(identity)
        assert bench.run(write)[0].outcome.ok
    assert bench.close()
    return bench.pool.directories


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
