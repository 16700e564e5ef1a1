# SPDX-License-Identifier: Apache-2.0
"""Judges a target's way over the fabric: paths, states, timeouts, iopolicy, security. Pure."""

from __future__ import annotations

from vllm_nvmeof_offload.fabric.findings import Finding, Severity
from vllm_nvmeof_offload.fabric.topology import (
    LIVE,
    OFF,
    OPTIMIZED,
    Controller,
    Namespace,
    Path,
    TargetFabric,
)

__all__ = ["can_do_io", "judge_paths"]

_IOPOLICY = "/sys/class/nvme-subsystem/{}/iopolicy"
#: What these remedies propose: seconds until I/O fails when every path is lost, and until the
#: controller is given up. Reads have deadlines of their own; these free buffers and processes.
_FAST_IO_FAIL_S, _CTRL_LOSS_S = 5, 600


def can_do_io(fabric: TargetFabric) -> bool:
    """May the target be touched? No: some namespace of it has no live path, and would hang."""
    return all(any(_open(fabric, path) for path in one.paths) for one in fabric.namespaces)


def judge_paths(fabric: TargetFabric) -> list[Finding]:
    """Findings about where the target lies and how it is reached."""
    findings = [_where(fabric)]
    for namespace in fabric.namespaces:
        if any(one.over_fabric for one in namespace.subsystem.controllers):
            findings += _count(fabric, namespace)
            findings += _iopolicy(fabric, namespace)
            findings += _ana(fabric, namespace)
    over_fabric = [one for one in fabric.controllers if one.over_fabric]
    if fabric.controllers:
        findings.append(_states(fabric))
    if over_fabric:
        findings.append(_fast_io_fail(fabric, over_fabric))
    tcp = [one for one in over_fabric if one.transport == "tcp"]
    if tcp:
        findings += [_tls(fabric, tcp), _authentication(fabric, tcp)]
    return findings


def _where(fabric: TargetFabric) -> Finding:
    if fabric.mount is None:
        evidence = "its mount is unknown, and so is what it lies on"
    elif fabric.device_gone:
        evidence = f"the block device {fabric.mount.device} under its file system is gone"
        point = fabric.mount.point
        remedy = f"connect again, then umount {point} and mount it from its new device"
        return Finding("fabric", fabric.target, Severity.ERROR, evidence, remedy)
    elif not fabric.devices:
        evidence = f"not on NVMe over Fabrics: {fabric.mount.file_system} without a block device"
    elif not fabric.over_fabric:
        last = ", ".join(one.name for one in fabric.devices if not one.over)
        what = "local NVMe" if fabric.namespaces else "local"
        evidence = f"not on NVMe over Fabrics: {fabric.mount.file_system} on {last} ({what})"
    else:
        shown = [f"{one.device} by {_transports(one)}" for one in fabric.namespaces]
        evidence = f"NVMe over Fabrics: {', '.join(shown)}"
    return Finding("fabric", fabric.target, Severity.OK, evidence)


def _transports(namespace: Namespace) -> str:
    known = {one.transport or "unknown" for one in namespace.subsystem.controllers}
    return "/".join(sorted(known))


def _controller(fabric: TargetFabric, path: Path) -> Controller | None:
    return next((one for one in fabric.controllers if one.name == path.controller), None)


def _open(fabric: TargetFabric, path: Path) -> bool:
    """Could I/O pass? What is unknown counts as open."""
    controller = _controller(fabric, path)
    live = controller is not None and controller.state in (LIVE, None)
    return live and path.ana_state in (None, OPTIMIZED, "non-optimized")


def _count(fabric: TargetFabric, namespace: Namespace) -> list[Finding]:
    count = len(namespace.paths)
    if count > 1:
        evidence = (
            f"{namespace.device} has {count}: {', '.join(one.name for one in namespace.paths)}"
        )
        return [Finding("paths", fabric.target, Severity.OK, evidence)]
    if not namespace.multipath:
        evidence = f"{namespace.device} has one: the kernel's native multipath is off"
        remedy = (
            'echo "options nvme_core multipath=Y" > /etc/modprobe.d/nvme.conf (or '
            "nvme_core.multipath=Y on the kernel's command line), start again, and connect by "
            "every address of the target"
        )
    else:
        evidence = f"{namespace.device} has {'one' if count else 'none'}"
        remedy = (
            f"nvme connect -t {_transports(namespace)} -n {namespace.subsystem.nqn or 'NQN'} "
            "-a ANOTHER_ADDRESS -s 4420, through another interface"
        )
    evidence += "; when it is lost, so is the target"
    return [Finding("paths", fabric.target, Severity.WARNING, evidence, remedy)]


