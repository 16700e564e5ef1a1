# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench ttft`, `hits`, `turns`, `serve`: whole servers, yours or small ones here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_nvmeof_bench.cli import Json, Plot, bench_app, import_bench, names, plain_errors

__all__ = ["hits", "serve", "serve_report", "ttft", "turns"]

_BUILD = Path("build/bench")
Directory = Annotated[Path, typer.Option("--dir", help="Where pools of servers started here lie.")]
Arms = Annotated[
    str,
    typer.Option(
        help="Servers to start here, of none,cpu,pool,target,full,peer,peer_target,peer_full; "
        "on a GPU ours also as full:dma or full:kernel."
    ),
]
BaseUrl = Annotated[
    list[str] | None,
    typer.Option(help="Measure this server instead: NAME=http://HOST:PORT. Repeatable."),
]
TokenIds = Annotated[
    str,
    typer.Option(help="LOW:HIGH of the prompts' token ids. Default, with --base-url: 1000:30000."),
]
Rounds = Annotated[int, typer.Option(help="Of everything, arms interleaved.", min=1)]
Seed = Annotated[int, typer.Option(help="Of the prompts and the order.")]
Rate = Annotated[
    int, typer.Option("--target-mb-per-s", help="Of the throttled stand-in for a target.", min=1)
]

ServerArgs = Annotated[
    str,
    typer.Option(help="More arguments of vllm serve, quoted, for the servers started here."),
]


