# SPDX-License-Identifier: Apache-2.0
"""A sizing as tables for people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vllm_nvmeof_offload.commands.size.report import SizeReport

__all__ = ["show"]

#: Where nobody watches: a formula on one line is easier to search than what is folded at 80.
_FILE_COLUMNS = 160


def show(report: SizeReport) -> None:
    """Print all of `report`, each figure with its formula."""
    console = _console()
    console.print(report.model, highlight=False, markup=False, style="bold")
    console.print(_layers_table(report))
    console.print(_figures_table(report))
    verdict = "in time" if report.meets_ttft else "NOT in time"
    console.print(f"bottleneck: {report.bottleneck}; {verdict}", highlight=False)
    console.print(_scaling_table(report))
    for title, lines in (("assumed", report.assumptions), ("note", report.notes)):
        for line in lines:
            console.print(f"{title}: {line}", highlight=False, markup=False)
    published = f"published ratio: {report.published_source}"
    console.print(published, highlight=False, markup=False)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_FILE_COLUMNS)
    return console


def _layers_table(report: SizeReport) -> Table:
    from rich.table import Table

    from vllm_nvmeof_offload.commands.size.human import human_bytes

    table = Table(
        "layers", "kind", "block in one layer of a rank", "K and V apart", "kept", title="layers"
    )
    for row in report.layers:
        kept = "every token"
        if row.window_tokens is not None:
            kept = f"the last {row.window_tokens} tokens"
        page, piece = human_bytes(row.page_bytes), human_bytes(row.fragment_bytes)
        if not row.page_bytes:
            kept = "one state a sequence, no KV per token"
            piece = ""
            page = "unknown" if row.state_bytes is None else human_bytes(row.state_bytes)
        table.add_row(str(row.layers), row.kind, page, piece, kept)
    return table


def _figures_table(report: SizeReport) -> Table:
    from rich.table import Table

    table = Table("", "figure", "value", "formula", title="figures")
    last = ""
    for figure in report.figures:
        new = figure.section != last
        if new and last:
            table.add_section()
        last = figure.section
        table.add_row(last if new else "", figure.name, figure.text, figure.formula)
    return table


def _scaling_table(report: SizeReport) -> Table:
    from rich.table import Table

    table = Table(
        "drives", "sessions held", "at once in the TTFT", "bottleneck", "published: GPUs",
        "published: sessions", title="by the number of drives (other things as given)",
    )  # fmt: skip
    for row in report.scaling:
        table.add_row(
            str(row.drives), f"{row.sessions_held:,}", f"{row.sessions_in_time:,}", row.bottleneck,
            str(row.published_gpus), str(row.published_sessions),
        )  # fmt: skip
    return table
