# SPDX-License-Identifier: Apache-2.0
"""What every benchmark prints of its samples, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["show"]


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
