# SPDX-License-Identifier: Apache-2.0
"""Every test of this folder runs over the host's engine, the stub, and a GPU if there is one."""

from __future__ import annotations

import pytest

from tests.gpu.device import Device, HostDevice, StubDevice, TorchDevice, has_gpu
from vllm_nvmeof_offload.copy.base import Backend

_REAL = pytest.param(
    TorchDevice,
    id="gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here")],
)


@pytest.fixture(
    params=[pytest.param(HostDevice, id="host"), pytest.param(StubDevice, id="stub"), _REAL]
)
def device(request: pytest.FixtureRequest) -> Device:
    made: Device = request.param()
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip other backends on the host, which copies in only one way: the test would be the same."""
    items[:] = [item for item in items if not _is_repetition(item)]


def _is_repetition(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("device") is HostDevice and params.get("backend") is Backend.KERNEL
