# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof size`: KV bytes of a model, what fits where, and the bandwidth that it takes.

A sizing as tables for people.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vllm_nvmeof_offload.commands.size.kv import Deployment
    from vllm_nvmeof_offload.commands.size.model import ModelShape
    from vllm_nvmeof_offload.commands.size.report import SizeReport

__all__ = [
    "show",
    "size",
]


#: Where nobody watches: a formula on one line is easier to search than what is folded at 80.
_FILE_COLUMNS = 160


def show(report: SizeReport) -> None:
    """Print all of `report`, each figure with its formula."""
    console = _console()
    console.print(report.model, highlight=False, markup=False, style="bold")
    console.print(_layers_table(report))
    console.print(_figures_table(report))
    verdict = "in time" if report.meets_ttft else "NOT in time"
    console.print(f"bottleneck: {report.bottleneck}; {verdict}", highlight=False)
    console.print(_scaling_table(report))
    for title, lines in (("assumed", report.assumptions), ("note", report.notes)):
        for line in lines:
            console.print(f"{title}: {line}", highlight=False, markup=False)
    published = f"published ratio: {report.published_source}"
    console.print(published, highlight=False, markup=False)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_FILE_COLUMNS)
    return console


def _layers_table(report: SizeReport) -> Table:
    from rich.table import Table

    from vllm_nvmeof_offload.units import human_bytes

    table = Table(
        "layers", "kind", "block in one layer of a rank", "K and V apart", "kept", title="layers"
    )
    for row in report.layers:
        kept = "every token"
        if row.window_tokens is not None:
            kept = f"the last {row.window_tokens} tokens"
        page, piece = human_bytes(row.page_bytes), human_bytes(row.fragment_bytes)
        if not row.page_bytes:
            kept = "one state a sequence, no KV per token"
            piece = ""
            page = "unknown" if row.state_bytes is None else human_bytes(row.state_bytes)
        table.add_row(str(row.layers), row.kind, page, piece, kept)
    return table


def _figures_table(report: SizeReport) -> Table:
    from rich.table import Table

    table = Table("", "figure", "value", "formula", title="figures")
    last = ""
    for figure in report.figures:
        new = figure.section != last
        if new and last:
            table.add_section()
        last = figure.section
        table.add_row(last if new else "", figure.name, figure.text, figure.formula)
    return table


def _scaling_table(report: SizeReport) -> Table:
    from rich.table import Table

    table = Table(
        "drives", "sessions held", "at once in the TTFT", "bottleneck", "published: GPUs",
        "published: sessions", title="by the number of drives (other things as given)",
    )  # fmt: skip
    for row in report.scaling:
        table.add_row(
            str(row.drives), f"{row.sessions_held:,}", f"{row.sessions_in_time:,}", row.bottleneck,
            str(row.published_gpus), str(row.published_sessions),
        )  # fmt: skip
    return table


Text = str | None


