# SPDX-License-Identifier: Apache-2.0
"""`bench pool`: the pool's I/O beside its rivals, interleaved in one run on one disk.

Cases, all with O_DIRECT on storage that was written before (`arms` says how each arm does it):

    batch_write, batch_read   `bytes_per_round`, submitted at once, until all of it is done
    mixed                     the same bytes, half reads and half writes, alternating
    single_write, single_read one job of `single_bytes`, made of blocks, until it is done
    read_beside_writes        one read of a block at a time, `read_gap_s` after the one before
                              has finished, while a writer keeps `queued_bytes` queued
    writes_beside_read        that writer's throughput meanwhile
    writes_alone              the same writer without reads

Every arm takes part in batches and mixed; in the other cases the arms that have jobs and a queue
of writes of their own: `ours`, `ours_threads`, `vllm_fs`. The last three cases run at only one
block size, 2 MiB, and not at all if that is not listed.

Block sizes follow each other, each with its own files; within one, round by round, kind by
kind, all arms in an order drawn from the seed. So arms that are compared were measured within
seconds of each other, and none always comes after the same other one, whose traces the disk may
still be busy with. Before every measurement what others left behind is written out (syncfs), and
after a deletion the disk gets a moment: mounted with `discard` it is busy with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import conditions
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import home_in, quiet_interpreter, sync_file_system
from vllm_nvmeof_bench.pool.arms import (
    Arm,
    EngineMover,
    FioArm,
    FsMover,
    Ground,
    MoverArm,
    RingArm,
    build_ring,
    describe_fs,
    fill,
    fio_version,
    import_fs,
    limits,
    open_engine,
    write_flat,
)
from vllm_nvmeof_bench.pool.report import KINDS, Sample, Settings
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.results import BenchError, dump, size_name
from vllm_nvmeof_bench.settings import (
    recorded,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import slot_stride_bytes

_OURS = ("ours", "ours_threads")
#: Where the ring loop is compiled to, from the current directory.
BUILD_DIR = Path("build/bench")
_REMEDY = "give another --dir, or fewer --bytes-per-round"
_MANAGER_ENTRIES = 1_000_000
#: A single measurement's description has more parts; a log gets only the others.
_LOGGED_PARTS = 2


class Field:
    """All arms of one block size on one directory, opened and closed together.

    Ours and the fs tier share one staging memory; ours share one pool; fio and the ring share one
    flat file. An arm that cannot run here is left out, and `missing` has the reason; one that
    fails while it runs ends the benchmark. engines: the engines that ours really run.
    """

    def __init__(
        self, directory: Path, settings: Settings, block_bytes: int, missing: dict[str, str]
    ) -> None:
        self.arms: dict[str, Arm] = {}
        self.missing = dict(missing)
        self.engines: dict[str, str] = {}
        self._directory = directory / f"block-{block_bytes}"
        self._settings = settings
        self._block_bytes = block_bytes
        self._blocks = settings.blocks_needed(block_bytes)
        with contextlib.ExitStack() as stack:
            self._open(stack)
            #: Stops the arms, closes the pool, unmaps, deletes the files: in this order.
            self.close = stack.pop_all().close

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._directory.mkdir()
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        staging = Staging(slot_stride_bytes(self._block_bytes), self._blocks, 0)
        stack.callback(staging.close)
        fill(staging, self._settings.seed)
        wanted = [name for name in self._settings.arms if name not in self.missing]
        given = (self._settings, self._block_bytes)
        if any(name in _OURS for name in wanted):
            self._open_ours(stack, staging, wanted)
        if "vllm_fs" in wanted:
            tier = FsMover(self._directory / "fs", self._block_bytes, self._blocks, staging)
            self._add(stack, "vllm_fs", MoverArm(tier, *given))
            self.engines["vllm_fs"] = "O_DIRECT" if tier.direct else "buffered"
        flat = self._directory / "flat"
        if "fio" in wanted or "ring" in wanted:
            write_flat(flat, self._blocks * self._block_bytes, self._settings.seed)
        if "fio" in wanted:
            self._add(stack, "fio", FioArm(flat, *given))
        if "ring" in wanted:
            self._add(stack, "ring", RingArm(build_ring(BUILD_DIR), flat, *given))

    def _open_ours(self, stack: contextlib.ExitStack, staging: Staging, wanted: list[str]) -> None:
        ground = Ground(self._directory / "pool", self._block_bytes, self._blocks, staging)
        stack.callback(ground.pool.close)
        for name in _OURS:
            if name not in wanted:
                continue
            try:
                engine = open_engine(name, ground)
            except BenchError as error:
                self.missing[name] = str(error)
                continue
            self.engines[name] = engine.name
            mover = EngineMover(engine, ground)
            self._add(stack, name, MoverArm(mover, self._settings, self._block_bytes))

    def _add(self, stack: contextlib.ExitStack, name: str, arm: Arm) -> None:
        self.arms[name] = arm
        stack.callback(arm.close)


def steps(settings: Settings, arms: tuple[str, ...]) -> int:
    """The number of measurements."""
    kinds = sum(len(settings.kinds(arm, block)) for arm in arms for block in settings.blocks)
    return kinds * settings.rounds


def run(
    settings: Settings, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the conditions. All files are deleted at the end.

    Raises:
        BenchError: too little space, no arm that can run, or an arm failed.
    """
    limit = settings.disk_bytes_max
    with home_in(settings.directory, limit, _REMEDY) as home, quiet_interpreter():
        on_progress(0, 0, "finding the arms that can run")
        missing = _unavailable(settings)
        gc.collect()
        gc.freeze()  # vLLM's modules are not looked through before every measurement
        found = conditions.at_start(home)
        one = _Run(settings, home, missing, on_progress)
        for block_bytes in settings.blocks:
            one.block(block_bytes)
        if not one.samples:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in one.missing.items())
            raise BenchError(f"no arm can run here ({reasons})")
    found["settings"] = {
        **recorded(settings),
        "block_bytes": settings.blocks,
        "engine": limits(),
    }
    found["arms"] = _described(settings, one.engines, one.missing)
    return one.samples, {**found, "load_average_at_end": conditions.load_average()}


