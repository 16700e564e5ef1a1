# SPDX-License-Identifier: Apache-2.0
"""A KV cache with a given layout on a device, staging, and the copy engine between them."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass

import numpy as np

from tests.chunks import pieces_of
from tests.gpu.device import Device
from tests.unit.copies.rig import Signals
from vllm_nvmeof_offload.copy.base import Backend, CopyEngine, Direction, Payloads
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine, DmaCopier, KernelCopier
from vllm_nvmeof_offload.copy.geometry import CacheTensor, ChunkGeometry
from vllm_nvmeof_offload.copy.gpu_checksums import GpuChecksums
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.copy.pinning import StagingPinning
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import HEADER_BYTES, slot_stride_bytes

WAIT_S = 30.0


@dataclass(frozen=True)
class Layout:
    """(offset, stride, page) of each tensor in one allocation of `total` bytes."""

    name: str
    tensors: tuple[tuple[int, int, int], ...]
    total: int


def _layout(name: str, layers: int, page: int, blocks: int) -> Layout:
    block = layers * page
    match name:
        case "contiguous":  # BLHNC: all layers of a block are contiguous
            return Layout(name, ((0, block, block),), blocks * block)
        case "packed":  # the same memory as one tensor per layer
            tensors = tuple((at * page, block, page) for at in range(layers))
            return Layout(name, tensors, blocks * block)
        case "per_layer":
            tensors = tuple((at * blocks * page, page, page) for at in range(layers))
            return Layout(name, tensors, blocks * block)
        case "split":  # K of all blocks, then V of all blocks, layer by layer
            return _layout("per_layer", 2 * layers, page // 2, blocks)
        case "padded":  # as vLLM pads pages of hybrid models to one size
            stride = page + 256
            tensors = tuple((at * blocks * stride, stride, page) for at in range(layers))
            return Layout(name, tensors, layers * blocks * stride)
    raise AssertionError(name)


LAYOUTS = ("contiguous", "packed", "per_layer", "split", "padded")


class Rig:
    """Slots of `per_chunk` blocks in registrations of a few slots each."""

    def __init__(
        self,
        device: Device,
        layout: str,
        backend: Backend,
        page: int,
        layers: int = 3,
        blocks: int = 48,
        per_chunk: int = 3,
        waker: Waker | None = None,
        checksums: bool = False,
    ) -> None:
        self.device = device
        shape = _layout(layout, layers, page, blocks)
        self.cache = device.allocate(shape.total)
        self.blocks, self.per_chunk = blocks, per_chunk
        base = self.cache.address
        self.tensors = [
            CacheTensor(base + at, stride, size, blocks) for at, stride, size in shape.tensors
        ]
        self.geometry = ChunkGeometry(self.tensors, per_chunk)
        self._shape = shape
        slot = slot_stride_bytes(self.geometry.payload_bytes)
        self.slots = blocks // per_chunk
        self._memory = mmap.mmap(-1, slot * self.slots)
        self.staging = np.frombuffer(self._memory, np.uint8).reshape(self.slots, slot)
        self.map = StagingMap(self.staging.ctypes.data, slot, self.slots - 1, 1)
        self._rung = Signals()
        self._done: dict[int, bool] = {}
        starts = np.array([t.address for t in self.tensors], np.uint64)
        self.engine = _engine(device, backend, self.map, starts, waker or self._rung, checksums)

    def chunks(self, rng: np.random.Generator) -> list[tuple[list[int], int]]:
        """All blocks and all slots, in random order."""
        blocks = rng.permutation(self.blocks).reshape(self.slots, self.per_chunk).tolist()
        return list(zip(blocks, rng.permutation(self.slots).tolist(), strict=True))

    def submit(
        self,
        direction: Direction,
        chunks: list[tuple[list[int], int]],
        fence: object | None = None,
        payloads: Payloads | None = None,
    ) -> int:
        """Copy chunks of (blocks, slot). fence: a fence that was recorded earlier."""
        fence = fence or self.engine.record_fence()
        return self.engine.submit(direction, self.pieces(chunks), fence, payloads)

    def payloads(self, chunks: list[tuple[list[int], int]]) -> Payloads:
        """Those of chunks of (blocks, slot)."""
        count = len(chunks)
        return Payloads.of(
            np.full(count, self.per_chunk * len(self.tensors), np.uint32),
            np.array([self.payload(slot).ctypes.data for _, slot in chunks], np.uint64),
            np.full(count, self.geometry.payload_bytes, np.uint64),
        )

    def pieces(self, chunks: list[tuple[list[int], int]]) -> np.ndarray:
        """The pieces of chunks of (blocks, slot)."""
        parts = []
        for blocks, slot in chunks:
            pieces = pieces_of(self.geometry, np.array(blocks, np.int32)).rows
            pieces[:, 1] += np.uint64(self.staging[slot].ctypes.data + HEADER_BYTES)
            parts.append(pieces)
        return np.concatenate(parts)

    def wait(self, *tickets: int) -> None:
        end_s = time.monotonic() + WAIT_S
        while not set(tickets) <= self._done.keys():
            self.device.go_on()
            self._done |= {ticket: outcome.ok for ticket, outcome in self.engine.poll()}
            self._rung.acquire(timeout=0.05)
            assert time.monotonic() < end_s, "a copy does not end"
        assert all(self._done[ticket] for ticket in tickets)

    def content_of(self, cache: np.ndarray, blocks: list[int]) -> np.ndarray:
        """A slot's bytes for these blocks: block by block, and per block tensor by tensor."""
        pages = [
            cache[at + block * stride :][:size]
            for block in blocks
            for at, stride, size in self._shape.tensors
        ]
        return np.concatenate(pages)

    def place(self, cache: np.ndarray, blocks: list[int], content: np.ndarray) -> None:
        """Put a slot's bytes back into a copy of the cache."""
        at = 0
        for block in blocks:
            for offset, stride, size in self._shape.tensors:
                cache[offset + block * stride :][:size] = content[at : at + size]
                at += size

    def payload(self, slot: int) -> np.ndarray:
        return self.staging[slot, HEADER_BYTES:][: self.geometry.payload_bytes]

    def close(self) -> None:
        self.device.go_on()
        self.engine.close()
        del self.staging


def _engine(
    device: Device,
    backend: Backend,
    staging: StagingMap,
    starts: np.ndarray,
    waker: Waker,
    checksums: bool,
) -> CopyEngine:
    """An engine over a GPU with registrations of five slots and one backend for all copies.

    checksums: the GPU makes them; the host always does.
    """
    cuda = device.cuda
    if cuda is None:
        return HostCopyEngine(waker.wake)
    pins = StagingPinning(cuda, staging, waker.wake, 5 * staging.slot_bytes)
    kernel = KernelCopier(cuda, device.kernel()) if backend is Backend.KERNEL else None
    crcs = GpuChecksums(cuda, device.crc_kernel()) if checksums else None
    copiers = Copiers(DmaCopier(cuda), kernel, lambda _, __: backend, crcs)
    engine = CudaCopyEngine(cuda, device.model_stream, copiers, pins, starts, waker)
    pins.start()
    return engine
