# SPDX-License-Identifier: Apache-2.0
"""`bench pool`: the pool's I/O against that of other engines, interleaved in one run on one disk.

Cases, all with O_DIRECT on storage that was written before (`arms` describes each arm):

    batch_write, batch_read   `bytes_per_round`, submitted at once; ends when all are done
    mixed                     the same bytes, half reads and half writes, alternating
    single_write, single_read one job of `single_bytes`, in blocks; ends when it is done
    read_beside_writes        single-block reads, each `read_gap_s` after the previous one has
                              completed, while a writer keeps `queued_bytes` queued
    writes_beside_read        that writer's throughput during these reads
    writes_alone              the same writer without reads

Every arm runs batches and mixed. The other cases are only for arms with jobs and their own queue of
writes: `ours`, `ours_threads`, `vllm_fs`. The last three cases run only with blocks of 2 MiB, and
not at all if that size is not measured.

Block sizes are measured one after another, each with its own files. For each size, a round runs all
kinds, and each kind all arms in random order. Compared arms are thus measured within seconds of
each other, and none always follows the same other arm, whose I/O the disk may still be processing.
Dirty pages are written out before every measurement (syncfs). A pause follows each deletion,
because a disk mounted with `discard` is busy after it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import conditions
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import home_in, quiet_interpreter, sync_file_system
from vllm_nvmeof_bench.pool.arms import (
    Fio,
    FsMover,
    Ground,
    Moved,
    PipelineMover,
    Settings,
    build_ring,
    fill,
    import_fs,
    limits,
    measure_fio,
    measure_moves,
    measure_ring,
    measure_ring_slots,
    write_flat,
)
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.reports.pool import KINDS, Sample
from vllm_nvmeof_bench.results import BenchError, dump, size_name
from vllm_nvmeof_bench.settings import recorded
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import slot_stride_bytes

#: Our arms → their engines.
_OURS = {"ours": "uring", "ours_threads": "threads"}
_FLAT = {"fio": measure_fio, "ring": measure_ring, "ring_slots": measure_ring_slots}
#: The directory of the compiled ring loop, relative to the current directory.
_BUILD_DIR = Path("build/bench")
_REMEDY = "give another --dir, or fewer --bytes-per-round"
#: Descriptions with more parts than this are of single measurements, and are not logged.
_LOGGED_PARTS = 2


def run(
    settings: Settings, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return samples and conditions. All files are deleted at the end.

    Raises: BenchError: there is too little space, no arm can run, or an arm failed.
    """
    limit = settings.disk_bytes_max
    with home_in(settings.directory, limit, _REMEDY) as home, quiet_interpreter():
        on_progress(0, 0, "finding the arms that can run")
        one = _Run(settings, home, on_progress)
        gc.collect()
        gc.freeze()  # exclude vLLM's modules from the collections before each measurement
        found = conditions.at_start(home)
        for block_bytes in settings.blocks:
            one.block(block_bytes)
    if not one.samples:
        missing = ((name, arm.get("reason")) for name, arm in one.arms.items())
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing if reason)
        raise BenchError(f"no arm can run here ({reasons})")
    found["settings"] = {**recorded(settings), "block_bytes": settings.blocks, "engine": limits()}
    found["arms"] = one.arms
    return one.samples, {**found, "load_average_at_end": conditions.load_average()}