def _unavailable(settings: Settings) -> dict[str, str]:
    """Why a wanted arm cannot run, as far as that can be found out without a pool."""
    checks = {
        "fio": fio_version,
        "ring": lambda: build_ring(BUILD_DIR),
        "vllm_fs": import_fs,
    }
    reasons = {}
    for name in settings.arms:
        try:
            checks.get(name, lambda: None)()
        except BenchError as error:
            reasons[name] = str(error)
    return reasons


def _described(
    settings: Settings, engines: dict[str, str], missing: dict[str, str]
) -> dict[str, Any]:
    """What each arm really was."""
    arms: dict[str, Any] = {}
    for name in settings.arms:
        if name in missing:
            arms[name] = {"available": False, "reason": missing[name]}
            continue
        arms[name] = {"available": True}
        if name in engines:
            arms[name]["runs"] = engines[name]
        if name == "vllm_fs":
            arms[name] |= describe_fs()
        if name == "fio":
            arms[name]["registered"] = FioArm.registered
    return arms


class _Run:
    def __init__(
        self, settings: Settings, home: Path, missing: dict[str, str], on_progress: OnProgress
    ) -> None:
        self.samples: list[Sample] = []
        self.missing = missing
        self.engines: dict[str, str] = {}
        self._settings = settings
        self._home = home
        self._on_progress = on_progress
        self._done = 0

    def block(self, block_bytes: int) -> None:
        self._report(f"{size_name(block_bytes)} · writing everything once")
        field = Field(self._home, self._settings, block_bytes, self.missing)
        with contextlib.closing(field):
            self.missing.update(field.missing)
            self.engines.update(field.engines)
            for number in range(self._settings.rounds):
                self._round(field, block_bytes, number)

    def _round(self, field: Field, block_bytes: int, number: int) -> None:
        dice = random.Random(f"{self._settings.seed} {block_bytes} {number}")
        for kind in KINDS:
            for name in dice.sample(list(field.arms), len(field.arms)):
                if kind not in self._settings.kinds(name, block_bytes):
                    continue
                size = size_name(block_bytes)
                self._report(f"{size} · round {number + 1} · {kind} · {name}")
                self._measure(field, name, kind, block_bytes, number)
                self._done += 1

    def _measure(self, field: Field, name: str, kind: str, block_bytes: int, number: int) -> None:
        arm = field.arms[name]
        gc.collect()
        sync_file_system(self._home)
        for case, moved in arm.measure(kind).items():
            if case in self._settings.cases:
                self.samples.append(moved.sample(name, case, block_bytes, number))
        if arm.tidy():
            sync_file_system(self._home)
            time.sleep(self._settings.settle_s)

    def _report(self, what: str) -> None:
        arms = tuple(name for name in self._settings.arms if name not in self.missing)
        self._on_progress(self._done, steps(self._settings, arms), what)


def _measure_manager(on_progress: OnProgress) -> dict[str, Any]:
    """The manager's own figures; in a process without vLLM."""
    from vllm_nvmeof_bench import manager

    on_progress(1, 1, "the manager at a million entries")
    program = (
        f"import json; from {manager.__name__} import measure_manager; "
        f"print(json.dumps(measure_manager({_MANAGER_ENTRIES})))"
    )
    paths = [str(Path(manager.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise BenchError(f"the manager's benchmark failed: {lines[-1]}")
    return dict(json.loads(done.stdout))


def measure(settings: Settings, json_path: Path) -> None:
    """Run, and write the JSON file.

    Raises:
        BenchError: it cannot run here, or an arm failed.
    """
    with progress(lambda what: what.count(" · ") <= _LOGGED_PARTS) as on_progress:
        samples, found = run(settings, on_progress)
        manager = _measure_manager(on_progress) if settings.goals else None
    dump(json_path, "pool", samples, {**found, "manager": manager})


COMMANDS = (
    Command(
        "pool",
        """Measure the pool's I/O beside its rivals, interleaved in one run on one disk.

        Takes about 8 minutes and up to 3 GiB of the disk, which is left as it was. Nothing else
        should run meanwhile: the load average before and after is printed and kept.
        """,
        Settings,
        measure,
    ),
)
