# SPDX-License-Identifier: Apache-2.0
"""An earlier name, for the benchmarks that still use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import conditions
from vllm_nvmeof_bench.pool.arms import limits

__all__ = ["at_start"]


def at_start(_: object, directory: Path) -> dict[str, Any]:
    return {**conditions.at_start(directory), "settings": {"engine": limits()}}
