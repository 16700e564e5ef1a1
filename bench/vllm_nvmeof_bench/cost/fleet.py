# SPDX-License-Identifier: Apache-2.0
"""An earlier name, for the benchmarks that still use it."""

from __future__ import annotations

from vllm_nvmeof_bench.cost.measure import plainly

__all__ = ["plainly"]
