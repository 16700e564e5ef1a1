# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench latency` and `latency-report`: their options, on the app of `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_nvmeof_bench.cli import (
    Json,
    Plot,
    bench_app,
    import_bench,
    names,
    parse_size,
    plain_errors,
)

__all__ = ["latency", "latency_report"]

_JSON = Path("build/bench/latency.json")


@bench_app.command()
def latency(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=DIRECTORY, once or twice: what the second adds to the first. Given once, "
            "a throttled stand-in on the same disk is the second."
        ),
    ] = None,
    throttle: Annotated[
        int, typer.Option(help="MB/s of the second target's disk; 0: as it is.", min=0)
    ] = 0,
    json_path: Json = _JSON,
    jobs: Annotated[str, typer.Option(help="Processes at once, such as 1,2,4.")] = "",
    depths: Annotated[str, typer.Option(help="In flight in each, such as 1,4,16.")] = "",
    slot: Annotated[str, typer.Option(help="Payload of the pool's slot, beside 4 KiB.")] = "512KiB",
    cases: Annotated[str, typer.Option(help="Of read,write.")] = "read",
    rounds: Annotated[int, typer.Option(help="Samples of everything.", min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Of one measurement.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of contents, places and orders.")] = 1,
    plot: Plot = None,
) -> None:
    """Measure the latency of random I/O on two targets, and what our engine adds to fio there.

    At each number of jobs and depth, with 4 KiB and with whole slots, interleaved. Takes about 6
    minutes and 0.6 GiB of each target, which is left as it was. A throttle needs a control group,
    for which this mostly has to run as root. Nothing else should run meanwhile.
    """
    with plain_errors():
        known = import_bench("latency.settings")
        fixed = known.Settings()
        settings = known.Settings(
            cases=names(cases, fixed.cases),
            jobs=_numbers(jobs, "--jobs") or fixed.jobs,
            depths=_numbers(depths, "--depths") or fixed.depths,
            slot_bytes=parse_size(slot, "--slot"),
            rounds=rounds,
            run_s=seconds,
            seed=seed,
        )
        places = known.places_of(target or ["local=build/bench/latency-disk"], throttle)
        import_bench("latency.command").measure(settings, places, json_path)
        import_bench("show").show_file("latency", json_path, plot)


@bench_app.command("latency-report")
def latency_report(
    json_path: Annotated[Path, typer.Argument(help="A file that `bench latency` wrote.")] = _JSON,
    plot: Plot = None,
) -> None:
    """Print the tables of a file of `bench latency` again, or draw it; measure nothing."""
    with plain_errors():
        import_bench("show").show_file("latency", json_path, plot)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give numbers as 1,2,4", param_hint=option) from None
