# SPDX-License-Identifier: Apache-2.0
"""Modes, space and O_DIRECT of a pool's files."""

from __future__ import annotations

import errno
import logging
import os
import resource
import stat
from pathlib import Path

import pytest

from tests.resets import reset
from tests.slots import write_slot
from vllm_nvmeof_offload.errors import PoolError, io_error
from vllm_nvmeof_offload.limits import space_bytes
from vllm_nvmeof_offload.pool import slab
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.pool.slab import probe_o_direct

from .kit import (
    SLOT_BYTES,
    TAG,
    OpenPool,
    entries,
    fill,
    make_spec,
    name,
    put,
)


def test_files_are_private_and_wider_modes_are_tightened(
    open_pool: OpenPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool()
    stored = fill(pool)
    directory = pool.directories[0]
    for path in [directory, directory.parent, directory.parent.parent]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for file in ("slab", "table", "superblock", "lock", "lease"):
        assert stat.S_IMODE((directory / file).stat().st_mode) == 0o600
    (directory / "slab").chmod(0o644)
    directory.parent.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert entries(open_pool()) == stored
    assert stat.S_IMODE((directory / "slab").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    assert "mode 644" in caplog.text
    assert "mode 755" in caplog.text


def test_a_link_in_place_of_the_slab_is_refused(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool()
    slab = pool.directories[0] / "slab"
    pool.close()
    slab.unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    slab.symlink_to(victim)
    with pytest.raises(PoolError, match="cannot use the pool"):
        open_pool()
    assert victim.read_text() == "precious"


def test_less_than_one_slot_is_refused(open_pool: OpenPool) -> None:
    with pytest.raises(PoolError, match="less than one slot"):
        open_pool(2, slots=1)


def test_a_target_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "t0").write_text("a file")
    with pytest.raises(PoolError, match="t0"):
        Pool.open(make_spec(tmp_path / "t0"))


def test_names_on_disk_reveal_no_key(open_pool: OpenPool, tmp_path: Path) -> None:
    fill(open_pool())
    names = {path.name for path in tmp_path.rglob("*")}
    digest = Keyspace.of({"model": "m"}).digest
    assert names == {
        *("t0", digest, "keyspace.json", "engine-0", "rank-0"),
        *("superblock", "table", "log", "slab", "lock", "lease"),
    }


def test_a_full_target_shrinks_the_pool(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec = make_spec(small_disk, slots=500)
        pool = Pool.open(spec)
    assert 50 < pool.slots < 86  # of 12 KiB in 1 MiB
    free, kept = space_bytes(small_disk)
    assert free >= kept >= 64 << 10, "something stays free for others"
    assert caplog.text.count(f"no space for {spec.slots_per_target} slots") == 1
    for slot in range(pool.slots):
        put(pool, slot, name(slot))
    stored = {slot: name(slot) for slot in range(pool.slots)}
    assert reset(pool, TAG).ok  # there is room for superblocks even now
    for slot in range(pool.slots):
        put(pool, slot, name(slot))
    pool.close()
    pool = Pool.open(make_spec(small_disk, slots=500))
    assert entries(pool) == stored
    pool.close()


def test_a_disk_filled_by_others_later_costs_no_slot(small_disk: Path) -> None:
    pool = Pool.open(make_spec(small_disk, slots=500))
    slots = pool.slots
    pool.close()
    status = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(bytes((status.f_bavail - 4) * status.f_frsize))
    pool = Pool.open(make_spec(small_disk, slots=500))
    assert pool.slots == slots
    pool.close()


def test_targets_of_unequal_size_are_used_to_the_smaller(small_disk: Path, tmp_path: Path) -> None:
    pool = Pool.open(make_spec(small_disk, tmp_path / "t0", slots=500))
    assert pool.slots < 500
    assert pool.slots % 2 == 0
    for slot in range(pool.slots):
        put(pool, slot, name(slot))
    pool.close()


def test_no_space_for_one_slot_is_refused_by_name(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - 5 * 4096))
    with pytest.raises(PoolError, match="small"):
        Pool.open(make_spec(small_disk))


class Refusing:
    """Replaces the one call that opens with O_DIRECT by that of a file system without it."""

    def __init__(self, error: int) -> None:
        self._error = error

    def __call__(self, directory: Path) -> None:
        raise OSError(self._error, os.strerror(self._error))


def test_without_o_direct_auto_falls_back_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slab, "probe_o_direct", Refusing(errno.EINVAL))
    with pytest.raises(PoolError, match="O_DIRECT does not work"):
        Pool.open(make_spec(tmp_path / "t0", o_direct="on"))
    pool = Pool.open(make_spec(tmp_path / "t0", o_direct="auto"))
    assert not pool.direct
    assert pool.fallbacks == (f"o_direct→buffered on {pool.directories[0]}: EINVAL",)
    assert pool.fallbacks[0] in caplog.text
    pool.close()


def test_the_o_direct_probe_asks_the_file_system(tmp_path: Path) -> None:
    try:
        fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        with pytest.raises(OSError, match=os.strerror(error.errno or 0)):
            probe_o_direct(tmp_path)
    else:
        os.close(fd)
        probe_o_direct(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["x"]
    with pytest.raises(OSError, match=r"Invalid argument|such|denied|supported"):
        probe_o_direct(Path("/proc/self"))


def test_a_write_that_the_disk_refuses_is_an_io_error(open_pool: OpenPool) -> None:
    """A real refusal by the kernel: RLIMIT_FSIZE below the slot's place."""
    pool = open_pool()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    slot = memoryview(bytearray(pool.slot_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * SLOT_BYTES, hard))
    try:
        outcome = write_slot(pool, slot, 9, name(9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome == io_error(errno.EFBIG)
    assert entries(open_pool()) == {}
