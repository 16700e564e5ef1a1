# SPDX-License-Identifier: Apache-2.0
"""Builds the copy engine of a GPU: driver, registration, kernel, table; and says what it built."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.calibrate import calibrate
from vllm_nvmeof_offload.copy.cuda import Copiers, CudaCopyEngine
from vllm_nvmeof_offload.copy.dma import DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.copy.kernel import KernelCopier
from vllm_nvmeof_offload.copy.nvrtc import (
    cache_directory,
    kernel_source,
    load_or_compile,
    replace_file,
)
from vllm_nvmeof_offload.copy.select import Backend, Cell, Selector, dump_cells, parse_cells
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.units import MIB
from vllm_nvmeof_offload.worker.pinning import StagingPinning
from vllm_nvmeof_offload.worker.staging_map import StagingMap

__all__ = ["ChosenCopy", "choose_copy_engine"]

logger = logging.getLogger(LOGGER_NAME)

#: Less registered memory than this says nothing about the larger cells of the table.
_CALIBRATION_BYTES_MIN = 4 * MIB


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
    """backend: auto, dma or kernel. cache_starts: where KV cache tensors begin.

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
    if backend == Backend.DMA.value:
        return Copiers(dma, None, Selector().choose)
    try:
        kernel = _load_kernel(cuda)
    except EngineError as error:
        if backend == Backend.KERNEL.value:
            raise
        fallbacks.append(f"copies: DMA alone, also of small fragments ({error})")
        return Copiers(dma, None, Selector().choose)
    if backend == Backend.KERNEL.value:
        return Copiers(dma, kernel, lambda direction, pieces: Backend.KERNEL)
    cells = _table(cuda, dma, kernel, scratch)
    wins = sum(cell.kernel_us < cell.dma_us for cell in cells)
    logger.info("copies: the kernel takes %d of %d kinds of transfer", wins, len(cells))
    return Copiers(dma, kernel, Selector(cells).choose)


def _load_kernel(cuda: Cuda) -> KernelCopier:
    if not cuda.host_pointers_work_in_kernels:
        raise EngineError("kernels cannot reach host memory at its own address here")
    code = load_or_compile(cuda.facts.arch, cache_directory())
    return KernelCopier(cuda, cuda.load_kernel(code, "copy_blocks"))


def _table(
    cuda: Cuda, dma: DmaCopier, kernel: KernelCopier, scratch: tuple[int, int]
) -> list[Cell]:
    """From its file, or measured now and kept there."""
    facts = cuda.facts
    version = hashlib.sha256(kernel_source().encode()).hexdigest()[:16]
    name = f"table-{facts.uuid}-{facts.driver_version}-{version}.json"
    path = cache_directory() / name
    try:
        return parse_cells(path.read_bytes())
    except (OSError, ValueError):  # none yet, or not ours
        pass
    if scratch[1] < _CALIBRATION_BYTES_MIN:
        return []
    started_s = time.perf_counter()
    try:
        cells = calibrate(cuda, dma, kernel, scratch)
    except CudaError as error:  # such as no GPU memory left
        logger.warning("copies: DMA and kernel were not compared: %s", error)
        return []
    logger.info("copies: compared DMA and kernel in %.1f s", time.perf_counter() - started_s)
    replace_file(path, dump_cells(cells))
    return cells
