# SPDX-License-Identifier: Apache-2.0
"""The `vllm-nvmeof` command. `bench` and `demo` come from the package vllm_nvmeof_bench."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.commands import EPILOG, FAILED, Commands, print_json
from vllm_nvmeof_offload.commands.size.deployment import Deployment

app = typer.Typer(
    cls=Commands,
    epilog=EPILOG,
    help="KV-cache offloading for vLLM: pinned CPU memory and a file pool on NVMe-oF.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
config_app = typer.Typer(help="List the configuration's keys, or check a configuration.")
app.add_typer(config_app, name="config", invoke_without_command=True)
pool_app = typer.Typer(
    help="Show, check and edit pools on disk. Pools in use by a server are only read.",
    no_args_is_help=True,
)
app.add_typer(pool_app, name="pool")
_INSTALL = "install this package's wheel, or set PYTHONPATH=bench in a checkout"
_SERVER = "http://127.0.0.1:8000"
try:
    from vllm_nvmeof_bench.cli import bench_app, demo
except ModuleNotFoundError:
    _ANY = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command("demo", context_settings=_ANY, hidden=True)
    @app.command(context_settings=_ANY)
    def bench() -> None:
        """Run benchmarks. The package vllm_nvmeof_bench is not installed."""
        typer.echo(
            f"vllm-nvmeof: the benchmarks (vllm_nvmeof_bench) are not installed: {_INSTALL}",
            err=True,
        )
        raise typer.Exit(FAILED)

else:
    app.command()(demo)
    app.add_typer(bench_app, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KvType = Annotated[
    str, typer.Option(help="Data type of the KV cache: auto (the model's), bf16, fp16, fp8, fp32.")
]
Targets = Annotated[
    list[Path] | None,
    typer.Option("--target", help="Target directory; repeatable. Default: the configured targets."),
]
_WHICH = typer.Argument(
    metavar="KEYSPACE|DIR",
    help="A keyspace or its first digits, or the directory of a keyspace, engine or rank.",
)
Which = Annotated[str, _WHICH]
MaybeWhich = Annotated[
    str | None,
    typer.Argument(
        metavar="KEYSPACE|DIR",
        help="A keyspace or its first digits, or a directory. Default: all pools on the targets.",
    ),
]

PlannedPool = Annotated[
    str | None,
    typer.Option(
        help="Size of the planned pool over all targets, such as 2TiB. 0 means no pool, and no "
        "target is examined. Default: VLLM_NVMEOF_POOL_BYTES."
    ),
]
ServerUrl = Annotated[
    str | None,
    typer.Option(help="Address of a running server; its metrics are checked for unwritten chunks."),
]


def _with_deployment(*only: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**given` with options for the `Deployment` fields in `only`, or all."""
    hints = get_type_hints(Deployment)

    def replaced(command: Callable[..., None]) -> Callable[..., None]:
        own = signature(command, eval_str=True)
        options = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        for one in fields(Deployment):
            if one.metadata and (not only or one.name in only):
                flag, help_text = one.metadata["flag"], one.metadata["help"]
                kind: Any = str if one.metadata["read"] else hints[one.name]
                made = Annotated[kind, typer.Option(flag, help=help_text)]
                options.append(
                    options[0].replace(name=one.name, default=one.default, annotation=made)
                )
        command.__signature__ = own.replace(parameters=options)  # type: ignore[attr-defined]
        return command

    return replaced


