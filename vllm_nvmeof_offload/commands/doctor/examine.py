# SPDX-License-Identifier: Apache-2.0
"""The checks of `vllm-nvmeof doctor`, and the tree of its findings.

Examining a target cannot hang: sysfs is read first, and a target without a live path is judged but
not touched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from vllm_nvmeof_offload.commands import plain_console, print_json
from vllm_nvmeof_offload.commands.doctor import host, judge
from vllm_nvmeof_offload.commands.doctor.host import Nic
from vllm_nvmeof_offload.commands.doctor.measure import Measured, MeasureError, Progress, measure
from vllm_nvmeof_offload.errors import install_extra
from vllm_nvmeof_offload.fabric import (
    LIVE,
    OFF,
    OPTIMIZED,
    BlockDevice,
    Controller,
    Finding,
    Machine,
    Namespace,
    Path,
    Severity,
    TargetFabric,
    discover,
    error,
    judge_gpus,
    ok,
    read_machine,
    read_rdma_ports,
    worst,
)
from vllm_nvmeof_offload.mounts import MOUNTINFO
from vllm_nvmeof_offload.units import format_bytes

#: The kernel reports nearly 2^31 for a device without a limit, such as an NVMe-oF device.
_NO_LIMIT_KB = 1 << 30
_STYLES = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}
_FILE_COLUMNS = 240


@dataclass(frozen=True, slots=True)
class Examined:
    """The result for a target. `link_bytes_per_s` is for all paths, one way; None if unknown."""

    fabric: TargetFabric
    nics: dict[str, Nic]
    findings: list[Finding]
    link_bytes_per_s: float | None
    measured: Measured | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.fabric),
            "interfaces": {name: asdict(nic) for name, nic in self.nics.items()},
            "link_bytes_per_s": self.link_bytes_per_s,
            "measured": asdict(self.measured) if self.measured else None,
        }


def examine(
    targets: list[str],
    staging_bytes: int,
    as_json: bool,
    measured: bool,
    calibrated: bool,
    peers: Sequence[str] = (),
    secret: bytes = b"",
    pool: str | int | None = None,
    url: str | None = None,
) -> int:
    """Examine this machine, `targets` and `peers`, print the findings and return the exit code.

    `secret` is the peers' share secret, or empty. `pool` is the planned `pool_bytes`; with 0, no
    target is examined. `url` is the address of a running server, whose metrics are checked.
    """
    machine, console = read_machine(), plain_console(stderr=True)
    targets = [] if pool == 0 else targets
    answers, of_peers = _ask_peers(peers, secret) if peers else ([], [])
    own = [
        *host.check_host(staging_bytes),
        judge.judge_kernel(machine, len(targets)),
        *judge_gpus(machine),
        *(host.calibrate_gpus() if calibrated else ()),
        *of_peers,
        *([host.check_holes(url)] if url else ()),
    ]
    examined = []
    for path in targets:
        on_progress = functools.partial(_show_progress, console, path) if measured else None
        examined.append(examine_target(path, machine, on_progress))
    if pool == 0:
        own.append(ok("pool_space", "pool_bytes is 0: without a pool, no target is examined"))
    elif pool and all(worst(one.findings) is not Severity.ERROR for one in examined):
        own.append(host.check_pool(targets, pool))
    findings = own + [finding for one in examined for finding in one.findings]
    verdict = worst(findings)
    if as_json:
        print_json(
            {
                "worst": verdict.name.lower(),
                "findings": [finding.to_json() for finding in findings],
                "targets": [one.to_json() for one in examined],
                "peers": answers,
            }
        )
        return int(verdict)
    tree = Tree("vllm-nvmeof doctor")
    _add_findings(tree.add("host"), own)
    for one in examined:
        branch = tree.add(_text(one.fabric.target))
        branch.children.append(outline(one.fabric, one.nics))
        _add_findings(branch, one.findings)
    plain_console(_FILE_COLUMNS).print(tree)
    return int(verdict)


def _ask_peers(
    addresses: Sequence[str], secret: bytes
) -> tuple[list[dict[str, Any]], list[Finding]]:
    try:
        from vllm_nvmeof_offload.commands.doctor.peers import ask_all, check_transport, judge_answer
    except ImportError as failure:
        return [], [error("peers", str(failure), install_extra("peers"))]
    answers = list(ask_all(addresses, secret))
    return [asdict(one) for one in answers], [check_transport(), *map(judge_answer, answers)]


def _show_progress(console: Console, path: str, phase: str) -> None:
    console.print(_text(f"measuring {path}: {phase}"), soft_wrap=True)


def examine_target(
    target: str,
    machine: Machine,
    on_progress: Progress | None = None,
    sysfs: str = "/sys",
    mountinfo: str = MOUNTINFO,
) -> Examined:
    """Examine `target`, with I/O only if I/O cannot hang; measure it if `on_progress` is given."""
    fabric = discover(os.path.abspath(target), sysfs, mountinfo)
    touched: list[Finding] = []
    if _may_touch(fabric):
        touched = host.check_target(target)
        if os.path.isdir(target) and worst(touched) is not Severity.ERROR:
            touched += host.check_regions(target)
        # Follow symbolic links only now, because they may lead to another mount.
        real = discover(os.path.realpath(target), sysfs, mountinfo)
        fabric = replace(real, target=target)
    if not _may_touch(fabric):
        evidence = "not touched: no live path leads to the target, and I/O may hang"
        touched = [error("target", evidence, "restore a path first; see the controllers' states")]
    nics = host.nics_of(fabric)
    allowed = host.link_bytes_per_s(fabric, nics)
    findings = [
        *judge.judge_paths(fabric),
        *judge.judge_rdma(fabric, nics, read_rdma_ports(sysfs)),
        *judge.judge_mount(fabric),
        *judge.judge_pcie(fabric, nics),
        *judge.judge_numa(fabric, nics, machine),
        *touched,
    ]
    measured = None
    if on_progress is not None and worst(touched) is not Severity.ERROR:
        try:
            measured = measure(target, on_progress)
            findings.append(_judge_measured(measured, allowed))
        except MeasureError as why:
            findings.append(error("measured", str(why)))
    findings = [replace(one, subject=target) for one in findings]
    return Examined(fabric, nics, findings, allowed, measured)


def _may_touch(fabric: TargetFabric) -> bool:
    return judge.can_do_io(fabric) and not fabric.device_gone


def _judge_measured(measured: Measured, allowed: float | None) -> Finding:
    """Report the measured rates, but never as a warning: only the operator knows what to expect."""
    write, read = (
        f"{format_bytes(rate)}/s" + (f" ({rate / allowed:.0%} of the links)" if allowed else "")
        for rate in (measured.write_bytes_per_s, measured.read_bytes_per_s)
    )
    links = "the rate of the links is unknown"
    if allowed is not None:
        links = f"the links allow {format_bytes(allowed)}/s"
    evidence = (
        f"write {write}, read {read}; one {format_bytes(measured.chunk_bytes)} chunk is read in "
        f"{measured.read_latency_s_median * 1e3:.2f} ms (median of {measured.singles}, "
        f"at most {measured.read_latency_s_max * 1e3:.2f}); {links}; {measured.engine}"
    )
    return ok("measured", evidence)


def _add_findings(branch: Tree, findings: Iterable[Finding]) -> None:
    for finding in findings:
        severity = (f"{finding.severity.name.lower():7}", _STYLES[finding.severity])
        leaf = branch.add(Text.assemble(severity, _text(f" {finding.check}: {finding.evidence}")))
        if finding.remedy:
            leaf.add(_text(f"remedy: {finding.remedy}"))


def _text(text: str, style: str = "") -> Text:
    """Escape invalid bytes, which names in a mount table may contain."""
    return Text(text.encode(errors="backslashreplace").decode(), style)


def outline(fabric: TargetFabric, nics: dict[str, Nic]) -> Tree:
    """Return one target as a tree: file system → block devices → namespace → subsystem → paths."""
    if fabric.mount is None:
        return Tree("mount unknown")
    mount, options = fabric.mount, ",".join(fabric.mount.options)
    top = Tree(_text(f"{mount.file_system} at {mount.point} ({options}) on {mount.source}"))
    if fabric.device_gone:
        top.add(_text(f"the block device {mount.device} is gone", "yellow"))
    elif fabric.devices:
        devices = {one.name: one for one in fabric.devices}
        _add_device(top, fabric.devices[0], devices, fabric, nics)
    return top


def _add_device(
    above: Tree,
    device: BlockDevice,
    devices: dict[str, BlockDevice],
    fabric: TargetFabric,
    nics: dict[str, Nic],
) -> None:
    """Add a device and the devices below it. `devices` are the devices that have no line yet."""
    below = {name: one for name, one in devices.items() if name != device.name}
    for namespace in fabric.namespaces:
        if namespace.device == device.name:
            _add_namespace(above, namespace, nics)
            return
    over = f" over {', '.join(device.over)}" if device.over else ""
    line = above.add(_text(f"{device.kind} {device.name}, {_size(device.size_bytes)}{over}"))
    for name in device.over:
        if name in below:
            _add_device(line, below[name], below, fabric, nics)


def _size(count: int | None) -> str:
    return "size unknown" if count is None else format_bytes(count)


def _or_unknown(value: object, unit: str = "") -> str:
    return "unknown" if value is None else f"{value}{unit}"


def _add_namespace(above: Tree, namespace: Namespace, nics: dict[str, Nic]) -> None:
    limits, subsystem = namespace.limits, namespace.subsystem
    most = limits.max_hw_sectors_kb
    of_hardware = f" of {_or_unknown(most)}" if most is None or most < _NO_LIMIT_KB else ""
    text = (
        f"namespace {namespace.device}: nsid {_or_unknown(namespace.nsid)}, "
        f"{_size(namespace.size_bytes)}, blocks of {_or_unknown(limits.logical_block_bytes)} B, "
        f"transfers up to {_or_unknown(limits.max_sectors_kb)}{of_hardware} KiB, "
        f"{namespace.wwid or 'wwid unknown'}"
    )
    policy = f", iopolicy {subsystem.iopolicy}" if subsystem.iopolicy else ""
    model = subsystem.model or "model unknown"
    line = above.add(_text(text)).add(
        _text(f"subsystem {subsystem.nqn or 'unknown'}: {model}{policy}")
    )
    for controller in subsystem.controllers:
        paths = [one for one in namespace.paths if one.controller == controller.name]
        for path in paths:
            line.add(_path(path, controller, nics))
        if not paths:
            line.add(_path(None, controller, nics))


def _path(path: Path | None, controller: Controller, nics: dict[str, Nic]) -> Text:
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
    return _text(f"{text}: {', '.join(parts)}", "green" if good else "yellow")


def _timeout(seconds: int | None) -> str:
    return "off" if seconds == OFF else _or_unknown(seconds, " s")


def _carried_by(controller: Controller, nic: Nic | None) -> list[str]:
    if nic is not None:
        speed = f"{nic.speed_mbps / 1000:g} Gb/s" if nic.speed_mbps else "speed unknown"
        return [f"{nic.name} ({speed})"]
    if controller.pcie is not None and controller.pcie.speed and controller.pcie.width:
        return [f"PCIe {controller.pcie.speed:g} GT/s x{controller.pcie.width}"]
    return ["interface unknown"] if controller.over_fabric else []
