# SPDX-License-Identifier: Apache-2.0
"""Every I/O engine, by name, for the tests of this directory. A new engine is one more entry."""

from __future__ import annotations

from collections.abc import Callable

from vllm_nvmeof_offload.config import TUNING, Tuning
from vllm_nvmeof_offload.io.base import IoEngine
from vllm_nvmeof_offload.io.native import How, NativeIoEngine
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.units import KIB

#: (pool, staging memory, its address, options that all engines have) → engine.
Factory = Callable[..., IoEngine]


def _native(how: How, limits: Tuning) -> Factory:
    def make(pool: Pool, memory: memoryview, base_address: int, **options: object) -> IoEngine:
        return NativeIoEngine(pool, memory, base_address, limits, how, **options)  # type: ignore[arg-type]

    return make


ENGINES: dict[str, Factory] = {
    "threads": _native(How.THREADS, Tuning(io_threads=4)),
    "uring": _native(How.REGISTERED, TUNING),
    # Small, so that a slot of these tests is moved in several pieces.
    "uring-unregistered": _native(How.UNREGISTERED, Tuning(io_split_bytes=16 * KIB)),
}
