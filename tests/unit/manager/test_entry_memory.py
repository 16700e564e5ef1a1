# SPDX-License-Identifier: Apache-2.0
"""Many entries: bytes per entry, and objects per entry that the garbage collector walks.

Less than a million, which scales: nothing here is timed (that is `bench`'s part).
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.protocol import AdoptedEntries, OpReport, WriteCommand

from .bench import hello

ADOPTED = 200_000
STORED = 16_000
CACHE_SLOTS = 512
BATCH = 256
KEY_BYTES = 36  # vLLM's
BYTES_PER_ENTRY_MAX = 320  # 240 here; the bound for a million is 400
#: Objects of a core without entries, and a few per chunk in progress.
TRACKED_OBJECTS_MAX = 2_000


@pytest.fixture
def growth() -> Iterator[list[int]]:
    """Bytes and collected objects that the test has added when it calls `_measure`."""
    gc.collect()
    before = [0, len(gc.get_objects())]
    tracemalloc.start()
    yield before
    tracemalloc.stop()


def _measure(before: list[int]) -> tuple[int, int]:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before[0], len(gc.get_objects()) - before[1]


def _keys(first: int, count: int = BATCH) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "big") for number in range(first, first + count)]


def _store(core: ManagerCore, keys: list[bytes]) -> None:
    """Store chunks, report them copied, write them, report them written."""
    plan = core.prepare_store(keys)
    assert plan.command is not None
    ranks = core.config.world_size
    core.report([OpReport(plan.command.op)] * ranks)
    while commands := core.take_commands():
        core.report([OpReport(c.op) for c in commands if isinstance(c, WriteCommand)] * ranks)


def _assert_light(before: list[int], entries: int) -> None:
    taken_bytes, objects = _measure(before)
    assert taken_bytes / entries <= BYTES_PER_ENTRY_MAX
    assert objects <= TRACKED_OBJECTS_MAX


def test_adopted_entries_are_light(growth: list[int]) -> None:
    numbers = np.arange(ADOPTED)
    tables = [
        AdoptedEntries(numbers, numbers.astype(np.uint64) + 7, tuple(_keys(0, ADOPTED)))
        for _ in range(2)
    ]
    empty = hello(0, CACHE_SLOTS, ADOPTED, ())
    hellos = [
        type(empty)(**{**vars(empty), "rank": rank, "adopted": table})
        for rank, table in enumerate(tables)
    ]
    del tables
    agreement = agree(hellos)
    assert agreement.notes == ()
    core = ManagerCore(CoreConfig(world_size=2), agreement)
    del agreement, hellos, numbers, empty
    _assert_light(growth, ADOPTED)
    assert core.gauges()["entries"] == ADOPTED
    assert core.lookup(_keys(ADOPTED - 1, 1)[0]) is Source.POOL
    _store(core, _keys(ADOPTED))  # the pool is full: the oldest are evicted
    assert core.gauges()["entries"] == ADOPTED
    assert [core.lookup(key) for key in _keys(0)] == [None] * BATCH
    core.reset()
    assert core.gauges()["entries"] == 0
    assert _measure(growth)[0] / ADOPTED < 100, "memory is kept per slot"


def test_stored_entries_are_light_while_they_come_and_go(growth: list[int]) -> None:
    core = ManagerCore(CoreConfig(), agree([hello(0, CACHE_SLOTS, STORED, ())]))
    for first in range(0, STORED + STORED // 2, BATCH):
        _store(core, _keys(first))
        if first % (BATCH * 16) == 0:
            load = core.prepare_load(_keys(first // 4 * 3 // BATCH * BATCH))
            core.report([OpReport(load.op)])
    gauges = core.gauges()
    assert gauges["entries"] == gauges["pool_slots_used"] == STORED
    _assert_light(growth, STORED)


def test_an_entry_keeps_its_place_and_generation_through_state_changes() -> None:
    """Place and generation stay through every change of state."""
    agreement = agree([hello(0, 2, 4, ())])
    core = ManagerCore(CoreConfig(land_cache_share=1.0), agreement, first_generation=100)
    _store(core, [b"a", b"b"])
    before = {e.identity: (e.cache_slot, e.pool_slot) for e in core.entries()}
    assert {identity.generation for identity in before} == {101, 102}
    _store(core, [b"c", b"d"])  # a and b are only in the pool now
    pooled = {e.identity: e.pool_slot for e in core.entries() if e.identity in before}
    assert pooled == {identity: slots[1] for identity, slots in before.items()}
    load = core.prepare_load([b"a"])
    (chunk,) = load.chunks
    assert chunk.identity in before
    assert chunk.pool_slot == before[chunk.identity][1]
    core.report([OpReport(load.op)])
    (again,) = [e for e in core.entries() if e.identity.key == b"a"]
    assert (again.identity, again.cache_slot) == (chunk.identity, chunk.cache_slot)
