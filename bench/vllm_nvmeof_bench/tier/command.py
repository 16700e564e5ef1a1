# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench tier` behind its options: run with a progress bar, print, write, draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_nvmeof_bench.pool.targets import missed
from vllm_nvmeof_bench.tier import report
from vllm_nvmeof_bench.tier.run import Progress as OnProgress
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
    with _progress() as on_progress:
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
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    report.print_conditions(console, conditions)
    report.print_samples(console, samples)
    rows = evaluate(samples, conditions) if with_targets else []
    if rows:
        report.print_targets(console, rows)
    console.print(f"{len(samples)} samples in {json_path}", highlight=False, soft_wrap=True)
    if plot_path is not None:
        from vllm_nvmeof_bench.tier.plot import plot

        plot(plot_path, samples, conditions)
        console.print(f"picture in {plot_path}", highlight=False, soft_wrap=True)
    return not missed(rows)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A bar that is drawn between measurements only: a refreshing thread would be measured."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what, refresh=True)
            quiet = what.startswith("load") and what.count(" · ") >= _STEP_PARTS
            if not console.is_terminal and not quiet:
                bar.console.print(f"{done}/{total} {what}", highlight=False)

        yield tell
