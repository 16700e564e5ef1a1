# SPDX-License-Identifier: Apache-2.0
"""`bench copy`: copies between the first GPU and pinned memory, arms in turn, round by round.

Cases; a value is GB/s (1e9 bytes of payload) unless it says otherwise:

    transfer  one transfer of `blocks` blocks, and one contiguous copy of the same bytes
    few       transfers of few small fragments, where `auto` has to choose
    model     one transfer of `blocks` fragments, or blocks, of each model of vLLM's table
    both      both directions at once at `both_size`, half of the blocks each, and each alone
    mix       the same blocks, another share of them loads: "load 25%"
    submit    host time of one submit of the engine, µs
    loop_…    steps/s of a loop of compute beside copies
    sweep     the kernel by its thread blocks: arms kernel_2 … kernel_32
    sweep_matrix  steps/s of a bf16 matrix product beside each of them, copying both ways
    crc       CRC-32C of chunks in GPU memory, by the GPU: alone, and beside the product below
    crc_join  host time to join the parts of one chunk, µs
    crc_matrix  steps/s of a bf16 matrix product, alone and beside the CRC
    disk      a load from disk to the GPU: streamed, in two phases, and each half alone
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import platform
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import packages
from vllm_nvmeof_bench.gpu.crc_kernel import CRC_BLOCKS, KERNEL_NAME, CrcKernel, cut_chunks, join
from vllm_nvmeof_bench.gpu.report import Sample, model_blocks
from vllm_nvmeof_bench.gpu.world import World, load_theirs
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.settings import check_names, option, recorded
from vllm_nvmeof_bench.stream import load as stream
from vllm_nvmeof_bench.stream.load import Rig, measure_arm
from vllm_nvmeof_offload.copy.base import Backend, Descriptors, Direction
from vllm_nvmeof_offload.copy.choose import KvDevice
from vllm_nvmeof_offload.copy.driver import Cuda, compile_kernels
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric.machine import read_gpus
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.units import GIB, KIB, MIB

#: What is measured unless parts are named.
_USUAL_PARTS = ("transfer", "few", "model", "both", "submit", "loops", "disk")
_PARTS = (*_USUAL_PARTS, "sweep", "crc")


def _model_sizes() -> tuple[int, ...]:
    sizes = {size for one in model_blocks() for size in (one.fragment_bytes, one.block_bytes)}
    return tuple(sorted(sizes))


@dataclass(frozen=True)
class Settings:
    """sizes: bytes of a block in one transfer of `blocks` blocks, or of as many as fit into
    `bytes_max`. counts: for `small_sizes`, where `auto` has to choose. loop_s: of each loop of
    compute, alone and beside copies. sweep_blocks: thread blocks of the kernel. mix_percent:
    shares of loads beside those of `both`. crc_chunks: bytes of a piece, and pieces of a chunk;
    crc_bytes: of all chunks of one run. disk_bytes: of one load; disk_chunk_bytes: of one slot
    of the pool; disk_tier_slots: cache slots that the two phases go through.
    """

    directory: Path = option(
        Path("build/bench/copy-disk"),
        "For the part disk: a directory on the disk to load from.",
        flag="--dir",
    )
    parts: tuple[str, ...] = option(
        _USUAL_PARTS,
        f"Of {','.join(_PARTS)}: sweep is the kernel by its thread blocks, crc is CRC-32C by the "
        "GPU.",
    )
    rounds: int = option(5, "Samples of everything.", min=1)
    gib: float = option(4.0, "GiB of GPU memory, and as many of pinned memory.", min=0.25)
    blocks: int = 1000
    sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(13))  # 4 KiB … 16 MiB
    small_sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(7))  # 4 KiB … 256 KiB
    counts: tuple[int, ...] = (4, 16, 64, 256)
    model_sizes: tuple[int, ...] = _model_sizes()
    both_size: int = 2 * MIB
    mix_percent: tuple[int, ...] = (10, 25, 75, 90)
    submit_size: int = 512 * KIB
    loop_s: float = 2.0
    sweep_blocks: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32)
    sweep_sizes: tuple[int, ...] = (8 * KIB, 32 * KIB, 128 * KIB, 2 * MIB)
    crc_chunks: tuple[tuple[int, int], ...] = ((2 * MIB, 1), (64 * KIB, 8), (72 * KIB, 5))
    crc_bytes: int = 256 * MIB
    disk_bytes: int = 4 * GIB
    disk_chunk_bytes: int = 2 * MIB
    disk_tier_slots: int = 512

    def __post_init__(self) -> None:
        check_names("part", self.parts, _PARTS)

    @property
    def bytes_max(self) -> int:
        return int(self.gib * GIB)

    def count_of(self, size: int) -> int:
        return max(1, min(self.blocks, self.bytes_max // size))


_PACKAGES = (
    *("torch", "vllm", "triton", "numpy"),
    *("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc"),
)


def conditions_of(world: World, settings: Settings, theirs: str) -> dict[str, Any]:
    """Versions, GPU and its link, machine, settings, what preparing took.

    theirs: the version of the vLLM whose copy code ran, or why none did.
    """
    facts = world.cuda.facts
    links = [asdict(gpu.pcie) for gpu in read_gpus() if gpu.uuid == facts.uuid and gpu.pcie]
    return {
        "gpu": {"name": facts.name, "arch": facts.arch, "numa_node": facts.numa_node},
        "pcie": links[0] if links else None,
        "driver": facts.driver_version,
        "batch_call": world.cuda.has_batch,
        "numa_bound": world.numa_bound,
        "versions": {"python": platform.python_version(), **packages(_PACKAGES)},
        "vllm_arm": theirs,
        "failed_arms": world.failed,
        "cpus": len(os.sched_getaffinity(0)),
        "settings": recorded(settings),
        "seconds": world.seconds,
        "cells": [asdict(c) | {"direction": c.direction.value} for c in world.cells],
        "load_average_at_end": os.getloadavg(),
    }


# -- copies -----------------------------------------------------------------------------

#: Of ours; where vLLM's copy code can be had it is one more.
ARMS = ("dma", "dma_overlap", "kernel", "auto")
_CHECKED = ((4 * KIB, 100), (24 * KIB + 16, 50), (512 * KIB, 8))


def measure_copies(
    world: World, settings: Settings, on_progress: OnProgress = unheard
) -> list[Sample]:
    """Samples of the arms that did not fail; those of one that fails later are dropped as well.

    Raises: BenchError: an arm moved wrong bytes, or every arm failed.
    """
    for arm in list(world.arms):
        for size, count in _CHECKED:
            if world.attempt(arm, functools.partial(world.check, arm, size, count)) is False:
                raise BenchError(f"{arm}: wrong bytes with {count} blocks of {size}")
    samples: list[Sample] = []
    cases = [case for part, case in _CASES.items() if part in settings.parts]
    rounds = range(-1, settings.rounds)  # the first one warms up
    for step, number in enumerate(rounds):
        on_progress(step, len(rounds), f"copies, round {max(0, number) + 1} of {settings.rounds}")
        for case in cases:
            samples += [one for one in case(world, settings, number) if number >= 0]
    if not world.arms:
        failed = "; ".join(f"{arm}: {error}" for arm, error in world.failed.items())
        raise BenchError(f"every way to copy failed: {failed}")
    return [one for one in samples if one.arm not in world.failed]


def _transfers(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    """One transfer of many blocks, and one contiguous copy of the same bytes."""
    for size in settings.sizes:
        count = settings.count_of(size)
        for direction in Direction:
            whole = {direction: world.contiguous(size * count)}
            took_s = _seconds(world, "dma", whole)
            if took_s is not None:
                yield _rate("transfer", "contiguous", direction.value, size, count, number, took_s)
            yield from _arms(world, "transfer", direction, size, count, number)


def _few_small(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    for size in settings.small_sizes:
        for count in settings.counts:
            for direction in Direction:
                yield from _arms(world, "few", direction, size, count, number)


def _models(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    for size in settings.model_sizes:
        for direction in Direction:
            yield from _arms(world, "model", direction, size, settings.count_of(size), number)


def _arms(
    world: World, case: str, direction: Direction, size: int, count: int, number: int
) -> Iterator[Sample]:
    work = {direction: world.pieces(size, count, number + 1)}
    for arm in list(world.arms):
        took_s = _seconds(world, arm, work)
        if took_s is not None:
            yield _rate(case, arm, direction.value, size, count, number, took_s)


def _both_ways(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    """Stores from one part of both memories, loads into the rest; half and half, then mixes."""
    size = settings.both_size
    count = max(2, min(settings.blocks, settings.bytes_max // size))
    for percent in (50, *settings.mix_percent):
        loads = min(count - 1, max(1, count * percent // 100))
        parts = {
            Direction.STORE: world.pieces(size, count - loads, number + 1),
            Direction.LOAD: world.pieces(size, loads, number + 2, first=size * (count - loads)),
        }
        case, what = ("both", "both") if percent == 50 else ("mix", f"load {percent}%")
        asked = [(what, count, parts)]
        if percent == 50:
            asked += [(one.value, len(rows), {one: rows}) for one, rows in parts.items()]
        for arm, (name, blocks, work) in itertools.product(list(world.arms), asked):
            took_s = _seconds(world, arm, work)
            if took_s is not None:
                yield _rate(case, arm, name, size, blocks, number, took_s)


def _submits(world: World, settings: Settings, number: int) -> Iterator[Sample]:
    size, count = settings.submit_size, settings.count_of(settings.submit_size)
    for direction, backend in itertools.product(Direction, (Backend.DMA, Backend.KERNEL)):
        call = functools.partial(world.submit_us, size, count, direction, backend)
        took_us = world.attempt(backend.value, call)
        if took_us is not None:
            found = round(took_us, 2)
            yield Sample("submit", backend.value, direction.value, size, count, number, found)


def _seconds(world: World, arm: str, work: dict[Direction, Descriptors]) -> float | None:
    """None: the arm failed, now or before."""
    return world.attempt(arm, functools.partial(world.seconds_of, arm, work))


def _rate(
    case: str, arm: str, direction: str, size: int, count: int, number: int, took_s: float
) -> Sample:
    rate = round(size * count / took_s / 1e9, 3)
    return Sample(case, arm, direction, size, count, number, rate)


_CASES: dict[str, Callable[[World, Settings, int], Iterator[Sample]]] = {
    "transfer": _transfers,
    "few": _few_small,
    "model": _models,
    "both": _both_ways,
    "submit": _submits,
}


# -- loops of compute beside copies -----------------------------------------------------

_LOOP_ARMS = ("alone", "dma", "dma_overlap", "kernel")
_LOOP_STEPS = 10
_LOOP_BLOCK_BYTES = 2 * MIB


def measure_loops(
    world: World,
    settings: Settings,
    torch: Any,
    on_progress: OnProgress = unheard,
) -> list[Sample]:
    """Steps/s of a bf16 matrix product and of adding large arrays, each with each arm."""
    large = torch.zeros(256 * MIB, dtype=torch.float32, device="cuda")
    loops: dict[str, Callable[[], object]] = {
        "matrix": matrix_step(torch),
        "memory": lambda: large.add_(1.0),
    }
    samples = []
    for number in range(settings.rounds):
        on_progress(number, settings.rounds, f"loops of compute, round {number + 1}")
        for name, step in loops.items():
            for arm in _LOOP_ARMS:
                if arm != "alone" and arm not in world.arms:
                    continue
                with copying(world, settings, arm):
                    rate = steps_per_s(step, settings.loop_s, torch)
                if arm in world.failed:
                    continue  # its copies ended before the loop did
                samples.append(Sample(f"loop_{name}", arm, "both", 0, 0, number, round(rate, 3)))
    return [one for one in samples if one.arm not in world.failed]


def matrix_step(torch: Any) -> Callable[[], object]:
    """One bf16 matrix product."""
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(square)
    return lambda: torch.mm(square, square, out=product)


def steps_per_s(step: Callable[[], object], seconds: float, torch: Any) -> float:
    """Steps on the current stream."""
    step()
    torch.cuda.synchronize()
    done, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        for _ in range(_LOOP_STEPS):
            step()
        # Only this stream: waiting for the device would be waiting for the copies as well.
        torch.cuda.current_stream().synchronize()
        done += _LOOP_STEPS
    return done / (time.perf_counter() - start_s)


@contextmanager
def copying(world: World, settings: Settings, arm: str) -> Iterator[None]:
    """Copies both ways, one transfer after the other, until left, or until the arm fails."""
    if arm == "alone":
        yield
        return
    count = max(1, min(256, settings.bytes_max // _LOOP_BLOCK_BYTES // 2))
    work = {
        Direction.STORE: world.pieces(_LOOP_BLOCK_BYTES, count),
        Direction.LOAD: world.pieces(_LOOP_BLOCK_BYTES, count, first=_LOOP_BLOCK_BYTES * count),
    }
    stopping = threading.Event()

    def run() -> None:
        world.cuda.make_current()
        transfer = functools.partial(world.seconds_of, arm, work)
        while not stopping.is_set() and world.attempt(arm, transfer) is not None:
            pass

    thread = threading.Thread(target=run, name="copies")
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


# -- the kernel by its thread blocks ----------------------------------------------------


def measure_sweep(
    world: World,
    settings: Settings,
    torch: Any | None,
    on_progress: OnProgress = unheard,
) -> list[Sample]:
    """GB/s alone, and with torch the steps/s of a bf16 matrix product beside copies both ways."""
    if Backend.KERNEL.value in world.failed:
        return []
    step = matrix_step(torch) if torch is not None else None
    samples = []
    for number in range(-1, settings.rounds):  # the first one warms up
        on_progress(number + 1, settings.rounds + 1, f"thread blocks, round {max(0, number) + 1}")
        for blocks in settings.sweep_blocks:
            with world.kernel_of(blocks) as arm:
                found = _sweep_rates(world, settings, arm, number)
                if number == 0 and step is not None and arm in world.arms:
                    with copying(world, settings, arm):
                        rate = steps_per_s(step, settings.loop_s, torch)
                    found.append(_steps(arm, rate))
            samples += found if number >= 0 else []
        if number == 0 and step is not None:
            samples.append(_steps("alone", steps_per_s(step, settings.loop_s, torch)))
    return [one for one in samples if one.arm not in world.failed]


def _sweep_rates(world: World, settings: Settings, arm: str, number: int) -> list[Sample]:
    samples = []
    for size in settings.sweep_sizes:
        count = settings.count_of(size)
        for direction in Direction:
            work = {direction: world.pieces(size, count, number + 1)}
            took_s = world.attempt(arm, functools.partial(world.seconds_of, arm, work))
            if took_s is None:
                continue
            rate = round(size * count / took_s / 1e9, 3)
            samples.append(Sample("sweep", arm, direction.value, size, count, number, rate))
    return samples


def _steps(arm: str, rate: float) -> Sample:
    return Sample("sweep_matrix", arm, "both", 0, 0, 0, round(rate, 3))


# -- CRC-32C by the GPU -----------------------------------------------------------------


class _Chunks:
    """Chunks of `per_chunk` pieces each in GPU memory, and one kernel for all of them."""

    def __init__(self, world: World, kernel: int, size: int, per_chunk: int, total: int) -> None:
        self.world, self.size, self.per_chunk = world, size, per_chunk
        self.count = max(1, total // (size * per_chunk))
        self.pieces = world.pieces(size, self.count * per_chunk)
        rows = np.ascontiguousarray(self.pieces[:, (0, 2)])
        self._parts, self._counts = cut_chunks(np.split(rows, self.count))
        self._kernel = CrcKernel(world.cuda, kernel, len(self._parts))
        self._stream = world.cuda.create_stream()

    def run(self) -> float:
        """Seconds from the first launch until the last chunk is done, without joining."""
        start_s = time.perf_counter()
        self._kernel.submit(self._parts, self._stream)
        self.world.cuda.synchronize_stream(self._stream)
        return time.perf_counter() - start_s

    def join(self) -> list[int]:
        words = self._kernel.words(len(self._parts))
        return join(words, self._parts[:, 1], self._counts)

    def check(self) -> None:
        """Raises: BenchError: another CRC than the library's of the same bytes."""
        content = self.world.fill(self.pieces)
        self.run()
        for found, chunk in zip(self.join(), np.split(content, self.count), strict=True):
            if found != crc32c(chunk):
                pieces = f"{self.per_chunk} × {self.size} bytes"
                raise BenchError(f"crc: a wrong CRC of a chunk of {pieces}")

    def close(self) -> None:
        self.world.cuda.destroy_stream(self._stream)
        self._kernel.close()


