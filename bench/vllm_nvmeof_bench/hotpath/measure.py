# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath chunks`: the cost per chunk on every thread that requests wait for.

Our manager and vLLM's own `CPUOffloadingManager` are in one process, with the same number of
entries, and take turns within a round in random order. Times are CPU time of one thread, to exclude
other load of the machine as far as possible. Garbage collection is as in production: objects that
are older than the managers are frozen, as vLLM's engine does at its start, and the collector stays
enabled. The first round is a warm-up and is discarded.

Each round creates our manager from a pool's table again; this is the sample of adoption. It then
fills the CPU tier, so that every store evicts, and measures every size: one op of that many chunks,
and ops of one chunk, which give the cost per op. vLLM's manager stays full.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import OnProgress, home_in, progress, unheard
from vllm_nvmeof_bench.hotpath import managers
from vllm_nvmeof_bench.hotpath.worker import Worker
from vllm_nvmeof_bench.reports.hotpath import CASES, ONE, OURS, SIDES, VLLM, Sample
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.settings import check_positive, option, recorded
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, StoredGroup, encode_entry
from vllm_nvmeof_offload.pool.recovery import adopt_entries
from vllm_nvmeof_offload.protocol import AdoptedEntries, SlotIdentity, slots_by_target
from vllm_nvmeof_offload.units import MIB

_EPOCH = 1
_MEMORY_CACHE_SLOTS = 4096


@dataclass(frozen=True)
class Settings:
    """ops: one-chunk ops per sample; the same number of requests, each with its own state, may
    start in one step."""

    chunks: tuple[int, ...] = option((512, 8192, 65_536), "Chunks per op.")
    entries: int = option(1_000_000, "Chunks in each manager's index.", min=1)
    repeats: int = option(7, "Measured rounds, after a warm-up round.", min=1)
    seed: int = option(1, "Seed for keys and order.")
    directory: Path = option(
        Path("build/bench/disk"),
        "Directory for the pool's table, 64 bytes per entry.",
        flag="--dir",
    )
    ops: int = 200

    def __post_init__(self) -> None:
        check_positive(self, "chunks", "entries", "repeats")
        if self.entries < 2 * (self.cache_slots + 2 * sum(self.sizes.values())):
            raise BenchError(
                f"{self.entries} entries are too few for ops of {max(self.chunks)} chunks: chunks "
                "must not be evicted from the pool before they are loaded"
            )

    @property
    def sizes(self) -> dict[int, int]:
        """Chunks per op → chunks per sample."""
        return {ONE: self.ops} | {one: one for one in self.chunks}

    @property
    def cache_slots(self) -> int:
        """Cache slots for two stores of the largest size: half may hold chunks not yet written."""
        return 2 * max(self.sizes.values())


class Table:
    """The tables of a full pool on disk, which a rank adopts when it starts."""

    def __init__(self, directory: Path, keys: npt.NDArray[np.void], targets: int) -> None:
        self._counts = slots_by_target(len(keys), targets)
        self._paths = [directory / f"table-{target}" for target in range(targets)]
        for target, path in enumerate(self._paths):
            rows = range(target, len(keys), targets)
            identities = (SlotIdentity(keys[row].tobytes(), row + 1) for row in rows)
            entries = map(encode_entry, count(), identities, repeat(_EPOCH))
            path.write_bytes(b"".join(entries))

    def adopt(self) -> tuple[AdoptedEntries, float]:
        """Return the adopted entries, and the CPU seconds that adoption took."""
        fds = [os.open(path, os.O_RDONLY) for path in self._paths]
        try:
            slabs: Any = [
                SimpleNamespace(table_fd=fd, table_slots_found=count)
                for fd, count in zip(fds, self._counts, strict=True)
            ]
            group = StoredGroup(0, GroupKind.FULL, 1, 1, 1)
            superblocks: Any = [
                SimpleNamespace(epoch=_EPOCH, groups=(group,), target_index=target)
                for target in range(len(slabs))
            ]
            began_s = time.thread_time()
            found = adopt_entries(slabs, self._counts, superblocks)
            return found, time.thread_time() - began_s
        finally:
            for fd in fds:
                os.close(fd)


