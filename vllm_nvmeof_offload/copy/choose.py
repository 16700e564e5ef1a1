# SPDX-License-Identifier: Apache-2.0
"""What a worker's KV cache lies on, the host or a GPU, and the copy engine for it.

Builds the copy engine of a GPU: driver, registration, kernel, table; and says what it built.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import CopyEngine
from vllm_nvmeof_offload.copy.calibration import kept_or_measured, load_kernel
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine, DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.copy.pinning import StagingPinning
from vllm_nvmeof_offload.copy.select import Backend, Selector, best_of
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric.machine import gpu_warnings
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.staging import StagingMap

__all__ = [
    "BuiltCopy",
    "ChosenCopy",
    "KvDevice",
    "choose_copy_engine",
    "open_device",
]


logger = logging.getLogger(LOGGER_NAME)

_AUTO = "auto"


@dataclass(frozen=True)
class ChosenCopy:
    """fallbacks: what the engine lacks of the best one, for people."""

    engine: CudaCopyEngine
    fallbacks: tuple[str, ...]


def choose_copy_engine(
    cuda: Cuda,
    backend: str,
    staging: StagingMap,
    cache_starts: npt.NDArray[np.uint64],
    model_stream: Callable[[], int],
    on_done: Callable[[], None],
) -> ChosenCopy:
    """backend: auto, or the value of a `Backend`. cache_starts: where KV cache tensors begin.

    Nothing has been put into `staging` yet: with auto a part of it is overwritten.

    Raises: EngineError: staging cannot be registered, or `kernel` was asked for and cannot be had.
    """
    fallbacks: list[str] = []
    if not cuda.has_batch:
        fallbacks.append("copies: this driver has no batch call; 12.8 and later have")
    pins = StagingPinning(cuda, staging, on_done)
    try:
        copiers = _copiers(cuda, backend, pins.first, fallbacks)
        engine = CudaCopyEngine(cuda, model_stream, copiers, pins, cache_starts, on_done)
    except BaseException:
        pins.close()
        raise
    pins.start()
    for line in fallbacks:
        logger.warning("%s", line)
    return ChosenCopy(engine, tuple(fallbacks))


def _copiers(cuda: Cuda, backend: str, scratch: tuple[int, int], fallbacks: list[str]) -> Copiers:
    dma = DmaCopier(cuda)
    if backend not in (_AUTO, Backend.KERNEL.value):  # one kind of DMA for everything
        return Copiers(dma, None, lambda direction, pieces: Backend(backend))
    try:
        kernel = load_kernel(cuda)
    except EngineError as error:
        if backend == Backend.KERNEL.value:
            raise
        fallbacks.append(f"copies: DMA alone, also of small fragments ({error})")
        return Copiers(dma, None, Selector().choose)
    if backend == Backend.KERNEL.value:
        return Copiers(dma, kernel, lambda direction, pieces: Backend.KERNEL)
    cells = kept_or_measured(cuda, dma, kernel, scratch)
    wins = Counter(best_of(cell) for cell in cells)
    logger.info(
        "copies: of %d kinds of transfer the kernel takes %d, DMA with the overlap hint %d",
        *(len(cells), wins[Backend.KERNEL], wins[Backend.OVERLAP]),
    )
    return Copiers(dma, kernel, Selector(cells).choose)


@dataclass(frozen=True)
class BuiltCopy:
    """fallbacks: what the engine lacks of the best one, for people."""

    engine: CopyEngine
    name: str
    fallbacks: tuple[str, ...] = ()


def _no_stream() -> int:
    return 0


@dataclass(frozen=True)
class KvDevice:
    """cuda: None: the KV cache is in CPU memory. model_stream: asked on the model's thread."""

    cuda: Cuda | None = None
    model_stream: Callable[[], int] = _no_stream
    warnings: tuple[str, ...] = field(default=())

    @property
    def numa_node(self) -> int | None:
        """Where pinned memory should lie; None: anywhere."""
        return self.cuda.facts.numa_node if self.cuda else None

    def copy_engine(
        self,
        backend: str,
        staging: StagingMap,
        cache_starts: npt.NDArray[np.uint64],
        on_done: Callable[[], None],
    ) -> BuiltCopy:
        """backend: auto, dma or kernel; nothing to choose in CPU memory.

        Raises: EngineError: staging cannot be registered, or `backend` cannot be had.
        """
        if self.cuda is None:
            return BuiltCopy(HostCopyEngine(on_done=on_done), "host memcpy")
        chosen = choose_copy_engine(
            self.cuda, backend, staging, cache_starts, self.model_stream, on_done
        )
        return BuiltCopy(chosen.engine, f"{backend} on {self.cuda.facts.name}", chosen.fallbacks)


def open_device(device: str) -> KvDevice:
    """The device that torch calls `device`: `cpu`, `cuda` (the current GPU) or `cuda:N`.

    Raises: EngineError: another kind, or CUDA cannot be used here; names what is missing.
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
    except RuntimeError as error:  # torch's, for whatever it finds amiss
        raise EngineError(f"CUDA cannot be used here: {error}") from None
    return KvDevice(
        cuda,
        lambda: int(torch.cuda.current_stream().cuda_stream),
        gpu_warnings(cuda.facts.uuid),
    )
