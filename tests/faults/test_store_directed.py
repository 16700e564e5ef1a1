# SPDX-License-Identifier: Apache-2.0
"""Sequences that the simulation rarely reaches, or that once failed, written step by step."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.resets import reset
from tests.slots import write_slot
from vllm_nvmeof_offload.errors import io_error
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import SlotIdentity

from .kit import adopted, make_spec, name
from .store.disk import Crash, Data, Disk, Event


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path.resolve())
    with disk.active():
        yield disk


@pytest.fixture
def spec(disk: Disk) -> PoolSpec:
    return make_spec(disk.root / "t", slots=4, payload_bytes=5000, o_direct="off")


def put(pool: Pool, slot: int, identity: SlotIdentity, stamp: Stamp | None = None) -> None:
    memory = memoryview(bytearray(pool.slot_bytes))
    assert write_slot(pool, memory, slot, identity, stamp).ok


def start(spec: PoolSpec, use: Callable[[Pool], None]) -> dict[int, SlotIdentity]:
    """One life: adopt, use, and end without closing. Returns the adopted entries."""
    pool = Pool.open(spec)
    try:
        found = adopted(pool)
        use(pool)
    finally:
        pool.close()
    return found


def rest(pool: Pool) -> None:
    """Use nothing."""


def test_writes_after_a_failed_reset_do_not_outlive_the_next_one(
    disk: Disk, spec: PoolSpec
) -> None:
    def fail_to_reset_and_go_on(pool: Pool) -> None:
        disk.fail, disk.fail_count = ("superblock", errno.EIO), 1
        found = reset(pool, pool.stamp.tag)
        assert found.outcomes == [io_error(errno.EIO)]
        put(pool, 0, name(0), found.stamps[0])  # in an epoch that is not on the disk

    def reset_and_go_on(pool: Pool) -> None:
        assert reset(pool, pool.stamp.tag).ok
        put(pool, 1, name(1), pool.stamp)

    start(spec, fail_to_reset_and_go_on)
    assert start(spec, reset_and_go_on) == {}
    assert start(spec, rest) == {1: name(1)}


def test_a_start_makes_the_superblock_it_keeps_durable(disk: Disk, spec: PoolSpec) -> None:
    """A process was killed during a reset, between the rename and the fsync of the directory."""

    def be_killed_in_a_reset(pool: Pool) -> None:
        put(pool, 0, name(0))
        disk.crash_after = 3  # write, fsync, rename; not the directory
        with pytest.raises(Crash):
            reset(pool, pool.stamp.tag)

    def only_bytes_survive(journal: list[Event]) -> None:
        for event in journal:
            if isinstance(event, Data):
                event.redo()

    start(spec, be_killed_in_a_reset)
    disk.dead, disk.crash_after = False, None
    assert start(spec, lambda pool: put(pool, 1, name(1))) == {}, "the page cache has the reset"
    disk.crash(only_bytes_survive)
    assert start(spec, rest) == {1: name(1)}


def test_an_unchanged_superblock_is_not_written_again(disk: Disk, spec: PoolSpec) -> None:
    """The disk may have no room for a second superblock."""
    start(spec, lambda pool: put(pool, 0, name(0)))
    disk.fail, disk.fail_count = ("superblock", errno.ENOSPC), 1000
    assert start(spec, rest) == {0: name(0)}
