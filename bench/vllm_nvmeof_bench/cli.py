# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench …`: a command per benchmark, and one that prints its file again.

The options of `bench NAME` are declared by the benchmark's settings. A benchmark is imported
when its command is asked for, so that other commands start without waiting for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from vllm_nvmeof_bench import benchmark as benchmarks
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.settings import Option, option_of
from vllm_nvmeof_offload.errors import OffloadError

__all__ = ["bench_app"]

_REPORT = "-report"
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
#: Earlier names of commands, which still work.
_RENAMED: dict[str, str] = {}

Plot = Annotated[Path | None, typer.Option(help="Also draw them: a PNG file; needs matplotlib.")]
Goals = Annotated[bool, typer.Option("--targets/--no-targets", help="Print the goals.")]
Check = Annotated[bool, typer.Option("--check", help="Exit code 1 if a goal is missed.")]


class _Benches(TyperGroup):
    """The benchmarks' commands, made when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        made = [name + end for name in benchmarks.PACKAGES for end in ("", _REPORT)]
        return list(dict.fromkeys([*made, *super().list_commands(ctx)]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (written := super().get_command(ctx, cmd_name)) is not None:
            return written
        name, report = cmd_name.removesuffix(_REPORT), cmd_name.endswith(_REPORT)
        if name in _RENAMED:
            name = _RENAMED[name]
            shown = name + _REPORT * report
            typer.echo(f"vllm-nvmeof: `bench {cmd_name}` is now `bench {shown}`", err=True)
        if name not in benchmarks.PACKAGES:
            return None
        return _command_of(cmd_name, _report_of(name) if report else _measure_of(name))


bench_app = typer.Typer(
    cls=_Benches,
    help="Benchmarks on this machine: ours beside fio, a bare ring loop and vLLM's own fs tier.",
    no_args_is_help=True,
)


@bench_app.callback()
def bench() -> None:
    """Benchmarks on this machine: ours beside fio, a bare ring loop and vLLM's own fs tier."""


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """One line on stderr, and exit code 1, for what the world did."""
    try:
        yield
    except (BenchError, OffloadError) as error:
        typer.echo(f"vllm-nvmeof: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("vllm-nvmeof: interrupted; what was written is deleted", err=True)
        raise typer.Exit(130) from None


def _command_of(name: str, function: Callable[..., None]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(name)(function)
    return typer.main.get_command(app)


def _file_of(name: str) -> Path:
    return Path(f"build/bench/{name}.json")


def _measure_of(name: str) -> Callable[..., None]:
    """`bench NAME`: measure, write the file, print it."""
    command, found = benchmarks.command(name), benchmarks.benchmark(name)

    def run(**given: Any) -> None:
        json_path: Path = given["json_path"]
        with plain_errors():
            command.measure(settings_of(command.settings, given), json_path)
            reached = found.show(json_path, given["plot"], given.get("goals", True))
        raise typer.Exit(int(given.get("check", False) and not reached))

    written = Annotated[Path, typer.Option("--json", help="File to write the samples to.")]
    options: dict[str, tuple[Any, Any]] = {
        **options_of(command.settings),
        "json_path": (written, _file_of(name)),
        "plot": (Plot, None),
    }
    if found.goals is not None:
        options.setdefault("goals", (Goals, True))
        options["check"] = (Check, False)
    return _with_options(run, options, command.help)


def _report_of(name: str) -> Callable[..., None]:
    """`bench NAME-report`: print the file again."""
    found = benchmarks.benchmark(name)

    def run(**given: Any) -> None:
        with plain_errors():
            reached = found.show(given["json_path"], given["plot"], given.get("goals", True))
        raise typer.Exit(int(given.get("check", False) and not reached))

    file = Annotated[Path, typer.Argument(help="A file that the benchmark wrote.")]
    options: dict[str, tuple[Any, Any]] = {
        "json_path": (file, _file_of(name)),
        "plot": (Plot, None),
    }
    if found.goals is not None:
        options |= {"goals": (Goals, True), "check": (Check, False)}
    text = f"Print the tables of a file of `bench {name}` again, or draw it; measure nothing."
    return _with_options(run, options, text)


def _with_options(
    function: Callable[..., None], options: dict[str, tuple[Any, Any]], text: str
) -> Callable[..., None]:
    """Give a function the signature from which typer makes options: name → (type, default)."""
    function.__doc__ = text
    function.__annotations__ = {name: kind for name, (kind, _) in options.items()}
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            for name, (kind, default) in options.items()
        ]
    )
    return function


def options_of(settings: type[Any]) -> dict[str, tuple[Any, Any]]:
    """(type, default) of the options that settings declare, by the names of their fields."""
    found: dict[str, tuple[Any, Any]] = {}
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        hint, option = hints[one.name], option_of(one)
        if dataclasses.is_dataclass(hint):
            found |= options_of(hint)
        elif option is not None:
            found[one.name] = _typed(one, hint, option)
    return found


def _typed(one: dataclasses.Field[Any], hint: Any, option: Option) -> tuple[Any, Any]:
    if option.argument:
        return Annotated[hint, typer.Argument(help=option.help)], inspect.Parameter.empty
    flag, more = [option.flag] if option.flag else [], {"help": option.help}
    several = get_origin(hint) is tuple
    if option.repeated:
        return Annotated[list[str] | None, typer.Option(*flag, **more)], None
    if several or option.read is not None:
        values = one.default if several else (one.default,)
        shown = ",".join(map(option.write, values))
        kind = Annotated[str, typer.Option(*flag, show_default=shown or False, **more)]
        return kind, "" if several else shown
    return Annotated[hint, typer.Option(*flag, min=option.min, **more)], one.default


