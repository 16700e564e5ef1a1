# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench cost` behind its options: run with a progress bar, print, write, draw."""

from __future__ import annotations

from pathlib import Path

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.cost import report
from vllm_nvmeof_bench.cost.run import run
from vllm_nvmeof_bench.cost.samples import dump, load
from vllm_nvmeof_bench.cost.settings import Settings
from vllm_nvmeof_bench.cost.targets import evaluate, missed
from vllm_nvmeof_bench.show import show as show_all

__all__ = ["measure", "show"]

_FILE_COLUMNS = 130
_LOGS = "cost-logs"


def measure(settings: Settings, directory: Path, json_path: Path) -> None:
    """Run, and write the JSON file; the servers' logs stay beside it if the run fails.

    Raises:
        BenchError: it cannot run here, or a server failed.
    """
    with progress() as on_progress:
        samples, conditions = run(settings, directory, json_path.parent / _LOGS, on_progress)
    dump(json_path, samples, conditions)


def show(json_path: Path, plot_path: Path | None, with_targets: bool) -> bool:
    """Print (and draw) what a file holds; True unless a target is missed.

    Raises:
        BenchError: not such a file, or no matplotlib.
    """
    samples, conditions = load(json_path)
    rows = evaluate(samples, conditions) if with_targets else []

    def draw(path: Path) -> None:
        from vllm_nvmeof_bench.cost.plot import plot

        plot(path, samples, conditions)

    found = (samples, conditions, rows)
    show_all(json_path, plot_path, report, found, draw, _FILE_COLUMNS)
    return not missed(rows)
