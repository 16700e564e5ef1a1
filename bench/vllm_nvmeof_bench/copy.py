# SPDX-License-Identifier: Apache-2.0
"""`bench copy`: copies between the first GPU and pinned memory. Each round measures every arm.

Cases, in GB/s (1e9 bytes of payload per second) unless stated otherwise:

    transfer    a transfer of `blocks` blocks, and a contiguous copy of the same size
    few         transfers of a few small fragments, where `auto`'s choice matters
    both        concurrent loads and stores of `both_size`, half of the blocks each; then each alone
    mix         like both, with other shares of loads, such as "load 25%"
    submit      host time of one call of the engine's `submit`, µs
    loop_…      steps/s of a compute loop during copies
    crc         CRC-32C of chunks in GPU memory, on the GPU; the arms are launch configurations
    crc_join    host time to join the partial CRCs of a chunk, µs
    crc_beside  like crc, at up to `crc_gb_per_s`, during the matrix product of crc_matrix
    crc_matrix  steps/s of a bf16 matrix product, alone and during crc_beside
    disk        a load from disk to the GPU: streamed, in two phases, or only the read
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import packages
from vllm_nvmeof_bench.home import OnProgress, home_in, progress, unheard
from vllm_nvmeof_bench.reports.copy import Sample
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.rig import Rig, measure_arm
from vllm_nvmeof_bench.rig import Settings as LoadSettings
from vllm_nvmeof_bench.settings import check_names, option, recorded
from vllm_nvmeof_offload.copy.base import (
    DESCRIPTORS_MAX,
    Backend,
    Descriptors,
    Direction,
    Payloads,
    sides,
)
from vllm_nvmeof_offload.copy.calibration import Cell, KvDevice, Selector, calibrate
from vllm_nvmeof_offload.copy.cuda import (
    BLOCKS_MAX,
    PART_BYTES_MAX,
    Copiers,
    CudaCopyEngine,
    DmaCopier,
    KernelCopier,
    Table,
)
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError, compile_kernels
from vllm_nvmeof_offload.copy.gpu_checksums import CRC_BLOCKS, KERNEL_NAME, GpuChecksums, Launch
from vllm_nvmeof_offload.copy.gpu_checksums import PART_BYTES_MAX as CRC_PART_BYTES_MAX
from vllm_nvmeof_offload.copy.pinning import REGISTERED_BYTES_MAX, Readiness, StagingPinning
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric import read_gpus
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import GIB, KIB, MIB

_T = TypeVar("_T")
_Places = npt.NDArray[np.uint64]
CopyCall = Callable[[Direction, Descriptors, int], None]

#: Size of staging slots: a power of two, so that registrations end at a power of two.
_SLOT_BYTES = MIB
#: Compensates for the unused end of a registration, which is at most an eighth of its size.
_ROOM = 8 / 7


class World:
    """GPU memory and staging, each for `size` bytes of blocks, and the arms that copy between them.

    arms: dma, dma_overlap, kernel, auto, and `others`. An arm that fails is moved to `failed`, with
    its error. kernel: the loaded function, or the reason why there is none.
    """

    def __init__(
        self,
        cuda: Cuda,
        kernel: int | EngineError,
        size: int,
        others: Mapping[str, CopyCall] | None = None,
        piece_bytes_max: int = REGISTERED_BYTES_MAX,
    ) -> None:
        self.cuda = cuda
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        slots = -(-int(size * _ROOM) // _SLOT_BYTES)
        with self._timed("populate"):
            self._memory = Staging(_SLOT_BYTES, slots, 0, numa_node=cuda.facts.numa_node)
        self.numa_bound = self._memory.on_node
        self._staging = np.frombuffer(self._memory.view, np.uint8)
        with self._timed("register"):
            self._pins = StagingPinning(cuda, self._memory.map, lambda: None, piece_bytes_max)
            self._pins.start()
            self._pins.wait()
        if self._pins.readiness(self._pins.starts) is not Readiness.READY:
            raise BenchError("staging could not be registered with CUDA; the log has the error")
        self._piece_bytes = self._pins.first[1]
        self._gpu = cuda.allocate(self._memory.size_bytes)
        self._function = kernel
        self._tables = 2 + size // (DESCRIPTORS_MAX * PART_BYTES_MAX)
        self._used: list[Table] = []
        self._dma = DmaCopier(cuda)
        self._kernel = self._copier()
        self.cells = self._calibrated()
        self._choose = Selector(self.cells).choose
        #: The backends that `auto` chooses from, including any that are removed as arms.
        self._ours: dict[Backend, CopyCall] = {
            Backend.DMA: self._dma.copy,
            Backend.OVERLAP: functools.partial(self._dma.copy, overlap=True),
            Backend.KERNEL: functools.partial(self._by_kernel, self._kernel),
        }
        self._others = frozenset(others or {})
        ours = {backend.value: call for backend, call in self._ours.items()}
        arms = {**ours, "auto": self._auto, **(others or {})}
        self.arms = {name: call for name, call in arms.items() if name not in self.failed}
        self._streams = {direction: cuda.create_stream() for direction in Direction}

    def pieces(self, size: int, count: int, seed: int = 0, first: int = 0) -> Descriptors:
        """Return blocks in random order on the GPU and sequential in staging. Offset `first` is a
        multiple of `size`. As in the product, no block spans two registrations."""
        per_piece = self._piece_bytes // size
        assert per_piece, "a block is larger than a registration"
        numbers = first // size + np.arange(count, dtype=np.uint64)
        pieces, within = np.divmod(numbers, np.uint64(per_piece))
        places = pieces * np.uint64(self._piece_bytes) + within * np.uint64(size)
        mixed = np.random.default_rng(seed).permutation(places)
        return self._rows(mixed, places, np.full_like(places, size))

    def contiguous(self, size: int) -> Descriptors:
        """Return the first `size` bytes of both sides as one piece per registration."""
        starts = np.arange(0, size, self._piece_bytes, dtype=np.uint64)
        sizes = np.minimum(np.uint64(self._piece_bytes), np.uint64(size) - starts)
        return self._rows(starts, starts, sizes)

    def _rows(self, on_gpu: _Places, in_staging: _Places, sizes: _Places) -> Descriptors:
        base = np.uint64(self._staging.ctypes.data)
        return np.column_stack((np.uint64(self._gpu) + on_gpu, base + in_staging, sizes))

    def attempt(self, arm: str, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return the result of a call that uses `arm`; None if this or an earlier call failed."""
        if arm not in self.arms:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            # Other projects' code can raise anything; ours may raise only driver errors.
            if arm not in self._others and not isinstance(error, CudaError):
                raise
            del self.arms[arm]
            self.failed[arm] = _line_of(error)
            for stream in self._streams.values():  # wait for copies that the arm started
                with contextlib.suppress(CudaError):
                    self.cuda.synchronize_stream(stream)
            self._give_back()
            return None

    def seconds_of(self, arm: str, work: dict[Direction, Descriptors]) -> float:
        """Return the seconds from the first submission to the end of all work."""
        start_s = time.perf_counter()
        for direction, pieces in work.items():
            self.arms[arm](direction, pieces, self._streams[direction])
        for direction in work:
            self.cuda.synchronize_stream(self._streams[direction])
        took_s = time.perf_counter() - start_s
        self._give_back()
        return took_s

    def check(self, arm: str, size: int, count: int) -> bool:
        """Load and store random bytes with `arm`; return whether they are unchanged."""
        pieces = self.pieces(size, count)
        content, blocks = self.fill(pieces, arm), self._blocks(pieces)
        for block in blocks:
            block[:] = 0
        self.seconds_of(arm, {Direction.STORE: pieces})
        return np.array_equal(np.concatenate(blocks), content)

    def fill(self, pieces: Descriptors, arm: str = "dma") -> npt.NDArray[np.uint8]:
        """Load random bytes into the pieces' GPU memory; return the bytes in the pieces' order."""
        content = np.random.default_rng(len(pieces)).integers(
            0, 256, int(pieces[:, 2].sum()), np.uint8
        )
        ends = np.cumsum(pieces[:, 2])[:-1].astype(np.intp)
        for block, part in zip(self._blocks(pieces), np.split(content, ends), strict=True):
            block[:] = part
        self.seconds_of(arm, {Direction.LOAD: pieces})
        return content

    def _blocks(self, pieces: Descriptors) -> list[npt.NDArray[np.uint8]]:
        starts = pieces[:, 1] - np.uint64(self._staging.ctypes.data)
        return [self._staging[at:end] for at, end in np.c_[starts, starts + pieces[:, 2]].tolist()]

    def submit_us(self, size: int, count: int, direction: Direction, backend: Backend) -> float:
        """Return the host time of one `submit` to an engine that has already used its streams."""
        kernel = self._copier() if backend is Backend.KERNEL else None
        copiers = Copiers(self._dma, kernel, lambda _, __: backend)
        pins = SimpleNamespace(  # the engine must not unregister the memory
            starts=self._pins.starts, readiness=self._pins.readiness, close=lambda: None
        )
        engine = CudaCopyEngine(self.cuda, lambda: 0, copiers, pins, np.array([], np.uint64))
        place, fence = self.pieces(size, count), engine.record_fence()
        self.cuda.synchronize_stream(0)  # the engine delays transfers until the fence has passed
        engine.submit(direction, place, fence)
        self.cuda.synchronize_stream(engine.streams[direction])
        engine.poll()
        start_s = time.perf_counter()
        engine.submit(direction, place, fence)
        took_s = time.perf_counter() - start_s
        del fence
        engine.close()
        return 1e6 * took_s

    def close(self) -> None:
        for stream in self._streams.values():
            self.cuda.destroy_stream(stream)
        if self._kernel is not None:
            self._kernel.close()
        self.cuda.free(self._gpu)
        self._pins.close()
        del self._staging
        self._memory.close()

    def _copier(self) -> KernelCopier | None:
        if isinstance(self._function, EngineError):
            return None
        return KernelCopier(self.cuda, self._function, BLOCKS_MAX, self._tables)

    def _calibrated(self) -> list[Cell]:
        """Return the calibration that `auto` uses; empty without a kernel or on failure."""
        why: object = self._function
        if self._kernel is not None:
            try:
                with self._timed("calibrate"):
                    return calibrate(self.cuda, self._dma, self._kernel, self._pins.first)
            except CudaError as error:
                why = error
        self.failed |= dict.fromkeys(("kernel", "auto"), _line_of(why))
        return []

    def _give_back(self) -> None:
        while self._used:
            self._used.pop().give_back()

    def _by_kernel(
        self, kernel: KernelCopier, direction: Direction, pieces: Descriptors, stream: int
    ) -> None:
        if not kernel.copy(direction, pieces, stream, self._used):
            raise RuntimeError("more descriptors than the kernel has tables")

    def _auto(self, direction: Direction, pieces: Descriptors, stream: int) -> None:
        self._ours[self._choose(direction, pieces)](direction, pieces, stream)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start_s, 4)


