# SPDX-License-Identifier: Apache-2.0
"""Chooses DMA, DMA with the overlap hint, or the kernel, based on times measured on this GPU.

The table of times is measured once and cached. Only one process per host measures at a time,
because the ranks of a server start together and would disturb each other's measurements.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.copy.base import Backend, CopyEngine, Descriptors, Direction
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine, DmaCopier, KernelCopier, Table
from vllm_nvmeof_offload.copy.driver import (
    Cuda,
    CudaError,
    cache_directory,
    kernel_source,
    load_cached_kernel,
    replace_file,
)
from vllm_nvmeof_offload.copy.gpu_checksums import CRC_BLOCKS, GpuChecksums
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.copy.pinning import StagingPinning
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric import gpu_warnings
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.staging import Staging, StagingMap
from vllm_nvmeof_offload.units import KIB, MIB

#: The table's grid, in powers of two, so that rounding finds the nearest cell.
FRAGMENT_BYTES = tuple(KIB << k for k in range(2, 9))  # 4 KiB … 256 KiB
COUNTS = (4, 16, 64, 256, 1024)
_SIZE_LOG2_MIN, _SIZE_LOG2_MAX = 12, 18
_WORD_BYTES = 16
#: The kernel must be this many times as fast as DMA when measured on an idle GPU, because it takes
#: multiprocessors away from a running model, and DMA takes none.
KERNEL_MARGIN = 1.5
#: RMM and cuDF set the overlap hint only up to this size; larger copies were slower with it.
OVERLAP_BYTES_MAX = 128 * KIB

_Measurement = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Cell:
    """Median times to copy `count` fragments of `fragment_bytes`, in µs from submission to end.

    `overlap_us` is None if it was not measured. `spread` is (slowest - fastest round) / median, for
    the method that varied most.
    """

    direction: Direction
    fragment_bytes: int
    count: int
    dma_us: _Measurement
    kernel_us: _Measurement
    overlap_us: _Measurement | None = None
    spread: _Measurement = 0.0


_TABLE = TypeAdapter(dict[str, list[Cell]])


def best_of(cell: Cell) -> Backend:
    """Return DMA unless another method is clearly faster: the overlap hint by more than the spread,
    or the kernel by a factor of `KERNEL_MARGIN` over the faster kind of DMA."""
    backend, took_us = Backend.DMA, cell.dma_us
    if cell.overlap_us is not None and cell.overlap_us * (1 + cell.spread) < took_us:
        backend, took_us = Backend.OVERLAP, cell.overlap_us
    return Backend.KERNEL if cell.kernel_us * KERNEL_MARGIN <= took_us else backend


class Selector:
    """Chooses a method from measured cells; without cells, always DMA.

    For a count that was not measured, the result for fewer fragments of the same size is used.
    """

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        known = {(c.direction, c.fragment_bytes, c.count): best_of(c) for c in cells}
        #: The best method by count and size, per direction. An empty list means DMA for all sizes.
        self._loads, self._stores = (
            _by_count(direction, known) for direction in (Direction.LOAD, Direction.STORE)
        )

    def choose(self, direction: Direction, pieces: Descriptors) -> Backend:
        """Choose the method for coalesced pieces. Every transfer waits for this, so pieces are
        examined only if another method can be faster than DMA."""
        count = len(pieces)
        table = self._loads if direction is Direction.LOAD else self._stores
        nearest = ((count * count).bit_length() + 1) // 4  # the logarithm to base 4, rounded
        sizes = table[min(max(nearest, 1), len(COUNTS)) - 1]
        if not sizes:
            return Backend.DMA
        log2 = _log2(int(np.add.reduce(pieces[:, 2])) // count)
        if log2 > _SIZE_LOG2_MAX:
            return Backend.DMA
        best = sizes[max(log2 - _SIZE_LOG2_MIN, 0)]
        # The kernel copies unaligned pieces by words or bytes, whose speed was not measured.
        if best is Backend.KERNEL and int(np.bitwise_or.reduce(pieces, axis=None)) % _WORD_BYTES:
            return Backend.DMA
        if best is Backend.OVERLAP and int(pieces[:, 2].max()) > OVERLAP_BYTES_MAX:
            return Backend.DMA
        return best


def _by_count(
    direction: Direction, known: dict[tuple[Direction, int, int], Backend]
) -> list[list[Backend]]:
    best = dict.fromkeys(FRAGMENT_BYTES, Backend.DMA)
    table = []
    for count in COUNTS:
        best = {size: known.get((direction, size, count), best[size]) for size in FRAGMENT_BYTES}
        all_dma = set(best.values()) == {Backend.DMA}
        table.append([] if all_dma else list(best.values()))
    return table


def _log2(number: int) -> int:
    return (number * number).bit_length() // 2


def grid(size: int) -> list[tuple[int, int]]:
    """Return the (bytes, count) of each cell that fits in `size` bytes, smallest first."""
    cells = [cell for cell in itertools.product(FRAGMENT_BYTES, COUNTS) if math.prod(cell) <= size]
    return sorted(cells, key=math.prod)


def dump_cells(cells: list[Cell]) -> bytes:
    return _TABLE.dump_json({"cells": cells}, indent=1)


def parse_cells(content: bytes, size: int) -> list[Cell]:
    """Parse JSON. Raises ValueError if it is invalid or lacks a cell of `grid(size)`."""
    try:
        cells = _TABLE.validate_json(content, strict=True)["cells"]
    except (KeyError, ValidationError) as error:
        raise ValueError(f"not a table of cells: {error}") from None
    if missing_cells(cells, size):
        raise ValueError("a table with cells missing")
    return cells


def missing_cells(cells: Iterable[Cell], size: int) -> int:
    """Count the cells of `grid(size)`, in both directions, that `cells` lacks."""
    wanted = {(direction, *cell) for direction in Direction for cell in grid(size)}
    return len(wanted - {(c.direction, c.fragment_bytes, c.count) for c in cells})


pause = time.sleep

#: The maximum GPU memory that a measurement uses, and the maximum staging that it overwrites.
CALIBRATION_BYTES_MAX = 64 * MIB
#: The minimum registered memory needed to measure a table.
_BYTES_MIN = 4 * MIB
_ROUNDS = 3
#: The time limits for a measurement at a server's start, and at a user's request.
_BUDGET_S, _BUDGET_WHEN_ASKED_S = 1.5, 60.0
#: This is long enough for sixteen ranks to measure one after another.
_LOCK_WAIT_S_MAX = 60.0
_LOCK_POLL_S = 0.05
_LOCK = "vllm-nvmeof-calibration.lock"

_Way = Callable[[int, list[Table]], object]


def calibrate(
    cuda: Cuda,
    dma: DmaCopier,
    kernel: KernelCopier,
    staging: tuple[int, int],
    budget_s: float = _BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Cell]:
    """Measure the cells of `grid`, smallest first, until the budget runs out.

    `staging` is the address and size in bytes of registered, unused memory, which is overwritten.
    Raises: CudaError: for example, if no GPU memory is free.
    """
    size = min(CALIBRATION_BYTES_MAX, staging[1])
    cells: list[Cell] = []
    started_s = clock()
    stream = cuda.create_stream()
    memory = 0
    try:
        memory = cuda.allocate(size)
        for (fragment_bytes, count), direction in itertools.product(grid(size), Direction):
            if clock() - started_s > budget_s:
                break
            pieces = _scattered(memory, staging[0], fragment_bytes, count)
            ways = _ways(cuda, dma, kernel, direction, pieces)
            measured = _measure(ways, cuda, stream, clock)
            cells.append(Cell(direction, fragment_bytes, count, *measured))
    finally:
        cuda.synchronize_stream(stream)
        if memory:
            cuda.free(memory)
        cuda.destroy_stream(stream)
    return cells


def _scattered(memory: int, staging: int, fragment_bytes: int, count: int) -> Descriptors:
    """Return pieces in order in staging but scattered in GPU memory, as in a paged cache."""
    pieces = np.empty((count, 3), np.uint64)
    places = np.arange(count, dtype=np.uint64) * np.uint64(fragment_bytes)
    pieces[:, 0] = np.uint64(memory) + np.random.default_rng(0).permutation(places)
    pieces[:, 1] = np.uint64(staging) + places
    pieces[:, 2] = fragment_bytes
    return pieces


def _ways(
    cuda: Cuda, dma: DmaCopier, kernel: KernelCopier, direction: Direction, pieces: Descriptors
) -> dict[Backend, _Way]:
    ways: dict[Backend, _Way] = {
        Backend.DMA: lambda stream, used: dma.copy(direction, pieces, stream),
        Backend.KERNEL: lambda stream, used: kernel.copy(direction, pieces, stream, used),
    }
    if cuda.has_batch and int(pieces[0, 2]) <= OVERLAP_BYTES_MAX:
        ways[Backend.OVERLAP] = lambda stream, used: dma.copy(
            direction, pieces, stream, overlap=True
        )
    return ways


def _measure(
    ways: dict[Backend, _Way], cuda: Cuda, stream: int, clock: Callable[[], float]
) -> tuple[float, float, float | None, float]:
    """Return a cell's measurements. The methods alternate; the first round is a warm-up."""
    used: list[Table] = []
    took_us: dict[Backend, list[float]] = {way: [] for way in ways}
    for number, way in itertools.product(range(1 + _ROUNDS), ways):
        start_s = clock()
        ways[way](stream, used)
        cuda.synchronize_stream(stream)
        if number:
            took_us[way].append(1e6 * (clock() - start_s))
        while used:
            used.pop().give_back()
    median = {way: statistics.median(times) for way, times in took_us.items()}
    spread = max((max(times) - min(times)) / median[way] for way, times in took_us.items())
    overlap_us = median.get(Backend.OVERLAP)
    return median[Backend.DMA], median[Backend.KERNEL], overlap_us, round(spread, 3)