@app.command(epilog=EPILOG)
@_with_deployment(
    *("tensor_parallel", "pipeline_parallel"),
    *("prefill_context_parallel", "decode_context_parallel"),
    *("layout", "block_tokens", "blocks_per_chunk"),
)
def doctor(
    target: Annotated[
        list[str] | None,
        typer.Option(help="Pool directory to check; repeatable. Default: the configured targets."),
    ] = None,
    staging: Annotated[
        str | None, typer.Option(help="Pinned memory of the planned server, such as 30GiB.")
    ] = None,
    pool: PlannedPool = None,
    url: ServerUrl = None,
    as_json: AsJson = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure each target: write 256 MiB in about 3 seconds."),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Compare DMA with the copy kernel on each GPU, and replace the saved result. This "
            "takes a few seconds per GPU, during which nothing else should run on the GPU.",
        ),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Examine a model instead of the machine: a config.json or its directory. "
            "--kv-dtype and the deployment options apply only to a model."
        ),
    ] = None,
    kv_dtype: KvType = "auto",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST:PORT of a server that reads for others; repeatable. Shows the keyspace and "
            "slot size of each rank, and the transport that connections would use. Default: "
            "VLLM_NVMEOF_PEERS."
        ),
    ] = None,
    share_secret_file: Annotated[
        str | None,
        typer.Option(
            help="The share_secret_file of the peers. Default: VLLM_NVMEOF_SHARE_SECRET_FILE."
        ),
    ] = None,
    **given: Any,
) -> None:
    """Check this machine and the I/O path to its targets, including each NVMe-oF path.

    With --model, show the model's KV cache groups, their sizes, and the blocks stored for each
    group. No GPU is needed.
    """
    if model is not None:
        from vllm_nvmeof_offload.commands.doctor.model import examine_model

        code = examine_model(model, kv_dtype, as_json, **given)
        raise typer.Exit(code)
    from vllm_nvmeof_offload.commands.doctor.examine import examine
    from vllm_nvmeof_offload.config import diagnose, share_secret
    from vllm_nvmeof_offload.errors import raise_all

    named: dict[str, Any] = {"staging_bytes": staging, "pool_bytes": pool, "peers": peer}
    named["share_secret_file"] = share_secret_file
    settings, errors = diagnose({key: value for key, value in named.items() if value})
    raise_all([one for one in errors if one.key != "pool_bytes"])  # a bad --pool is a finding
    size = pool if settings.pool_bytes is None else settings.pool_bytes
    planned = (target or settings.targets, settings.staging_bytes, as_json, measure, calibrate)
    raise typer.Exit(examine(*planned, settings.peers, share_secret(settings), size, url))


@app.command()
@_with_deployment()
def size(
    model: Annotated[
        Path | None, typer.Option(help="A config.json, or the directory that holds it.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A known model, such as Qwen3-8B.")] = None,
    weights_bytes: Annotated[
        str | None,
        typer.Option(
            help="Size of all weights, such as 140GB. Default: from the model's index or estimated."
        ),
    ] = None,
    kv_dtype: KvType = "auto",
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Size a deployment: a model's KV bytes, the sessions that fit and those that load in time.

    Each number is computed, not measured, and printed with its formula. The assumptions are listed
    at the end.
    """
    from vllm_nvmeof_offload.commands.size.model import choose_model
    from vllm_nvmeof_offload.commands.size.report import build, show

    shape = choose_model(model, preset, weights_bytes)
    element_bytes = shape.kv_element_bytes(kv_dtype)
    report = build(shape, Deployment(kv_element_bytes=element_bytes, **given))
    if as_json:
        print_json(asdict(report))
    else:
        show(report)


@app.command()
def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(help="Id of the request, as in vLLM's response."),
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Explain the request that started last.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of the server's metrics_listen. Default: http://127.0.0.1:9808."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a request: where tokens were found, which were loaded or computed, and why.

    The server keeps records of the last 1,000 requests.
    """
    from vllm_nvmeof_offload.commands.explain import explain as print_records

    if (request_id is None) != last:
        raise typer.BadParameter("give either the id of a request or --last")
    print_records(request_id, url, as_json)


@app.command()
def top(
    url: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="Addresses of servers with /metrics. Default: http://127.0.0.1:8000.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between readings of a server.")
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Read twice, one interval apart, print all views and exit. The default in a pipe.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with every metric; implies --once.")
    ] = False,
) -> None:
    """Watch servers: tiers, token sources, rates, queues, decisions, verdicts, lost chunks.

    Rates are computed from two readings of /metrics; an idle server's gauges do not change. Digits
    select the view, n selects the next server, and q quits.
    """
    from vllm_nvmeof_offload.commands.top import run

    raise typer.Exit(run(url or [_SERVER], interval, once, as_json))