def _line_of(error: object) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


_WORD_BYTES = 8
_CHUNK_BYTES_MAX = 8192


class VllmCopier:
    """vLLM's copy code. As in vLLM's worker, its pointers are held in pinned tensors."""

    def __init__(self, torch: Any, ops: Any, small: Any) -> None:
        self._torch = torch
        self._ops = ops
        self._small = small
        self._streams: dict[int, Any] = {}
        self._tables: tuple[Any, ...] = ()

    def copy(self, direction: Direction, pieces: Descriptors, stream: int) -> None:
        """Copy on `stream`. As in vLLM, only loads permit reading the sources in any order."""
        tables = self._filled(direction, pieces)
        outer = self._streams.get(stream)
        if outer is None:
            outer = self._streams[stream] = self._torch.cuda.ExternalStream(stream)
        load = direction is Direction.LOAD
        largest = int(pieces[:, 2].max())
        fits = largest < self._small.THRESHOLD_BYTES and not (pieces[:, 2] % _WORD_BYTES).any()
        swap, more = self._ops.swap_blocks_batch, {}
        if load and fits:
            swap = self._small.swap_blocks_batch
            more["bytes_per_chunk"] = min(1 << (largest - 1).bit_length(), _CHUNK_BYTES_MAX)
        with self._torch.cuda.stream(outer):
            swap(*tables, is_src_access_order_any=load, **more)

    def close(self) -> None:
        """Free the tables. The streams must still exist, because torch records events on them."""
        self._tables = ()
        self._streams.clear()

    def _filled(self, direction: Direction, pieces: Descriptors) -> tuple[Any, ...]:
        if not self._tables or self._tables[0].numel() < len(pieces):
            self._tables = tuple(
                self._torch.empty(len(pieces), dtype=self._torch.int64, pin_memory=True)
                for _ in range(3)
            )
        destinations, sources, sizes = sides(direction, pieces)
        tables = tuple(table[: len(pieces)] for table in self._tables)
        for table, column in zip(tables, (sources, destinations, sizes), strict=True):
            table.numpy()[:] = column
        return tables


