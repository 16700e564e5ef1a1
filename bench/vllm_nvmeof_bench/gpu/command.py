# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench copy` behind its options: run with a progress bar, write, read, draw."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress, progress
from vllm_nvmeof_bench.gpu import report
from vllm_nvmeof_bench.gpu.conditions import conditions
from vllm_nvmeof_bench.gpu.crc import measure_crc
from vllm_nvmeof_bench.gpu.crc_kernel import CRC_BLOCKS, KERNEL_NAME
from vllm_nvmeof_bench.gpu.disk import measure_disk
from vllm_nvmeof_bench.gpu.loops import measure_loops
from vllm_nvmeof_bench.gpu.measure import measure as measure_copies
from vllm_nvmeof_bench.gpu.samples import Sample, dump, load, median_of
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.sweep import measure_sweep
from vllm_nvmeof_bench.gpu.targets import Row, evaluate
from vllm_nvmeof_bench.gpu.theirs import load_theirs
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.nvrtc import compile_kernels
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.units import MIB

__all__ = ["FILE_COLUMNS", "beside", "draw", "measure", "read", "report"]

FILE_COLUMNS = 150


def measure(settings: Settings, directory: Path, json_path: Path) -> None:
    """Run on the first GPU, and write the JSON file after each part.

    directory: for `disk`; on the disk to load from.

    Raises:
        BenchError, OffloadError: no GPU, or an arm moved wrong bytes.
    """
    try:
        cuda = Cuda(0)
    except EngineError as error:
        raise BenchError(f"bench copy needs an NVIDIA GPU: {error}") from None
    theirs, about = load_theirs()
    others = {"vllm": theirs.copy} if theirs else {}
    kernel = _kernel(cuda)
    samples: list[Sample] = []
    with (
        progress() as tell,
        contextlib.closing(World(cuda, kernel, settings.bytes_max, others)) as world,
    ):
        for part in (_copies, _sweep, _crc, _loops, _disk):
            samples += part(world, settings, directory, tell)
            dump(json_path, samples, conditions(world, settings, about))


def _kernel(cuda: Cuda) -> int | EngineError:
    """The copy kernel, or why there is none: DMA is measured all the same."""
    try:
        return cuda.load_kernel(compile_kernels(cuda.facts.arch), "copy_blocks")
    except EngineError as error:
        return error


def read(json_path: Path) -> tuple[list[Sample], dict[str, Any], list[Row]]:
    """Samples, conditions, targets.

    Raises:
        BenchError: not such a file.
    """
    samples, found = load(json_path)
    return samples, found, evaluate(samples)


def draw(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """The PNG; matplotlib is imported only for it."""
    from vllm_nvmeof_bench.gpu.plot import plot

    plot(path, samples, conditions)


def beside(samples: Sequence[Sample]) -> dict[str, str]:
    """Blocks of 2 MiB in one direction and in both, DMA and kernel."""
    found = {}
    one = [
        f"{direction} {rate:.1f} GB/s"
        for direction in ("store", "load")
        if (rate := _rate(samples, "transfer", "dma", direction)) is not None
    ]
    if one:
        found["one direction, DMA or kernel"] = f"{', '.join(one)} (DMA)"
    for arm, name in (("dma", "DMA"), ("kernel", "kernel")):
        rate = _rate(samples, "both", arm, "both")
        if rate is not None:
            found[f"both directions at once, blocks of 2 MB, {name}"] = f"{rate:.1f} GB/s"
    return found


def _rate(samples: Sequence[Sample], case: str, arm: str, direction: str) -> float | None:
    return median_of(samples, case=case, arm=arm, direction=direction, block_bytes=2 * MIB)


def _copies(world: World, settings: Settings, _: Path, tell: OnProgress) -> list[Sample]:
    return measure_copies(world, settings, tell)


def _loops(world: World, settings: Settings, _: Path, tell: OnProgress) -> list[Sample]:
    if "loops" not in settings.parts:
        return []
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise BenchError("the loops of compute need torch; leave out the part: loops") from None
    return measure_loops(world, settings, torch, tell)


def _sweep(world: World, settings: Settings, _: Path, tell: OnProgress) -> list[Sample]:
    if "sweep" not in settings.parts:
        return []
    return measure_sweep(world, settings, _torch(), tell)


def _crc(world: World, settings: Settings, _: Path, tell: OnProgress) -> list[Sample]:
    if "crc" not in settings.parts:
        return []
    code = compile_kernels(world.cuda.facts.arch, CRC_BLOCKS)
    kernel = world.cuda.load_kernel(code, KERNEL_NAME)
    return measure_crc(world, settings, kernel, _torch(), tell)


def _torch() -> Any | None:
    """None: what needs no loop of compute is measured all the same."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _disk(world: World, settings: Settings, directory: Path, tell: OnProgress) -> list[Sample]:
    if "disk" not in settings.parts:
        return []
    return measure_disk(world.cuda, settings, directory, tell)
