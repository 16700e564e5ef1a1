# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm-nvmeof size`, and a report as tables for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_nvmeof_offload.commands import plain_errors, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_nvmeof_offload.commands.size.kv import Deployment
    from vllm_nvmeof_offload.commands.size.model import ModelShape
    from vllm_nvmeof_offload.commands.size.report import SizeReport

_FILE_COLUMNS = 160


def _opt(flag: str, help_text: str) -> Any:
    return typer.Option(flag, help=help_text)


def size(
    ctx: typer.Context,
    model: Annotated[
        Path | None, _opt("--model", "A config.json, or the directory that holds it.")
    ] = None,
    preset: Annotated[str | None, _opt("--preset", "A known model, such as Qwen3-8B.")] = None,
    weights_bytes: Annotated[
        str | None,
        _opt(
            "--weights-bytes",
            "Weights of the whole model, such as 140GB. Default: from its index, or estimated.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str, _opt("--kv-dtype", "KV cache's type: auto (the model's), bf16, fp16, fp8 or fp32.")
    ] = "auto",
    # From here on the names are Deployment's fields, which parse and check the values.
    gpus: Annotated[
        int | None, _opt("--gpus", "GPUs of all engines. Default: those of one engine.")
    ] = None,
    gpu_memory_bytes: Annotated[str, _opt("--gpu-memory", "Memory of one GPU.")] = "80GiB",
    gpu_memory_utilization: Annotated[
        float, _opt("--gpu-utilization", "Share of GPU memory that vLLM takes.")
    ] = 0.92,
    gpu_reserve_bytes: Annotated[
        str, _opt("--gpu-reserve", "Part of vLLM's memory for activations and CUDA graphs.")
    ] = "4GiB",
    tensor_parallel: Annotated[int, _opt("--tp", "Tensor parallel size of one engine.")] = 1,
    pipeline_parallel: Annotated[int, _opt("--pp", "Pipeline parallel size of one engine.")] = 1,
    block_tokens: Annotated[int, _opt("--block-tokens", "Tokens in a block.")] = 16,
    blocks_per_chunk: Annotated[
        int | None, _opt("--blocks-per-chunk", "Default: as many as the server would choose.")
    ] = None,
    staging_bytes: Annotated[str, _opt("--staging", "Pinned CPU memory of one engine.")] = "8GiB",
    context_tokens: Annotated[str, _opt("--context", "Tokens of a session.")] = "32k",
    concurrency: Annotated[
        int, _opt("--concurrency", "Sessions that return at the same moment.")
    ] = 16,
    drives: Annotated[int, _opt("--drives", "Drives in the enclosure.")] = 24,
    drive_bytes: Annotated[str, _opt("--drive-bytes", "Capacity of one drive.")] = "15.36TB",
    drive_fill: Annotated[float, _opt("--drive-fill", "Share of a drive for the pool.")] = 0.9,
    drive_read_bytes_per_s: Annotated[
        str, _opt("--drive-read", "Sequential read rate of one drive.")
    ] = "6.5GB/s",
    link: Annotated[
        str, _opt("--link", "All links between the enclosure and the GPU hosts.")
    ] = "2x100GbE",
    gpu_link: Annotated[str, _opt("--gpu-link", "Link of one GPU to its host.")] = "pcie5x16",
    link_efficiency: Annotated[
        float, _opt("--link-efficiency", "Payload's share of a link's rate.")
    ] = 0.9,
    ttft_seconds: Annotated[str, _opt("--ttft", "Wanted time to first token.")] = "2s",
    as_json: Annotated[bool, _opt("--json", "Print JSON.")] = False,
) -> None:
    """Size a deployment: KV bytes of a model, sessions that fit, sessions that load in time.

    Nothing is measured: each number is computed and printed with its formula; assumptions are
    listed below. Exit code: 0 printed (in time or not), 2 a value cannot be used.
    """
    from vllm_nvmeof_offload.commands.size.report import build

    with plain_errors(2):
        shape = _model(model, preset, weights_bytes)
        report = build(shape, _deployment(ctx, _kv_bytes(shape, kv_dtype)))
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        _show(report)


def _model(path: Path | None, name: str | None, weights_text: str | None) -> ModelShape:
    from vllm_nvmeof_offload.commands.size.config_json import preset, preset_names, read_model
    from vllm_nvmeof_offload.errors import ConfigError
    from vllm_nvmeof_offload.units import parse_bytes

    try:
        weights_bytes = None if weights_text is None else parse_bytes(weights_text)
    except ValueError as error:
        remedy = str(error).removeprefix(f"{weights_text!r} ")
        raise ConfigError("--weights-bytes", weights_text, remedy) from None
    if (path is None) == (name is None):
        given = None if path is None else str(path)
        remedy = f"give one of --model and --preset; presets are {', '.join(preset_names())}"
        raise ConfigError("--model", given, remedy)
    return read_model(path, weights_bytes) if path else preset(str(name), weights_bytes)


def _kv_bytes(shape: ModelShape, name: str) -> int:
    from vllm_nvmeof_offload.commands.size.model import DTYPES, dtype_bytes
    from vllm_nvmeof_offload.errors import ConfigError

    found = shape.element_bytes if name == "auto" else dtype_bytes(name)
    if found is None:
        raise ConfigError("--kv-dtype", name, f"give auto or one of {', '.join(DTYPES)}")
    return found


def _deployment(ctx: typer.Context, kv_element_bytes: int) -> Deployment:
    """The deployment of the options; ConfigError names one whose value cannot be used."""
    from pydantic import ValidationError

    from vllm_nvmeof_offload.commands.size.kv import Deployment
    from vllm_nvmeof_offload.errors import ConfigError

    given = {name: value for name, value in ctx.params.items() if name in Deployment.model_fields}
    if given["gpus"] is None:
        given["gpus"] = max(1, given["tensor_parallel"] * given["pipeline_parallel"])
    try:
        return Deployment(**given, kv_element_bytes=kv_element_bytes)
    except ValidationError as error:
        first = error.errors()[0]
        flags = {option.name: option.opts[0] for option in ctx.command.params}
        wrong = first.get("ctx", {}).get("error")
        if wrong is None:
            remedy = first["msg"].replace("Input should be", "give a value")
        else:
            remedy = str(wrong).removeprefix(f"{first['input']!r} ")
        raise ConfigError(flags[str(first["loc"][0])], first["input"], remedy) from None


def _show(report: SizeReport) -> None:
    """Print all of `report`, each figure with its formula."""
    console = wide_console(_FILE_COLUMNS)
    console.print(report.model, highlight=False, markup=False, style="bold")
    console.print(_layers_table(report))
    console.print(_figures_table(report))
    verdict = "in time" if report.meets_ttft else "NOT in time"
    console.print(f"bottleneck: {report.bottleneck}; {verdict}", highlight=False)
    console.print(_scaling_table(report))
    lines = [
        *(f"assumed: {line}" for line in report.assumptions),
        *(f"note: {line}" for line in report.notes),
        f"published ratio: {report.published_source}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


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
            kept, piece = "one state per sequence, no KV per token", ""
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
