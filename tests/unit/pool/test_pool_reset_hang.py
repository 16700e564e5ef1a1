# SPDX-License-Identifier: Apache-2.0
"""A reset whose superblock one target does not take, for now or at all."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.resets import Superblocks, reset
from tests.wait import wait_until
from vllm_nvmeof_offload.errors import CANCELLED, OK, PoolLockedError, io_error
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
        if directory.resolve().parents[2].name in self.where:
            self.entered += 1
            self._open.wait()
        write_superblock(directory, superblock)

    def end(self) -> None:
        self._open.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang()
    monkeypatch.setattr(superblock_writer, "write_superblock", hang.write)
    yield hang
    hang.end()


def epochs(pool: Pool) -> list[int]:
    found = [read_superblock(directory) for directory in pool.directories]
    return [superblock.epoch for superblock in found if superblock is not None]


def test_a_reset_needs_no_new_thread(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = open_pool(2)
    old = pool.stamp.epoch

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert reset(pool, TAG).outcomes == [OK, OK]
    assert epochs(pool) == [pool.stamp.epoch] * 2
    assert pool.stamp.epoch != old


@pytest.mark.parametrize("target", [0, 1])
def test_the_other_target_does_not_wait(open_pool: OpenPool, hang: Hang, target: int) -> None:
    pool = open_pool(2)
    fill(pool)
    old = pool.stamp.epoch
    hang.where = {f"t{target}"}
    superblocks = Superblocks(pool, TAG)
    superblocks.wait(1 - target)
    new = pool.stamp.epoch
    assert set(epochs(pool)) == {old, new}
    assert superblocks.outcomes[target] is None
    assert not pool.await_superblocks(0)
    hang.end()
    superblocks.wait(target)
    assert superblocks.outcomes == [OK, OK]
    assert pool.await_superblocks(120.0)
    assert epochs(pool) == [new, new]
    put(pool, 5, name(50))
    assert entries(open_pool(2)) == {5: name(50)}


def test_an_older_superblock_never_follows_a_newer_one(open_pool: OpenPool, hang: Hang) -> None:
    pool = open_pool(2)
    hang.where = {"t0"}
    resets = [Superblocks(pool, TAG)]
    wait_until("the write that hangs", lambda: hang.entered == 1)
    resets += [Superblocks(pool, TAG) for _ in range(4)]
    for one in resets:
        one.wait(1)
    assert hang.entered == 1, "one thread for the target that hangs, whatever is asked of it"
    for one in resets[1:-1]:
        one.wait(0)
    assert [one.outcomes[0] for one in resets] == [None, *[CANCELLED] * 3, None]
    hang.end()
    resets[0].wait(0)
    resets[-1].wait(0)
    assert (resets[0].outcomes[0], resets[-1].outcomes[0]) == (OK, OK)
    assert hang.entered == 2, "only the newest one follows"
    assert epochs(pool) == [pool.stamp.epoch] * 2


def test_a_target_that_fails_beside_one_that_hangs(open_pool: OpenPool, hang: Hang) -> None:
    """Neither names what is written there until it has the superblock."""
    pool = open_pool(2)
    old = pool.stamp
    hang.where = {"t0"}
    blocker = pool.directories[1] / "superblock.new"
    blocker.mkdir()
    superblocks = Superblocks(pool, TAG)
    superblocks.wait(1)
    assert superblocks.outcomes == [None, io_error(errno.EISDIR)]
    named = pool.superblocks[0].epoch
    assert superblocks.stamp.epoch == named
    assert superblocks.unnamed.epoch not in (named, old.epoch)
    assert epochs(pool) == [old.epoch] * 2
    hang.end()
    superblocks.wait(0)
    assert epochs(pool) == [named, old.epoch]


def test_a_writer_that_hung_while_another_wrote_changes_nothing(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one may be a prober, or the region's next owner."""
    directory = open_pool(1).directories[0]
    found = read_superblock(directory)
    assert found is not None
    older, newer = (replace(found, sequence=found.sequence + n) for n in (1, 2))
    write = os.write

    def hang(fd: int, page: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        write_superblock(directory, newer)
        return write(fd, page)

    monkeypatch.setattr(os, "write", hang)
    with pytest.raises(OSError, match="has just written it") as refused:
        write_superblock(directory, older)
    assert refused.value.errno == errno.ESTALE
    assert read_superblock(directory) == newer
    write_superblock(directory, found)
    assert read_superblock(directory) == found, "the next one writes again"


def test_files_that_are_replaced_get_no_superblock_that_waits_for_the_old_ones(
    open_pool: OpenPool, hang: Hang
) -> None:
    """The new files may have a newer one by the time when the old ones return."""
    pool = open_pool(2)
    hang.where = {"t0"}
    hanging = Superblocks(pool, TAG)
    wait_until("the write that hangs", lambda: hang.entered == 1)
    waiting = Superblocks(pool, TAG)
    close = pool.exchange(0, None, None)
    waiting.wait(0)
    assert waiting.outcomes[0] == CANCELLED
    away = Superblocks(pool, TAG)
    assert away.outcomes[0] == io_error(errno.ENODEV)
    hang.end()
    hanging.wait(0)
    assert hang.entered == 1
    away.wait(1)
    close()


def test_a_closed_pool_stays_locked_while_a_superblock_hangs(
    open_pool: OpenPool, hang: Hang
) -> None:
    """A late write must not replace another owner's superblock."""
    pool = open_pool(2, engine_index=0)
    hang.where = {"t0"}
    superblocks = Superblocks(pool, TAG)
    superblocks.wait(1)
    with pytest.raises(PoolLockedError):
        open_pool(2, engine_index=0)  # closes the first one before