def measure_crc(
    world: World,
    settings: Settings,
    kernel: int,
    torch: Any | None,
    on_progress: OnProgress = unheard,
) -> list[Sample]:
    """GB/s by the chunk's pieces, the host's time to join; steps/s of the loop beside, with torch.

    Raises: BenchError: a wrong CRC.
    """
    samples: list[Sample] = []
    for step, (size, per_chunk) in enumerate(settings.crc_chunks):
        on_progress(step, len(settings.crc_chunks), f"CRC of {per_chunk} pieces of {size}")
        total = min(settings.bytes_max, settings.crc_bytes)
        chunks = _Chunks(world, kernel, size, per_chunk, total)
        with contextlib.closing(chunks):
            chunks.check()
            for number in range(settings.rounds):
                rate = round(size * per_chunk * chunks.count / chunks.run() / 1e9, 3)
                start_s = time.perf_counter()
                chunks.join()
                join_us = 1e6 * (time.perf_counter() - start_s) / chunks.count
                place = size, per_chunk, number
                samples.append(Sample("crc", "gpu", "load", *place, rate))
                samples.append(Sample("crc_join", "host", "load", *place, round(join_us, 2)))
            if torch is not None and step == 0:
                samples += _crc_beside(chunks, settings, torch)
    return samples


