# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench cost`: run with a progress bar, write; read a file again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.cost import report
from vllm_nvmeof_bench.cost.paired import ratios_of
from vllm_nvmeof_bench.cost.run import run
from vllm_nvmeof_bench.cost.samples import Sample, dump, load
from vllm_nvmeof_bench.cost.settings import BASE, OURS, Settings
from vllm_nvmeof_bench.cost.targets import Row, evaluate

__all__ = ["FILE_COLUMNS", "beside", "draw", "measure", "read", "report"]

FILE_COLUMNS = 130
_LOGS = "cost-logs"


def measure(settings: Settings, directory: Path, json_path: Path) -> None:
    """Run, and write the JSON file; the servers' logs stay beside it if the run fails.

    Raises:
        BenchError: it cannot run here, or a server failed.
    """
    with progress() as on_progress:
        samples, conditions = run(settings, directory, json_path.parent / _LOGS, on_progress)
    dump(json_path, samples, conditions)


def read(json_path: Path) -> tuple[list[Sample], dict[str, Any], list[Row]]:
    """Samples, conditions, targets.

    Raises:
        BenchError: not such a file.
    """
    samples, conditions = load(json_path)
    return samples, conditions, evaluate(samples, conditions)


def draw(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """The PNG; matplotlib is imported only for it."""
    from vllm_nvmeof_bench.cost.plot import plot

    plot(path, samples, conditions)


def beside(samples: Sequence[Sample]) -> dict[str, str]:
    """Throughput of the default settings against no offloading, paired by round."""
    ratio = ratios_of(samples, OURS, BASE, "batch", "tokens_per_s")
    if ratio is None:
        return {}
    name = "throughput where offloading cannot help, with / without"
    return {name: f"{100 * (1 - ratio.middle):.1f} % less (median of {ratio.n} rounds)"}
