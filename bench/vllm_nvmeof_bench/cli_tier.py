# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench tier` and `tier-report`: their options, on the app of `cli`."""

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

__all__ = ["tier"]

_JSON = Path("build/bench/tier.json")


@bench_app.command()
def tier(
    directory: Annotated[
        Path, typer.Option("--dir", help="The disk to throttle: a directory on it.")
    ] = Path("build/bench/tier-disk"),
    json_path: Json = _JSON,
    parts: Annotated[
        str, typer.Option(help="Of load,resume,prefetch,admission. Default: all.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Of everything; at most 3 of a server.", min=1)] = 3,
    throttle: Annotated[
        int, typer.Option(help="MB/s that the part load may read; 0: no limit.", min=0)
    ] = 100,
    seed: Annotated[int, typer.Option(help="Of contents, prompts and orders.")] = 1,
    plot: Plot = None,
    targets: Targets = True,
    check: Check = False,
) -> None:
    """Measure loads larger than the CPU tier, resumes after preemption, prefetch, admission.

    The disk is throttled by a control group, for which this mostly has to run as root. The
    part load takes 3 minutes; the others start vllm serve on the CPU with a small random
    model, seven times in all, and take 10. The disk is left as it was.
    """
    with plain_errors():
        known = import_bench("tier.settings")
        settings = known.Settings(
            parts=names(parts, known.PARTS),
            rounds=rounds,
            throttle_mb_per_s=throttle,
            seed=seed,
        )
        import_bench("tier.command").measure(settings, directory, json_path)
        reached = import_bench("show").show_file("tier", json_path, plot, targets)
    raise typer.Exit(int(check and not reached))


add_report("tier", _JSON)
