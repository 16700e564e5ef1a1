# SPDX-License-Identifier: Apache-2.0
"""What every benchmark prints of its samples, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_nvmeof_bench.page.kinds import bench_of
from vllm_nvmeof_bench.pool.targets import missed

__all__ = ["show", "show_file"]

#: Of a table that goes to a file, unless the benchmark has a FILE_COLUMNS of its own.
_FILE_COLUMNS = 130


def show_file(
    name: str, json_path: Path, plot_path: Path | None, with_targets: bool = True
) -> bool:
    """Print (and draw) what a file of benchmark `name` holds; True unless a target is missed.

    Raises:
        BenchError: not such a file, or no matplotlib.
    """
    bench = bench_of(name)
    samples, conditions, rows = bench.read(json_path)
    found = (samples, conditions, rows if with_targets else [])
    show(
        json_path,
        plot_path,
        bench.report,
        found,
        lambda path: bench.draw(path, samples, conditions),
        getattr(bench, "FILE_COLUMNS", _FILE_COLUMNS),
    )
    return not missed(found[2])


def show(
    json_path: Path,
    plot_path: Path | None,
    report: Any,
    found: tuple[Sequence[Any], dict[str, Any], Sequence[Any]],
    plot: Callable[[Path], None],
    columns: int,
) -> None:
    """Print tables and targets, draw if asked to.

    report: a module with print_conditions, print_samples and print_targets. found: samples,
    conditions, rows of targets. plot: imports matplotlib when it is called. columns: of a table
    that goes to a file.
    """
    samples, conditions, rows = found
    console = Console()
    if not console.is_terminal:
        console = Console(width=columns)
    report.print_conditions(console, conditions)
    report.print_samples(console, samples)
    if rows:
        report.print_targets(console, rows)
    console.print(f"{len(samples)} samples in {json_path}", highlight=False, soft_wrap=True)
    if plot_path is not None:
        plot(plot_path)
        console.print(f"picture in {plot_path}", highlight=False, soft_wrap=True)