def _iopolicy(fabric: TargetFabric, namespace: Namespace) -> list[Finding]:
    policy, name = namespace.subsystem.iopolicy, namespace.subsystem.name
    equal = [one for one in namespace.paths if one.ana_state in (None, OPTIMIZED)]
    if len(namespace.paths) < 2:
        return []
    if policy is None:
        evidence = f"unknown for {namespace.device}"
        return [Finding("iopolicy", fabric.target, Severity.OK, evidence)]
    if policy != "numa" or len(equal) < 2:
        why = "" if policy != "numa" else "; one path alone is optimized, so it matters little"
        evidence = f"{policy} for {namespace.device}{why}"
        return [Finding("iopolicy", fabric.target, Severity.OK, evidence)]
    evidence = f"numa for {namespace.device}: of {len(equal)} equal paths one is used at a time"
    remedy = f"echo round-robin > {_IOPOLICY.format(name)}"
    return [Finding("iopolicy", fabric.target, Severity.WARNING, evidence, remedy)]


def _ana(fabric: TargetFabric, namespace: Namespace) -> list[Finding]:
    if not namespace.paths:
        return []
    shown = ", ".join(f"{one.name} {one.ana_state or 'unknown'}" for one in namespace.paths)
    states = {one.ana_state for one in namespace.paths}
    if states == {None}:
        evidence = f"unknown: {namespace.device} shows no ANA state; its target may have none"
        return [Finding("ana", fabric.target, Severity.OK, evidence)]
    if states == {OPTIMIZED}:
        return [Finding("ana", fabric.target, Severity.OK, shown)]
    remedy = "see at the storage why; `nvme list-subsys -v` shows the states from here"
    return [Finding("ana", fabric.target, Severity.WARNING, shown, remedy)]


def _states(fabric: TargetFabric) -> Finding:
    shown = ", ".join(
        f"{one.name} ({one.address}) {one.state or 'unknown'}" for one in fabric.controllers
    )
    down = [one for one in fabric.controllers if one.state != LIVE]
    if not down:
        return Finding("controllers", fabric.target, Severity.OK, shown)
    severity = Severity.WARNING if can_do_io(fabric) else Severity.ERROR
    remedy = (
        "look at the link and at the target, and at `dmesg | grep nvme`; to give one up: "
        f"nvme disconnect -d {down[0].name}"
    )
    return Finding("controllers", fabric.target, severity, shown, remedy)


def _fast_io_fail(fabric: TargetFabric, controllers: list[Controller]) -> Finding:
    off = [one for one in controllers if one.fast_io_fail_tmo == OFF]
    if not off:
        known = ", ".join(
            f"{one.name} "
            + ("unknown" if one.fast_io_fail_tmo is None else f"{one.fast_io_fail_tmo} s")
            for one in controllers
        )
        return Finding("fast_io_fail_tmo", fabric.target, Severity.OK, known)
    hangs = sorted({_how_long(one.ctrl_loss_tmo) for one in off})
    evidence = (
        f"off for {', '.join(one.name for one in off)}: when every path is lost, I/O hangs "
        f"{' or '.join(hangs)}, and processes that wait for it cannot be killed"
    )
    files = " ".join(f"/sys/class/nvme/{one.name}/fast_io_fail_tmo" for one in off)
    remedy = (
        f"echo {_FAST_IO_FAIL_S} | tee {files}; and when connecting: nvme connect … "
        f"--fast_io_fail_tmo={_FAST_IO_FAIL_S} --ctrl-loss-tmo={_CTRL_LOSS_S}"
    )
    return Finding("fast_io_fail_tmo", fabric.target, Severity.WARNING, evidence, remedy)


def _how_long(ctrl_loss_tmo: int | None) -> str:
    if ctrl_loss_tmo is None:
        return "for ctrl_loss_tmo, which is unknown"
    if ctrl_loss_tmo == OFF:
        return "for ever (ctrl_loss_tmo is off)"
    return f"for ctrl_loss_tmo, {ctrl_loss_tmo} s"


def _tls(fabric: TargetFabric, controllers: list[Controller]) -> Finding:
    return _security(
        fabric,
        "tls",
        {one.name: one.tls for one in controllers},
        "KV cache crosses the network in the clear",
        "set up a key on both sides (nvme gen-tls-key), and nvme connect … --tls; or keep the "
        "network to yourself",
    )


def _authentication(fabric: TargetFabric, controllers: list[Controller]) -> Finding:
    return _security(
        fabric,
        "authentication",
        {one.name: one.dhchap for one in controllers},
        "whoever reaches the target may claim to be this host",
        "set up a key on both sides (nvme gen-dhchap-key), and nvme connect … --dhchap-secret=…; "
        "or keep the network to yourself",
    )


def _security(
    fabric: TargetFabric, check: str, seen: dict[str, str | None], danger: str, remedy: str
) -> Finding:
    shown = ", ".join(f"{name} {state or 'unknown'}" for name, state in seen.items())
    if "off" in seen.values():
        evidence = f"{shown}: {danger}"
        return Finding(check, fabric.target, Severity.WARNING, evidence, remedy)
    if None in seen.values():
        shown += " (this kernel does not show it, which may mean that there is none)"
    return Finding(check, fabric.target, Severity.OK, shown)
