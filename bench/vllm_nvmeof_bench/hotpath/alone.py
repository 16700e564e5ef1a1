# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath alone`: the cost of sharing on the scheduler's thread without other servers.

Three of our managers run in one process, each with the same chunks: two without sharing, and one
with an empty foreign table, which the product's follower of an empty directory updates. In each
block all managers run the same cases in random order: look up, load, store and write new chunks,
load others from the pool, look up chunks that do not exist, and run steps without work. Times are
CPU time of the calling thread.

The place where a manager's memory is allocated changes its times by a few per cent, however many
blocks are measured. New managers are therefore created for every round, in another order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.hotpath import managers
from vllm_nvmeof_bench.hotpath.measure import frozen
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.reports.alone import MISS, ON, SIDES, STEP, Sample
from vllm_nvmeof_bench.reports.hotpath import ONE, SCHEDULER
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.settings import check_positive, option, recorded
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import AdoptedEntries, place_of
from vllm_nvmeof_offload.units import MIB
from vllm_nvmeof_offload.vllm_adapter.sharing import ShareSettings

_FOLLOW_MS = 100
_SCANNED_S_MAX = 30.0
_POLL_S = 0.01
_STEPS = 200
_MISSES_SEED = 7


@dataclass(frozen=True)
class Settings:
    """ops: number of one-chunk ops per block."""

    chunks: int = option(512, "Chunks per op; ops of one chunk are measured too.", min=2)
    entries: int = option(200_000, "Chunks in each manager's index.", min=1)
    blocks: int = option(40, "Blocks per round.", min=1)
    rounds: int = option(8, "Rounds, each with new managers.", min=1)
    seed: int = option(1, "Seed for keys and order.")
    directory: Path = option(
        Path("build/bench/disk"), "Directory for two empty targets.", flag="--dir"
    )
    ops: int = 100
    cache_slots: int = 16_384

    def __post_init__(self) -> None:
        check_positive(self, "entries", "blocks", "rounds")
        if self.entries < 2 * (self.cache_slots + (self.blocks + 1) * sum(self.sizes.values())):
            raise BenchError(
                f"{self.entries} entries are too few for {self.blocks} blocks: chunks must not be "
                "evicted from the pool before they are loaded"
            )

    @property
    def sizes(self) -> dict[int, int]:
        """Chunks per op → chunks per sample."""
        return {ONE: self.ops, self.chunks: self.chunks}


def _adopted(keys: npt.NDArray[np.void]) -> AdoptedEntries:
    """Return the entries of a full pool, whose chunks are on the targets in turn."""
    rows = np.arange(len(keys))
    places = place_of(0, 0) | (rows % managers.TARGETS) << 32 | rows // managers.TARGETS
    return AdoptedEntries(places, rows.astype(np.uint64) + np.uint64(1), keys.tobytes())