def _crc_beside(chunks: _Chunks, settings: Settings, torch: Any) -> list[Sample]:
    step = matrix_step(torch)
    samples = []
    for number in range(settings.rounds):
        for arm in ("alone", "crc"):
            with _crc_running(chunks) if arm == "crc" else contextlib.nullcontext([]) as took_s:
                rate = steps_per_s(step, settings.loop_s, torch)
            samples.append(Sample("crc_matrix", arm, "both", 0, 0, number, round(rate, 3)))
            if took_s:
                moved = len(took_s) * chunks.size * chunks.per_chunk * chunks.count
                place = chunks.size, chunks.per_chunk, number
                rate = round(moved / sum(took_s) / 1e9, 3)
                samples.append(Sample("crc", "gpu_beside_matrix", "load", *place, rate))
    return samples


@contextlib.contextmanager
def _crc_running(chunks: _Chunks) -> Iterator[list[float]]:
    """CRCs one after the other on a thread until left; seconds that each run took."""
    stopping, took_s = threading.Event(), list[float]()

    def run() -> None:
        chunks.world.cuda.make_current()
        while not stopping.is_set():
            took_s.append(chunks.run())

    thread = threading.Thread(target=run, name="crc")
    thread.start()
    try:
        yield took_s
    finally:
        stopping.set()
        thread.join()


