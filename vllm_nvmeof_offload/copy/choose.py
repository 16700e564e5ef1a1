# SPDX-License-Identifier: Apache-2.0
"""Opens the device of a worker's KV cache, the host or a GPU, and builds the copy engine for it."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.copy.base import Backend, CopyEngine
from vllm_nvmeof_offload.copy.calibration import Selector, best_of, kept_or_measured, load_kernel
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine, DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.gpu_checksums import GpuChecksums, load_checksums
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.copy.pinning import StagingPinning
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric.machine import gpu_warnings
from vllm_nvmeof_offload.staging import StagingMap

_AUTO = "auto"


@dataclass(frozen=True)
class KvDevice:
    """The device of the KV cache."""

    #: None: the KV cache is in CPU memory.
    cuda: Cuda | None = None
    #: Returns the model's current stream; called on the model's thread.
    model_stream: Callable[[], int] = lambda: 0
    warnings: tuple[str, ...] = ()

    @property
    def numa_node(self) -> int | None:
        """The NUMA node on which pinned memory should be; None: any."""
        return self.cuda.facts.numa_node if self.cuda else None

    def copy_engine(
        self,
        backend: str,
        staging: StagingMap,
        cache_starts: npt.NDArray[np.uint64],
        on_done: Callable[[], None],
        checksum_at: str = "cpu",
    ) -> tuple[CopyEngine, tuple[str, ...]]:
        """Build the copy engine; return it and its fallbacks: lines on what it lacks, and why.

        backend: auto, or the value of a `Backend`; ignored in CPU memory. cache_starts: addresses
        of KV cache tensors. `staging` must be empty: with auto a part of it is overwritten.
        checksum_at: "gpu": the GPU makes the checksums of payloads, where it can; in CPU memory the
        copies make them anyway.

        Raises: EngineError: staging cannot be registered, or `kernel` is required and unavailable.
        """
        if self.cuda is None:
            return HostCopyEngine(on_done=on_done), ()
        fallbacks: list[str] = []
        if not self.cuda.has_batch:
            fallbacks.append("copies: this driver has no batch call; 12.8 and later have one")
        pins = StagingPinning(self.cuda, staging, on_done)
        try:
            copiers = _copiers(self.cuda, backend, pins.first, fallbacks)
            copiers = replace(copiers, checksums=_checksums(self.cuda, checksum_at, fallbacks))
            engine = CudaCopyEngine(
                self.cuda, self.model_stream, copiers, pins, cache_starts, on_done
            )
        except BaseException:
            pins.close()
            raise
        pins.start()
        for line in fallbacks:
            logger.warning("%s", line)
        return engine, tuple(fallbacks)

    def engine_name(self, backend: str) -> str:
        """The copy engine's name for logs and metrics."""
        return f"{backend} on {self.cuda.facts.name}" if self.cuda else "host memcpy"


def _checksums(cuda: Cuda, checksum_at: str, fallbacks: list[str]) -> GpuChecksums | None:
    if checksum_at != "gpu":
        return None
    try:
        return load_checksums(cuda)
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
            fallbacks.append(f"copies: DMA only, also of small fragments ({error})")
            backend = Backend.DMA.value
    if kernel is None or backend != _AUTO:  # one way for everything
        only = Backend(backend)
        return Copiers(dma, kernel, lambda direction, pieces: only)
    cells = kept_or_measured(cuda, dma, kernel, scratch)
    wins = Counter(best_of(cell) for cell in cells)
    logger.info(
        "copies: of %d kinds of transfer the kernel takes %d, DMA with the overlap hint %d",
        *(len(cells), wins[Backend.KERNEL], wins[Backend.OVERLAP]),
    )
    return Copiers(dma, kernel, Selector(cells).choose)


def open_device(device: str) -> KvDevice:
    """Open the device that torch calls `device`: `cpu`, `cuda` (the current GPU) or `cuda:N`.

    Raises: EngineError: another kind, or CUDA cannot be used here; the message names the cause.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return KvDevice()
    if kind != "cuda":
        raise EngineError(
            f"no copy engine for device {device!r}: this version serves NVIDIA GPUs and vLLM's "
            "CPU engine"
        )
    torch = importlib.import_module("torch")
    if torch.version.hip:
        raise EngineError("no copy engine for AMD GPUs: this version serves NVIDIA GPUs")
    try:
        cuda = Cuda(int(index) if index else torch.cuda.current_device())
    except RuntimeError as error:  # torch raises it for every cause
        raise EngineError(f"CUDA cannot be used here: {error}") from None
    return KvDevice(
        cuda, lambda: int(torch.cuda.current_stream().cuda_stream), gpu_warnings(cuda.facts.uuid)
    )
