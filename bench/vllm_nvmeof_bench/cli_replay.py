# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench replay` and `replay-report`: agentic sessions against servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_nvmeof_bench.cli import Json, Plot, bench_app, import_bench, names, plain_errors
from vllm_nvmeof_bench.cli_tiers import Ramp, Scale, Seed, Think, Trace, Users

__all__ = ["replay", "replay_report"]

_JSON = Path("build/bench/replay.json")


@bench_app.command()
def replay(
    trace: Trace,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the pools of servers started here lie.")
    ] = Path("build/bench/replay-disk"),
    json_path: Json = _JSON,
    arms: Annotated[
        str,
        typer.Option(
            help="Servers to start: of none,cpu,pool,target,full,peer,peer_target,peer_full. "
            "Default: none,cpu,pool."
        ),
    ] = "",
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of a server that runs; repeatable. Then none is started."),
    ] = None,
    users: Users = 16,
    ramp: Ramp = 5.0,
    time_scale: Scale = 1.0,
    think_max: Think = 60.0,
    seed: Seed = 1,
    duration: Annotated[float, typer.Option(help="Seconds an arm.")] = 300.0,
    context_max: Annotated[
        int, typer.Option(help="A session ends before its first longer request.", min=1)
    ] = 131_072,
    block_tokens: Annotated[
        int, typer.Option(help="Replay each block of the trace with so many tokens; 0: as it is.")
    ] = 0,
    sessions: Annotated[int, typer.Option(help="Of the trace; 0: all.", min=0)] = 0,
    token_ids: Annotated[
        str, typer.Option(help="Ids that prompts are made of: LOW:HIGH, in the vocabulary.")
    ] = "300:2000",
    gpu_tokens: Annotated[
        int, typer.Option(help="GPU cache of servers started here.", min=64)
    ] = 8192,
    third_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens in a CPU tier that holds a third. 0: a third of the whole trace, of which "
            "a short run may never ask for more.",
            min=0,
        ),
    ] = 0,
    plot: Plot = None,
) -> None:
    """Replay agentic sessions against servers: TTFT, throughput, hits by tier, over time.

    Users come one after the other, think as long as the trace says, and share prefixes as far as
    the trace says. Without --base-url small servers are started on the CPU, one an arm; shrink
    the trace for them, as with --block-tokens 2 --context-max 4000 --time-scale 0.1.
    """
    low, high = _ids(token_ids)
    with plain_errors():
        known = import_bench("replay.settings")
        settings = known.Settings(
            arms=names(arms, known.ARMS_DEFAULT),
            base_urls=tuple(base_url or ()),
            pace=import_bench("traces.schedule").Pace(users, ramp, time_scale, think_max, seed),
            vocabulary=import_bench("replay.prompts").Vocabulary(low, high, seed),
            duration_s=duration,
            block_tokens=block_tokens or None,
            context_tokens_max=context_max,
            sessions=sessions or None,
            gpu_tokens=gpu_tokens,
            third_tokens=third_tokens or None,
        )
        command = import_bench("replay.command")
        command.measure(settings, trace, directory, json_path)
        command.show(json_path, plot)


def _ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise typer.BadParameter(f"{text!r}: give LOW:HIGH", param_hint="--token-ids")
    return int(low), int(high)


@bench_app.command("replay-report")
def replay_report(
    json_path: Annotated[Path, typer.Argument(help="A file that `bench replay` wrote.")] = (_JSON),
    plot: Plot = None,
) -> None:
    """Print the tables of a file of `bench replay` again, or draw it; ask nobody."""
    with plain_errors():
        import_bench("replay.command").show(json_path, plot)
