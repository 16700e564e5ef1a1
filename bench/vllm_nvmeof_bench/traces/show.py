# SPDX-License-Identifier: Apache-2.0
"""What a benchmark over a trace prints of its file, and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["show"]

_FILE_COLUMNS = 180


def show(
    json_path: Path,
    plot_path: Path | None,
    found: tuple[Sequence[Any], dict[str, Any]],
    report: Any,
    plot: Callable[[Path], None],
) -> None:
    """found: samples and conditions. report: a module with print_conditions and print_samples,
    which take both here. plot: imports matplotlib when it is called."""
    samples, conditions = found
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    report.print_conditions(console, conditions)
    report.print_samples(console, samples, conditions)
    console.print(f"{len(samples)} samples in {json_path}", highlight=False, soft_wrap=True)
    if plot_path is not None:
        plot(plot_path)
        console.print(f"picture in {plot_path}", highlight=False, soft_wrap=True)
