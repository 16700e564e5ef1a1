# SPDX-License-Identifier: Apache-2.0
"""`doctor --calibrate`: a finding for each GPU, over the stub."""

from __future__ import annotations

import pytest

from tests.unit.copies.fake_cuda import FakeCuda
from vllm_nvmeof_offload.commands.doctor import host
from vllm_nvmeof_offload.commands.doctor.host import calibrate_gpus
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.calibration import Cell
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.errors import EngineError
from vllm_nvmeof_offload.fabric.findings import Severity

_CELLS = [
    Cell(Direction.LOAD, 4096, 64, 20.0, 10.0, spread=0.07),
    Cell(Direction.STORE, 4096, 64, 20.0, 19.0),
]


class _Gpu(FakeCuda):
    """Can be given back."""

    released = 0

    def release(self) -> None:
        type(self).released += 1


def test_doctor_calibrates_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "calibrate_again", lambda cuda: _CELLS)

    def open_gpu(number: int) -> Cuda:
        if number == 2:
            raise CudaError("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
        return _Gpu()

    found = calibrate_gpus(open_gpu)
    assert [one.subject for one in found] == ["GPU 0", "GPU 1"] and _Gpu.released == 2
    assert all(one.severity is Severity.OK for one in found)
    assert found[0].evidence == (
        "of 2 kinds of transfer, 1 use the kernel and 0 DMA with the overlap hint; "
        "times varied by up to 7%"
    )


def test_doctor_reports_why_a_gpu_was_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(cuda: Cuda) -> list[Cell]:
        raise EngineError("nothing was kept")

    monkeypatch.setattr(host, "calibrate_again", cut_short)

    def open_gpu(number: int) -> Cuda:
        if number == 1:
            raise CudaError("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY")
        return _Gpu()

    short, broken = calibrate_gpus(open_gpu)
    assert short.severity is Severity.WARNING and "nothing was kept" in short.evidence
    assert broken.severity is Severity.WARNING and "OUT_OF_MEMORY" in broken.evidence


def test_doctor_reports_a_missing_gpu_once() -> None:
    def open_gpu(number: int) -> Cuda:
        raise EngineError("no NVIDIA driver here")

    (only,) = calibrate_gpus(open_gpu)
    assert only.subject == "host" and "no NVIDIA driver here" in only.evidence