def settings_of(settings: type[Any], given: dict[str, Any]) -> Any:
    """The settings that the options give."""
    values = {}
    hints = get_type_hints(settings)
    for one in dataclasses.fields(settings):
        hint, option = hints[one.name], option_of(one)
        if dataclasses.is_dataclass(hint):
            values[one.name] = settings_of(hint, given)
        elif option is not None:
            values[one.name] = _value_of(one, hint, option, given[one.name])
    return settings(**values)


def _value_of(one: dataclasses.Field[Any], hint: Any, option: Option, given: Any) -> Any:
    """Raises: typer.BadParameter: a text that is no value of this option."""
    several = get_origin(hint) is tuple
    if not several and option.read is None:
        return given
    read = option.read or (get_args(hint)[0] if several else hint)
    texts = given or [] if option.repeated else given.split(",") if several else [given]
    flag = option.flag or f"--{one.name.replace('_', '-')}"
    try:
        values = tuple(read(text.strip()) for text in texts if text.strip())
    except ValueError as error:
        said = str(error) if option.read else f"{given!r}: give numbers, such as 1,2,4"
        raise typer.BadParameter(said, param_hint=flag) from None
    if several:
        return values or one.default
    return values[0] if values else one.default


# -- benchmarks whose settings declare no options yet ---------------------------------------

_PACKAGE = "vllm_nvmeof_bench"

Json = Annotated[Path, typer.Option("--json", help="Where the samples go.")]
Written = Annotated[Path, typer.Argument(help="A file that the benchmark wrote.")]
Targets = Annotated[bool, typer.Option("--targets/--no-targets", help="Print the targets.")]


def import_bench(name: str) -> Any:
    """A module of the benchmarks; one plain line if they are not installed."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != _PACKAGE:
            raise
    typer.echo(
        f"vllm-nvmeof: the benchmarks ({_PACKAGE}) are not installed: install this package's "
        f"wheel, or set PYTHONPATH=bench in a checkout",
        err=True,
    )
    raise typer.Exit(1)


def names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """What a comma-separated option names; nothing: all that is known."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) or known


def _sizes(text: str, known: tuple[int, ...]) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.strip()]
    return tuple(parse_size(part, "--blocks") for part in parts) or known


def parse_size(text: str, option: str) -> int:
    """Bytes that an option gives, such as 64KiB; a usage error else."""
    from vllm_nvmeof_offload.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def add_report(name: str, default: Path) -> None:
    """Adds the command NAME-report: what `bench NAME` wrote, printed or drawn again.

    default: the file that it reads unless it is told another.
    """
    help_text = f"Print the tables of a file of `bench {name}` again, or draw it; measure nothing."

    @bench_app.command(f"{name}-report", help=help_text)
    def report(
        json_path: Written = default,
        plot: Plot = None,
        targets: Targets = True,
        check: Check = False,
    ) -> None:
        with plain_errors():
            reached = import_bench("show").show_file(name, json_path, plot, targets)
        raise typer.Exit(int(check and not reached))


@bench_app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Holds the JSON files of benchmarks.")],
    page: Annotated[
        Path | None, typer.Option(help="The page; pictures go beside it. Default: DIR/REPORT.md.")
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw them; needs matplotlib.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if a file was left out.")
    ] = False,
) -> None:
    """Write one Markdown page of all results in a directory, with plots and published figures.

    Measures nothing. A file that is damaged, or of no known benchmark, gets one line there.
    """
    with plain_errors():
        whole = import_bench("page.command").write(directory, page, plots)
    raise typer.Exit(int(check and not whole))


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


_TIER_JSON = Path("build/bench/tier.json")


@bench_app.command()
def tier(
    directory: Annotated[
        Path, typer.Option("--dir", help="The disk to throttle: a directory on it.")
    ] = Path("build/bench/tier-disk"),
    json_path: Json = _TIER_JSON,
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


add_report("tier", _TIER_JSON)


_TIERS_JSON = Path("build/bench/tiers.json")

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
TiersSeed = Annotated[int, typer.Option(help="Of the order of the sessions.")]


def _shares(text: str, option: str) -> tuple[float, ...] | None:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip()) or None
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=option) from None


@bench_app.command()
def tiers(
    trace: Trace,
    json_path: Json = _TIERS_JSON,
    users: Users = 16,
    ramp: Ramp = 5.0,
    time_scale: Scale = 1.0,
    think_max: Think = 60.0,
    seed: TiersSeed = 1,
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
    json_path: Annotated[Path, typer.Argument(help="A file that `bench tiers` wrote.")] = (
        _TIERS_JSON
    ),
    plot: Plot = None,
) -> None:
    """Print the tables of a file of `bench tiers` again, or draw it; simulate nothing."""
    with plain_errors():
        import_bench("tiers.command").show(json_path, plot)


_REPLAY_JSON = Path("build/bench/replay.json")


@bench_app.command()
def replay(
    trace: Trace,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the pools of servers started here lie.")
    ] = Path("build/bench/replay-disk"),
    json_path: Json = _REPLAY_JSON,
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
    seed: TiersSeed = 1,
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
    json_path: Annotated[Path, typer.Argument(help="A file that `bench replay` wrote.")] = (
        _REPLAY_JSON
    ),
    plot: Plot = None,
) -> None:
    """Print the tables of a file of `bench replay` again, or draw it; ask nobody."""
    with plain_errors():
        import_bench("replay.command").show(json_path, plot)
