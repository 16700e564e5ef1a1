# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor`: what this machine and its targets are like, and what to change."""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.tree import Tree

    from vllm_nvmeof_offload.commands.doctor.examine import Examined
    from vllm_nvmeof_offload.commands.doctor.outline import Line
    from vllm_nvmeof_offload.fabric.findings import Finding

__all__ = ["doctor"]

_STYLES = {"OK": "green", "WARNING": "yellow", "ERROR": "red"}
_LINE_STYLES = {True: "green", False: "yellow", None: ""}
#: Where nobody watches: one finding a line is easier to search than what is folded at 80.
_FILE_COLUMNS = 240


def doctor(
    target: Annotated[
        list[str] | None,
        typer.Option(help="A pool directory to check; may be repeated. Default: the default one."),
    ] = None,
    staging: Annotated[
        str | None, typer.Option(help="Pinned memory of the server to come, such as 30GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure each target: 256 MiB written, about 3 seconds."),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Compare DMA and the copy kernel on each GPU, and keep the result in place of the "
            "earlier one: seconds for each GPU, on which nothing else should run.",
        ),
    ] = False,
) -> None:
    """Check the I/O path of this machine and its targets, through NVMe-oF down to each path.

    Exit code: 0 all well, 1 something will run slower than it could, or fail sooner than it
    need, 2 something will not run.
    """
    from rich.console import Console

    from vllm_nvmeof_offload.commands.doctor.calibrations import calibrate_gpus
    from vllm_nvmeof_offload.commands.doctor.examine import Places, examine_target
    from vllm_nvmeof_offload.commands.doctor.host_checks import check_host
    from vllm_nvmeof_offload.commands.doctor.judge_machine import judge_kernel
    from vllm_nvmeof_offload.config import default_staging_bytes, default_target
    from vllm_nvmeof_offload.fabric.findings import worst
    from vllm_nvmeof_offload.fabric.judge_gpu import judge_gpus
    from vllm_nvmeof_offload.fabric.machine import read_machine
    from vllm_nvmeof_offload.units import parse_bytes

    try:
        staging_bytes = parse_bytes(staging) if staging else default_staging_bytes()
    except ValueError as error:
        typer.echo(f"vllm-nvmeof: --staging: {error}", err=True)
        raise typer.Exit(2) from None
    targets = target or [default_target(os.environ)]
    machine, places, console = read_machine(), Places(), Console(stderr=True)
    host = [
        *check_host(staging_bytes),
        judge_kernel(machine, len(targets)),
        *judge_gpus(machine),
        *(calibrate_gpus() if calibrate else ()),
    ]

    def told(path: str) -> Callable[[str], None] | None:
        return functools.partial(_tell, console, path) if measure else None

    examined = [examine_target(path, machine, places, told(path)) for path in targets]
    findings = host + [finding for one in examined for finding in one.findings]
    if as_json:
        typer.echo(json.dumps(_to_json(findings, examined), indent=2))
    else:
        _show(host, examined)
    raise typer.Exit(int(worst(findings)))


def _tell(console: Console, path: str, phase: str) -> None:
    text = _printable(f"measuring {path}: {phase}")
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _to_json(findings: list[Finding], examined: list[Examined]) -> dict[str, Any]:
    from vllm_nvmeof_offload.fabric.findings import worst

    return {
        "worst": worst(findings).name.lower(),
        "findings": [finding.to_json() for finding in findings],
        "targets": [one.to_json() for one in examined],
    }


def _show(host: list[Finding], examined: list[Examined]) -> None:
    from rich.markup import escape
    from rich.tree import Tree

    from vllm_nvmeof_offload.commands.doctor.outline import outline

    tree = Tree("vllm-nvmeof doctor")
    branch = tree.add("host")
    for finding in host:
        _add_finding(branch, finding)
    for one in examined:
        branch = tree.add(escape(_printable(one.fabric.target)))
        _add_line(branch, outline(one.fabric, one.nics))
        for finding in one.findings:
            _add_finding(branch, finding)
    _console().print(tree, highlight=False)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_FILE_COLUMNS)
    return console


def _add_line(branch: Tree, line: Line) -> None:
    from rich.markup import escape

    text, style = escape(_printable(line.text)), _LINE_STYLES[line.good]
    leaf = branch.add(f"[{style}]{text}[/]" if style else text)
    for below in line.below:
        _add_line(leaf, below)


def _add_finding(branch: Tree, finding: Finding) -> None:
    from rich.markup import escape

    severity = finding.severity.name
    line = f"[{_STYLES[severity]}]{severity.lower():7}[/] {finding.check}: "
    leaf = branch.add(line + escape(_printable(finding.evidence)))
    if finding.remedy:
        leaf.add(f"remedy: {escape(_printable(finding.remedy))}")


def _printable(text: str) -> str:
    """Names come from a mount table, which may hold bytes that are no text."""
    return text.encode(errors="backslashreplace").decode()