# -- GPU ⇄ CPU ⇄ disk -------------------------------------------------------------------

#: Ours → those of `bench stream`.
_DISK_ARMS = {"streamed": "ours", "two_phase": "two_phase", "read": "read"}


class GpuRig(Rig):
    """Blocks in GPU memory. model_stream: 0: nothing computes here."""

    def __init__(self, cuda: Cuda, directory: Path, settings: stream.Settings) -> None:
        self._cuda = cuda
        super().__init__(directory, settings)

    def _allocate(self) -> int:
        self._gpu = self._cuda.allocate(self._written.nbytes)
        self._stack.callback(lambda: self._cuda.free(self._gpu))
        self._stream = self._cuda.create_stream()
        self._stack.callback(lambda: self._cuda.destroy_stream(self._stream))
        return self._gpu

    def _numa_node(self) -> int | None:
        return self._cuda.facts.numa_node

    def _copy_engine(self, waker: Waker) -> Any:
        starts = np.array([self._gpu], np.uint64)
        return KvDevice(self._cuda).copy_engine("dma", self.staging, starts, waker.wake)[0]

    def fill(self) -> None:
        content = np.empty_like(self._written)
        content[self._ids.ravel()] = self._written
        self._now(self._gpu, content.ctypes.data, content.nbytes)

    def zero(self, count: int) -> None:
        """All of it: also what is not loaded must not look as if it were."""
        nothing = np.zeros_like(self._written)
        self._now(self._gpu, nothing.ctypes.data, nothing.nbytes)

    def same(self, count: int) -> bool:
        found = np.empty_like(self._written)
        self._now(found.ctypes.data, self._gpu, found.nbytes)
        rows = self._ids[:count].ravel()
        return bool(np.array_equal(found[rows], self._written[: len(rows)]))

    def _now(self, destination: int, source: int, count: int) -> None:
        self._cuda.copy(destination, source, count, self._stream)
        self._cuda.synchronize_stream(self._stream)


