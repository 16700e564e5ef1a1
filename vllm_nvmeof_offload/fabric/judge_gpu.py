# SPDX-License-Identifier: Apache-2.0
"""Judges GPUs: what their PCIe links run at, and whether this process is near them."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_nvmeof_offload.fabric.findings import Finding, Severity
from vllm_nvmeof_offload.fabric.gpus import Gpu
from vllm_nvmeof_offload.fabric.machine import Machine, read_machine
from vllm_nvmeof_offload.fabric.pcie import is_below, now, shape

__all__ = ["gpu_warnings", "judge_gpus"]


def judge_gpus(machine: Machine) -> list[Finding]:
    """A finding a GPU and question; none where there is no GPU, or nothing is told of it."""
    return [finding for gpu in machine.gpus for finding in _judge(gpu, machine)]


def gpu_warnings(uuid: str) -> tuple[str, ...]:
    """What slows copies to and from this GPU, for people. uuid: 32 hex digits."""
    machine = read_machine()
    return tuple(_lines(_judge(gpu, machine) for gpu in machine.gpus if gpu.uuid == uuid))


def _lines(judged: Iterable[list[Finding]]) -> Iterable[str]:
    for findings in judged:
        for one in findings:
            if one.severity is not Severity.OK:
                yield f"{one.subject}: {one.evidence}; {one.remedy}"


def _judge(gpu: Gpu, machine: Machine) -> list[Finding]:
    subject = f"GPU {gpu.index}"
    return [*_judge_link(gpu, subject), *_judge_node(gpu, subject, machine)]


def _judge_link(gpu: Gpu, subject: str) -> list[Finding]:
    link = gpu.pcie
    if link is None or (link.speed is None and link.width is None):
        return []
    shown = f"{gpu.name or 'it'} runs at {now(link)}"
    thinner = link.width is not None and link.width_max is not None and link.width < link.width_max
    if not is_below(link):
        return [Finding("gpu_link", subject, Severity.OK, shown)]
    shown += f", and can do {shape(link.speed_max, link.width_max)}"
    if gpu.is_idle and not thinner:
        shown += "; it is idle, and the link may sleep"
        return [Finding("gpu_link", subject, Severity.OK, shown, "ask again while it computes")]
    remedy = f"another slot, or reseat it; lspci -vv -s {link.address} shows LnkCap and LnkSta"
    return [Finding("gpu_link", subject, Severity.WARNING, shown, remedy)]


def _judge_node(gpu: Gpu, subject: str, machine: Machine) -> list[Finding]:
    if len(machine.nodes) < 2 or gpu.numa_node is None:
        return []
    node = gpu.numa_node
    own = ", ".join(map(str, sorted(machine.own_nodes))) or "none known"
    shown = f"on node {node}; this process may run on node {own}"
    if node in machine.own_nodes:
        return [Finding("gpu_node", subject, Severity.OK, shown)]
    remedy = f"numactl --cpunodebind={node} vllm serve …; pinned memory goes to node {node} anyway"
    return [Finding("gpu_node", subject, Severity.WARNING, shown, remedy)]
