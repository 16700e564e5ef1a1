# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof doctor`: the command, and its findings as JSON or as a tree for people."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_nvmeof_offload.commands import print_json, wide_console
from vllm_nvmeof_offload.fabric.topology import (
    LIVE,
    OFF,
    OPTIMIZED,
    BlockDevice,
    Controller,
    Namespace,
    Path,
    QueueLimits,
    TargetFabric,
)
from vllm_nvmeof_offload.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from vllm_nvmeof_offload.commands.doctor.examine import Examined
    from vllm_nvmeof_offload.commands.doctor.host import Nic
    from vllm_nvmeof_offload.fabric.findings import Finding

#: The kernel shows nearly 2^31 for a device that has no limit of its own.
_NO_LIMIT_KB = 1 << 30
_STYLES = {"OK": "green", "WARNING": "yellow", "ERROR": "red"}
_LINE_STYLES = {True: "green", False: "yellow", None: ""}
_FILE_COLUMNS = 240


def doctor(
    target: Annotated[
        list[str] | None,
        typer.Option(help="A pool directory to check; repeatable. Default: the default one."),
    ] = None,
    staging: Annotated[
        str | None, typer.Option(help="Pinned memory of the planned server, such as 30GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure each target: 256 MiB written, about 3 seconds."),
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Compare DMA and the copy kernel on each GPU and keep the result instead of the "
            "earlier one: takes seconds per GPU, on which nothing else should run.",
        ),
    ] = False,
) -> None:
    """Check the I/O path of this machine and its targets, through NVMe-oF down to each path.

    Exit code: 0 healthy, 1 works, but slower or less resilient than it could be, 2 something
    cannot run.
    """
    from rich.console import Console

    from vllm_nvmeof_offload.commands.doctor.examine import examine_target
    from vllm_nvmeof_offload.commands.doctor.host import Places, calibrate_gpus, check_host
    from vllm_nvmeof_offload.commands.doctor.judge import judge_kernel
    from vllm_nvmeof_offload.config import default_staging_bytes, default_target
    from vllm_nvmeof_offload.fabric.findings import worst
    from vllm_nvmeof_offload.fabric.machine import judge_gpus, read_machine
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
    examined = []
    for path in targets:
        on_progress = functools.partial(_show_progress, console, path) if measure else None
        examined.append(examine_target(path, machine, places, on_progress))
    findings = host + [finding for one in examined for finding in one.findings]
    verdict = worst(findings)
    if as_json:
        print_json(
            {
                "worst": verdict.name.lower(),
                "findings": [finding.to_json() for finding in findings],
                "targets": [one.to_json() for one in examined],
            }
        )
    else:
        _show(host, examined)
    raise typer.Exit(int(verdict))


def _show_progress(console: Console, path: str, phase: str) -> None:
    text = _printable(f"measuring {path}: {phase}")
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _show(host: list[Finding], examined: list[Examined]) -> None:
    from rich.markup import escape
    from rich.tree import Tree

    tree = Tree("vllm-nvmeof doctor")
    branch = tree.add("host")
    for finding in host:
        _add_finding(branch, finding)
    for one in examined:
        branch = tree.add(escape(_printable(one.fabric.target)))
        _add_line(branch, outline(one.fabric, one.nics))
        for finding in one.findings:
            _add_finding(branch, finding)
    wide_console(_FILE_COLUMNS).print(tree, highlight=False)


def _add_line(branch: Tree, line: TreeLine) -> None:
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
    """Names come from a mount table, which may hold bytes that are not text."""
    return text.encode(errors="backslashreplace").decode()


@dataclass
class TreeLine:
    """One line of the tree. good: None if there is nothing to judge."""

    text: str
    good: bool | None = None
    below: list[TreeLine] = field(default_factory=list)


def outline(fabric: TargetFabric, nics: dict[str, Nic]) -> TreeLine:
    """One target as a tree: file system → block devices → namespace → subsystem → paths. Pure."""
    if fabric.mount is None:
        return TreeLine("mount unknown")
    mount, options = fabric.mount, ",".join(fabric.mount.options)
    top = TreeLine(f"{mount.file_system} at {mount.point} ({options}) on {mount.source}")
    if fabric.device_gone:
        top.below.append(TreeLine(f"its block device {mount.device} is gone", good=False))
    elif fabric.devices:
        devices = {one.name: one for one in fabric.devices}
        top.below.append(_stack(fabric.devices[0], devices, fabric, nics))
    return top