def measure_disk(
    cuda: Cuda,
    settings: Settings,
    on_progress: OnProgress = unheard,
) -> list[Sample]:
    """GB/s of payload of loads, of half the CPU tier and of four times it.

    Raises:
        BenchError: no room in `directory`, or a load brought other bytes than were written.
    """
    plan = stream.Settings(
        parts=("load",),
        rounds=settings.rounds,
        throttle_mb_per_s=0,
        tier_bytes=settings.disk_tier_slots * settings.disk_chunk_bytes,
        chunk_bytes=settings.disk_chunk_bytes,
        block_bytes=settings.disk_chunk_bytes,
        sizes=(0.5, settings.disk_bytes / (settings.disk_tier_slots * settings.disk_chunk_bytes)),
    )
    samples: list[Sample] = []
    with home_in(settings.directory, plan.disk_bytes_max) as home:
        rig = GpuRig(cuda, home / "pool", plan)
        try:
            on_progress(0, settings.rounds, "disk · writing the pool once")
            rig.write_all()
            for number in range(settings.rounds):
                on_progress(number, settings.rounds, f"disk, round {number + 1}")
                samples += _disk_round(rig, plan, number)
        finally:
            rig.close()
    return samples


def _disk_round(rig: GpuRig, plan: stream.Settings, number: int) -> list[Sample]:
    dice = random.Random(number)
    samples = []
    for size in plan.sizes:
        count = plan.chunks(size)
        for arm in dice.sample(sorted(_DISK_ARMS), len(_DISK_ARMS)):
            seconds, _ = measure_arm(rig, _DISK_ARMS[arm], count)
            rate = round(count * plan.chunk_bytes / seconds / 1e9, 3)
            samples.append(Sample("disk", arm, "load", plan.chunk_bytes, count, number, rate))
    return samples


