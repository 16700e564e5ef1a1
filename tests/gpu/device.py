# SPDX-License-Identifier: Apache-2.0
"""The devices of these tests: a real GPU through torch, the stub of its driver, or the host.

With the stub every test runs on any machine, so that on a GPU only the GPU is new. The stub proves
nothing about a GPU. The host's engine, which serves vLLM's CPU engine, passes the same suite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
from vllm_nvmeof_offload.copy.driver import COPY_BLOCKS, Cuda, compile_kernels
from vllm_nvmeof_offload.copy.gpu_checksums import CRC_BLOCKS, KERNEL_NAME

#: About 0.2 s on a GPU of 2 GHz.
_SLOW_CYCLES = 400_000_000


def has_gpu() -> bool:
    """Whether there is a GPU. The check is cheap, because every collection of tests makes it."""
    return Path("/dev/nvidiactl").exists()


class Memory(Protocol):
    """Bytes on the device."""

    address: int

    def write(self, content: np.ndarray) -> None:
        """Write now; everything that is submitted later sees the bytes."""

    def read(self) -> np.ndarray:
        """Read now, after all work of the model's stream."""


class Device(Protocol):
    """One GPU or its stand-in. cuda: None if the KV cache is in CPU memory."""

    cuda: Cuda | None

    def allocate(self, count: int) -> Memory: ...

    def kernel(self) -> int:
        """The fast copy kernel."""

    def crc_kernel(self) -> int:
        """The kernel of checksums."""

    def model_stream(self) -> int: ...

    def later(self, memory: Memory, content: np.ndarray) -> None:
        """Compute for a while on the model's stream, then write `content`."""

    def go_on(self) -> None:
        """Advance the device; a GPU advances by itself."""

    def capture(self, meanwhile: Callable[[], None]) -> None:
        """Capture a graph as vLLM does while `meanwhile` runs; check that the graph is whole."""


class _TorchMemory:
    def __init__(self, torch: Any, count: int) -> None:
        self.tensor = torch.zeros(count, dtype=torch.uint8, device="cuda")
        self.address = self.tensor.data_ptr()
        self._torch = torch

    def write(self, content: np.ndarray) -> None:
        self.tensor.copy_(self._torch.from_numpy(content))
        self._torch.cuda.synchronize()

    def read(self) -> np.ndarray:
        found: np.ndarray = self.tensor.cpu().numpy()
        return found


class TorchDevice:
    """The first GPU."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()
        self.cuda: Cuda = Cuda(torch.cuda.current_device())

    def allocate(self, count: int) -> Memory:
        return _TorchMemory(self._torch, count)

    def kernel(self) -> int:
        return self.cuda.load_kernel(_compiled(self.cuda.facts.arch), "copy_blocks")

    def crc_kernel(self) -> int:
        return self.cuda.load_kernel(_compiled(self.cuda.facts.arch, CRC_BLOCKS), KERNEL_NAME)

    def model_stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def later(self, memory: Memory, content: np.ndarray) -> None:
        assert isinstance(memory, _TorchMemory)
        ready = self._torch.from_numpy(content).cuda()
        self._torch.cuda._sleep(_SLOW_CYCLES)
        memory.tensor.copy_(ready)

    def go_on(self) -> None:
        return

    def capture(self, meanwhile: Callable[[], None]) -> None:
        torch = self._torch
        graph, one = torch.cuda.CUDAGraph(), torch.ones(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            two = one * 2
            meanwhile()
            three = two + 1
        graph.replay()
        torch.cuda.synchronize()
        assert bool((three == 3).all())


class _StubMemory:
    def __init__(self, count: int) -> None:
        self.array = np.zeros(count, np.uint8)
        self.address = self.array.ctypes.data

    def write(self, content: np.ndarray) -> None:
        self.array[:] = content

    def read(self) -> np.ndarray:
        return self.array.copy()


class StubDevice:
    """No GPU: see `FakeCuda`."""

    def __init__(self, seed: int = 0) -> None:
        self._fake = FakeCuda(seed)
        self.cuda: Cuda = self._fake

    def allocate(self, count: int) -> Memory:
        return _StubMemory(count)

    def kernel(self) -> int:
        return self.cuda.load_kernel(b"", "copy_blocks")

    def crc_kernel(self) -> int:
        return self.cuda.load_kernel(b"", KERNEL_NAME)

    def model_stream(self) -> int:
        return MODEL_STREAM

    def later(self, memory: Memory, content: np.ndarray) -> None:
        write: Callable[[], None] = functools.partial(memory.write, content.copy())
        self._fake.on_model(write)

    def go_on(self) -> None:
        self._fake.drain()

    def capture(self, meanwhile: Callable[[], None]) -> None:
        self._fake.capturing = True
        meanwhile()
        self._fake.capturing = False
        assert self._fake.spoilt == []


class HostDevice:
    """CPU memory and the host's copies. The forward pass has run when vLLM asks for a copy."""

    cuda = None

    def allocate(self, count: int) -> Memory:
        return _StubMemory(count)

    def kernel(self) -> int:
        raise AssertionError("the host has no kernel")

    def crc_kernel(self) -> int:
        raise AssertionError("the host has no kernel")

    def model_stream(self) -> int:
        raise AssertionError("the host has no streams")

    def later(self, memory: Memory, content: np.ndarray) -> None:
        memory.write(content)

    def go_on(self) -> None:
        return

    def capture(self, meanwhile: Callable[[], None]) -> None:
        meanwhile()


@functools.cache
def _compiled(arch: str, name: str = COPY_BLOCKS) -> bytes:
    return compile_kernels(arch, name)
