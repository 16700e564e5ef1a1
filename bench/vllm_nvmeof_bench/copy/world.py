# SPDX-License-Identifier: Apache-2.0
"""Blocks in GPU memory and in registered staging, and timed copies between them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_offload.copy.base import (
    DESCRIPTORS_MAX,
    Backend,
    Descriptors,
    Direction,
    Payloads,
    sides,
)
from vllm_nvmeof_offload.copy.calibration import Cell, Selector, calibrate
from vllm_nvmeof_offload.copy.cuda import (
    BLOCKS_MAX,
    PART_BYTES_MAX,
    Copiers,
    CudaCopyEngine,
    DmaCopier,
    KernelCopier,
    Table,
)
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.copy.gpu_checksums import PART_BYTES_MAX as CRC_PART_BYTES_MAX
from vllm_nvmeof_offload.copy.gpu_checksums import GpuChecksums, Launch
from vllm_nvmeof_offload.copy.pinning import REGISTERED_BYTES_MAX, Readiness, StagingPinning
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.units import MIB

_T = TypeVar("_T")
_Places = npt.NDArray[np.uint64]
CopyCall = Callable[[Direction, Descriptors, int], None]

#: Size of the staging's slots: with a power of two, a registration ends at a power of two.
_SLOT_BYTES = MIB
#: Blocks of up to an eighth of a registration may leave its end unused; this adds as much.
_ROOM = 8 / 7


class World:
    """Memory for `size` bytes of blocks on each side; the CPU side is staging as in a server.

    Arms: dma, dma_overlap, kernel, auto, and those of `others`. If an arm fails, it is removed, and
    `failed` contains its error. kernel: the loaded function, or why there is none.
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
        #: The backends among which `auto` chooses, even if one was removed as an arm.
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
        """Return blocks in random order on the GPU and in sequence in staging.

        first: the offset in bytes at which the blocks begin, a multiple of `size`. As with the
        product's slots, no block spans two registrations.
        """
        per_piece = self._piece_bytes // size
        assert per_piece, "a block is larger than a registration"
        numbers = first // size + np.arange(count, dtype=np.uint64)
        pieces, within = np.divmod(numbers, np.uint64(per_piece))
        places = pieces * np.uint64(self._piece_bytes) + within * np.uint64(size)
        mixed = np.random.default_rng(seed).permutation(places)
        return self._rows(mixed, places, np.full_like(places, size))

    def contiguous(self, size: int) -> Descriptors:
        """Return the first `size` bytes of both sides, in one piece per registration."""
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
            # Third-party code may raise anything; our code may raise only the driver's errors.
            if arm not in self._others and not isinstance(error, CudaError):
                raise
            del self.arms[arm]
            self.failed[arm] = _line_of(error)
            for stream in self._streams.values():  # wait for copies that the arm had started
                with contextlib.suppress(CudaError):
                    self.cuda.synchronize_stream(stream)
            self._give_back()
            return None

    def seconds_of(self, arm: str, work: dict[Direction, Descriptors]) -> float:
        """Return the seconds from the first submission until everything is done."""
        start_s = time.perf_counter()
        for direction, pieces in work.items():
            self.arms[arm](direction, pieces, self._streams[direction])
        for direction in work:
            self.cuda.synchronize_stream(self._streams[direction])
        took_s = time.perf_counter() - start_s
        self._give_back()
        return took_s

    def check(self, arm: str, size: int, count: int) -> bool:
        """Load and store random bytes by `arm`; return whether they are unchanged."""
        pieces = self.pieces(size, count)
        content, blocks = self.fill(pieces, arm), self._blocks(pieces)
        for block in blocks:
            block[:] = 0
        self.seconds_of(arm, {Direction.STORE: pieces})
        return np.array_equal(np.concatenate(blocks), content)

    def fill(self, pieces: Descriptors, arm: str = "dma") -> npt.NDArray[np.uint8]:
        """Load random bytes into the pieces in GPU memory; return them in the order of `pieces`."""
        content = np.random.default_rng(len(pieces)).integers(
            0, 256, int(pieces[:, 2].sum()), np.uint8
        )
        ends = np.cumsum(pieces[:, 2])[:-1].astype(np.intp)
        for block, part in zip(self._blocks(pieces), np.split(content, ends), strict=True):
            block[:] = part
        self.seconds_of(arm, {Direction.LOAD: pieces})
        return content

    def _blocks(self, pieces: Descriptors) -> list[npt.NDArray[np.uint8]]:
        """Return views of the pieces in staging."""
        starts = pieces[:, 1] - np.uint64(self._staging.ctypes.data)
        return [self._staging[at:end] for at, end in np.c_[starts, starts + pieces[:, 2]].tolist()]

    def submit_us(self, size: int, count: int, direction: Direction, backend: Backend) -> float:
        """Return the host time of one `submit` to an engine whose streams were used before."""
        kernel = self._copier() if backend is Backend.KERNEL else None
        copiers = Copiers(self._dma, kernel, lambda _, __: backend)
        pins = SimpleNamespace(  # its `close` does not end the registration
            starts=self._pins.starts, readiness=self._pins.readiness, close=lambda: None
        )
        engine = CudaCopyEngine(self.cuda, lambda: 0, copiers, pins, np.array([], np.uint64))
        place, fence = self.pieces(size, count), engine.record_fence()
        self.cuda.synchronize_stream(0)  # the engine delays transfers until their fence has passed
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
        """Return the cells by which `auto` chooses; none without a kernel or if this fails."""
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


