# SPDX-License-Identifier: Apache-2.0
"""`python -m research.cluster play TRACE` simulates clusters and writes a file of samples;
`python -m research.cluster report FILE` prints it again."""

from __future__ import annotations

from typing import Any

import typer
from vllm_nvmeof_bench.cli import bench_of

from research.cluster.measure import COMMANDS
from research.cluster.report import BENCHES
from vllm_nvmeof_offload.commands import Commands


class _Parts(Commands):
    def list_commands(self, ctx: Any) -> list[str]:
        return ["play", "report"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        return bench_of(cmd_name, BENCHES[0], COMMANDS[0] if cmd_name == "play" else None)


app = typer.Typer(cls=_Parts, no_args_is_help=True)


@app.callback(help=__doc__)
def _whole() -> None:
    """Typer makes a group of commands only where there is one."""


if __name__ == "__main__":
    app(prog_name="python -m research.cluster")