def load_kernel(cuda: Cuda) -> KernelCopier:
    """Load the copy kernel. Raises EngineError as `load_cached_kernel` does."""
    return KernelCopier(cuda, load_cached_kernel(cuda))


def kept_or_measured(
    cuda: Cuda,
    dma: DmaCopier,
    kernel: KernelCopier,
    scratch: tuple[int, int],
    lock_wait_s: float = _LOCK_WAIT_S_MAX,
) -> list[Cell]:
    """Return the cached table, or measure one and cache it if complete. An empty table means DMA
    only.

    `scratch` is the address and size in bytes of registered, unused memory, which is overwritten.
    """
    size = min(CALIBRATION_BYTES_MAX, scratch[1])
    if (kept := _read(cuda, size)) is not None:
        return kept
    if size < _BYTES_MIN:
        return []
    with _alone_on_this_host(lock_wait_s) as alone:
        if (kept := _read(cuda, size)) is not None:  # written by the process that held the lock
            return kept
        if not alone:
            logger.warning(
                "copies: other processes have been measuring for %.0f s; this server copies by DMA "
                "only, and the next start tries again",
                lock_wait_s,
            )
            return []
        return _measured(cuda, dma, kernel, scratch, _BUDGET_S)


def calibrate_again(cuda: Cuda, lock_wait_s: float = _LOCK_WAIT_S_MAX) -> list[Cell]:
    """Measure even if a table is cached; cache the new table and return it.

    Raises: EngineError: no kernel, no memory, another process is measuring, or time ran out.
    """
    with contextlib.ExitStack() as undo:
        kernel = load_kernel(cuda)
        undo.callback(kernel.close)
        staging = Staging(CALIBRATION_BYTES_MAX, 1, 0)
        undo.callback(staging.close)
        scratch = staging.map.base_address, CALIBRATION_BYTES_MAX
        cuda.register(*scratch)
        undo.callback(cuda.unregister, scratch[0])
        if not undo.enter_context(_alone_on_this_host(lock_wait_s)):
            raise EngineError("another process on this host is measuring")
        cells = _measured(cuda, DmaCopier(cuda), kernel, scratch, _BUDGET_WHEN_ASKED_S)
    if missing_cells(cells, CALIBRATION_BYTES_MAX):
        raise EngineError("the comparison did not finish in time; nothing was saved")
    return cells