def load_theirs() -> tuple[VllmCopier | None, str]:
    """Return vLLM's copier and version, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return None, "torch finds no GPU"
        ops = importlib.import_module("vllm._custom_ops")
        small = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
        version = str(importlib.import_module("vllm.version").__version__)
    except Exception as error:  # noqa: BLE001 - other projects' imports can raise anything
        return None, _line_of(error)
    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        return None, f"vLLM {version} was built without CUDA"
    return VllmCopier(torch, ops, small), version


class CrcKernel:
    """The CRC kernel for a fixed list of chunks, on a separate stream.

    chunks: uint64[m, 2] per chunk: each piece's address and size in bytes, in order. Sizes are
    multiples of 512 bytes; addresses are aligned to 16 bytes.
    """

    def __init__(
        self,
        cuda: Cuda,
        kernel: int,
        chunks: Sequence[_Places],
        launch: Launch | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        """urgent: whether the stream has priority."""
        self._cuda = cuda
        rows = np.concatenate(chunks)
        ends = np.cumsum(rows[:, 1])
        # Payloads are contiguous; their staging addresses serve only as offsets.
        pieces = np.stack([rows[:, 0], ends - rows[:, 1], rows[:, 1]], axis=1)
        counts = np.array([len(chunk) for chunk in chunks], np.uint32)
        sizes = np.array([chunk[:, 1].sum() for chunk in chunks], np.uint64)
        self._payloads = Payloads.of(counts, np.cumsum(sizes) - sizes, sizes)
        parts_max = int((rows[:, 1] // np.uint64(CRC_PART_BYTES_MAX) + np.uint64(1)).sum())
        self._kernel = GpuChecksums(cuda, kernel, launch, parts_max)
        prepared = self._kernel.prepare(pieces, self._payloads)
        assert prepared is not None
        self._checksums = prepared
        self._stream = cuda.create_stream(urgent)

    def run(self) -> None:
        """Compute the CRCs of all parts for `join`."""
        self._kernel.launch(self._checksums, self._stream)
        self._cuda.synchronize_stream(self._stream)

    def join(self) -> list[int]:
        """Return each chunk's CRC-32C."""
        self._kernel.write(self._checksums)
        crcs: list[int] = self._payloads.crcs.tolist()
        return crcs

    def close(self) -> None:
        self._cuda.destroy_stream(self._stream)
        self._kernel.close()