class _Round:
    """The managers of one round, created in random order, and keys that they have not seen."""

    def __init__(
        self, settings: Settings, number: int, keys: npt.NDArray[np.void], targets: list[Path]
    ) -> None:
        self._settings, self._number = settings, number
        self._dice = random.Random(f"{settings.seed} {number}")
        self._made = 0
        self.sides: dict[str, managers.OurManager] = {}
        first = self._new_keys(settings.cache_slots)
        for side in self._dice.sample(SIDES, len(SIDES)):
            share = ShareSettings(_FOLLOW_MS) if side == ON else None
            made = managers.OurManager(_adopted(keys), settings.cache_slots, targets, share)
            made.fill(first)
            self.sides[side] = made
        # The lower half is evicted first.
        rows = np.random.default_rng([settings.seed, 2 + number]).permutation(len(keys) // 2)
        self._in_pool = keys[len(keys) - len(rows) :][rows]

    def close(self) -> None:
        for one in self.sides.values():
            one.manager.shutdown()

    def wait_for_follower(self) -> None:
        """Wait for the follower's first scan; raise BenchError if it does not happen in time."""
        end_s = time.monotonic() + _SCANNED_S_MAX
        while not self.sides[ON].manager.core.gauges()["shared_age_seconds"]:
            if time.monotonic() > end_s:
                raise BenchError("the follower does not start")
            time.sleep(_POLL_S)

    def measure(self, block: int) -> Iterator[Sample]:
        """Measure all cases of a block, with ops of both sizes."""
        for chunks, count in self._settings.sizes.items():
            recorders = {side: managers.Recorder(side, chunks, self._number) for side in self.sides}
            new, self._in_pool, in_pool = (
                self._new_keys(count), self._in_pool[count:], self._in_pool[:count],
            )  # fmt: skip
            missing = managers.random_keys([self._settings.seed, _MISSES_SEED, block], count)
            for case in ("store", "cpu", "pool", MISS, STEP):
                for side in self._dice.sample(SIDES, len(SIDES)):
                    one, into = self.sides[side], recorders[side]
                    if case == STEP:
                        yield self._sample(side, STEP, STEP, chunks, block, _steps(one))
                    elif case == MISS:
                        us = _misses(one, managers.batches_of(missing, chunks))
                        yield self._sample(side, MISS, "look_up", chunks, block, us)
                    elif case == "store":
                        one.measure_store(into, managers.batches_of(new, chunks))
                    else:
                        keys = in_pool if case == "pool" else new
                        one.measure_load(into, case, managers.batches_of(keys, chunks))
            for side, recorder in recorders.items():
                for found in recorder.samples:
                    if found.thread == SCHEDULER and found.us_per_chunk is not None:
                        us = found.us_per_chunk
                        yield self._sample(side, found.case, found.stage, chunks, block, us)

    def _sample(
        self, side: str, case: str, stage: str, chunks: int, block: int, us: float
    ) -> Sample:
        return Sample(side, case, stage, chunks, self._number, block, us)

    def _new_keys(self, count: int) -> npt.NDArray[np.void]:
        """Return keys of chunks that no manager has stored."""
        self._made += 1
        words = [self._settings.seed, 3, 1 + self._number, self._made]
        return managers.random_keys(words, count)


def _misses(one: managers.OurManager, batches: managers.Batches) -> float:
    """Return the µs per look-up of chunks that do not exist."""
    contexts = one.contexts(batches)
    began_s = time.thread_time()
    one.look_up(batches, contexts)
    us = 1e6 * (time.thread_time() - began_s) / sum(map(len, batches))
    one.end(contexts)
    return us


def _steps(one: managers.OurManager) -> float:
    """Return the µs per step that has no look-ups, commands or reports."""
    manager, counts = one.manager, Counts()
    began_s = time.thread_time()
    for _ in range(_STEPS):
        manager.report((), counts)
        manager.take_commands()
        manager.get_stats()
    return 1e6 * (time.thread_time() - began_s) / _STEPS


@contextmanager
def _round(
    settings: Settings, number: int, keys: npt.NDArray[np.void], targets: list[Path]
) -> Iterator[_Round]:
    one = _Round(settings, number, keys, targets)
    try:
        one.wait_for_follower()
        yield one
    finally:
        one.close()


def run(
    settings: Settings, home: Path, on_progress: OnProgress = unheard
) -> tuple[list[Sample], Mapping[str, Any]]:
    """Return samples and conditions. home: an empty directory for the targets."""
    found = {**at_start(home), "settings": recorded(settings)}
    targets = [home / str(target) for target in range(managers.TARGETS)]
    for target in targets:
        target.mkdir()
    samples: list[Sample] = []
    with frozen():
        keys = managers.random_keys([settings.seed], settings.entries)
        for number in range(settings.rounds):
            on_progress(number, settings.rounds, f"round {number + 1}")
            with _round(settings, number, keys, targets) as one:
                for block in range(-1, settings.blocks):
                    measured = list(one.measure(block + 1))
                    samples += measured if block >= 0 else []  # block -1 warms up
    found["load_average_at_end"] = load_average()
    return samples, found


def _measure(settings: Settings, json_path: Path) -> None:
    with progress() as on_progress, home_in(settings.directory, MIB) as home:
        samples, found = run(settings, home, on_progress)
        dump(json_path, "alone", samples, dict(found))


COMMANDS = (
    Command(
        "alone",
        """Measure the cost of sharing on the scheduler's thread without other servers.

        Three managers take turns in this process: two without sharing, and one with an empty
        foreign table and its follower. No data is copied, read or written. Takes a minute.
        """,
        Settings,
        _measure,
    ),
)
