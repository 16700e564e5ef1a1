# SPDX-License-Identifier: Apache-2.0
"""Every I/O engine, by name, for the tests of this directory. A new engine is one more entry."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from vllm_nvmeof_offload.io.base import IoEngine, IoLimits
from vllm_nvmeof_offload.io.threads import ThreadsIoEngine
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.units import KIB

#: (pool, staging memory, its address, options that all engines have) → engine.
Factory = Callable[..., IoEngine]


def _threads(pool: Pool, memory: memoryview, base_address: int, **options: object) -> IoEngine:
    return ThreadsIoEngine(pool, memory, base_address, IoLimits(threads=4), **options)  # type: ignore[arg-type]


def _uring(registered: bool, limits: IoLimits) -> Factory:
    def make(pool: Pool, memory: memoryview, base_address: int, **options: object) -> IoEngine:
        # Imported late: the module does not exist before the native part is built.
        module = importlib.import_module("vllm_nvmeof_offload.io.uring")
        engine: IoEngine = module.UringIoEngine(
            pool, memory, base_address, limits, registered=registered, **options
        )
        return engine

    return make


ENGINES: dict[str, Factory] = {
    "threads": _threads,
    "uring": _uring(True, IoLimits()),
    # Small, so that a slot of these tests is moved in several pieces.
    "uring-unregistered": _uring(False, IoLimits(split_bytes=16 * KIB)),
}
