# SPDX-License-Identifier: Apache-2.0
"""A simulated server that stores its own chunks next to real servers, which follow its table.

`python -m tests.e2e.stranger TARGET PUTS SECONDS` creates the last possible engine directory in the
target's only keyspace and writes PUTS entries into its table at a steady rate, each for a separate
slot, as a server's table thread does. The slab is empty, because no request uses these keys. The
process prints a line after the last entry, and removes the directory when its stdin ends.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    SLAB_FILE,
    TABLE_FILE,
    Superblock,
    encode_entry,
    read_superblock,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lease import DirectoryLock, Lease, Permits
from vllm_nvmeof_offload.pool.ownership import INSTANCES_MAX, LOCAL
from vllm_nvmeof_offload.protocol import SlotIdentity

_ROOT = Path(__file__).parents[2]
_TICK_S = 0.01
_HASH_BYTES = 32
_ENGINE = f"engine-{INSTANCES_MAX - 1}"


@contextmanager
def stranger(target: Path, puts: int, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process, which prints a line when all is written; remove its directory at the end."""
    command = [sys.executable, "-m", __name__, str(target), str(puts), str(seconds)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        process.communicate()


def _region_like(one: Path, slots: int) -> tuple[Path, Superblock]:
    """Create a directory with a superblock, both like those of the real region `one`."""
    found = read_superblock(one)
    assert found is not None and found.world_size == 1
    directory = one.parents[1] / _ENGINE / "rank-0"
    directory.mkdir(parents=True)
    superblock = Superblock(
        uuid=random.randbytes(16),
        keyspace=found.keyspace,
        slot_bytes=found.slot_bytes,
        payload_bytes=found.payload_bytes,
        slots=slots,
        target_index=0,
        target_count=1,
        rank=0,
        world_size=1,
        epoch=1,
        tag=found.tag,
        sequence=1,
        groups=found.groups,
    )
    return directory, superblock


def _write(table: Path, puts: int, seconds: float, group_id: int) -> None:
    fd = os.open(table, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, puts * ENTRY_BYTES)
    begun_s = time.monotonic()
    for slot in range(puts):
        key = random.randbytes(_HASH_BYTES) + group_id.to_bytes(4, "big")
        entry = encode_entry(slot, SlotIdentity(key, slot + 1), 1)
        os.pwrite(fd, entry, slot * ENTRY_BYTES)
        ahead_s = begun_s + seconds * slot / puts - time.monotonic()
        if ahead_s > _TICK_S:
            time.sleep(ahead_s)
    os.close(fd)


def main(target: str, puts: str, seconds: str) -> None:
    real = sorted(Path(target).glob("*/engine-*/rank-0"))
    directory, superblock = _region_like(real[0], int(puts))
    try:
        lock = DirectoryLock.claim(directory)
        assert lock is not None, "the directory is new"
        Lease.claim_in(directory, LOCAL, Permits.new(1), 0)
        (directory / TABLE_FILE).touch(0o600)
        with (directory / SLAB_FILE).open("wb") as slab:
            slab.truncate(superblock.slots * superblock.slot_bytes)
        write_superblock(directory, superblock)
        group_id = superblock.groups[0].group_id
        _write(directory / TABLE_FILE, int(puts), float(seconds), group_id)
        print("written", flush=True)
        sys.stdin.buffer.read()
        lock.release()
    finally:
        shutil.rmtree(directory.parent)


if __name__ == "__main__":
    main(*sys.argv[1:])
