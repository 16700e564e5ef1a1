# SPDX-License-Identifier: Apache-2.0
"""The manager's time, memory and GC pauses, as in the scheduler's process, with a million entries.

There is no I/O and no GPU: every operation succeeds on a simulated rank. Times are CPU time of the
thread, to exclude other load. `python -m vllm_nvmeof_bench.manager` prints JSON.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from vllm_nvmeof_offload.groups import GROUP_ID_BYTES, Group, GroupKind
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.protocol import (
    AdoptedEntries,
    OpReport,
    RankHello,
    place_of,
    slots_by_target,
)

KEY_BYTES = 36  # vLLM's: a SHA-256 and a group number
CACHE_SLOTS = 4096
_TARGETS = 2
BATCH = 64  # chunks of one store
SWEEPS = 7


def measure_manager(entries: int = 1_000_000) -> dict[str, Any]:
    """Measure a manager core with `entries` chunks in its pool.

    lookup_us: the slower of hits and misses, each a median over sweeps of random keys that are new
    objects. bytes_per_entry: growth of resident memory, keys included; the larger of the values for
    an adopted pool and for a stored one. gc_pause_ms_max: the longest garbage collection, automatic
    or forced, while chunks are stored, loaded and evicted with a full pool.
    """
    before = _resident_bytes()
    stored = _Rank(entries)
    for _ in range(0, entries, BATCH):
        stored.store(stored.new_keys(BATCH))
    stored_bytes = (_resident_bytes() - before) / entries
    with _pauses() as pauses:
        store_us = stored.churn(max(BATCH, entries // 10))
    del stored
    before = _resident_bytes()
    adopted = _Rank(entries, _adopted(entries))
    adopted_bytes = (_resident_bytes() - before) / entries
    with _pauses() as adopted_pauses:
        adopted.churn(BATCH)
    hit_us, miss_us = _lookups(adopted.core.lookup, adopted.core)
    return {
        "entries": entries,
        "lookup_us": max(hit_us, miss_us),
        "lookup_hit_us": hit_us,
        "lookup_miss_us": miss_us,
        "vllm_face_lookup_us": _face_lookups(adopted.hello),
        "bytes_per_entry": max(stored_bytes, adopted_bytes),
        "bytes_per_entry_stored": stored_bytes,
        "bytes_per_entry_adopted": adopted_bytes,
        "gc_pause_ms_max": 1000 * max(pauses + adopted_pauses),
        "adopt_s": adopted.attach_s,
        "store_us_per_chunk": store_us,
    }


class _Rank:
    """A manager core, and a rank on which every operation succeeds at once."""

    def __init__(self, pool_slots: int, adopted: AdoptedEntries | None = None) -> None:
        self._random = random.Random(1)
        self.hello = RankHello(
            rank=0,
            engine_index=0,
            keyspace="benchmark",
            cache_slots=CACHE_SLOTS,
            pool_slots=pool_slots,
            target_count=_TARGETS,
            slot_bytes=1 << 20,
            adopted=adopted or AdoptedEntries(),
        )
        begin_s = time.thread_time()
        self.core = ManagerCore(CoreConfig(), agree([self.hello]))
        self.attach_s = time.thread_time() - begin_s

    def new_keys(self, count: int) -> list[bytes]:
        return [_new_key(self._random) for _ in range(count)]

    def store(self, keys: list[bytes]) -> None:
        plan = self.core.prepare_store(keys)
        assert plan.command is not None
        self.core.report([OpReport(plan.command.op)])
        while commands := self.core.take_commands():
            self.core.report([OpReport(command.op) for command in commands])  # type: ignore[union-attr]

    def churn(self, count: int) -> float:
        """Store new chunks in a full pool and load older ones; return µs per stored chunk."""
        spent_s = 0.0
        previous: list[bytes] = []
        for number in range(0, count, BATCH):
            keys = self.new_keys(BATCH)
            begin_s = time.thread_time()
            self.store(keys)
            spent_s += time.thread_time() - begin_s
            found = [key for key in previous if self.core.lookup(key) is not None]
            command = self.core.prepare_load(found)
            self.core.report([OpReport(command.op)])
            previous = keys
            if number % (count // 8 or 1) < BATCH:
                gc.collect()
        return spent_s / count * 1e6


def _new_key(rng: random.Random) -> bytes:
    """Return a new random key of group 0."""
    return rng.randbytes(KEY_BYTES - GROUP_ID_BYTES) + bytes(GROUP_ID_BYTES)


def _adopted(entries: int) -> AdoptedEntries:
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 256, (entries, KEY_BYTES), np.uint8)
    keys[:, -GROUP_ID_BYTES:] = 0
    slots = slots_by_target(entries, _TARGETS)
    places = [place_of(target, 0) | np.arange(count) for target, count in enumerate(slots)]
    return AdoptedEntries(
        np.concatenate(places),
        np.arange(entries, dtype=np.uint64) + np.uint64(1 << 50),
        keys.tobytes(),
    )


def _lookups(
    lookup: Callable[..., object], core: ManagerCore, *context: object
) -> tuple[float, float]:
    """Return (µs per hit, µs per miss)."""
    rng = random.Random(3)
    known = [entry.key for entry in core.entries()]
    count = min(len(known), 100_000)

    def sweep_us(keys: list[bytes]) -> float:
        begin_s = time.thread_time()
        for key in keys:
            lookup(key, *context)
        return (time.thread_time() - begin_s) / count * 1e6

    hits, misses = [], []
    for _ in range(SWEEPS):
        hits.append(sweep_us([bytes(bytearray(key)) for key in rng.sample(known, count)]))
        misses.append(sweep_us([_new_key(rng) for _ in range(count)]))
    return statistics.median(hits), statistics.median(misses)


def _face_lookups(hello: RankHello) -> float | None:
    """Return µs per look-up by vLLM's interface, the slower of hit and miss; None without vLLM."""
    try:
        from vllm.v1.kv_offload.base import ReqContext

        from vllm_nvmeof_offload.vllm_adapter.manager import NVMeoFOffloadingManager
    except ImportError:
        return None
    manager = NVMeoFOffloadingManager(CoreConfig())
    manager.attach([hello], KEY_BYTES, (Group(0, GroupKind.FULL, 256),))
    return max(_lookups(manager.lookup, manager.core, ReqContext("request")))


@contextmanager
def _pauses() -> Iterator[list[float]]:
    """Record the seconds of each garbage collection in the list that is yielded."""
    seconds = [0.0]
    began = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            seconds.append(time.thread_time() - began)

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    print(json.dumps(measure_manager(*map(int, sys.argv[1:])), indent=2))
