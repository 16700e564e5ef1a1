# SPDX-License-Identifier: Apache-2.0
"""The terminal's text of a benchmark's tables, and its samples as a file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from vllm_nvmeof_bench.benchmark import benchmark
from vllm_nvmeof_bench.results import dump
from vllm_nvmeof_bench.tables import show


def printed(name: str, samples: Sequence[Any], conditions: dict[str, Any]) -> str:
    bench = benchmark(name)
    goals = bench.goals(samples, conditions) if bench.goals else []
    out = io.StringIO()
    show(Console(file=out, width=200), bench.parts(samples, conditions, goals))
    return out.getvalue()


def written(path: Path, name: str, samples: Sequence[Any], conditions: dict[str, Any]) -> Path:
    dump(path, name, samples, conditions)
    return path
