# SPDX-License-Identifier: Apache-2.0
"""What a worker's KV cache lies on, the host or a GPU, and the copy engine for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import CopyEngine
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.gpu import choose_copy_engine
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric.judge_gpu import gpu_warnings
from vllm_nvmeof_offload.staging_map import StagingMap

__all__ = ["BuiltCopy", "KvDevice", "open_device"]


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
