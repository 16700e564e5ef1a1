# SPDX-License-Identifier: Apache-2.0
"""One run: every round measures all arms one after the other, in an order drawn from the seed.

Block sizes follow each other, each with its own files; within one, round by round, kind by
kind, all arms. So arms that are compared were measured within seconds of each other, and none
always comes after the same other one, whose traces the disk may still be busy with. Before
every measurement what others left behind is written out (syncfs), and after a deletion the disk
gets a moment: mounted with `discard` it is busy with it.

Everything lies in one directory of ours inside the one given, and is deleted at the end, on
Ctrl-C and SIGTERM too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.home import home_in, quiet_interpreter
from vllm_nvmeof_bench.pool.conditions import at_end, at_start
from vllm_nvmeof_bench.pool.field import Field, check_arms
from vllm_nvmeof_bench.pool.samples import Sample, size_name
from vllm_nvmeof_bench.pool.settings import KINDS, BenchError, Settings

__all__ = ["run", "steps"]

_REMEDY = "give another --dir, or fewer --bytes-per-round"


_libc = ctypes.CDLL(None, use_errno=True)


def steps(settings: Settings, arms: tuple[str, ...]) -> int:
    """How many measurements there are."""
    kinds = sum(len(settings.kinds(arm, block)) for arm in arms for block in settings.blocks)
    return kinds * settings.rounds


def run(
    settings: Settings, directory: Path, on_progress: OnProgress = lambda done, total, what: None
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the conditions.

    Raises:
        BenchError: too little space, no arm that can run, or an arm failed.
    """
    with home_in(directory, settings.disk_bytes_max, _REMEDY) as home, quiet_interpreter():
        on_progress(0, 0, "looking which arms can run")
        missing = check_arms(settings)
        gc.collect()
        gc.freeze()  # vLLM's modules are not looked through before every measurement
        conditions = at_start(settings, home)
        run = _Run(settings, home, missing, on_progress)
        for block_bytes in settings.blocks:
            run.block(block_bytes)
        if not run.samples:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in run.missing.items())
            raise BenchError(f"no arm can run here ({reasons})")
        return run.samples, at_end(conditions, settings, run.engines, run.missing)


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
        name = size_name(block_bytes)
        self._tell(f"{name} · writing everything once")
        field = Field(self._home, self._settings, block_bytes, self.missing)
        try:
            self.missing.update(field.missing)
            self.engines.update(field.engines)
            for number in range(self._settings.rounds):
                self._round(field, block_bytes, number)
        finally:
            field.close()

    def _round(self, field: Field, block_bytes: int, number: int) -> None:
        dice = random.Random(f"{self._settings.seed} {block_bytes} {number}")
        for kind in KINDS:
            for name in dice.sample(list(field.arms), len(field.arms)):
                if kind not in self._settings.kinds(name, block_bytes):
                    continue
                size = size_name(block_bytes)
                self._tell(f"{size} · round {number + 1} · {kind} · {name}")
                self._measure(field, name, kind, block_bytes, number)
                self._done += 1

    def _measure(self, field: Field, name: str, kind: str, block_bytes: int, number: int) -> None:
        arm = field.arms[name]
        gc.collect()
        sync_file_system(self._home)
        for case, figures in arm.measure(kind).items():
            if case in self._settings.cases:
                self.samples.append(Sample.of(name, case, block_bytes, number, figures))
        if arm.tidy():
            sync_file_system(self._home)
            time.sleep(self._settings.settle_s)

    def _tell(self, what: str) -> None:
        arms = tuple(name for name in self._settings.arms if name not in self.missing)
        self._on_progress(self._done, steps(self._settings, arms), what)


def sync_file_system(directory: Path) -> None:
    """Write out what is dirty on the file system of `directory`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _libc.syncfs(fd)
    finally:
        os.close(fd)