@app.command("try", epilog=EPILOG)
def try_server(
    url: Annotated[str, typer.Option(help="Address of the server.")] = _SERVER,
    model: Annotated[
        str | None, typer.Option(help="Model to query. Default: the first model in the list.")
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Prompt length in tokens, enough for several chunks."),
    ] = 2000,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's API key.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove on a running server that a repeated prompt is loaded from a tier.

    Send random words, empty the GPU's prefix cache, and send the same words again. Print the time
    to the first token, the sources of the tokens, and whether the answers agree. Without
    VLLM_SERVER_DEV_MODE=1 the server cannot empty its cache; other prompts then evict the content.
    """
    from vllm_nvmeof_offload.errors import OffloadError

    try:
        from vllm_nvmeof_offload.commands.try_server import run
    except ModuleNotFoundError as error:
        raise OffloadError(f"{error}; {_INSTALL}") from None
    raise typer.Exit(run(url, model, tokens, api_key, as_json))


@app.command()
def version() -> None:
    """Print this package's version, and vLLM's if it is installed."""
    from importlib import metadata

    try:
        vllm = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        vllm = "not installed"
    typer.echo(f"vllm-nvmeof-offload {__version__} (vllm {vllm})")


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the versions, as the version command does.")
    ] = False,
) -> None:
    if show_version:
        version()
        raise typer.Exit


@config_app.callback()
def config(context: typer.Context, as_json: AsJson = False) -> None:
    """List every configuration key with its meaning, default on this machine and allowed values."""
    if context.invoked_subcommand is None:
        from vllm_nvmeof_offload.commands import configuration

        configuration.print_keys(as_json)


@config_app.command("show")
def config_show(
    key: Annotated[str, typer.Argument(help="A key, or its environment variable.")],
    as_json: AsJson = False,
) -> None:
    """Show one configuration key, its environment variable and the variable's value."""
    from vllm_nvmeof_offload.commands import configuration

    configuration.print_key(key, as_json)


@config_app.command("check")
@_with_deployment(
    *("tensor_parallel", "pipeline_parallel"),
    *("prefill_context_parallel", "decode_context_parallel"),
    *("layout", "block_tokens"),
)
def config_check(
    source: Annotated[
        str, typer.Argument(help="The configuration: JSON text, a JSON file, or vLLM's YAML file.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Also check sizes for this model: a config.json, its directory, or a known model. "
            "Default: the model in a YAML file."
        ),
    ] = None,
    kv_dtype: KvType = "auto",
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Check a configuration as a server would on this machine, and report all errors at once.

    The source can be a whole --kv-transfer-config, only its kv_connector_extra_config, or a file
    for vLLM's --config. Nothing is created.
    """
    from vllm_nvmeof_offload.commands import configuration

    configuration.check(source, model, kv_dtype, as_json, given)


@pool_app.command("ls")
def list_pools(
    target: Targets = None,
    regions: Annotated[
        bool,
        typer.Option("--regions", help="Also list each region's owner, lease, tag and readers."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List targets and their pools: entries, size, last use, and the process using each one.

    Pools of other models and format versions are included. A region is one rank's part of a pool
    on one target.
    """
    from vllm_nvmeof_offload.commands.pool import show

    show.print_pools(target, regions, as_json)


@pool_app.command()
def inspect(
    which: Which,
    target: Targets = None,
    slot: Annotated[
        int | None, typer.Option(help="Slot to read and show as well; needs one rank's directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a pool's superblock, geometry, facts and occupancy, and optionally one slot."""
    from vllm_nvmeof_offload.commands.pool import show

    show.print_details(target, which, slot, as_json)


@pool_app.command("check", epilog=EPILOG)
def check_pools(
    which: MaybeWhich = None,
    target: Targets = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Read every stored slot in full and verify its checksums."),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Rebuild wrong table entries from slot headers, or drop them."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check superblocks, and tables against slot headers. The worst finding sets the exit code."""
    from vllm_nvmeof_offload.commands.pool import check, show

    with show.progress() as on_progress:
        reports = check.check(show.choose(target, which), repair, deep, on_progress)
    raise typer.Exit(show.print_reports(reports, as_json))


@pool_app.command("rm")
def remove_pools(
    which: Annotated[str | None, _WHICH] = None,
    target: Targets = None,
    unused_for: Annotated[
        str | None,
        typer.Option(
            help="Remove all pools that no server has used for this time, such as 14d or 12h."
        ),
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option(
            help="Overwrite only the chunks of requests with this cache_salt; - reads the salt "
            "from standard input. The exit code is 1 if the salt of other chunks is unknown."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a pool, or all pools that are no longer used, for example after a vLLM upgrade.

    List the directories and ask first. Never remove a pool that a server is using, and delete only
    files created by this program. With --unused-for, name all of a pool's targets in one call.
    """
    from vllm_nvmeof_offload.commands.pool import show
    from vllm_nvmeof_offload.errors import PoolError

    if unused_for is not None:
        if which is not None or salt is not None:
            raise PoolError("pool rm: give --unused-for without a pool and without --salt")
        show.remove_unused(target, unused_for, yes, as_json)
        return
    if which is None:
        raise PoolError("pool rm: name a pool, as listed by pool ls, or give --unused-for")
    if salt == "-":
        salt = sys.stdin.readline().rstrip("\n")
    raise typer.Exit(show.remove(show.choose(target, which), yes, as_json, salt))


@pool_app.command()
def prefill(which: MaybeWhich = None, target: Targets = None, as_json: AsJson = False) -> None:
    """Write zeros into slots that were never written, so that first writes run at full speed.

    The pool must exist and must not be in use. Slots that hold chunks are not changed.
    """
    from vllm_nvmeof_offload.commands.pool import show

    show.prefill(show.choose(target, which), as_json)


if __name__ == "__main__":
    app()
