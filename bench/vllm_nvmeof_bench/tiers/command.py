# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench tiers` behind its options: run with a progress bar, print, write, draw."""

from __future__ import annotations

from pathlib import Path

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.tiers import report
from vllm_nvmeof_bench.tiers.run import run
from vllm_nvmeof_bench.tiers.samples import dump, load
from vllm_nvmeof_bench.tiers.settings import Settings
from vllm_nvmeof_bench.traces.show import show as show_all

__all__ = ["measure", "show"]


def measure(settings: Settings, trace: Path, json_path: Path) -> None:
    """Run, and write the JSON file.

    Raises:
        BenchError: the trace cannot be read, or the file cannot be written.
    """
    with progress() as on_progress:
        samples, conditions = run(settings, trace, on_progress)
    dump(json_path, samples, conditions)


def show(json_path: Path, plot_path: Path | None) -> None:
    """Print (and draw) what a file holds.

    Raises:
        BenchError: not such a file, or no matplotlib.
    """
    found = load(json_path)

    def draw(path: Path) -> None:
        from vllm_nvmeof_bench.tiers.plot import plot

        plot(path, *found)

    show_all(json_path, plot_path, found, report, draw)
