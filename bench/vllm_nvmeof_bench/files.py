# SPDX-License-Identifier: Apache-2.0
"""The earlier name of `results`, until every benchmark uses that one."""

from __future__ import annotations

from vllm_nvmeof_bench.results import dump, load
from vllm_nvmeof_bench.results import name_in as bench_of

__all__ = ["bench_of", "dump", "load"]
