# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench report`: all results of a directory as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_nvmeof_bench.cli import bench_app, import_bench, plain_errors

__all__ = ["report"]


@bench_app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Holds the JSON files of benchmarks.")],
    page: Annotated[
        Path | None, typer.Option(help="The page; pictures go beside it. Default: DIR/REPORT.md.")
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw them; needs matplotlib.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if a file was left out.")
    ] = False,
) -> None:
    """Write one Markdown page of all results in a directory, with plots and published figures.

    Measures nothing. A file that is damaged, or of no known benchmark, gets one line there.
    """
    with plain_errors():
        whole = import_bench("page.command").write(directory, page, plots)
    raise typer.Exit(int(check and not whole))
