# SPDX-License-Identifier: Apache-2.0
"""`python -m research.cluster play TRACE` simulates clusters and writes a results file;
`python -m research.cluster report FILE` prints it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_nvmeof_bench.cli import Check, bench_of

from research.cluster.measure import COMMANDS
from research.cluster.report import REPORT
from vllm_nvmeof_offload.commands import Commands


class _Parts(Commands):
    def list_commands(self, ctx: Any) -> list[str]:
        return ["play", *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "play":
            return bench_of(cmd_name, REPORT, COMMANDS[0])
        return super().get_command(ctx, cmd_name)


app = typer.Typer(cls=_Parts, no_args_is_help=True)


@app.callback(help=__doc__)
def _whole() -> None:
    """Make Typer create a group of commands, which needs a callback."""


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="A results file written by `play`.")],
    check: Check = False,
) -> None:
    """Print a results file's tables again."""
    raise typer.Exit(int(not REPORT.show(path) and check))


if __name__ == "__main__":
    app(prog_name="python -m research.cluster")
