# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor`: what runs slower here than it could, and the remedy."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

__all__ = ["doctor"]

_STYLES = {"OK": "green", "WARNING": "yellow", "ERROR": "red"}


def doctor(
    target: Annotated[
        list[str] | None,
        typer.Option(help="A pool directory to check; may be repeated. Default: the default one."),
    ] = None,
    staging: Annotated[
        str | None, typer.Option(help="Pinned memory of the server to come, such as 30GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check the I/O path of this machine and of its targets.

    Exit code: 0 all well, 1 something will run slower than it could, 2 something will not run.
    """
    from vllm_nvmeof_offload.config import default_staging_bytes, default_target
    from vllm_nvmeof_offload.fabric.findings import worst
    from vllm_nvmeof_offload.fabric.host_checks import check_host, check_target
    from vllm_nvmeof_offload.units import parse_bytes

    try:
        staging_bytes = parse_bytes(staging) if staging else default_staging_bytes()
    except ValueError as error:
        typer.echo(f"vllm-nvmeof: --staging: {error}", err=True)
        raise typer.Exit(2) from None
    findings = check_host(staging_bytes)
    for path in target or [default_target(os.environ)]:
        findings += check_target(path)
    if as_json:
        shown = {
            "worst": worst(findings).name.lower(),
            "findings": [finding.to_json() for finding in findings],
        }
        typer.echo(json.dumps(shown, indent=2))
        raise typer.Exit(int(worst(findings)))
    from rich.console import Console
    from rich.markup import escape
    from rich.tree import Tree

    tree = Tree("vllm-nvmeof doctor")
    branches = {subject: tree.add(escape(subject)) for subject in {f.subject: 0 for f in findings}}
    for finding in findings:
        severity = finding.severity.name
        line = f"[{_STYLES[severity]}]{severity.lower():7}[/] {finding.check}: "
        leaf = branches[finding.subject].add(line + escape(finding.evidence))
        if finding.remedy:
            leaf.add(f"remedy: {escape(finding.remedy)}")
    Console().print(tree, highlight=False)
    raise typer.Exit(int(worst(findings)))