def _numbers(text: str, option: str) -> dict[str, tuple[int, ...]]:
    """A setting of this name, unless the option was not given."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        message = f"{text!r}: give numbers, such as 256,1024"
        raise typer.BadParameter(message, param_hint=f"--{option}") from None
    return {option: found} if found else {}


def _run(
    name: str,
    given: dict[str, Any],
    arms: str,
    base_url: list[str] | None,
    token_ids: str,
    paths: tuple[Path, Path, Path | None],
) -> None:
    directory, json_path, plot = paths
    with plain_errors():
        command = import_bench("serve.command")
        settings = command.BENCHES[name].module.Settings(**given)
        chosen = names(arms, ())
        files = {name: json_path}
        command.measure({name: settings}, chosen, base_url or (), token_ids, directory, files)
        import_bench("show").show_file(name, json_path, plot)


@bench_app.command()
def ttft(
    base_url: BaseUrl = None,
    arms: Arms = "",
    lengths: Annotated[str, typer.Option(help="Of prompts. Default: 256,1024,4096.")] = "",
    rounds: Rounds = 3,
    target_rate: Rate = 200,
    server_args: ServerArgs = "",
    token_ids: TokenIds = "",
    seed: Seed = 1,
    directory: Directory = _BUILD / "disk",
    json_path: Json = _BUILD / "ttft.json",
    plot: Plot = None,
) -> None:
    """Time to first token of one request, against its length: computed, and brought back.

    With --base-url any server with an OpenAI API is measured, several side by side. Without, small
    servers are started here on the engine of the vLLM that is installed, about half a minute each.
    """
    given: dict[str, Any] = {
        "rounds": rounds,
        "seed": seed,
        "target_mb_per_s": target_rate,
        "server_args": server_args,
    }
    given |= _numbers(lengths, "lengths")
    _run("ttft", given, arms, base_url, token_ids, (directory, json_path, plot))


@bench_app.command()
def hits(
    base_url: BaseUrl = None,
    arms: Arms = "",
    rates: Annotated[str, typer.Option(help="Per cent. Default: 0,25,50,75,100.")] = "",
    count: Annotated[int, typer.Option(help="Prompts at once.", min=1)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 512,
    rounds: Rounds = 2,
    target_rate: Rate = 200,
    server_args: ServerArgs = "",
    token_ids: TokenIds = "",
    seed: Seed = 1,
    directory: Directory = _BUILD / "disk",
    json_path: Json = _BUILD / "hits.json",
    plot: Plot = None,
) -> None:
    """Throughput of many unique prompts at once, against the share that was seen before.

    As `bench ttft` with servers.
    """
    given: dict[str, Any] = {
        "count": count,
        "prompt_tokens": prompt_tokens,
        "rounds": rounds,
        "seed": seed,
    }
    given |= {"target_mb_per_s": target_rate, "server_args": server_args}
    given |= _numbers(rates, "rates")
    _run("hits", given, arms, base_url, token_ids, (directory, json_path, plot))


@bench_app.command()
def turns(
    base_url: BaseUrl = None,
    arms: Arms = "",
    concurrency: Annotated[str, typer.Option(help="Conversations at once. Default: 4,8,16.")] = "",
    first_tokens: Annotated[int, typer.Option(help="Of the first turn's prompt.", min=1)] = 448,
    grow_tokens: Annotated[int, typer.Option(help="That each later turn adds.", min=1)] = 160,
    answer_tokens: Annotated[int, typer.Option(help="Of each answer.", min=1)] = 16,
    rounds: Rounds = 2,
    target_rate: Rate = 200,
    server_args: ServerArgs = "",
    token_ids: TokenIds = "",
    seed: Seed = 1,
    directory: Directory = _BUILD / "disk",
    json_path: Json = _BUILD / "turns.json",
    plot: Plot = None,
) -> None:
    """Conversations of four turns with growing context, some at once: tokens/s and TTFT.

    As `bench ttft` with servers. The arm `target` is a stand-in for an NVMe-oF target: a directory
    on this disk that a control group throttles (mostly as root).
    """
    given: dict[str, Any] = {
        "first_tokens": first_tokens,
        "grow_tokens": grow_tokens,
        "answer_tokens": answer_tokens,
        "rounds": rounds,
        "seed": seed,
        "target_mb_per_s": target_rate,
        "server_args": server_args,
        **_numbers(concurrency, "concurrency"),
    }
    _run("turns", given, arms, base_url, token_ids, (directory, json_path, plot))


@bench_app.command("serve")
def serve(
    base_url: BaseUrl = None,
    arms: Arms = "",
    parts: Annotated[str, typer.Option(help="Of ttft,hits,turns. Default: all.")] = "",
    target_rate: Rate = 200,
    server_args: ServerArgs = "",
    token_ids: TokenIds = "",
    seed: Seed = 1,
    directory: Directory = _BUILD / "disk",
    out: Annotated[Path, typer.Option(help="Where a JSON file and a picture each go.")] = _BUILD,
) -> None:
    """`bench ttft`, `hits` and `turns` one after the other on the same servers, by default sizes.

    Servers that are started here start once, and are large enough for all parts.
    """
    with plain_errors():
        command = import_bench("serve.command")
        chosen = names(parts, tuple(command.BENCHES))
        unknown = [part for part in chosen if part not in command.BENCHES]
        if unknown:
            message = f"no part {unknown[0]!r}; there are {', '.join(command.BENCHES)}"
            raise typer.BadParameter(message, param_hint="--parts")
        given = {"seed": seed, "target_mb_per_s": target_rate, "server_args": server_args}
        settings = {name: command.BENCHES[name].module.Settings(**given) for name in chosen}
        files = {name: out / f"{name}.json" for name in chosen}
        known = names(arms, ())
        command.measure(settings, known, base_url or (), token_ids, directory, files)
        for name, path in files.items():
            import_bench("show").show_file(name, path, path.with_suffix(".png"))


@bench_app.command("serve-report")
def serve_report(
    json_path: Annotated[Path, typer.Argument(help="A file of bench ttft, hits or turns.")],
    plot: Plot = None,
) -> None:
    """Print the tables of such a file again, or draw it; measure nothing."""
    with plain_errors():
        name = import_bench("files").bench_of(json_path)
        command = import_bench("serve.command")
        if name not in command.BENCHES:
            known = ", ".join(command.BENCHES)
            typer.echo(f"vllm-nvmeof: {json_path} is of bench {name}, not of {known}", err=True)
            raise typer.Exit(1)
        import_bench("show").show_file(name, json_path, plot)
