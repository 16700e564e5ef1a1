# SPDX-License-Identifier: Apache-2.0
"""A reset whose superblock one target does not take, for now or at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wait import wait_until
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool import pool as superblock_writer
from vllm_nvmeof_offload.pool.format import Superblock, read_superblock, write_superblock
from vllm_nvmeof_offload.pool.pool import Pool

from .kit import TAG, OpenPool, entries, fill, name, put


class Hang:
    """Makes superblock writes wait on every target whose directory is below `where`."""

    def __init__(self) -> None:
        self.where: set[str] = set()
        self.entered = 0
        self._open = threading.Event()

    def write(self, directory: Path, superblock: Superblock) -> None:
        if directory.parents[2].name in self.where:
            self.entered += 1
            self._open.wait()
        write_superblock(directory, superblock)

    def end(self) -> None:
        self._open.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang()
    monkeypatch.setattr(superblock_writer, "write_superblock", hang.write)
    monkeypatch.setattr(superblock_writer, "PATIENCE_S", 0.05)
    yield hang
    hang.end()


def epochs(pool: Pool) -> list[int]:
    found = [read_superblock(directory) for directory in pool.directories]
    return [superblock.epoch for superblock in found if superblock is not None]


def test_a_reset_needs_no_new_thread(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = open_pool(2)
    old = pool.stamp.epoch

    def refuse(run: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(superblock_writer, "start_thread", refuse)
    pool.reset(TAG, named=True)
    assert epochs(pool) == [pool.stamp.epoch] * 2
    assert pool.stamp.epoch != old


@pytest.mark.parametrize("target", ["t0", "t1"])
def test_the_other_target_does_not_wait(open_pool: OpenPool, hang: Hang, target: str) -> None:
    pool = open_pool(2)
    fill(pool)
    old = pool.stamp.epoch
    hang.where = {target}
    pool.reset(TAG, named=True)
    new = pool.stamp.epoch
    assert set(epochs(pool)) == {old, new}
    assert not pool.reset_is_durable
    hang.end()
    wait_until("the superblock that hung", lambda: pool.reset_is_durable)
    assert epochs(pool) == [new, new]
    put(pool, 5, name(50))
    assert entries(open_pool(2)) == {5: name(50)}


def test_an_older_superblock_never_follows_a_newer_one(open_pool: OpenPool, hang: Hang) -> None:
    pool = open_pool(2)
    hang.where = {"t0"}
    for _ in range(5):
        pool.reset(TAG, named=True)
    assert hang.entered == 1, "one thread for the target that hangs, whatever is asked of it"
    hang.end()
    wait_until("the superblock that hung", lambda: pool.reset_is_durable)
    assert hang.entered == 2, "only the newest one follows"
    assert epochs(pool) == [pool.stamp.epoch] * 2


def test_where_every_target_hangs_the_reset_waits_for_one(open_pool: OpenPool, hang: Hang) -> None:
    pool = open_pool(2)
    hang.where = {"t0", "t1"}
    reset = threading.Thread(target=pool.reset, args=(TAG, True))
    reset.start()
    wait_until("both writes", lambda: hang.entered == 2)
    reset.join(0.2)
    assert reset.is_alive(), "the superblock is not on disk yet"
    hang.end()
    reset.join()
    wait_until("the other one", lambda: pool.reset_is_durable)


def test_a_target_that_fails_beside_one_that_hangs_fails_the_reset(
    open_pool: OpenPool, hang: Hang
) -> None:
    pool = open_pool(2)
    hang.where = {"t0"}
    blocker = pool.directories[1] / "superblock.new"
    blocker.mkdir()
    with pytest.raises(OSError, match="superblock"):
        pool.reset(TAG, named=True)
    named = pool.superblocks[0].epoch
    assert pool.stamp.epoch != named
    hang.end()
    blocker.rmdir()
    wait_until("the one that hung", lambda: named in epochs(pool))
    assert not pool.reset_is_durable


def test_a_closed_pool_stays_locked_while_a_superblock_hangs(
    open_pool: OpenPool, hang: Hang, tmp_path: Path
) -> None:
    """A late write must not replace another owner's superblock."""
    pool = open_pool(2, engine_index=0)
    hang.where = {"t0"}
    pool.reset(TAG, named=True)
    with pytest.raises(PoolLockedError):
        open_pool(2, engine_index=0)  # closes the first one before
