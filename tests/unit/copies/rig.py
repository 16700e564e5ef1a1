# SPDX-License-Identifier: Apache-2.0
"""A KV cache and staging in ordinary memory, and the CUDA engine over the stub."""

from __future__ import annotations

import itertools
import os
import select

import numpy as np

from tests.chunks import pieces_of
from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
from vllm_nvmeof_offload.copy.base import Backend, Direction
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine, DmaCopier, KernelCopier
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.copy.gpu_checksums import GpuChecksums
from vllm_nvmeof_offload.copy.pinning import Readiness
from vllm_nvmeof_offload.io.base import Waker

BLOCKS = 8
PAGE_BYTES = 24


class Signals(Waker):
    """The wake-ups of an engine, which a test takes one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._pending = 0

    def acquire(self, timeout: float) -> bool:
        """Take one wake-up; False if none comes for `timeout` seconds."""
        if not self._pending:
            if not select.select([self.fd], [], [], timeout)[0]:
                return False
            self._pending = os.eventfd_read(self.fd)
        self._pending -= 1
        return True


class Pins:
    """Staging that is registered as the test says."""

    def __init__(self, starts: list[int]) -> None:
        self.starts = np.array(starts, np.uint64)
        self.state = Readiness.READY
        self.closed = False

    def readiness(self, addresses: np.ndarray) -> Readiness:
        return self.state

    def close(self) -> None:
        self.closed = True


class Rig:
    """`layers` tensors of BLOCKS blocks; staging slots of two blocks behind a gap each.

    The tensors are adjacent in memory, so that the last block of one is followed by
    the first of the next, although they are two allocations.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        layers: int,
        backend: Backend = Backend.DMA,
        waker: Waker | None = None,
        page: int = PAGE_BYTES,
        checksums: GpuChecksums | None = None,
    ) -> None:
        self.cuda = cuda
        self.cache = np.zeros((layers, BLOCKS, page), np.uint8)
        self.staging = np.zeros((BLOCKS, 2 * layers * page), np.uint8)
        tensors = [CacheTensor(t.ctypes.data, page, page, BLOCKS) for t in self.cache]
        self.geometry = ChunkGeometry(tensors, 2)
        # Two registrations: the first half of the slots, and the others.
        halves = [self.staging[: BLOCKS // 2], self.staging[BLOCKS // 2 :]]
        self.pins = Pins([half.ctypes.data for half in halves])
        cuda.regions = [(a.ctypes.data, a.nbytes) for a in (*self.cache, *halves)]
        kernel = (
            KernelCopier(cuda, cuda.load_kernel(b"", "")) if backend is Backend.KERNEL else None
        )
        self.engine = CudaCopyEngine(
            cuda,
            lambda: MODEL_STREAM,
            Copiers(DmaCopier(cuda), kernel, lambda _, __: backend, checksums),
            self.pins,
            np.array([t.address for t in tensors], np.uint64),
            waker,
        )
        self._values = itertools.count(1)

    def pieces(self, blocks: list[int], slots: list[int]) -> np.ndarray:
        """Blocks 2i and 2i + 1 of the list belong to slot i of the list."""
        parts = []
        for at, slot in enumerate(slots):
            chunk = pieces_of(self.geometry, np.array(blocks[2 * at : 2 * at + 2], np.int32)).rows
            chunk[:, 1] += np.uint64(self.staging[slot].ctypes.data)
            parts.append(chunk)
        return np.concatenate(parts)

    def fresh(self, shape: tuple[int, ...]) -> np.ndarray:
        """Bytes unlike any before."""
        return np.random.default_rng(next(self._values)).integers(1, 256, shape, np.uint8)

    def in_slot_order(self, blocks: list[int], content: np.ndarray) -> np.ndarray:
        """The contents of the slots as uint8[layers, BLOCKS, bytes of a page]."""
        return content[:, blocks].transpose(1, 0, 2).reshape(len(blocks) // 2, -1)

    def finish(self) -> list[tuple[int, bool]]:
        """Run everything; return the results of `poll`, which also starts waiting work."""
        done: list[tuple[int, bool]] = []
        while True:
            self.cuda.drain()
            done += [(ticket, outcome.ok) for ticket, outcome in self.engine.poll()]
            if self.cuda.is_idle:
                return done

    def store(self, blocks: list[int], slots: list[int]) -> int:
        fence = self.engine.record_fence()
        return self.engine.submit(Direction.STORE, self.pieces(blocks, slots), fence)

    def load(self, blocks: list[int], slots: list[int]) -> int:
        fence = self.engine.record_fence()
        return self.engine.submit(Direction.LOAD, self.pieces(blocks, slots), fence)

    def passed_fence(self) -> object:
        """A fence after which the model has no work left."""
        fence = self.engine.record_fence()
        self.cuda.drain(MODEL_STREAM)
        return fence
