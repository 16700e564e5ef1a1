# SPDX-License-Identifier: Apache-2.0
"""Output helpers and exit codes that all commands share.

`doctor` exits with the worst `Severity` of its findings, `pool check` with the worst `Damage`. A
command imports its implementation only when it is called, so that `--help` stays fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import printable

__all__ = ["EPILOG", "EXIT_CODES", "FAILED", "Commands", "plain_console", "print_json", "table"]

#: docs/operations.md repeats this table.
EXIT_CODES = {
    0: "success; nothing needs attention",
    1: "doctor: works, but slower or less resilient than it could be; pool check: all damage was "
    "repaired; pool rm: not confirmed, or chunks with an unknown salt remain; try: the "
    "prompt was not loaded, or the answers differ; bench --check, demo: a goal was missed",
    2: "failure: an option, a configuration or a file was rejected, or the command failed; "
    "doctor: something cannot run",
    4: "pool check: damage remains; the damaged chunks are recomputed",
    8: "pool check: a pool cannot be used",
    130: "interrupted",
}
FAILED = 2
EPILOG = "Exit codes:\n\n" + "\n\n".join(f"{code}: {says}." for code, says in EXIT_CODES.items())


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


def plain_console(file_columns: int | None = None, *, stderr: bool = False) -> Console:
    """Return a console that prints texts verbatim, without rich's markup. In a file or pipe, it is
    `file_columns` wide, if given, to avoid wrapping."""
    console = Console(stderr=stderr, emoji=False, highlight=False, markup=False)
    if file_columns is not None and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = file_columns
    return console


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
) -> Table:
    """Return a table for a `plain_console`, which prints cells verbatim."""
    made = Table(*headings, title=title)
    for row in rows:
        made.add_row(*row)
    return made
