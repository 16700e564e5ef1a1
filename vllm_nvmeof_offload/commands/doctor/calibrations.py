# SPDX-License-Identifier: Apache-2.0
"""`doctor --calibrate`: compares DMA and the copy kernel on every GPU of this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.copy.select import Backend, best_of
from vllm_nvmeof_offload.copy.table import calibrate_again
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric.findings import Finding, Severity

__all__ = ["calibrate_gpus"]

_CHECK = "copy_table"


def calibrate_gpus(open_gpu: Callable[[int], Cuda] = Cuda) -> list[Finding]:
    """A finding for each GPU, or one if there is none."""
    findings: list[Finding] = []
    while True:
        try:
            cuda = open_gpu(len(findings))
        except EngineError as error:
            is_last = isinstance(error, CudaError) and error.name == "CUDA_ERROR_INVALID_DEVICE"
            if not findings or not is_last:
                findings.append(_failed("host", error))
            return findings
        findings.append(_calibrate(cuda, f"GPU {len(findings)}"))
        cuda.release()


def _calibrate(cuda: Cuda, subject: str) -> Finding:
    try:
        cells = calibrate_again(cuda)
    except EngineError as error:
        return _failed(subject, error)
    wins = Counter(best_of(cell) for cell in cells)
    spread = max(cell.spread for cell in cells)
    shown = (
        f"of {len(cells)} kinds of transfer the kernel takes {wins[Backend.KERNEL]}, DMA with the "
        f"overlap hint {wins[Backend.OVERLAP]}; times varied by up to {spread:.0%}"
    )
    return Finding(_CHECK, subject, Severity.OK, shown)


def _failed(subject: str, error: EngineError) -> Finding:
    shown = f"DMA and the copy kernel were not compared: {error}"
    remedy = "DMA carries every transfer until a comparison succeeds"
    return Finding(_CHECK, subject, Severity.WARNING, shown, remedy)
