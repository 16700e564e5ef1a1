# SPDX-License-Identifier: Apache-2.0
"""Builds the copy engine of a GPU: driver, registration, kernel, table; and says what it built."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine
from vllm_nvmeof_offload.copy.dma import DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.pinning import StagingPinning
from vllm_nvmeof_offload.copy.select import Backend, Selector, best_of
from vllm_nvmeof_offload.copy.table import kept_or_measured, load_kernel
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.staging_map import StagingMap

__all__ = ["ChosenCopy", "choose_copy_engine"]

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
