# SPDX-License-Identifier: Apache-2.0
"""Settings of the end-to-end tests. Two groups run side by side, so no server may own a core."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e import servers
from tests.e2e.shapes.rig import Zygote

# With one math thread a server computes the same on every core. By default vLLM would bind the
# thread to a core: to the same core in every server.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["OMP_NUM_THREADS"] = "1"
# Faults are injected by their control files, in servers that these tests start.
os.environ["VLLM_NVMEOF_ALLOW_FAULT_INJECTION"] = "1"


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> servers.Reference:
    return servers.reference()
