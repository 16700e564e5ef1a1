# SPDX-License-Identifier: Apache-2.0
"""The output that the commands share.

A command imports its implementation when it is called, so that `--help` stays quick.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_nvmeof_offload.errors import OffloadError

__all__ = ["plain_errors", "print_json", "table", "wide_console"]


@contextlib.contextmanager
def plain_errors(code: int = 1) -> Iterator[None]:
    """Print an `OffloadError` as one line on stderr, and exit with `code`."""
    try:
        yield
    except OffloadError as error:
        typer.echo(f"vllm-nvmeof: {error}", err=True)
        raise typer.Exit(code) from None


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def wide_console(file_columns: int) -> Console:
    """A console for stdout, of `file_columns` columns if stdout is not a terminal.

    In a file one finding or formula per line is easier to search than text folded at 80.
    """
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=file_columns)
    return console


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
) -> Table:
    """A table for people, whose cells are printed as they are: rich reads no markup in them."""
    made = Table(*headings, title=title)
    for row in rows:
        made.add_row(*map(Text, row))
    return made
