# SPDX-License-Identifier: Apache-2.0
"""Every test of this folder runs twice: over the stub, and on a GPU where there is one."""

from __future__ import annotations

import pytest

from tests.gpu.device import Device, StubDevice, TorchDevice, has_gpu

_REAL = pytest.param(
    TorchDevice,
    id="gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here")],
)


@pytest.fixture(params=[pytest.param(StubDevice, id="stub"), _REAL])
def device(request: pytest.FixtureRequest) -> Device:
    made: Device = request.param()
    return made
