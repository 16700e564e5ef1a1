# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench cost`: what offloading costs where it cannot help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_nvmeof_bench.cli import (
    Check,
    Json,
    Plot,
    Targets,
    add_report,
    bench_app,
    import_bench,
    names,
    plain_errors,
)

__all__ = ["cost"]

_JSON = Path("build/bench/cost.json")


@bench_app.command()
def cost(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where model and pools lie meanwhile.")
    ] = Path("build/bench/disk"),
    json_path: Json = _JSON,
    pairs: Annotated[int, typer.Option(help="Rounds, each with every server.", min=1)] = 20,
    arms: Annotated[
        str,
        typer.Option(
            help="Of none,ours,ours_prompt_only,ours_cpu_only. Default: all but the last."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the prompts and the order.")] = 1,
    plot: Plot = None,
    targets: Targets = True,
    check: Check = False,
) -> None:
    """Measure what offloading costs when nothing is ever found and everything fits.

    Starts a real `vllm serve` for each arm, all at once, asks them in turn, and compares each
    with the one without offloading, round by round. Takes about 10 minutes, 6 GiB of memory
    and up to 5 GiB of the disk, which is left as it was. Nothing else should run meanwhile.
    """
    with plain_errors():
        known = import_bench("cost.settings")
        settings = known.Settings(arms=names(arms, known.ARMS_DEFAULT), pairs=pairs, seed=seed)
        import_bench("cost.command").measure(settings, directory, json_path)
        reached = import_bench("show").show_file("cost", json_path, plot, targets)
    raise typer.Exit(int(check and not reached))


add_report("cost", _JSON)
