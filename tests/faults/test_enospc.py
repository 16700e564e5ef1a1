# SPDX-License-Identifier: Apache-2.0
"""Full file systems: a small real one of each kind that may be mounted here."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_disk import mounted, tmpfs
from vllm_nvmeof_offload.errors import OK, OutcomeKind, io_error
from vllm_nvmeof_offload.limits import space_bytes
from vllm_nvmeof_offload.pool import slab
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.units import MIB

from .kit import Bench, adopted, make_spec, name

DISK_BYTES = 8 * MIB
WANTED = 500


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if request.param == "tmpfs":
        with tmpfs(path, DISK_BYTES):
            yield path
        return
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, DISK_BYTES)
    make = ["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)]
    try:
        subprocess.run(make, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4 can be made here: {error}")
    with mounted(path, "-t", "ext4", "-o", "loop", str(image)):
        yield path


def test_a_full_target_shrinks_the_pool_and_every_slot_can_be_written(
    engine_name: str, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec(small_disk / "t", slots=WANTED)
    pool = Pool.open(spec)
    slots = pool.slots
    assert pool.slots < WANTED
    assert caplog.text.count(f"no space for {spec.slots_per_target} slots") == 1
    free, kept = space_bytes(small_disk)
    assert free >= kept >= 64 << 10, "something stays free for others"
    assert DISK_BYTES // 2 < slots * pool.slot_bytes < DISK_BYTES
    bench = Bench(engine_name, pool)
    bench.store((slot, name(slot)) for slot in range(slots))
    assert set(bench.reset()) == {OK}  # a full disk has room for superblocks
    bench.store((slot, name(slot, 2)) for slot in range(slots))
    assert bench.close()
    pool = Pool.open(spec)
    assert adopted(pool) == {slot: name(slot, 2) for slot in range(slots)}
    pool.close()


def make_sparse(fd: int, size: int) -> None:
    """The effect of `slab.reserve` on a file system without fallocate."""
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)


def test_a_sparse_slab_that_finds_no_space_fails_only_the_write(
    engine_name: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "reserve", make_sparse)
    spec = make_spec(small_disk / "t", slots=WANTED, log_pages=0)
    pool = Pool.open(spec)
    slots = pool.slots
    # Another service takes what was free at the start, and the sparse slab does not hold it.
    with (small_disk / "another").open("wb") as another:
        os.posix_fallocate(another.fileno(), 0, DISK_BYTES * 3 // 8)
    bench = Bench(engine_name, pool)
    written, refused = {}, []
    for slot in range(slots):
        (completion,) = bench.run(bench.write(slot, 0, name(slot)))
        if completion.outcome == OK:
            written[slot] = name(slot)
        else:
            assert completion.outcome == io_error(errno.ENOSPC), completion
            refused.append(slot)
        if len(refused) == 5:
            break
    assert len(refused) == 5
    assert len(written) > 50
    # The other slots are still read and overwritten.
    for slot in list(written)[:3]:
        assert bench.run(bench.read(slot, 1, name(slot)))[0].outcome == OK
        assert bench.right(1, name(slot))
        written[slot] = name(slot, 2)
        bench.store([(slot, name(slot, 2))])
    for slot in refused:
        (completion,) = bench.run(bench.read(slot, 1, name(slot)))
        assert completion.outcome.kind is OutcomeKind.CHECKSUM_MISMATCH
    assert bench.close()
    pool = Pool.open(spec)
    assert pool.slots == slots, "a start cuts nothing"
    assert adopted(pool) == written
    pool.close()


def test_a_pool_on_a_disk_that_is_full_to_the_last_byte_opens_as_before(small_disk: Path) -> None:
    spec = make_spec(small_disk / "t", slots=20)
    pool = Pool.open(spec)
    direct, fallbacks = pool.direct, pool.fallbacks
    pool.close()
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        for piece in (MIB, 4096, 1):
            with contextlib.suppress(OSError):  # ENOSPC
                while filler.write(bytes(piece)) == piece:
                    pass
    pool = Pool.open(spec)
    assert (pool.direct, pool.fallbacks, pool.slots) == (direct, fallbacks, 20)
    pool.close()
