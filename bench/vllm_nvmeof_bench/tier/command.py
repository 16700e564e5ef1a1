# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench tier` behind its options: run with a progress bar, print, write, draw."""

from __future__ import annotations

from pathlib import Path

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.pool.targets import missed
from vllm_nvmeof_bench.show import show as show_all
from vllm_nvmeof_bench.tier import report
from vllm_nvmeof_bench.tier.run import run
from vllm_nvmeof_bench.tier.samples import dump, load
from vllm_nvmeof_bench.tier.settings import Settings
from vllm_nvmeof_bench.tier.targets import evaluate

__all__ = ["measure", "show"]

#: What a single load's description has more of; a log gets only the others.
_STEP_PARTS = 3
_FILE_COLUMNS = 140


def measure(settings: Settings, directory: Path, json_path: Path) -> None:
    """Run, and write the JSON file after each part.

    Raises:
        BenchError, OffloadError: it cannot run here, or a part failed.
    """
    with progress(_is_logged) as on_progress:
        run(
            settings,
            directory,
            on_progress,
            lambda samples, conditions: dump(json_path, samples, conditions),
        )


def show(json_path: Path, plot_path: Path | None, with_targets: bool) -> bool:
    """Print (and draw) what a file holds; True unless a target is missed.

    Raises:
        BenchError: not such a file, or no matplotlib.
    """
    samples, conditions = load(json_path)
    rows = evaluate(samples, conditions) if with_targets else []

    def draw(path: Path) -> None:
        from vllm_nvmeof_bench.tier.plot import plot

        plot(path, samples, conditions)

    found = (samples, conditions, rows)
    show_all(json_path, plot_path, report, found, draw, _FILE_COLUMNS)
    return not missed(rows)


def _is_logged(what: str) -> bool:
    return not what.startswith("load") or what.count(" · ") < _STEP_PARTS
