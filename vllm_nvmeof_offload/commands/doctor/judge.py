# SPDX-License-Identifier: Apache-2.0
"""Judgements of a target's fabric paths, mount, PCIe links and NUMA node, and of the kernel.

All functions are pure. `examine` adds the target's name to each finding about a target.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from vllm_nvmeof_offload.commands.doctor.host import Nic
from vllm_nvmeof_offload.fabric import (
    ACTIVE,
    LIVE,
    OFF,
    OPEN,
    OPTIMIZED,
    ROCE_V2,
    Controller,
    Finding,
    Machine,
    Namespace,
    PcieLink,
    RdmaPort,
    TargetFabric,
    error,
    ok,
    roce_payload_bytes,
    warning,
)

#: The timeouts that remedies suggest: until I/O fails after the loss of every path, and until the
#: kernel removes the controller. Reads have deadlines; the timeouts free buffers and processes.
_FAST_IO_FAIL_S, _CTRL_LOSS_S = 5, 600
#: The RoCE packet payload, in bytes, that an Ethernet MTU should allow.
_ROCE_PAYLOAD_BYTES = 4096


def can_do_io(fabric: TargetFabric) -> bool:
    """Return whether each namespace has a live path; without one, I/O may hang."""
    live = {one.name for one in fabric.controllers if one.state in (LIVE, None)}
    return all(
        any(path.controller in live and path.ana_state in OPEN for path in namespace.paths)
        for namespace in fabric.namespaces
    )


def judge_paths(fabric: TargetFabric) -> list[Finding]:
    findings = [_judge_fabric(fabric)]
    for namespace in fabric.namespaces:
        if any(one.over_fabric for one in namespace.subsystem.controllers):
            findings.append(_judge_count(namespace))
            findings += _judge_iopolicy(namespace)
            findings += _judge_ana(namespace)
    over_fabric = [one for one in fabric.controllers if one.over_fabric]
    if fabric.controllers:
        findings.append(_judge_states(fabric))
    if over_fabric:
        findings.append(_judge_fast_io_fail(over_fabric))
    tcp = [one for one in over_fabric if one.transport == "tcp"]
    if tcp:
        findings += _judge_security(tcp)
    return findings


def _judge_fabric(fabric: TargetFabric) -> Finding:
    mount = fabric.mount
    if mount is None:
        return ok("fabric", "the mount and the devices are unknown")
    if fabric.device_gone:
        evidence = f"the block device {mount.device} under its file system is gone"
        remedy = f"reconnect, then umount {mount.point} and mount it from its new device"
        return error("fabric", evidence, remedy)
    if fabric.over_fabric:
        shown = ", ".join(f"{one.device} by {_transports(one)}" for one in fabric.namespaces)
        return ok("fabric", f"NVMe over Fabrics: {shown}")
    where = "without a block device"
    if fabric.devices:
        last = ", ".join(one.name for one in fabric.devices if not one.over)
        where = f"on {last} ({'local NVMe' if fabric.namespaces else 'local'})"
    return ok("fabric", f"not on NVMe over Fabrics: {mount.file_system} {where}")


def _transports(namespace: Namespace) -> str:
    known = {one.transport or "unknown" for one in namespace.subsystem.controllers}
    return "/".join(sorted(known))


def _states(states: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {state or 'unknown'}" for name, state in states.items())


def _judge_count(namespace: Namespace) -> Finding:
    count, device = len(namespace.paths), namespace.device
    if count > 1:
        names = ", ".join(one.name for one in namespace.paths)
        return ok("paths", f"{device} has {count} paths: {names}")
    if not namespace.multipath:
        evidence = f"{device} has one path, because the kernel's native multipath is off"
        remedy = (
            'echo "options nvme_core multipath=Y" > /etc/modprobe.d/nvme.conf (or '
            "nvme_core.multipath=Y on the kernel's command line), reboot, and connect to "
            "every address of the target"
        )
    else:
        evidence = f"{device} has {'one' if count else 'no'} path"
        remedy = (
            f"nvme connect -t {_transports(namespace)} -n {namespace.subsystem.nqn or 'NQN'} "
            "-a ANOTHER_ADDRESS -s 4420, through another interface"
        )
    return warning("paths", f"{evidence}; a lost path makes the target unusable", remedy)


def _judge_iopolicy(namespace: Namespace) -> Iterator[Finding]:
    policy, device = namespace.subsystem.iopolicy, namespace.device
    equal = [one for one in namespace.paths if one.ana_state in (None, OPTIMIZED)]
    if len(namespace.paths) < 2:
        return
    if policy == "numa" and len(equal) > 1:
        evidence = f"numa for {device}: only one of {len(equal)} equal paths is used at a time"
        name = namespace.subsystem.name
        remedy = f"echo round-robin > /sys/class/nvme-subsystem/{name}/iopolicy"
        yield warning("iopolicy", evidence, remedy)
    elif policy == "numa":
        yield ok("iopolicy", f"numa for {device}, which has only one optimized path")
    else:
        yield ok("iopolicy", f"{policy or 'unknown'} for {device}")


def _judge_ana(namespace: Namespace) -> Iterator[Finding]:
    seen = {one.name: one.ana_state for one in namespace.paths}
    states = set(seen.values())
    if states == {None}:
        evidence = f"unknown: {namespace.device} shows no ANA state; its target may not support ANA"
        yield ok("ana", evidence)
    elif states == {OPTIMIZED}:
        yield ok("ana", _states(seen))
    elif states:
        remedy = "find the cause on the storage system; `nvme list-subsys -v` shows the states"
        yield warning("ana", _states(seen), remedy)


def _judge_states(fabric: TargetFabric) -> Finding:
    shown = _states({f"{one.name} ({one.address})": one.state for one in fabric.controllers})
    down = [one for one in fabric.controllers if one.state != LIVE]
    if not down:
        return ok("controllers", shown)
    finding = warning if can_do_io(fabric) else error
    remedy = (
        "check the link, the target and `dmesg | grep nvme`; to remove a controller: "
        f"nvme disconnect -d {down[0].name}"
    )
    return finding("controllers", shown, remedy)


def _judge_fast_io_fail(controllers: list[Controller]) -> Finding:
    off = [one for one in controllers if one.fast_io_fail_tmo == OFF]
    if not off:
        times = {one.name: one.fast_io_fail_tmo for one in controllers}
        shown = {name: None if s is None else f"{s} s" for name, s in times.items()}
        return ok("fast_io_fail_tmo", _states(shown))
    known = {None: "for ctrl_loss_tmo, which is unknown", OFF: "forever (ctrl_loss_tmo is off)"}
    losses = {one.ctrl_loss_tmo for one in off}
    hangs = sorted(known.get(loss, f"for ctrl_loss_tmo, {loss} s") for loss in losses)
    evidence = (
        f"off for {', '.join(one.name for one in off)}: when every path is lost, I/O hangs "
        f"{' or '.join(hangs)}, and processes that wait for it cannot be killed"
    )
    files = " ".join(f"/sys/class/nvme/{one.name}/fast_io_fail_tmo" for one in off)
    remedy = (
        f"echo {_FAST_IO_FAIL_S} | tee {files}; and when connecting: nvme connect … "
        f"--fast_io_fail_tmo={_FAST_IO_FAIL_S} --ctrl-loss-tmo={_CTRL_LOSS_S}"
    )
    return warning("fast_io_fail_tmo", evidence, remedy)


def judge_rdma(
    fabric: TargetFabric, nics: dict[str, Nic], ports: Sequence[RdmaPort]
) -> Iterator[Finding]:
    """Judge the RDMA port, the GID and the MTU of each NVMe/RDMA path whose interface is known."""
    for controller in fabric.controllers:
        nic = nics.get(controller.name)
        if controller.transport != "rdma" or nic is None:
            continue
        port = next((port for port in ports if port.on(nic.name)), None)
        if port is not None:
            yield from _judge_port(controller, nic, port)
        elif any(port.gids for port in ports):  # GIDs of InfiniBand ports have no interface
            evidence = f"{controller.name} uses {nic.name}, which has no RoCE port"
            remedy = "give an interface of a RoCE card with --host-iface; see `rdma link`"
            yield warning("rdma_port", evidence, remedy)


def _judge_port(controller: Controller, nic: Nic, port: RdmaPort) -> Iterator[Finding]:
    name, gids = f"{controller.name}: {port.device}", port.on(nic.name)
    shown = f"{name}/{port.number} on {nic.name} {port.state}"
    if port.state in (ACTIVE, None):
        yield ok("rdma_port", shown)
    else:
        yield warning("rdma_port", shown, "check the cable and the switch; see `rdma link`")
    is_v6 = ":" in (controller.traddr or "")
    family = ipaddress.IPv6Address if is_v6 else ipaddress.IPv4Address
    fitting = [
        f"{gid.index} ({gid.address}, {ROCE_V2})"
        for gid in gids
        if gid.kind == ROCE_V2 and isinstance(gid.address, family) and not gid.address.is_link_local
    ]
    if fitting:
        yield ok("rdma_gid", f"{name} has GID {', '.join(fitting)}")
    else:
        evidence = (
            f"{name} has no {ROCE_V2} GID of the address family of {controller.traddr}, only "
        )
        evidence += ", ".join(sorted({f"{gid.address} ({gid.kind})" for gid in gids}))
        remedy = f"ip addr add ADDRESS/PREFIX dev {nic.name}; each address adds a GID"
        yield warning("rdma_gid", evidence, remedy)
    if nic.mtu is None:
        return
    carried = roce_payload_bytes(nic.mtu)
    evidence = f"{controller.name}: {nic.name} has MTU {nic.mtu}, so an RDMA packet carries "
    evidence += f"{carried} bytes"
    if carried >= _ROCE_PAYLOAD_BYTES:
        yield ok("rdma_mtu", evidence)
    else:
        remedy = f"ip link set {nic.name} mtu 9000, after setting it on the switches and the target"
        yield warning("rdma_mtu", evidence, remedy)


def _judge_security(controllers: list[Controller]) -> Iterator[Finding]:
    clear = "KV cache crosses the network unencrypted"
    anyone = "any machine that can reach the target can claim to be this host"
    for check, attribute, danger, key, option in (
        ("tls", "tls", clear, "gen-tls-key", "--tls"),
        ("authentication", "dhchap", anyone, "gen-dhchap-key", "--dhchap-secret=…"),
    ):
        seen = {one.name: getattr(one, attribute) for one in controllers}
        shown = _states(seen)
        if "off" in seen.values():
            remedy = (
                f"set up a key on both sides (nvme {key}), and nvme connect … {option}; or exclude "
                "other machines from the network"
            )
            yield warning(check, f"{shown}: {danger}", remedy)
            continue
        if None in seen.values():
            shown += f" (this kernel does not show {check}, which may be off)"
        yield ok(check, shown)


def judge_mount(fabric: TargetFabric) -> list[Finding]:
    """Judge the mount's atime option, which decides whether a read also writes an inode."""
    if fabric.mount is None:
        return []
    options, remedy = fabric.mount.options, f"mount -o remount,noatime {fabric.mount.point}"
    if "noatime" in options:
        return [ok("atime", "noatime")]
    if "ro" in options:
        return [ok("atime", "mounted read-only")]
    if "relatime" in options:
        evidence = "relatime: the first read after a write also writes the inode's time"
        return [ok("atime", evidence, remedy)]
    evidence = "strictatime: every read also writes the inode's time"
    return [warning("atime", evidence, remedy)]