def _stack(
    device: BlockDevice, devices: dict[str, BlockDevice], fabric: TargetFabric, nics: dict[str, Nic]
) -> TreeLine:
    """A device over those below it; `devices` has the ones that no line above is about."""
    below = {name: one for name, one in devices.items() if name != device.name}
    for namespace in fabric.namespaces:
        if namespace.device == device.name:
            return _namespace(namespace, nics)
    under = [_stack(below[name], below, fabric, nics) for name in device.over if name in below]
    over = f" over {', '.join(device.over)}" if device.over else ""
    text = f"{device.kind} {device.name}, {_size(device.size_bytes)}{over}"
    return TreeLine(text, None, under)


def _size(count: int | None) -> str:
    return "size unknown" if count is None else format_bytes(count)


def _or_unknown(value: object, unit: str = "") -> str:
    return "unknown" if value is None else f"{value}{unit}"


def _of_hardware(limits: QueueLimits) -> str:
    """The hardware's limit; over fabrics there often is none, and the kernel shows its largest."""
    most = limits.max_hw_sectors_kb
    return "" if most is not None and most >= _NO_LIMIT_KB else f" of {_or_unknown(most)}"


def _namespace(namespace: Namespace, nics: dict[str, Nic]) -> TreeLine:
    limits, subsystem = namespace.limits, namespace.subsystem
    text = (
        f"namespace {namespace.device}: nsid {_or_unknown(namespace.nsid)}, "
        f"{_size(namespace.size_bytes)}, blocks of {_or_unknown(limits.logical_block_bytes)} B, "
        f"transfers up to {_or_unknown(limits.max_sectors_kb)}{_of_hardware(limits)} KiB, "
        f"{namespace.wwid or 'wwid unknown'}"
    )
    policy = f", iopolicy {subsystem.iopolicy}" if subsystem.iopolicy else ""
    below = TreeLine(
        f"subsystem {subsystem.nqn or 'unknown'}: {subsystem.model or 'model unknown'}{policy}"
    )
    for controller in subsystem.controllers:
        paths: list[Path | None] = [
            one for one in namespace.paths if one.controller == controller.name
        ]
        below.below += [_path(path, controller, nics) for path in paths or [None]]
    return TreeLine(text, None, [below])


def _path(path: Path | None, controller: Controller, nics: dict[str, Nic]) -> TreeLine:
    parts = [
        f"{controller.transport or 'transport unknown'} {controller.address}",
        _or_unknown(controller.state),
    ]
    if path is None:
        parts.append("no path to this namespace")
    elif controller.over_fabric or path.ana_state:
        group = "" if path.ana_group is None else f" (group {path.ana_group})"
        parts.append(f"ANA {_or_unknown(path.ana_state)}{group}")
    parts += _carried_by(controller, nics.get(controller.name))
    if controller.over_fabric:
        parts.append(f"{_or_unknown(controller.queue_count)} queues")
        parts.append(
            f"kato {_or_unknown(controller.kato, ' s')}, "
            f"fast_io_fail {_timeout(controller.fast_io_fail_tmo)}, "
            f"ctrl_loss {_timeout(controller.ctrl_loss_tmo)}"
        )
    text = f"path {path.name} by {controller.name}" if path else f"controller {controller.name}"
    good = path is not None and controller.state == LIVE and path.ana_state in (None, OPTIMIZED)
    return TreeLine(f"{text}: {', '.join(parts)}", good)


def _timeout(seconds: int | None) -> str:
    return "off" if seconds == OFF else _or_unknown(seconds, " s")


def _carried_by(controller: Controller, nic: Nic | None) -> list[str]:
    if nic is not None:
        speed = f"{nic.speed_mbps / 1000:g} Gb/s" if nic.speed_mbps else "speed unknown"
        return [f"{nic.name} ({speed})"]
    if controller.pcie is not None and controller.pcie.speed and controller.pcie.width:
        return [f"PCIe {controller.pcie.speed:g} GT/s x{controller.pcie.width}"]
    return ["interface unknown"] if controller.over_fabric else []
