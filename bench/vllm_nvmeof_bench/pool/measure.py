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
from dataclasses import dataclass
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
from vllm_nvmeof_bench.pool.report import ARMS, CASES, KINDS, Sample
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.results import BenchError, dump, size_name
from vllm_nvmeof_bench.settings import (
    check_names,
    check_positive,
    option,
    recorded,
    size_option,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import GIB, KIB, MIB, slot_stride_bytes

__all__ = ["BUILD_DIR", "COMMANDS", "FLAT_KINDS", "Field", "Settings", "run", "steps"]

#: Measured by every arm; the rest only by those that take jobs.
FLAT_KINDS = frozenset({"batch_write", "batch_read", "mixed"})
_BESIDE_KINDS = frozenset({"beside", "writes_alone"})
_FLAT_ARMS = frozenset({"fio", "ring"})
_OURS = ("ours", "ours_threads")
_BLOCKS = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
#: Where the ring loop is compiled to, from the current directory.
BUILD_DIR = Path("build/bench")
_REMEDY = "give another --dir, or fewer --bytes-per-round"
_MANAGER_ENTRIES = 1_000_000
#: A single measurement's description has more parts; a log gets only the others.
_LOGGED_PARTS = 2


@dataclass(frozen=True)
class Settings:
    """One run. Less than 1 GiB per round measures how an engine starts, not how it runs.

    Ours run with the product's configuration, as the conditions say. queued_bytes: what the
    saturating writer keeps queued. episode_bytes: what it may write before it pauses and the fs
    tier's files, which nothing else bounds, are deleted. reads: demand reads per round.
    settle_s: the disk's time after a deletion, before the next measurement.
    """

    directory: Path = option(
        Path("build/bench/disk"), "The disk to measure: a directory on it.", flag="--dir"
    )
    arms: tuple[str, ...] = option(ARMS, "Arms to measure.")
    cases: tuple[str, ...] = option(CASES, "Cases to measure.")
    blocks: tuple[int, ...] = size_option(_BLOCKS, "Block sizes.")
    rounds: int = option(5, "Samples of everything.", min=1)
    bytes_per_round: int = size_option(GIB, "Bytes that a batch moves.")
    depth: int = option(32, "Blocks in flight of fio and the ring.")
    seed: int = option(1, "Seed of the random bytes and of the blocks that are read.")
    goals: bool = option(
        True,
        "Print the goals, and measure the manager, which has some.",
        recorded=False,
        flag="--targets/--no-targets",
    )
    single_bytes: int = 128 * MIB
    queued_bytes: int = 64 * MIB
    episode_bytes: int = GIB
    reads: int = 100
    read_gap_s: float = 0.02
    beside_block_bytes: int = 2 * MIB
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        check_names("arm", self.arms, ARMS)
        check_names("case", self.cases, CASES)
        check_positive(self, "blocks", "rounds", "depth", "reads")
        for block in self.blocks:
            if block < 4 * KIB or block % (4 * KIB):
                raise BenchError(f"block size {block}: a multiple of 4 KiB, for O_DIRECT")
            if self.bytes_per_round < 8 * block:
                raise BenchError(
                    f"{self.bytes_per_round} bytes per round are fewer than 8 blocks of {block}"
                )

    def kinds(self, arm: str, block_bytes: int) -> tuple[str, ...]:
        """The kinds of measurement that `arm` takes part in at this block size."""
        wanted = [kind for kind, cases in KINDS.items() if set(cases) & set(self.cases)]
        if arm in _FLAT_ARMS:
            wanted = [kind for kind in wanted if kind in FLAT_KINDS]
        if block_bytes != self.beside_block_bytes:
            wanted = [kind for kind in wanted if kind not in _BESIDE_KINDS]
        return tuple(wanted)

    def batch_blocks(self, block_bytes: int) -> int:
        return self.bytes_per_round // block_bytes

    def single_blocks(self, block_bytes: int) -> int:
        return max(1, self.single_bytes // block_bytes)

    def blocks_needed(self, block_bytes: int) -> int:
        """Blocks that memory and storage must hold."""
        return max(self.batch_blocks(block_bytes), self.single_blocks(block_bytes))

    @property
    def disk_bytes_max(self) -> int:
        """The most bytes on the disk at any time: pool, flat file, the fs tier's files."""
        data = max(self.blocks_needed(block) * (block + 8 * KIB) for block in self.blocks)
        fs_writes = max(self.bytes_per_round, self.single_bytes)
        if set(self.cases) & {"read_beside_writes", "writes_beside_read", "writes_alone"}:
            fs_writes = max(fs_writes, self.episode_bytes + 2 * self.queued_bytes)
        return 2 * data + (data + fs_writes if "vllm_fs" in self.arms else 0)


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