_USUAL_PARTS = ("transfer", "few", "both", "submit", "loops", "disk")
_PARTS = (*_USUAL_PARTS, "crc")


@dataclass(frozen=True)
class Settings:
    """Settings for the run.

    sizes: bytes per block, for transfers of `blocks` blocks or as many as fit into `bytes_max`.
    counts: blocks per transfer of `small_sizes`. mix_percent: shares of loads, in addition to the
    50 % of `both`. loop_s: duration of a compute loop. crc_chunks: (bytes per piece, pieces per
    chunk). crc_bytes: bytes per run. crc_gb_per_s: rate limit during the matrix product: the rate
    of a fast link. crc_launches: (blocks, threads, bytes, whether urgent). disk_bytes: bytes per
    load. disk_chunk_bytes: bytes per pool slot. disk_tier_slots: cache slots for the two phases.
    """

    directory: Path = option(
        Path("build/bench/copy-disk"), "Directory on the disk to load from.", flag="--dir"
    )
    parts: tuple[str, ...] = option(_USUAL_PARTS, f"Parts to measure: {','.join(_PARTS)}.")
    rounds: int = option(5, "Samples per measurement.", min=1)
    gib: float = option(4.0, "GiB to use of GPU memory and of pinned memory.", min=0.25)
    blocks: int = 1000
    sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(13))  # 4 KiB … 16 MiB
    small_sizes: tuple[int, ...] = tuple((4 * KIB) << k for k in range(7))  # 4 KiB … 256 KiB
    counts: tuple[int, ...] = (4, 16, 64, 256)
    both_size: int = 2 * MIB
    mix_percent: tuple[int, ...] = (10, 25, 75, 90)
    submit_size: int = 512 * KIB
    loop_s: float = 2.0
    crc_chunks: tuple[tuple[int, int], ...] = ((2 * MIB, 1), (64 * KIB, 8), (72 * KIB, 5))
    crc_bytes: int = 256 * MIB
    crc_gb_per_s: float = 12.5
    crc_launches: tuple[tuple[int, int, int, bool], ...] = (
        (4, 256, 8 * MIB, False),
        (4, 1024, 8 * MIB, False),
        # About one launch runs per long kernel, so a launch's bytes limit the rate.
        (4, 1024, 24 * MIB, False),
        (8, 1024, 24 * MIB, False),
        (16, 1024, 24 * MIB, False),
        (8, 1024, 24 * MIB, True),
        (16, 256, 24 * MIB, False),
    )
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

    def shapes(self, sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return a transfer's (bytes per block, number of blocks) for each size."""
        return tuple((size, self.count_of(size)) for size in sizes)


_PACKAGES = (
    *("torch", "vllm", "triton", "numpy"),
    *("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc"),
)


def conditions_of(world: World, settings: Settings, theirs: str) -> dict[str, Any]:
    """Return versions, GPU, link, machine, settings and setup times. theirs: the version of the
    measured vLLM, or the reason why vLLM was not measured."""
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


#: This benchmark's arm → the rig's corresponding arm.
_DISK_ARMS = {"streamed": "ours", "two_phase": "two_phase", "read": "read"}


class GpuRig(Rig):
    """A rig whose blocks are in GPU memory."""

    def __init__(self, cuda: Cuda, directory: Path, settings: LoadSettings) -> None:
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
        return KvDevice(self._cuda).copy_engine("dma", self.staging, starts, waker)[0]

    def fill(self) -> None:
        content = np.empty_like(self._written)
        content[self._ids.ravel()] = self._written
        self._now(self._gpu, content.ctypes.data, content.nbytes)

    def zero(self, count: int) -> None:
        """Zero all blocks, so that no block looks loaded before it is."""
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


#: Our arms, without vLLM's copy code.
ARMS = ("dma", "dma_overlap", "kernel", "auto")
_CHECKED = ((4 * KIB, 100), (24 * KIB + 16, 50), (512 * KIB, 8))
_LOOP_ARMS = ("alone", "dma", "dma_overlap", "kernel")
#: Transfers up to this size are too short for one measurement: their samples are medians.
_SHORT_BYTES, _SHORT_REPEATS = 16 * MIB, 9
_LOOP_STEPS = 10
_LOOP_BLOCK_BYTES = 2 * MIB
_Shapes = tuple[tuple[int, int], ...]  # bytes per block, blocks
_Where = tuple[str, int, int, int]  # direction, bytes per block, blocks, round


def _gb_per_s(count: int, took_s: float) -> float:
    return round(count / took_s / 1e9, 3)


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _at_pace(call: Callable[[], object], each_s: float, ended_s: list[float]) -> bool:
    """Call `call`, pause to keep a pace of one call per `each_s`, and append the end time."""
    call()
    time.sleep(max(0.0, ended_s[0] + each_s * len(ended_s) - time.perf_counter()))
    ended_s.append(time.perf_counter())
    return True


class Bench:
    """The parts of `bench copy`. A part's results exclude arms that failed during it. torch: runs
    the compute loops; None if it is not installed."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        torch: Any = None,
        on_progress: OnProgress = unheard,
        keep: Callable[[Sequence[Sample]], None] = lambda _: None,
    ) -> None:
        """Set up the parts. keep: called with the part's samples so far, during crc and disk."""
        self._world = world
        self._settings = settings
        self._torch = torch
        self._on_progress = on_progress
        self._keep = keep

    def _rounds(self, what: str, warm_up: bool = False) -> Iterator[int]:
        """Yield the numbers of the rounds. A warm-up is round -1."""
        numbers = range(-1 if warm_up else 0, self._settings.rounds)
        for step, number in enumerate(numbers):
            self._on_progress(step, len(numbers), f"{what}, round {max(0, number) + 1}")
            yield number

    def _kept(self, samples: Iterable[Sample]) -> list[Sample]:
        taken = [one for one in samples if one.round >= 0]
        return [one for one in taken if one.arm not in self._world.failed]

    def copies(self) -> list[Sample]:
        """Measure copies; raise BenchError if an arm copied wrong bytes or every arm failed."""
        world, settings = self._world, self._settings
        for arm in list(world.arms):
            for size, count in _CHECKED:
                if world.attempt(arm, world.check, arm, size, count) is False:
                    raise BenchError(f"{arm}: wrong bytes in {count} blocks of {size} bytes")
        few = tuple(itertools.product(settings.small_sizes, settings.counts))
        cases: dict[str, Callable[[int], Iterator[Sample]]] = {
            "transfer": partial(self._one_way, "transfer", settings.shapes(settings.sizes)),
            "few": partial(self._one_way, "few", few),
            "both": self._both_ways,
            "submit": self._submits,
        }
        wanted = [case for part, case in cases.items() if part in settings.parts]
        numbers = self._rounds("copies", warm_up=True)
        samples = [one for number in numbers for case in wanted for one in case(number)]
        if not world.arms:
            failed = "; ".join(f"{arm}: {error}" for arm, error in world.failed.items())
            raise BenchError(f"every arm failed: {failed}")
        return self._kept(samples)

    def _one_way(self, part: str, shapes: _Shapes, number: int) -> Iterator[Sample]:
        """Measure each direction alone and, for "transfer", a contiguous copy per shape."""
        for direction, (size, count) in itertools.product(Direction, shapes):
            where = direction.value, size, count, number
            if part == "transfer":
                whole = {direction: self._world.contiguous(size * count)}
                for one in self._rates(part, ("dma",), where, whole):
                    yield replace(one, arm="contiguous")
            work = {direction: self._world.pieces(size, count, number + 1)}
            yield from self._rates(part, self._world.arms, where, work)

    def _both_ways(self, number: int) -> Iterator[Sample]:
        """Measure concurrent stores and loads, half each and in other mixes, and each alone."""
        world, settings = self._world, self._settings
        size = settings.both_size
        count = max(2, min(settings.blocks, settings.bytes_max // size))
        for percent in (50, *settings.mix_percent):
            loads = min(count - 1, max(1, count * percent // 100))
            parts = {
                Direction.STORE: world.pieces(size, count - loads, number + 1),
                Direction.LOAD: world.pieces(size, loads, number + 2, first=size * (count - loads)),
            }
            case, name = ("both", "both") if percent == 50 else ("mix", f"load {percent}%")
            yield from self._rates(case, world.arms, (name, size, count, number), parts)
            for direction, pieces in parts.items() if percent == 50 else ():
                where = direction.value, size, len(pieces), number
                yield from self._rates(case, world.arms, where, {direction: pieces})

    def _submits(self, number: int) -> Iterator[Sample]:
        world, size = self._world, self._settings.submit_size
        count = self._settings.count_of(size)
        for direction, backend in itertools.product(Direction, (Backend.DMA, Backend.KERNEL)):
            arm, submit = backend.value, (world.submit_us, size, count, direction, backend)
            if (took_us := world.attempt(arm, *submit)) is not None:
                yield Sample("submit", arm, direction.value, size, count, number, round(took_us, 2))

    def _rates(
        self, case: str, arms: Iterable[str], where: _Where, work: dict[Direction, Descriptors]
    ) -> Iterator[Sample]:
        _, size, count, _ = where
        repeats = _SHORT_REPEATS if size * count <= _SHORT_BYTES else 1
        for arm in tuple(arms):  # `attempt` may remove an arm
            took_s = self._world.attempt(arm, self._median_s, arm, work, repeats)
            if took_s is not None:
                yield Sample(case, arm, *where, _gb_per_s(size * count, took_s))

    def _median_s(self, arm: str, work: dict[Direction, Descriptors], repeats: int) -> float:
        return statistics.median(self._world.seconds_of(arm, work) for _ in range(repeats))

    def loops(self) -> list[Sample]:
        """Measure steps/s of a bf16 matrix product and of an addition while each arm copies.

        Raises: BenchError: torch is not installed.
        """
        torch = self._torch
        if torch is None:
            raise BenchError("the compute loops need torch: leave out the part loops")
        large = torch.zeros(256 * MIB, dtype=torch.float32, device="cuda")
        steps: dict[str, Callable[[], object]] = {
            "loop_matrix": self._matrix_step(),
            "loop_memory": lambda: large.add_(1.0),
        }
        samples = []
        for number in self._rounds("compute loops"):
            for (case, step), arm in itertools.product(steps.items(), _LOOP_ARMS):
                if arm == "alone" or arm in self._world.arms:
                    with self._copying(arm):
                        samples.append(self._steps(case, arm, number, step))
        return self._kept(samples)  # the copies of a failed arm stopped before the loop

    def _matrix_step(self) -> Callable[[], object]:
        torch = self._torch
        square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        product = torch.empty_like(square)
        return lambda: torch.mm(square, square, out=product)

    def _steps(self, case: str, arm: str, number: int, step: Callable[[], object]) -> Sample:
        step()
        self._torch.cuda.synchronize()
        done, start_s = 0, time.perf_counter()
        while time.perf_counter() - start_s < self._settings.loop_s:
            for _ in range(_LOOP_STEPS):
                step()
            # Synchronizing the device would also wait for the copies.
            self._torch.cuda.current_stream().synchronize()
            done += _LOOP_STEPS
        rate = done / (time.perf_counter() - start_s)
        return Sample(case, arm, "both", 0, 0, number, round(rate, 3))

    def _copying(self, arm: str) -> contextlib.AbstractContextManager[None]:
        """Copy both ways on another thread, one transfer after another, until the arm fails."""
        if arm == "alone":
            return contextlib.nullcontext()
        world, size = self._world, _LOOP_BLOCK_BYTES
        count = max(1, min(256, self._settings.bytes_max // size // 2))
        work = {
            Direction.STORE: world.pieces(size, count),
            Direction.LOAD: world.pieces(size, count, first=size * count),
        }
        return self._repeated(lambda: world.attempt(arm, world.seconds_of, arm, work) is not None)

    @contextlib.contextmanager
    def _repeated(self, call: Callable[[], bool]) -> Iterator[None]:
        """Call `call` repeatedly on another thread, while it returns True."""
        stopping = threading.Event()

        def run() -> None:
            self._world.cuda.make_current()
            while not stopping.is_set() and call():
                pass

        thread = threading.Thread(target=run, name="copies")
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def crc(self, kernel: int | None = None) -> list[Sample]:
        """Measure CRC-32C on the GPU; raise BenchError if a CRC was wrong."""
        world, settings = self._world, self._settings
        if kernel is None:
            code = compile_kernels(world.cuda.facts.arch, CRC_BLOCKS)
            kernel = world.cuda.load_kernel(code, KERNEL_NAME)
        samples: list[Sample] = []
        for step, (size, per_chunk) in enumerate(settings.crc_chunks):
            what = f"CRC of {per_chunk} pieces of {size}"
            self._on_progress(step, len(settings.crc_chunks), what)
            count = max(1, min(settings.bytes_max, settings.crc_bytes) // (size * per_chunk))
            pieces = world.pieces(size, count * per_chunk)
            content = world.fill(pieces)
            rows = np.split(np.ascontiguousarray(pieces[:, (0, 2)]), count)
            expected = [crc32c(chunk) for chunk in np.split(content, count)]
            with contextlib.ExitStack() as stack:
                arms = {}
                for blocks, threads, size_max, urgent in settings.crc_launches:
                    launch = Launch(blocks, threads, size_max)
                    measured = CrcKernel(world.cuda, kernel, rows, launch, urgent=urgent)
                    arm = f"{blocks}x{threads}, {size_max // MIB} MiB{', urgent' * urgent}"
                    arms[arm] = stack.enter_context(contextlib.closing(measured))
                for arm, chunks in arms.items():
                    chunks.run()
                    if chunks.join() != expected:
                        what = f"wrong CRC of a chunk of {per_chunk} × {size} bytes"
                        raise BenchError(f"crc: {what}, {arm}")
                for number in range(settings.rounds):
                    where = "load", size, per_chunk, number
                    samples += self._crc_alone(arms, content.size, where)
                    if self._torch is not None and step == 0:
                        samples += self._crc_beside(arms, content.size, where)
            self._keep(samples)
        return samples

    def _crc_alone(self, arms: dict[str, CrcKernel], count: int, where: _Where) -> Iterator[Sample]:
        """Yield each arm's GB/s, and the host time for joining parts. count: bytes per run."""
        for arm, chunks in arms.items():
            yield Sample("crc", arm, *where, _gb_per_s(count, _seconds(chunks.run)))
        joined = next(iter(arms.values()))
        took_s = _seconds(joined.join) / len(joined.join())
        yield Sample("crc_join", "host", *where, round(1e6 * took_s, 2))

    def _crc_beside(
        self, arms: dict[str, CrcKernel], count: int, where: _Where
    ) -> Iterator[Sample]:
        """Yield a matrix product's steps/s, alone and during each arm, and the arms' GB/s."""
        step, number = self._matrix_step(), where[-1]
        yield self._steps("crc_matrix", "alone", number, step)
        each_s = count / (1e9 * self._settings.crc_gb_per_s)
        for arm, chunks in arms.items():
            ended_s = [time.perf_counter()]
            with self._repeated(partial(_at_pace, chunks.run, each_s, ended_s)):
                yield self._steps("crc_matrix", arm, number, step)
            took_s = time.perf_counter() - ended_s[0]
            rate = _gb_per_s((len(ended_s) - 1) * count, took_s)
            yield Sample("crc_beside", arm, *where, rate)

    def disk(self) -> list[Sample]:
        """Measure loads of half the CPU tier's size and of `disk_bytes`; raise BenchError if
        `directory` lacks space or a load returned wrong bytes."""
        settings = self._settings
        tier_bytes = settings.disk_tier_slots * settings.disk_chunk_bytes
        plan = LoadSettings(
            tier_bytes=tier_bytes,
            chunk_bytes=settings.disk_chunk_bytes,
            block_bytes=settings.disk_chunk_bytes,
            sizes=(0.5, settings.disk_bytes / tier_bytes),
        )
        samples: list[Sample] = []
        with (
            home_in(settings.directory, plan.disk_bytes_max) as home,
            contextlib.closing(GpuRig(self._world.cuda, home / "pool", plan)) as rig,
        ):
            self._on_progress(0, settings.rounds, "disk · writing the pool")
            rig.write_all()
            for number in self._rounds("disk"):
                dice = random.Random(number)
                for count in map(plan.chunks, plan.sizes):
                    for arm in dice.sample(sorted(_DISK_ARMS), len(_DISK_ARMS)):
                        seconds, _ = measure_arm(rig, _DISK_ARMS[arm], count)
                        rate = _gb_per_s(count * plan.chunk_bytes, seconds)
                        where = plan.chunk_bytes, count, number
                        samples.append(Sample("disk", arm, "load", *where, rate))
                self._keep(samples)
        return samples


def measure(settings: Settings, json_path: Path) -> None:
    """Measure on the first GPU; write the JSON file after each part, and during crc and disk.

    Raises: BenchError, OffloadError: there is no GPU, or an arm copied wrong bytes.
    """
    try:
        cuda = Cuda(0)
    except EngineError as error:
        raise BenchError(f"bench copy needs an NVIDIA GPU: {error}") from None
    theirs, about = load_theirs()
    others = {"vllm": theirs.copy} if theirs else {}
    try:
        kernel: int | EngineError = cuda.load_kernel(
            compile_kernels(cuda.facts.arch), "copy_blocks"
        )
    except EngineError as error:
        kernel = error  # DMA can still be measured
    torch = None  # only the compute loops need torch
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
    samples: list[Sample] = []
    with (
        progress() as on_progress,
        contextlib.closing(World(cuda, kernel, settings.bytes_max, others)) as world,
        contextlib.closing(theirs) if theirs else contextlib.nullcontext(),
    ):

        def keep(newest: Sequence[Sample]) -> None:
            about_run = conditions_of(world, settings, about)
            dump(json_path, "copy", [*samples, *newest], about_run)

        bench = Bench(world, settings, torch, on_progress, keep)
        more = {"crc": bench.crc, "loops": bench.loops, "disk": bench.disk}
        wanted = [part for name, part in more.items() if name in settings.parts]
        for part in (bench.copies, *wanted):
            samples += part()
            keep(())


COMMANDS = (
    Command(
        "copy",
        """Measure copies between the first GPU and pinned memory by DMA, the kernel, and auto.

        Needs an NVIDIA GPU. Also measures vLLM's own copy code if vLLM was built with CUDA. Takes
        about 5 minutes, during which nothing else should run.
        """,
        Settings,
        measure,
    ),
)
