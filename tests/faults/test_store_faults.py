# SPDX-License-Identifier: Apache-2.0
"""The store under crashes and damage, from printed seeds, and controls of the simulation.

`python -m tests.faults.store --seed N` replays a seed; `tests.faults.store.world` lists the
checks.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import slots
from tests.owners import reset
from tests.slots import write_slot
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, OK, STALE, Outcome, io_error
from vllm_nvmeof_offload.pool import format as pool_format
from vllm_nvmeof_offload.pool import pool, recovery
from vllm_nvmeof_offload.pool import pool as superblock_writer
from vllm_nvmeof_offload.pool import recovery as prepare
from vllm_nvmeof_offload.pool.format import SlotPlace, Stamp, Superblock
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import AdoptedEntries, SlotIdentity
from vllm_nvmeof_offload.units import HEADER_BYTES

from .kit import adopted, make_spec, name
from .store.disk import Crash, Data, Disk, Event
from .store.world import TAG, play_in_memory

SEED = int(os.environ.get("VLLM_NVMEOF_SEED", "0")) or random.SystemRandom().getrandbits(32)
COUNT = int(os.environ.get("VLLM_NVMEOF_STORE_SEEDS", "500"))
BATCHES = 4
CONTROL_SEEDS_MAX = 500


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_load_gives_the_right_bytes_or_a_miss(batch: int) -> None:
    count = COUNT // BATCHES
    first = SEED + batch * count
    print(f"VLLM_NVMEOF_SEED={first}")
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        counts.update(play_in_memory(seed))
    print(dict(counts))
    assert counts["found again"] > count
    assert counts["served"] > counts["miss"] > count
    kinds = ("page cache", "nothing", "prefix", "subset", "torn", "bad disk")
    wanted = [f"crash: {kind}" for kind in kinds]
    wanted += ["kept", "lost", "torn", "misdirected", "flipped", "crash inside"]
    wanted += [f"rot: {what}" for what in ("slab", "table", "superblock", "swapped", "cut")]
    wanted += ["reset", "reset in part", "reset failed", "write failed", "clean end", "killed"]
    wanted += ["misdirected read", "read of another length"]
    assert [what for what in wanted if not counts[what]] == []


def test_a_crash_loses_a_name_now_and_then() -> None:
    seeds = range(SEED, SEED + CONTROL_SEEDS_MAX)
    assert any(play_in_memory(seed)["name lost"] for seed in seeds)


def test_a_seed_repeats() -> None:
    assert play_in_memory(SEED) == play_in_memory(SEED)


def verify_without(*checks: str, place: tuple[str, ...] = ()) -> object:
    """`format.verify` without these checks. place: the fields that are not compared."""

    def verify(
        slot: memoryview, identity: SlotIdentity, payload_bytes: int, at: SlotPlace, tag: bytes
    ) -> Outcome:
        header = pool_format.parse_header(slot[:HEADER_BYTES])
        if header is None:
            return CHECKSUM_MISMATCH
        found = header.identity
        wanted = SlotIdentity(
            found.key if "key" in checks else identity.key,
            found.generation if "generation" in checks else identity.generation,
        )
        at = at._replace(**{field: getattr(header.place, field) for field in place})
        if found != wanted or header.place != at:
            return STALE
        tag = header.stamp.tag if "tag" in checks else tag
        if "crc" in checks or ("length" in checks and payload_bytes != header.payload_bytes):
            return OK
        return pool_format.verify(slot, found, payload_bytes, at, tag)

    return verify


class Equal:
    """To everything, for example to the place of a slot of this number."""

    def __init__(self, slot: int = 0) -> None:
        self.slot = slot

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def decode_with(**changes: Callable[[int], object]) -> object:
    def decode(raw: np.ndarray, slots: np.ndarray) -> object:
        table = DECODE(raw, slots)
        count = len(slots)
        return replace(table, **{field: make(count) for field, make in changes.items()})  # type: ignore[arg-type]

    return decode


DECODE = recovery.decode_table


NEW_EPOCH = Pool._new_epoch


def any_tag(superblock: Superblock | None) -> Superblock | None:
    """The superblock, with the tag that a start compares its own with."""
    return superblock and replace(superblock, tag=TAG)


def adopt_nothing(*files: object, **more: object) -> AdoptedEntries:
    return AdoptedEntries()


def no_headers(fd: int, indices: np.ndarray, slot_bytes: int) -> Iterator[object]:
    yield indices.tolist(), [None] * len(indices)


def headers_of_any_place(fd: int, indices: np.ndarray, slot_bytes: int) -> Iterator[object]:
    for batch, headers in SCAN_HEADERS(fd, indices, slot_bytes):
        every = zip(batch, headers, strict=True)
        yield batch, [one and replace(one, place=Equal(index)) for index, one in every]  # type: ignore[arg-type]


SCAN_HEADERS = recovery.scan_headers


def play_many(lies: bool = False) -> None:
    for seed in range(SEED, SEED + CONTROL_SEEDS_MAX):
        play_in_memory(seed, lies)


#: Broken rule → (module or class, attribute, replacement). A wipe that leaves slab and table breaks
#: none: their epoch is not the one that begins. Sequences that differ are the simulator's.
BROKEN: dict[str, tuple[object, str, object]] = {
    "payload CRC not checked": (slots, "verify", verify_without("crc")),
    "generation not compared": (slots, "verify", verify_without("generation")),
    "key not compared": (slots, "verify", verify_without("key", "generation")),
    "place not compared": (
        slots,
        "verify",
        verify_without(place=("region_uuid", "rank", "slot")),
    ),
    "region not compared": (slots, "verify", verify_without(place=("region_uuid",))),
    "tag not compared": (slots, "verify", verify_without("tag")),
    "length of another group is accepted": (slots, "verify", verify_without("length")),
    "place not compared in recovery": (recovery, "scan_headers", headers_of_any_place),
    "epoch ignored": (recovery, "decode_table", decode_with(epochs=lambda count: Equal())),
    "old epoch is adopted": (pool, "new_epoch", min),
    "unnamed epoch is adopted": (
        Pool,
        "_new_epoch",
        lambda self, *others: others[0] if others else NEW_EPOCH(self),
    ),
    "tag of the superblock ignored": (
        recovery,
        "newest_of",
        lambda superblocks: any_tag(pool_format.newest_of(superblocks)),
    ),
    "reset not written": (
        superblock_writer,
        "write_superblock",
        lambda directory, superblock: None,
    ),
    "superblock of a start not written": (
        prepare,
        "write_superblock",
        lambda directory, superblock: None,
    ),
    "every load misses": (slots, "verify", lambda *slot: CHECKSUM_MISMATCH),
    "nothing is adopted": (pool, "adopt_entries", adopt_nothing),
    "lost entries not recovered": (recovery, "scan_headers", no_headers),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_simulation_detects_a_broken_rule(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls of the simulation itself."""
    monkeypatch.setattr(*BROKEN[what])
    with pytest.raises(AssertionError, match="replay"):
        play_many()


def test_the_simulation_detects_a_disk_that_ignores_fsync() -> None:
    """The store relies on fsync: without it a crash can undo a reset."""
    with pytest.raises(AssertionError, match="replay"):
        play_many(lies=True)


# -- sequences that the simulation rarely reaches, or that once failed ----------------


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
