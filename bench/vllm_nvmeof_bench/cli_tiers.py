# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench tiers` and `tiers-report`; options of what works on a public trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_nvmeof_bench.cli import Json, Plot, bench_app, import_bench, names, plain_errors

__all__ = ["Ramp", "Scale", "Seed", "Think", "Trace", "Users", "tiers", "tiers_report"]

_JSON = Path("build/bench/tiers.json")

Trace = Annotated[
    Path,
    typer.Argument(help="A folder of kv-cache-tester's *.json, or a *.jsonl of Mooncake's."),
]
Users = Annotated[int, typer.Option(help="Users at the same time.", min=1)]
Ramp = Annotated[
    float, typer.Option("--ramp", help="Seconds from one user's arrival to the next.", min=0)
]
Scale = Annotated[
    float, typer.Option("--time-scale", help="Of think times and arrivals; 0: none.", min=0)
]
Think = Annotated[float, typer.Option("--think-max", help="Seconds, after scaling.", min=0)]
Seed = Annotated[int, typer.Option(help="Of the order of the sessions.")]


def _shares(text: str, option: str) -> tuple[float, ...] | None:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip()) or None
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=option) from None


@bench_app.command()
def tiers(
    trace: Trace,
    json_path: Json = _JSON,
    users: Users = 16,
    ramp: Ramp = 5.0,
    time_scale: Scale = 1.0,
    think_max: Think = 60.0,
    seed: Seed = 1,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.", min=1)] = 512,
    context_max: Annotated[
        int, typer.Option(help="A session ends before its first longer request.", min=1)
    ] = 131_072,
    kv_bytes_per_token: Annotated[
        int, typer.Option(help="As `vllm-nvmeof size` says it for a model.", min=1)
    ] = 131_072,
    gpu: Annotated[float, typer.Option(help="GPU memory / working set.")] = 0.02,
    cpu: Annotated[float, typer.Option(help="CPU tier / working set.")] = 0.05,
    pool: Annotated[float, typer.Option(help="Pool / working set.")] = 0.1,
    pools: Annotated[str, typer.Option(help="Sweep, such as 0.05,0.1,0.4.")] = "",
    cpus: Annotated[str, typer.Option(help="Sweep, such as 0.02,0.1.")] = "",
    policies: Annotated[
        str, typer.Option(help="Of eviction, as eviction_policy has them, module:Class too.")
    ] = "lru,credited_lru",
    plot: Plot = None,
) -> None:
    """Simulate both tiers over a trace: hits by tier and bytes, over sizes and policies.

    What decides is the product's own manager; no server, no GPU and no disk are needed. Sizes
    are shares of the trace's working set.
    """
    with plain_errors():
        pace = import_bench("traces.schedule").Pace(users, ramp, time_scale, think_max, seed)
        sweeps: dict[str, Any] = {
            "pools": _shares(pools, "--pools"),
            "cpus": _shares(cpus, "--cpus"),
        }
        settings = import_bench("tiers.settings").Settings(
            pace=pace,
            chunk_tokens=chunk_tokens,
            context_tokens_max=context_max,
            kv_bytes_per_token=kv_bytes_per_token,
            gpu=gpu,
            cpu=cpu,
            pool=pool,
            policies=names(policies, ("lru", "credited_lru")),
            **{name: found for name, found in sweeps.items() if found},
        )
        command = import_bench("tiers.command")
        command.measure(settings, trace, json_path)
        command.show(json_path, plot)


@bench_app.command("tiers-report")
def tiers_report(
    json_path: Annotated[Path, typer.Argument(help="A file that `bench tiers` wrote.")] = (_JSON),
    plot: Plot = None,
) -> None:
    """Print the tables of a file of `bench tiers` again, or draw it; simulate nothing."""
    with plain_errors():
        import_bench("tiers.command").show(json_path, plot)