def judge_pcie(fabric: TargetFabric, nics: dict[str, Nic]) -> list[Finding]:
    links = _links(fabric, nics)
    if not links:
        return []
    below = {name: link for name, link in links.items() if link.is_slow or link.is_narrow}
    if not below:
        shown = ", ".join(f"{name} {link.current}" for name, link in links.items())
        return [ok("pcie_link", shown)]
    shown = ", ".join(
        f"{name} runs at {link.current} but supports {link.maximum}" for name, link in below.items()
    )
    addresses = " ".join(link.address for link in below.values())
    remedy = f"reseat it or use another slot; lspci -vv -s {addresses} shows LnkCap and LnkSta"
    return [warning("pcie_link", shown, remedy)]


def _links(fabric: TargetFabric, nics: dict[str, Nic]) -> dict[str, PcieLink]:
    found = {one.name: one.pcie for one in fabric.controllers if one.pcie is not None}
    for nic in nics.values():
        for card in nic.cards:
            name = nic.name if len(nic.cards) == 1 else f"{nic.name} at {card.address}"
            found[name] = card
    return found


def judge_numa(fabric: TargetFabric, nics: dict[str, Nic], machine: Machine) -> list[Finding]:
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
        return [ok("numa_node", shown)]
    return [warning("numa_node", shown, remedy)]


def judge_kernel(machine: Machine, target_count: int) -> Finding:
    kernel, shown = machine.kernel, f"Linux {machine.release}"
    if kernel == (0, 0):
        return ok("kernel", f"{shown}: its version is unknown")
    lacks = [
        ((5, 10), "has no suitable io_uring: I/O runs on threads instead"),
        ((6, 1), "has no deferred work in io_uring, so completions interrupt the I/O threads"),
    ]
    if target_count > 1:
        evidence = (
            f"cannot share registered memory between rings: each of {target_count} targets "
            "counts all staging against the locked-memory limit"
        )
        lacks.append(((6, 12), evidence))
    for since, evidence in lacks:
        if kernel < since:
            remedy = f"use Linux {since[0]}.{since[1]} or later (6.12 has all features)"
            return warning("kernel", f"{shown} {evidence}", remedy)
    return ok("kernel", f"{shown} supports all features that are used")
