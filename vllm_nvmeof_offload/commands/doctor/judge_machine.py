# SPDX-License-Identifier: Apache-2.0
"""Judges what is around a target: mount options, PCIe links, NUMA nodes, the kernel. Pure."""

from __future__ import annotations

from vllm_nvmeof_offload.commands.doctor.links import Nic
from vllm_nvmeof_offload.fabric.findings import Finding, Severity
from vllm_nvmeof_offload.fabric.machine import Machine
from vllm_nvmeof_offload.fabric.pcie import is_below, now, shape
from vllm_nvmeof_offload.fabric.topology import PcieLink, TargetFabric

__all__ = ["judge_kernel", "judge_mount", "judge_numa", "judge_pcie"]

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
