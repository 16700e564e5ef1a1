# SPDX-License-Identifier: Apache-2.0
"""Judges a target's way over the fabric: paths, states, timeouts, iopolicy, security. Pure.

Judges what is around a target: mount options, PCIe links, NUMA nodes, the kernel. Pure.
"""

from __future__ import annotations

from vllm_nvmeof_offload.commands.doctor.links import Nic
from vllm_nvmeof_offload.fabric.machine import Finding, Machine, Severity, is_below, now, shape
from vllm_nvmeof_offload.fabric.topology import (
    LIVE,
    OFF,
    OPTIMIZED,
    Controller,
    Namespace,
    Path,
    PcieLink,
    TargetFabric,
)

__all__ = [
    "can_do_io",
    "judge_kernel",
    "judge_mount",
    "judge_numa",
    "judge_paths",
    "judge_pcie",
]


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


#: What the I/O core asks of io_uring, by the first version of Linux that has it.
_DISABLED_RINGS = (5, 10)
_DEFERRED_WORK = (6, 1)
_SHARED_BUFFERS = (6, 12)


def judge_mount(fabric: TargetFabric) -> list[Finding]:
    """Whether each read of a slab also writes its inode."""
    if fabric.mount is None:
        return []
    options, remedy = fabric.mount.options, f"mount -o remount,noatime {fabric.mount.point}"
    if "noatime" in options:
        return [Finding("atime", fabric.target, Severity.OK, "noatime")]
    if "ro" in options:
        return [Finding("atime", fabric.target, Severity.OK, "mounted read-only")]
    if "relatime" in options:
        evidence = "relatime: the first read after a write also writes the inode's time"
        return [Finding("atime", fabric.target, Severity.OK, evidence, remedy)]
    evidence = "strictatime: every read also writes the inode's time"
    return [Finding("atime", fabric.target, Severity.WARNING, evidence, remedy)]


def judge_pcie(fabric: TargetFabric, nics: dict[str, Nic]) -> list[Finding]:
    """Links that run slower or narrower than their card can."""
    links = _links(fabric, nics)
    if not links:
        return []
    below = {name: link for name, link in links.items() if is_below(link)}
    if not below:
        shown = ", ".join(f"{name} {now(link)}" for name, link in links.items())
        return [Finding("pcie_link", fabric.target, Severity.OK, shown)]
    shown = ", ".join(
        f"{name} runs at {now(link)}, and can do {shape(link.speed_max, link.width_max)}"
        for name, link in below.items()
    )
    addresses = " ".join(link.address for link in below.values())
    remedy = f"another slot, or reseat it; lspci -vv -s {addresses} shows LnkCap and LnkSta"
    return [Finding("pcie_link", fabric.target, Severity.WARNING, shown, remedy)]


def _links(fabric: TargetFabric, nics: dict[str, Nic]) -> dict[str, PcieLink]:
    found = {one.name: one.pcie for one in fabric.controllers if one.pcie is not None}
    for nic in nics.values():
        for card in nic.cards:
            name = nic.name if len(nic.cards) == 1 else f"{nic.name} at {card.address}"
            found[name] = card
    return found


def judge_numa(fabric: TargetFabric, nics: dict[str, Nic], machine: Machine) -> list[Finding]:
    """Whether this process, and some GPU, are on the nodes where the target's links are."""
    at = {name: link.numa_node for name, link in _links(fabric, nics).items()}
    nodes = {node for node in at.values() if node is not None}
    if len(machine.nodes) < 2 or not nodes:
        return []
    shown = ", ".join(
        f"{name} on {'an unknown node' if node is None else f'node {node}'}"
        for name, node in at.items()
    )
    own = ", ".join(map(str, sorted(machine.own_nodes))) or "none known"
    shown += f"; this process may run on node {own}"
    gpu_nodes = {gpu.numa_node for gpu in machine.gpus if gpu.numa_node is not None}
    if gpu_nodes:
        shown += "; GPUs on node " + ", ".join(map(str, sorted(gpu_nodes)))
    first = min(nodes)
    if not nodes & machine.own_nodes:
        remedy = f"numactl --cpunodebind={first} --membind={first} vllm serve …"
    elif gpu_nodes and not nodes & gpu_nodes:
        remedy = f"use a GPU on node {first}, or a card on node {min(gpu_nodes)}"
    else:
        return [Finding("numa_node", fabric.target, Severity.OK, shown)]
    return [Finding("numa_node", fabric.target, Severity.WARNING, shown, remedy)]


def judge_kernel(machine: Machine, target_count: int) -> Finding:
    """What the I/O core goes without on this kernel."""
    kernel, shown = machine.kernel, f"Linux {machine.release}"
    if kernel == (0, 0):
        return Finding("kernel", "host", Severity.OK, f"{shown}: its version is unknown")
    if kernel < _DISABLED_RINGS:
        evidence, wanted = "has no io_uring that this can use: threads run instead", _DISABLED_RINGS
    elif kernel < _DEFERRED_WORK:
        evidence = "has no deferred work in io_uring: completions interrupt the I/O threads"
        wanted = _DEFERRED_WORK
    elif kernel < _SHARED_BUFFERS and target_count > 1:
        evidence = (
            f"cannot share registered memory between rings: each of {target_count} targets "
            "counts all staging against the locked-memory limit"
        )
        wanted = _SHARED_BUFFERS
    else:
        return Finding("kernel", "host", Severity.OK, f"{shown} has all that is used")
    remedy = f"Linux {wanted[0]}.{wanted[1]} or later (all is there from 6.12 on)"
    return Finding("kernel", "host", Severity.WARNING, f"{shown} {evidence}", remedy)