class _Run:
    """A run. arms: for the conditions, each requested arm's description, or why it cannot run."""

    def __init__(self, settings: Settings, home: Path, on_progress: OnProgress) -> None:
        self.samples: list[Sample] = []
        self.arms: dict[str, dict[str, Any]] = {}
        self._settings = settings
        self._home = home
        self._on_progress = on_progress
        self._done = 0
        self._tidy: Callable[[], bool] = lambda: False
        needs: dict[str, Callable[[], Any]] = {
            "fio": Fio,
            "ring": partial(build_ring, _BUILD_DIR),
            "ring_slots": partial(build_ring, _BUILD_DIR),
            "vllm_fs": import_fs,
        }
        self._needed: dict[str, Any] = {}
        for name in settings.arms:
            self.arms[name] = {"available": True}
            try:
                self._needed[name] = needs[name]() if name in needs else None
            except BenchError as error:
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self.arms[name] = {"available": False, "reason": str(error)}

    def _available(self) -> list[str]:
        return [name for name, arm in self.arms.items() if arm["available"]]

    def block(self, block_bytes: int) -> None:
        """Measure everything at one block size."""
        size = size_name(block_bytes)
        self._report(f"{size} · writing all files")
        with contextlib.ExitStack() as stack:
            arms = self._open(stack, block_bytes)
            for number in range(self._settings.rounds):
                dice = random.Random(f"{self._settings.seed} {block_bytes} {number}")
                for kind in KINDS:
                    for name in dice.sample(list(arms), len(arms)):
                        if kind in self._settings.kinds(name, block_bytes):
                            self._report(f"{size} · round {number + 1} · {kind} · {name}")
                            found = self._measured(partial(arms[name], kind))
                            self.samples += [
                                moved.sample(name, case, block_bytes, number)
                                for case, moved in found.items()
                                if case in self._settings.cases
                            ]
        if "fio" in arms:
            self.arms["fio"]["registered"] = self._needed["fio"].registered

    def _measured(self, measure: Callable[[], dict[str, Moved]]) -> dict[str, Moved]:
        gc.collect()
        sync_file_system(self._home)
        found = measure()
        if self._tidy():
            sync_file_system(self._home)
            time.sleep(self._settings.settle_s)
        self._done += 1
        return found

    def _open(
        self, stack: contextlib.ExitStack, block_bytes: int
    ) -> dict[str, Callable[[str], dict[str, Moved]]]:
        """Open the arms; return a function per arm that measures a kind. `stack` closes the arms.

        Our arms and the fs tier share one staging memory. Our arms, fio and the rings share one
        pool's slab; without an arm of ours, fio and the rings use a flat file. An arm that cannot
        run here is left out; a failure during a measurement ends the benchmark.
        """
        directory, given = self._home / f"block-{block_bytes}", (self._settings, block_bytes)
        directory.mkdir()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        blocks, wanted = self._settings.blocks_needed(block_bytes), self._available()
        staging = Staging(slot_stride_bytes(block_bytes), blocks, 0)
        stack.callback(staging.close)
        fill(staging, self._settings.seed)
        arms: dict[str, Callable[[str], dict[str, Moved]]] = {}
        flat, owner = directory / "flat", None

        def add(name: str, mover: PipelineMover | FsMover) -> None:
            stack.callback(mover.close)
            self.arms[name] |= mover.about()
            arms[name] = partial(measure_moves, mover, *given, random.Random(self._settings.seed))

        ours = [name for name in _OURS if name in wanted]
        if ours:
            ground = Ground(directory / "pool", block_bytes, blocks, staging)
            stack.callback(ground.pool.close)
            for name in ours:
                try:
                    mover = PipelineMover(_OURS[name], ground)
                except EngineError as error:
                    self._leave_out(name, error)
                else:
                    add(name, mover)
                    mover.fill()
                    flat, owner = ground.slab, owner or mover
        if "vllm_fs" in wanted:
            tier = FsMover(directory / "fs", block_bytes, blocks, staging)
            add("vllm_fs", tier)
            self._tidy = tier.tidy
        if owner is None and any(name in wanted for name in _FLAT):
            write_flat(flat, blocks * slot_stride_bytes(block_bytes), self._settings.seed)
        for name, measure_flat in _FLAT.items():
            if name in wanted:
                measure = partial(measure_flat, self._needed[name], flat, *given)
                arms[name] = partial(owner.lend, measure) if owner else measure
        return arms

    def _report(self, what: str) -> None:
        settings = self._settings
        kinds = [
            settings.kinds(name, size) for name in self._available() for size in settings.blocks
        ]
        self._on_progress(self._done, sum(map(len, kinds)) * settings.rounds, what)


def measure(settings: Settings, json_path: Path) -> None:
    """Run the benchmark and write the JSON file.

    Raises: BenchError: the benchmark cannot run here, or an arm failed.
    """
    with progress(lambda what: what.count(" · ") <= _LOGGED_PARTS) as on_progress:
        dump(json_path, "pool", *run(settings, on_progress))


COMMANDS = (
    Command(
        "pool",
        """Compare the pool's I/O with other engines, interleaved in one run on one disk.

        Takes about 8 minutes and up to 3 GiB of disk, freed at the end. Nothing else should run at
        the same time: the load average before and after is printed and saved.
        """,
        Settings,
        measure,
    ),
)
