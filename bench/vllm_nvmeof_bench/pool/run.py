# SPDX-License-Identifier: Apache-2.0
"""An earlier name, for the benchmarks that still use it."""

from __future__ import annotations

from vllm_nvmeof_bench.home import sync_file_system

__all__ = ["sync_file_system"]
