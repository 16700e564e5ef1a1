# SPDX-License-Identifier: Apache-2.0
"""An earlier name, for the benchmarks that still use it."""

from __future__ import annotations

from vllm_nvmeof_bench.results import BenchError

__all__ = ["BenchError", "Settings"]


class Settings:
    """Given to `pool.conditions.at_start`, which needs none."""
