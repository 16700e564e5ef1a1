# SPDX-License-Identifier: Apache-2.0
"""The devices of these tests: a real GPU through torch, the stub of its driver, or the host.

With the stub every test runs on any machine, so that on a GPU only the GPU is new. The stub proves
nothing about a GPU. The host's engine, which serves vLLM's CPU engine, passes the same suite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.copies.fake_cuda import MODEL_STREAM, FakeCuda
from vllm_nvmeof_offload.copy.driver import COPY_BLOCKS, Cuda, compile_kernels
from vllm_nvmeof_offload.copy.gpu_checksums import CRC_BLOCKS, KERNEL_NAME

#: About 0.2 s on a GPU of 2 GHz.
_SLOW_CYCLES = 400_000_000


def has_gpu() -> bool:
    """Whether there is a GPU. The check is cheap, because every collection of tests makes it."""
    return Path("/dev/nvidiactl").exists()


class _TorchMemory:
    """Bytes on the GPU. What is written is seen by all that is submitted later, and what is read
    follows all work of the model's stream."""

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
    """The first GPU. The other devices have the same methods."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.init()
        self.cuda: Cuda = Cuda(torch.cuda.current_device())

    def allocate(self, count: int) -> _TorchMemory:
        return _TorchMemory(self._torch, count)

    def kernel(self) -> int:
        return self.cuda.load_kernel(_compiled(self.cuda.facts.arch), "copy_blocks")

    def crc_kernel(self) -> int:
        return self.cuda.load_kernel(_compiled(self.cuda.facts.arch, CRC_BLOCKS), KERNEL_NAME)

    def model_stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def later(self, memory: _TorchMemory, content: np.ndarray) -> None:
        """Compute for a while on the model's stream, then write `content`."""
        ready = self._torch.from_numpy(content).cuda()
        self._torch.cuda._sleep(_SLOW_CYCLES)
        memory.tensor.copy_(ready)

    def go_on(self) -> None:
        """Advance the device; a GPU advances by itself."""

    def capture(self, meanwhile: Callable[[], None]) -> None:
        """Capture a graph as vLLM does while `meanwhile` runs; check that the graph is whole."""
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


class HostDevice:
    """CPU memory and the host's copies. The forward pass has run when vLLM asks for a copy."""

    cuda: Cuda | None = None

    def allocate(self, count: int) -> _StubMemory:
        return _StubMemory(count)

    def model_stream(self) -> int:
        raise AssertionError("the host has no streams")

    def later(self, memory: _StubMemory, content: np.ndarray) -> None:
        memory.write(content)

    def go_on(self) -> None:
        return

    def capture(self, meanwhile: Callable[[], None]) -> None:
        meanwhile()


class StubDevice(HostDevice):
    """No GPU: see `FakeCuda`."""

    def __init__(self, seed: int = 0) -> None:
        self._fake = FakeCuda(seed)
        self.cuda = self._fake

    def kernel(self) -> int:
        return self.cuda.load_kernel(b"", "copy_blocks")

    def crc_kernel(self) -> int:
        return self.cuda.load_kernel(b"", KERNEL_NAME)

    def model_stream(self) -> int:
        return MODEL_STREAM

    def later(self, memory: _StubMemory, content: np.ndarray) -> None:
        self._fake.on_model(functools.partial(memory.write, content.copy()))

    def go_on(self) -> None:
        self._fake.drain()

    def capture(self, meanwhile: Callable[[], None]) -> None:
        self._fake.capturing = True
        meanwhile()
        self._fake.capturing = False
        assert self._fake.spoilt == []


Device = TorchDevice | StubDevice | HostDevice


@functools.cache
def _compiled(arch: str, name: str = COPY_BLOCKS) -> bytes:
    return compile_kernels(arch, name)