def _measured(
    cuda: Cuda, dma: DmaCopier, kernel: KernelCopier, scratch: tuple[int, int], budget_s: float
) -> list[Cell]:
    started_s = time.perf_counter()
    try:
        cells = calibrate(cuda, dma, kernel, scratch, budget_s)
    except CudaError as error:  # for example, no GPU memory is left
        logger.warning("copies: cannot compare DMA with a kernel: %s", error)
        return []
    took_s = time.perf_counter() - started_s
    missing = missing_cells(cells, min(CALIBRATION_BYTES_MAX, scratch[1]))
    if missing:
        logger.warning(
            "copies: the comparison of DMA and kernel was stopped after %.1f s with %d cells "
            "missing, and was not saved; `vllm-nvmeof doctor --calibrate` allows it more time",
            *(took_s, missing),
        )
    else:
        logger.info("copies: compared DMA and kernel in %.1f s", took_s)
        replace_file(_path(cuda), dump_cells(cells))
    return cells


def _read(cuda: Cuda, size: int) -> list[Cell] | None:
    try:
        return parse_cells(_path(cuda).read_bytes(), size)
    except (OSError, ValueError):  # it is missing, invalid or incomplete
        return None


def _path(cuda: Cuda) -> Path:
    facts = cuda.facts
    version = hashlib.sha256(kernel_source().encode()).hexdigest()[:16]
    return cache_directory() / f"table-{facts.uuid}-{facts.driver_version}-{version}.json"


@contextlib.contextmanager
def _alone_on_this_host(wait_s: float) -> Iterator[bool]:
    """Yield whether this process may measure: False if others still are after `wait_s`."""
    try:
        handle = _open_lock(Path(tempfile.gettempdir()) / _LOCK)
    except OSError:
        yield True
        return
    try:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    yield False
                    return
            pause(_LOCK_POLL_S)
        yield True
    finally:
        os.close(handle)