Model = Annotated[Path | None, typer.Option(help="A config.json, or the directory that holds it.")]
Preset = Annotated[Text, typer.Option(help="A known model instead, such as Qwen3-8B.")]
Gpus = Annotated[int | None, typer.Option(help="GPUs of all engines. Default: one engine's.")]
GpuMemory = Annotated[Text, typer.Option(help="Of one GPU. Default 80GiB.")]
GpuUtilization = Annotated[
    float | None, typer.Option(help="Share of it for vLLM. Default 0.92, as vLLM's.")
]
GpuReserve = Annotated[Text, typer.Option(help="Of that for activations and graphs. Default 4GiB.")]
Tp = Annotated[int, typer.Option(help="Tensor parallel size of one engine.")]
Pp = Annotated[int, typer.Option(help="Pipeline parallel size of one engine.")]
WeightsBytes = Annotated[
    Text,
    typer.Option(help="Of the whole model, such as 140GB. Default: its index, or an estimate."),
]
KvDtype = Annotated[str, typer.Option(help="auto (the model's), bf16, fp16, fp8 or fp32.")]
BlockTokens = Annotated[int, typer.Option(help="Tokens in a block.")]
BlocksPerChunk = Annotated[int | None, typer.Option(help="Default: as the server chooses.")]
Staging = Annotated[Text, typer.Option(help="Pinned CPU memory of one engine. Default 8GiB.")]
Context = Annotated[Text, typer.Option(help="Tokens of a session. Default 32k.")]
Concurrency = Annotated[int, typer.Option(help="Sessions that come back at the same moment.")]
Drives = Annotated[int, typer.Option(help="Drives in the enclosure.")]
DriveBytes = Annotated[Text, typer.Option(help="Of one drive. Default 15.36TB.")]
DriveFill = Annotated[
    float | None, typer.Option(help="Share of a drive for the pool. Default 0.9.")
]
DriveRead = Annotated[Text, typer.Option(help="Of one drive. Default 6.5GB/s.")]
LinkText = Annotated[
    Text, typer.Option(help="All links between drives and GPU hosts. Default 2x100GbE.")
]
GpuLink = Annotated[Text, typer.Option(help="Of one GPU to its host. Default pcie5x16.")]
LinkEfficiency = Annotated[
    float | None, typer.Option(help="Payload's share of a link's rate. Default 0.9.")
]
Ttft = Annotated[Text, typer.Option(help="Time to first token aimed at. Default 2s.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def size(
    ctx: typer.Context,
    model: Model = None,
    preset: Preset = None,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    gpu_utilization: GpuUtilization = None,
    gpu_reserve: GpuReserve = None,
    tp: Tp = 1,
    pp: Pp = 1,
    weights_bytes: WeightsBytes = None,
    kv_dtype: KvDtype = "auto",
    block_tokens: BlockTokens = 16,
    blocks_per_chunk: BlocksPerChunk = None,
    staging: Staging = None,
    context: Context = None,
    concurrency: Concurrency = 16,
    drives: Drives = 24,
    drive_bytes: DriveBytes = None,
    drive_fill: DriveFill = None,
    drive_read: DriveRead = None,
    link: LinkText = None,
    gpu_link: GpuLink = None,
    link_efficiency: LinkEfficiency = None,
    ttft: Ttft = None,
    as_json: Json = False,
) -> None:
    """Size a deployment: KV bytes per token and block, what fits where, what loads in time.

    Arithmetic, nothing is measured: each number is printed with its formula, and what is
    assumed below. Exit code: 0 printed (in time or not), 2 a value that cannot be used.
    """
    from vllm_nvmeof_offload.commands.size.report import build
    from vllm_nvmeof_offload.errors import ConfigError

    try:
        shape = _model(model, preset, weights_bytes)
        report = build(shape, _deployment(shape, ctx.params))
    except ConfigError as error:
        typer.echo(f"vllm-nvmeof: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        show(report)


def _model(path: Path | None, name: Text, weights_bytes: Text) -> ModelShape:
    from vllm_nvmeof_offload.commands.size.config_json import read_model
    from vllm_nvmeof_offload.commands.size.presets import preset, preset_names
    from vllm_nvmeof_offload.errors import ConfigError
    from vllm_nvmeof_offload.units import parse_bytes

    weights = _parse(parse_bytes, "--weights-bytes", weights_bytes)
    if (path is None) == (name is None):
        given = None if path is None else str(path)
        remedy = f"give one of --model and --preset; presets are {', '.join(preset_names())}"
        raise ConfigError("--model", given, remedy)
    return read_model(path, weights) if path is not None else preset(str(name), weights)


def _parse(parser: Callable[[str], Any], option: str, text: Text) -> Any:
    """`text` parsed; None where the option was not given.

    Raises:
        ConfigError: naming the option, the value and what it may be.
    """
    from vllm_nvmeof_offload.errors import ConfigError

    if text is None:
        return None
    try:
        return parser(text)
    except ValueError as error:
        remedy = str(error).removeprefix(f"{text!r} ")
        raise ConfigError(option, text, remedy) from None


def _deployment(shape: ModelShape, options: dict[str, Any]) -> Deployment:
    """Raises: ConfigError naming the option."""
    from pydantic import ValidationError

    from vllm_nvmeof_offload.commands.size.kv import Deployment
    from vllm_nvmeof_offload.errors import ConfigError

    values = {field: value for field, (_, value) in _values(shape, options).items()}
    try:
        return Deployment(**{k: v for k, v in values.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option = _values(shape, options)[str(first["loc"][0])][0]
        remedy = first["msg"].replace("Input should be", "give a value")
        raise ConfigError(option, first["input"], remedy) from None


def _values(shape: ModelShape, given: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Deployment's field → (its option, the value or None)."""
    from vllm_nvmeof_offload.commands.size.kv import (
        parse_duration,
        parse_link,
        parse_rate,
        parse_tokens,
    )
    from vllm_nvmeof_offload.units import parse_bytes

    def parsed(option: str, parser: Callable[[str], Any]) -> tuple[str, Any]:
        name = f"--{option.replace('_', '-')}"
        return name, _parse(parser, name, given[option])

    def plain(option: str) -> tuple[str, Any]:
        return f"--{option.replace('_', '-')}", given[option]

    ranks = given["tp"] * given["pp"]
    links = {name: parsed(name, parse_link) for name in ("link", "gpu_link")}
    return {
        "gpus": ("--gpus", given["gpus"] if given["gpus"] is not None else max(1, ranks)),
        "gpu_memory_bytes": parsed("gpu_memory", parse_bytes),
        "gpu_memory_utilization": plain("gpu_utilization"),
        "gpu_reserve_bytes": parsed("gpu_reserve", parse_bytes),
        "tensor_parallel": plain("tp"),
        "pipeline_parallel": plain("pp"),
        "kv_element_bytes": ("--kv-dtype", _kv_bytes(shape, given["kv_dtype"])),
        "block_tokens": plain("block_tokens"),
        "blocks_per_chunk": plain("blocks_per_chunk"),
        "staging_bytes": parsed("staging", parse_bytes),
        "context_tokens": parsed("context", parse_tokens),
        "concurrency": plain("concurrency"),
        "drives": plain("drives"),
        "drive_bytes": parsed("drive_bytes", parse_bytes),
        "drive_fill": plain("drive_fill"),
        "drive_read_bytes_per_s": parsed("drive_read", parse_rate),
        "link": (links["link"][0], given["link"]),
        "gpu_link": (links["gpu_link"][0], given["gpu_link"]),
        "link_efficiency": plain("link_efficiency"),
        "ttft_seconds": parsed("ttft", parse_duration),
    }


def _kv_bytes(shape: ModelShape, name: str) -> int:
    from vllm_nvmeof_offload.commands.size.model import DTYPES, dtype_bytes
    from vllm_nvmeof_offload.errors import ConfigError

    found = shape.element_bytes if name == "auto" else dtype_bytes(name)
    if found is None:
        raise ConfigError("--kv-dtype", name, f"give auto or one of {', '.join(DTYPES)}")
    return found
