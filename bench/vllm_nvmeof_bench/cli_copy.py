# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench copy` and `copy-report`: their options, on the app of `cli`."""

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

__all__ = ["copy"]

_JSON = Path("build/bench/copy.json")


@bench_app.command()
def copy(
    directory: Annotated[
        Path, typer.Option("--dir", help="For the part disk: a directory on the disk to load from.")
    ] = Path("build/bench/copy-disk"),
    json_path: Json = _JSON,
    parts: Annotated[
        str,
        typer.Option(
            help="Of transfer,few,model,both,submit,loops,disk, sweep (the kernel by its thread "
            "blocks) and crc (CRC-32C by the GPU). Default: all but sweep and crc."
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(help="Of everything.", min=1)] = 5,
    gib: Annotated[
        float, typer.Option("--gib", help="GPU memory, and as much pinned memory.", min=0.25)
    ] = 4.0,
    plot: Plot = None,
    targets: Targets = True,
    check: Check = False,
) -> None:
    """Measure copies between the first GPU and pinned memory: DMA, the kernel, what auto takes.

    Needs an NVIDIA GPU. Beside them stands vLLM's own copy code, unmodified, where the vLLM
    that is installed has it for GPUs. Takes about 5 minutes; nothing else should run meanwhile.
    """
    with plain_errors():
        known = import_bench("gpu.settings")
        settings = known.Settings(
            parts=_known(names(parts, known.USUAL_PARTS), known.PARTS),
            rounds=rounds,
            bytes_max=int(gib * (1 << 30)),
        )
        import_bench("gpu.command").measure(settings, directory, json_path)
        reached = import_bench("show").show_file("copy", json_path, plot, targets)
    raise typer.Exit(int(check and not reached))


add_report("copy", _JSON)


def _known(given: tuple[str, ...], parts: tuple[str, ...]) -> tuple[str, ...]:
    for name in given:
        if name not in parts:
            there = ", ".join(parts)
            raise typer.BadParameter(f"no part {name!r}; there are {there}", param_hint="--parts")
    return given