@contextmanager
def frozen() -> Iterator[None]:
    """Freeze existing objects for the garbage collector, as vLLM's engine does at its start."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Round:
    """One round, with a new manager of ours whose CPU tier is full."""

    def __init__(
        self, settings: Settings, number: int, table: Table, keys: npt.NDArray[np.void]
    ) -> None:
        self.samples: list[Sample] = []
        self._number, self._settings = number, settings
        adopted, rank_s = table.adopt()
        self._ours = managers.OurManager(adopted, settings.cache_slots)
        self._blocks = managers.Blocks(max(settings.chunks))
        for stage, seconds in (("adopt_rank", rank_s), ("adopt_manager", self._ours.attach_s)):
            us = 1e6 * seconds / settings.entries
            self.samples.append(_start_sample(settings, stage, OURS, number, us))
        self._dice = random.Random(f"{settings.seed} {number}")
        self._made = 0
        self._ours.fill(self._new_keys(settings.cache_slots))
        # The lower half is evicted first.
        rows = np.random.default_rng([settings.seed, 2 + number]).permutation(len(keys) // 2)
        self._in_pool = keys[len(keys) - len(rows) :][rows]

    def measure(self, chunks: int, theirs: managers.VllmManager, rank: Worker) -> None:
        """Measure all stages of ops of `chunks` chunks."""
        count = self._settings.sizes[chunks]
        new, self._in_pool, in_pool = (
            self._new_keys(count), self._in_pool[count:], self._in_pool[:count],
        )  # fmt: skip
        recorders = {side: managers.Recorder(side, chunks, self._number) for side in SIDES}
        sides = {OURS: self._ours, VLLM: theirs}
        for side in self._dice.sample(SIDES, len(SIDES)):
            sides[side].measure_store(recorders[side], managers.batches_of(new, chunks))
        for side in self._dice.sample(SIDES, len(SIDES)):
            sides[side].measure_load(recorders[side], "cpu", managers.batches_of(new, chunks))
        self._ours.measure_load(recorders[OURS], "pool", managers.batches_of(in_pool, chunks))
        held, self._in_pool = self._in_pool[:count], self._in_pool[count:]
        self._ours.measure_holds(
            recorders[OURS], managers.batches_of(new, chunks), managers.batches_of(held, chunks)
        )
        rank.measure(recorders[OURS], managers.batches_of(new, chunks))
        if chunks != ONE:
            self._blocks.measure(recorders[VLLM], chunks)
        for recorder in recorders.values():
            self.samples += recorder.samples

    def _new_keys(self, count: int) -> npt.NDArray[np.void]:
        """Return keys of chunks that neither manager has stored."""
        self._made += 1
        return managers.random_keys([self._settings.seed, 3, 1 + self._number, self._made], count)


def _start_sample(
    settings: Settings, stage: str, side: str, number: int, us: float | None = None,
    size: float | None = None,
) -> Sample:  # fmt: skip
    thread = CASES["start"][stage].thread
    return Sample(stage, "start", side, thread, settings.entries, max(0, number), us, size)


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise reused free memory hides growth
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _fill_managers(
    settings: Settings, table: Table
) -> tuple[managers.VllmManager, Iterator[Sample]]:
    """Return vLLM's manager, full, and samples of both indexes' memory; ours is discarded."""
    adopted, _ = table.adopt()
    before = _resident_bytes()
    ours = managers.OurManager(adopted, _MEMORY_CACHE_SLOTS)
    grown = {OURS: _resident_bytes() - before}
    del ours, adopted
    keys = managers.random_keys([settings.seed, 1], settings.entries)
    before = _resident_bytes()
    theirs = managers.VllmManager(keys)
    grown[VLLM] = _resident_bytes() - before
    per_chunk = {side: one / settings.entries for side, one in grown.items()}
    return theirs, (
        _start_sample(settings, "memory", side, 0, size=one) for side, one in per_chunk.items()
    )


def run(
    settings: Settings, home: Path, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Return samples and conditions. home: an empty directory for the pool's tables."""
    found = {
        **at_start(home), "settings": recorded(settings), "cache_slots": settings.cache_slots,
    }  # fmt: skip
    total = (settings.repeats + 1) * len(settings.sizes)
    with frozen(), closing(Worker(max(settings.sizes.values()))) as rank:
        on_progress(0, total, "making the pool's tables")
        keys = managers.random_keys([settings.seed], settings.entries)
        table = Table(home, keys, managers.TARGETS)
        on_progress(0, total, "filling the managers")
        theirs, memory = _fill_managers(settings, table)
        samples = list(memory)
        for number in range(-1, settings.repeats):
            one = _Round(settings, number, table, keys)
            for at, chunks in enumerate(settings.sizes):
                done, name = (number + 1) * len(settings.sizes) + at, f"{max(0, number) + 1}"
                on_progress(done, total, f"round {name} · {chunks:,} chunks")
                one.measure(chunks, theirs, rank)
            samples += one.samples if number >= 0 else []
    found["load_average_at_end"] = load_average()
    return samples, found


def _measure(settings: Settings, json_path: Path) -> None:
    size = settings.entries * ENTRY_BYTES + MIB
    with progress() as on_progress, home_in(settings.directory, size) as home:
        dump(json_path, "hotpath", *run(settings, home, on_progress))


COMMANDS = (
    Command(
        "hotpath",
        """Measure the cost per chunk on the scheduler's, the model's and the pipeline's threads.

        Our manager and vLLM's CPU offloading manager take turns in this process, each with a
        million chunks; no data is copied, read or written. Takes 2 minutes and 2 GiB of memory.
        """,
        Settings,
        _measure,
    ),
)
