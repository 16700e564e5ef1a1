# SPDX-License-Identifier: Apache-2.0
"""Output helpers that all commands share.

A command imports its implementation only when it is called, so that `--help` stays fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from vllm_nvmeof_offload.commands.exit_codes import FAILED
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import printable

__all__ = ["Commands", "print_json", "table", "wide_console"]


class Commands(TyperGroup):
    """A command group that reports each `OffloadError` in one line and exits with `FAILED`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OffloadError as error:
            for line in str(error).splitlines():
                # The message may quote a server's answer, which could control the terminal.
                typer.echo(f"vllm-nvmeof: {printable(line)}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            typer.echo("vllm-nvmeof: interrupted", err=True)
            raise typer.Exit(130) from None


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def wide_console(file_columns: int) -> Console:
    """Return a console for stdout; in a file or pipe, `file_columns` wide to avoid wrapping."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=file_columns)
    return console


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
) -> Table:
    """Return a table whose cells are printed verbatim, without rich's markup."""
    made = Table(*headings, title=title)
    for row in rows:
        made.add_row(*map(Text, row))
    return made
