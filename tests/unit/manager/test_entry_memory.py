# SPDX-License-Identifier: Apache-2.0
"""A million entries: bytes per entry, and objects that the garbage collector walks.

Nothing here is timed (that is `bench`'s part). A process of its own, because what counts is the
memory that the kernel has given, native columns included.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.protocol import AdoptedEntries, OpReport, WriteCommand, place_of

from .bench import Bench, hello, key, keys_of

ENTRIES = 1_000_000
CACHE_SLOTS = 4096
BATCH = 2048
KEY_BYTES = 36  # vLLM's
BYTES_PER_ENTRY_MAX = 130
#: Of a core, and a few per batch in progress.
TRACKED_OBJECTS_MAX = 500


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def keys(first: int, count: int = BATCH) -> list[bytes]:
    return [
        number.to_bytes(KEY_BYTES - 4, "big") + bytes(4) for number in range(first, first + count)
    ]


def adopted() -> AdoptedEntries:
    numbers = np.arange(ENTRIES, dtype=np.int64)
    rows = np.zeros((ENTRIES, KEY_BYTES), np.uint8)
    rows[:, -8:-4] = numbers.astype(">u4").view(np.uint8).reshape(ENTRIES, 4)
    places = place_of(0, 0) + numbers
    return AdoptedEntries(places, numbers.astype(np.uint64) + 7, rows.tobytes())


def store(core: ManagerCore, first: int) -> None:
    """Store a batch of chunks, report it copied, write it, report it written."""
    plan = core.prepare_store(keys(first))
    assert plan.command is not None
    core.report([OpReport(plan.command.op)] * 2)
    while commands := core.take_commands():
        core.report([OpReport(c.op) for c in commands if isinstance(c, WriteCommand)] * 2)


def show(what: str, before: tuple[int, int]) -> None:
    per_entry = (resident_bytes() - before[0]) / ENTRIES
    objects = len(gc.get_objects()) - before[1]
    print(f"{what}: {per_entry:.1f} bytes per entry, {objects} objects")
    assert KEY_BYTES < per_entry <= BYTES_PER_ENTRY_MAX, what
    assert objects <= TRACKED_OBJECTS_MAX, what


def main() -> None:
    """Adopt a million entries, let a third of them go and others come, and void them."""
    hellos = [hello(rank, CACHE_SLOTS, ENTRIES, ()) for rank in range(2)]
    small = agree(hellos)
    store(ManagerCore(CoreConfig(world_size=2), small), 0)  # imports, and arenas, are there
    agreement = agree([replace(one, adopted=adopted()) for one in hellos])
    assert agreement.notes == ()
    gc.collect()
    before = resident_bytes(), len(gc.get_objects())
    core = ManagerCore(CoreConfig(world_size=2), agreement)
    show("adopted", before)
    assert core.gauges()["entries"] == ENTRIES
    assert core.lookup(keys(ENTRIES - 1, 1)[0]) is Source.POOL
    for first in range(ENTRIES, ENTRIES * 4 // 3, BATCH):  # the pool is full: the oldest go
        store(core, first)
        if first % (BATCH * 16) == 0:
            load = core.prepare_load(keys(first - ENTRIES // 2))
            core.report([OpReport(load.op)] * 2)
    assert core.gauges()["entries"] == core.gauges()["slots_used", "pool"] == ENTRIES
    assert core.counters["evictions", "pool"] >= ENTRIES // 3
    show("come and gone", before)
    core.reset()
    assert core.gauges()["entries"] == 0
    show("void", before)


def test_a_million_entries_are_light_while_they_come_and_go() -> None:
    module = [sys.executable, "-m", "tests.unit.manager.test_entry_memory"]
    root = Path(__file__).parents[3]
    # What is freed goes back to the kernel at once: no earlier array's memory is used again.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(module, capture_output=True, text=True, cwd=root, env=env, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("bytes per entry") == 3


def test_an_entry_keeps_its_place_and_generation_through_state_changes() -> None:
    bench = Bench(cache=2, pool=4, land_cache_share=1.0)
    bench.store(1, 2)
    bench.write_all()
    before = {e.key: (e.generation, e.place) for e in bench.core.entries()}
    assert {generation for generation, _ in before.values()} == {101, 102}
    bench.store(3, 4)  # 1 and 2 are only in the pool now
    bench.write_all()
    after = {e.key: (e.generation, e.place) for e in bench.core.entries()}
    assert {key: after[key] for key in keys_of(1, 2)} == before
    load = bench.load(1)
    assert (load.batch.generations[0], load.batch.places[0]) == before[key(1)]
    bench.done(load.op)
    (again,) = (e for e in bench.core.entries() if e.key == key(1))
    assert (again.generation, again.place) == before[key(1)]
    assert again.cache == load.batch.cache[0]


if __name__ == "__main__":
    main()
