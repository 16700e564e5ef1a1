# SPDX-License-Identifier: Apache-2.0
"""GPU memory and registered staging, and copies between them that are timed to their end."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.calibrate import calibrate
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine
from vllm_nvmeof_offload.copy.dma import DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.kernel import KernelCopier, Table
from vllm_nvmeof_offload.copy.select import Backend, Cell, Selector
from vllm_nvmeof_offload.units import MIB
from vllm_nvmeof_offload.worker.memory import populate, prefer_node
from vllm_nvmeof_offload.worker.pinning import StagingPinning
from vllm_nvmeof_offload.worker.staging_map import StagingMap

__all__ = ["CopyCall", "World"]

CopyCall = Callable[[Direction, Descriptors, int], None]


class _Borrowed:
    """Registration that an engine uses and does not own."""

    def __init__(self, pins: StagingPinning) -> None:
        self.starts = pins.starts
        self.readiness = pins.readiness

    def close(self) -> None:
        return


class World:
    """`size` bytes on each side. Arms: dma, dma_overlap, kernel, auto, and those of `others`."""

    def __init__(
        self, cuda: Cuda, kernel: int, size: int, others: Mapping[str, CopyCall] | None = None
    ) -> None:
        self.cuda = cuda
        self._memory = mmap.mmap(-1, size)
        self._staging = np.frombuffer(self._memory, np.uint8)
        address = self._staging.ctypes.data
        self.numa_bound = prefer_node(address, size, cuda.facts.numa_node)
        self.seconds: dict[str, float] = {}
        self._timed("populate", lambda: populate(address, size))
        place = StagingMap(address, MIB, max(1, size // MIB), 0)
        self._pins = self._timed("register", lambda: self._register(place))
        self._gpu = cuda.allocate(size)
        self._function = kernel
        self._dma, self._kernel = DmaCopier(cuda), KernelCopier(cuda, kernel)
        self.cells: list[Cell] = self._timed(
            "calibrate", lambda: calibrate(cuda, self._dma, self._kernel, self._pins.first)
        )
        self._choose = Selector(self.cells).choose
        self._used: list[Table] = []
        overlap = DmaCopier(cuda, overlap=True)
        self.arms: dict[str, CopyCall] = {
            "dma": self._dma.copy,
            "dma_overlap": overlap.copy,
            "kernel": self._by_kernel,
            "auto": self._auto,
            **(others or {}),
        }
        self._streams = {direction: cuda.create_stream() for direction in Direction}

    def pieces(self, size: int, count: int, seed: int = 0, first: int = 0) -> Descriptors:
        """Blocks in random order on the GPU, one after the other in staging."""
        rows = np.empty((count, 3), np.uint64)
        places = first + np.arange(count, dtype=np.uint64) * np.uint64(size)
        rows[:, 0] = np.uint64(self._gpu) + np.random.default_rng(seed).permutation(places)
        rows[:, 1] = np.uint64(self._staging.ctypes.data) + places
        rows[:, 2] = size
        return rows

    def seconds_of(self, arm: str, work: dict[Direction, Descriptors]) -> float:
        """From the first submit until everything is done."""
        start_s = time.perf_counter()
        for direction, pieces in work.items():
            self.arms[arm](direction, pieces, self._streams[direction])
        for direction in work:
            self.cuda.synchronize_stream(self._streams[direction])
        took_s = time.perf_counter() - start_s
        while self._used:
            self._used.pop().give_back()
        return took_s

    def check(self, arm: str, size: int, count: int) -> bool:
        """Whether bytes that are stored and loaded again are the same: no figure of wrong bytes."""
        place = self.pieces(size, count)
        end = count * size
        content = np.random.default_rng(size).integers(0, 256, end, np.uint8)
        self._staging[:end] = content
        self.seconds_of(arm, {Direction.LOAD: place})
        self._staging[:end] = 0
        self.seconds_of(arm, {Direction.STORE: place})
        return bool((self._staging[:end] == content).all())

    def submit_us(self, size: int, count: int, direction: Direction, backend: Backend) -> float:
        """Host time of one `submit` of the engine."""
        kernel = KernelCopier(self.cuda, self._function) if backend is Backend.KERNEL else None
        copiers = Copiers(self._dma, kernel, lambda _, __: backend)
        nothing = np.array([], np.uint64)
        engine = CudaCopyEngine(self.cuda, lambda: 0, copiers, _Borrowed(self._pins), nothing)
        place, fence = self.pieces(size, count), engine.record_fence()
        start_s = time.perf_counter()
        engine.submit(direction, place, fence)
        took_s = time.perf_counter() - start_s
        del fence
        engine.close()
        return 1e6 * took_s

    def close(self) -> None:
        for stream in self._streams.values():
            self.cuda.destroy_stream(stream)
        self._kernel.close()
        self.cuda.free(self._gpu)
        self._pins.close()
        del self._staging

    def _register(self, place: StagingMap) -> StagingPinning:
        # One registration: the contiguous copy may not cross two.
        pins = StagingPinning(
            self.cuda, place, lambda: None, piece_bytes_max=place.slot_bytes * place.cache_slots
        )
        pins.start()
        pins.wait()
        return pins

    def _by_kernel(self, direction: Direction, pieces: Descriptors, stream: int) -> None:
        if not self._kernel.copy(direction, pieces, stream, self._used):
            raise RuntimeError("more descriptors than the kernel has tables")

    def _auto(self, direction: Direction, pieces: Descriptors, stream: int) -> None:
        by_kernel = self._choose(direction, pieces) is Backend.KERNEL
        (self._by_kernel if by_kernel else self._dma.copy)(direction, pieces, stream)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = call()
        self.seconds[name] = round(time.perf_counter() - start_s, 4)
        return result