def _open_lock(path: Path) -> int:
    """Open the file for reading, which suffices to lock it even if another user owns it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o644)


_AUTO = "auto"


@dataclass(frozen=True)
class KvDevice:
    """The device of a worker's KV cache, host or GPU."""

    #: None if the KV cache is in CPU memory.
    cuda: Cuda | None = None
    #: Returns the model's current stream; called on the model's thread.
    model_stream: Callable[[], int] = lambda: 0
    warnings: tuple[str, ...] = ()

    @property
    def numa_node(self) -> int | None:
        """Return the NUMA node for pinned memory, or None for any node."""
        return self.cuda.facts.numa_node if self.cuda else None

    def copy_engine(
        self,
        backend: str,
        staging: StagingMap,
        cache_starts: npt.NDArray[np.uint64],
        waker: Waker,
        checksum_at: str = "cpu",
    ) -> tuple[CopyEngine, tuple[str, ...]]:
        """Build the copy engine. Return the engine and one line per fallback, with its cause.

        `backend` is auto or the value of a `Backend`, and is ignored for CPU memory. `cache_starts`
        are the addresses of the KV cache tensors. `staging` must be unused, because auto overwrites
        a part of it. `waker` is set when there may be something to poll. With `checksum_at` "gpu"
        the GPU computes checksums if it can; copies in CPU memory always compute them. Raises:
        EngineError: staging cannot be registered, or the backend `kernel` is unavailable.
        """
        if self.cuda is None:
            return HostCopyEngine(on_done=waker.wake), ()
        fallbacks: list[str] = []
        if not self.cuda.has_batch:
            fallbacks.append("copies: this driver lacks the batch call of CUDA 12.8 and later")
        pins = StagingPinning(self.cuda, staging, waker.wake)
        try:
            copiers = _copiers(self.cuda, backend, pins.first, fallbacks)
            copiers = replace(copiers, checksums=_checksums(self.cuda, checksum_at, fallbacks))
            engine = CudaCopyEngine(
                self.cuda, self.model_stream, copiers, pins, cache_starts, waker
            )
        except BaseException:
            pins.close()
            raise
        pins.start()
        for line in fallbacks:
            logger.warning("%s", line)
        return engine, tuple(fallbacks)

    def engine_name(self, backend: str) -> str:
        return f"{backend} on {self.cuda.facts.name}" if self.cuda else "host memcpy"


def _checksums(cuda: Cuda, checksum_at: str, fallbacks: list[str]) -> GpuChecksums | None:
    if checksum_at != "gpu":
        return None
    try:
        return GpuChecksums(cuda, load_cached_kernel(cuda, CRC_BLOCKS))
    except EngineError as error:
        fallbacks.append(f"checksums: on the CPU ({error})")
        return None


def _copiers(cuda: Cuda, backend: str, scratch: tuple[int, int], fallbacks: list[str]) -> Copiers:
    dma = DmaCopier(cuda)
    kernel = None
    if backend in (_AUTO, Backend.KERNEL.value):
        try:
            kernel = load_kernel(cuda)
        except EngineError as error:
            if backend != _AUTO:
                raise
            fallbacks.append(f"copies: DMA only, even for small fragments ({error})")
            backend = Backend.DMA.value
    if kernel is None or backend != _AUTO:  # only one method is used
        only = Backend(backend)
        return Copiers(dma, kernel, lambda direction, pieces: only)
    cells = kept_or_measured(cuda, dma, kernel, scratch)
    wins = Counter(best_of(cell) for cell in cells)
    logger.info(
        "copies: of %d kinds of transfer, %d use the kernel and %d use DMA with the overlap hint",
        *(len(cells), wins[Backend.KERNEL], wins[Backend.OVERLAP]),
    )
    return Copiers(dma, kernel, Selector(cells).choose)


def open_device(device: str) -> KvDevice:
    """Open the device that torch calls `device`: `cpu`, `cuda` (the current GPU) or `cuda:N`.

    Raises: EngineError: an unknown kind, or CUDA cannot be used here; the message says which.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return KvDevice()
    if kind != "cuda":
        raise EngineError(
            f"no copy engine for device {device!r}: this version supports NVIDIA GPUs and vLLM's "
            "CPU engine"
        )
    torch = importlib.import_module("torch")
    if torch.version.hip:
        raise EngineError("no copy engine for AMD GPUs: this version supports NVIDIA GPUs")
    try:
        cuda = Cuda(int(index) if index else torch.cuda.current_device())
    except RuntimeError as error:  # torch raises this for any cause
        raise EngineError(f"CUDA cannot be used here: {error}") from None
    return KvDevice(
        cuda, lambda: int(torch.cuda.current_stream().cuda_stream), gpu_warnings(cuda.facts.uuid)
    )
