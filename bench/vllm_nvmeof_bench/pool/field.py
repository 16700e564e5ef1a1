# SPDX-License-Identifier: Apache-2.0
"""All arms of one block size on one directory, opened and closed together.

Ours and the fs tier share one staging memory; ours share one pool; fio and the ring share one
flat file. An arm that cannot run here is left out and the reason is kept, for people and for
the JSON; one that fails while it runs ends the benchmark.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_nvmeof_bench.pool.arms.engine import EngineMover, Ground, open_engine
from vllm_nvmeof_bench.pool.arms.flat import (
    FioArm,
    RingArm,
    build_ring,
    fio_version,
    write_flat,
)
from vllm_nvmeof_bench.pool.arms.inprocess import MoverArm
from vllm_nvmeof_bench.pool.arms.vllm_fs import FsMover, import_tier
from vllm_nvmeof_bench.pool.settings import BenchError, Settings
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import slot_stride_bytes

if TYPE_CHECKING:
    from vllm_nvmeof_bench.pool.arms.base import Arm

__all__ = ["BUILD_DIR", "Field", "check_arms"]

#: Where the ring loop is compiled to, from the current directory.
BUILD_DIR = Path("build/bench")
_OURS = ("ours", "ours_threads")


def check_arms(settings: Settings) -> dict[str, str]:
    """Why an arm cannot run, of those wanted, as far as can be told without a pool."""
    checks = {
        "fio": fio_version,
        "ring": lambda: build_ring(BUILD_DIR),
        "vllm_fs": import_tier,
    }
    reasons = {}
    for name in settings.arms:
        try:
            checks.get(name, lambda: None)()
        except BenchError as error:
            reasons[name] = str(error)
    return reasons


class Field:
    """Open arms by name; `missing` says why others are not; `engines` what ours really run."""

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
        self._stack = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._directory.mkdir()
        self._stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        staging = Staging(slot_stride_bytes(self._block_bytes), self._blocks, 0)
        self._stack.callback(staging.close)
        fill(staging, self._settings.seed)
        wanted = [name for name in self._settings.arms if name not in self.missing]
        if any(name in _OURS for name in wanted):
            self._open_ours(staging, wanted)
        if "vllm_fs" in wanted:
            tier = FsMover(self._directory / "fs", self._block_bytes, self._blocks, staging)
            self._add("vllm_fs", MoverArm("vllm_fs", tier, self._settings, self._block_bytes))
            self.engines["vllm_fs"] = "O_DIRECT" if tier.direct else "buffered"
        flat = self._directory / "flat"
        if "fio" in wanted or "ring" in wanted:
            write_flat(flat, self._blocks * self._block_bytes, self._settings.seed)
        if "fio" in wanted:
            self._add("fio", FioArm(flat, self._settings, self._block_bytes))
        if "ring" in wanted:
            program = build_ring(BUILD_DIR)
            self._add("ring", RingArm(program, flat, self._settings, self._block_bytes))

    def _open_ours(self, staging: Staging, wanted: list[str]) -> None:
        pool_directory = self._directory / "pool"
        ground = Ground(pool_directory, self._block_bytes, self._blocks, staging)
        self._stack.callback(ground.pool.close)
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
            self._add(name, MoverArm(name, mover, self._settings, self._block_bytes))

    def _add(self, name: str, arm: Arm) -> None:
        self.arms[name] = arm
        self._stack.callback(arm.close)

    def close(self) -> None:
        """Stop the arms, close the pool, unmap, delete the files: in this order."""
        self._stack.close()


def fill(staging: Staging, seed: int) -> None:
    """Random bytes everywhere: no device can take them for zeros or shrink them."""
    memory = np.frombuffer(staging.view, np.uint8)
    chunk = np.frombuffer(np.random.default_rng(seed).bytes(1 << 24), np.uint8)
    for start in range(0, len(memory), len(chunk)):
        part = memory[start : start + len(chunk)]
        part[:] = chunk[: len(part)]