# -- vLLM's own copy code ---------------------------------------------------------------

_WORD_BYTES = 8
_CHUNK_BYTES_MAX = 8192


class VllmCopier:
    """vLLM's copy code. As in vLLM's worker, its pointers are in pinned tensors."""

    def __init__(self, torch: Any, ops: Any, small: Any) -> None:
        self._torch = torch
        self._ops = ops
        self._small = small
        self._streams: dict[int, Any] = {}
        self._tables: tuple[Any, ...] = ()

    def copy(self, direction: Direction, pieces: Descriptors, stream: int) -> None:
        """Copy on `stream`; as in vLLM, loads allow any access order, stores the stream's order."""
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
        """Free the tables; call before the streams are destroyed: torch records events on them."""
        self._tables = ()
        self._streams.clear()

    def _filled(self, direction: Direction, pieces: Descriptors) -> tuple[Any, ...]:
        """Return the sources, destinations and sizes as tensors in pinned memory."""
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
    """Return the copier and the version of its vLLM, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return None, "torch finds no GPU"
        ops = importlib.import_module("vllm._custom_ops")
        small = importlib.import_module("vllm.v1.kv_offload.cpu.swap_blocks_triton")
        version = str(importlib.import_module("vllm.version").__version__)
    except Exception as error:  # noqa: BLE001 - other people's import-time code; the arm is absent
        return None, _line_of(error)
    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        return None, f"this vLLM {version} was built without CUDA"
    return VllmCopier(torch, ops, small), version


class CrcKernel:
    """The CRC kernel for a fixed list of chunks, on a separate stream.

    chunks: for each chunk, uint64[m, 2]: (address, bytes) of its pieces in order. Sizes are
    multiples of 512 bytes; addresses are aligned to 16.
    """

    def __init__(
        self, cuda: Cuda, kernel: int, chunks: Sequence[_Places], launch: Launch | None = None
    ) -> None:
        self._cuda = cuda
        rows = np.concatenate(chunks)
        ends = np.cumsum(rows[:, 1])
        # The payloads are contiguous: staging addresses serve only as offsets here.
        pieces = np.stack([rows[:, 0], ends - rows[:, 1], rows[:, 1]], axis=1)
        counts = np.array([len(chunk) for chunk in chunks], np.uint32)
        sizes = np.array([chunk[:, 1].sum() for chunk in chunks], np.uint64)
        self._payloads = Payloads.of(counts, np.cumsum(sizes) - sizes, sizes)
        parts_max = int((rows[:, 1] // np.uint64(CRC_PART_BYTES_MAX) + np.uint64(1)).sum())
        self._kernel = GpuChecksums(cuda, kernel, launch, parts_max)
        prepared = self._kernel.prepare(pieces, self._payloads)
        assert prepared is not None
        self._checksums = prepared
        self._stream = cuda.create_stream(launch is not None and launch.urgent)

    def run(self) -> None:
        """Run the kernel until the CRCs of all parts are computed; `join` needs them."""
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