# -- the run ----------------------------------------------------------------------------


def _kernel(cuda: Cuda) -> int | EngineError:
    """The copy kernel, or why there is none: DMA is measured all the same."""
    try:
        return cuda.load_kernel(compile_kernels(cuda.facts.arch), "copy_blocks")
    except EngineError as error:
        return error


def _torch() -> Any | None:
    """None: what needs no loop of compute is measured all the same."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _loops(world: World, settings: Settings, on_progress: OnProgress) -> list[Sample]:
    torch = _torch()
    if torch is None:
        raise BenchError("the loops of compute need torch; leave out the part: loops")
    return measure_loops(world, settings, torch, on_progress)


def _sweep(world: World, settings: Settings, on_progress: OnProgress) -> list[Sample]:
    return measure_sweep(world, settings, _torch(), on_progress)


def _crc(world: World, settings: Settings, on_progress: OnProgress) -> list[Sample]:
    code = compile_kernels(world.cuda.facts.arch, CRC_BLOCKS)
    kernel = world.cuda.load_kernel(code, KERNEL_NAME)
    return measure_crc(world, settings, kernel, _torch(), on_progress)


def _disk(world: World, settings: Settings, on_progress: OnProgress) -> list[Sample]:
    return measure_disk(world.cuda, settings, on_progress)


_MORE = {"sweep": _sweep, "crc": _crc, "loops": _loops, "disk": _disk}


def measure(settings: Settings, json_path: Path) -> None:
    """Run on the first GPU, and write the JSON file after each part.

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
    parts = [measure_copies, *(part for name, part in _MORE.items() if name in settings.parts)]
    samples: list[Sample] = []
    with (
        progress() as on_progress,
        contextlib.closing(World(cuda, kernel, settings.bytes_max, others)) as world,
    ):
        for part in parts:
            samples += part(world, settings, on_progress)
            dump(json_path, "copy", samples, conditions_of(world, settings, about))


COMMANDS = (
    Command(
        "copy",
        """Measure copies between the first GPU and pinned memory: DMA, the kernel, what auto takes.

        Needs an NVIDIA GPU. vLLM's own copy code, unmodified, is measured beside them where the
        vLLM that is installed has it for GPUs. Takes about 5 minutes; nothing else should run
        meanwhile.
        """,
        Settings,
        measure,
    ),
)
