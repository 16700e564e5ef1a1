# SPDX-License-Identifier: Apache-2.0
"""This machine: NUMA nodes, kernel version, GPUs and their PCIe links, and findings about them."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from vllm_nvmeof_offload.fabric import Finding, Severity
from vllm_nvmeof_offload.fabric.topology import PcieLink, children, read_number, read_text

#: The GT/s per lane of each PCIe generation.
_SPEEDS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0, 7: 128.0}
#: From this performance state on, a GPU is idle, and its link may be slow.
_IDLE_FROM = 3


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `numa_node` is None if it is unknown or there is only one node. `uuid` is 32 hex
    digits. `pcie` has the maxima that both GPU and slot support. With `is_idle` the link may be
    slow to save power. `driver` is the NVIDIA driver's version, such as 580.95.05."""

    index: int
    numa_node: int | None
    name: str = ""
    uuid: str = ""
    pcie: PcieLink | None = None
    is_idle: bool = False
    driver: str = ""


def read_gpus(sysfs: str = "/sys") -> tuple[Gpu, ...]:
    """Return all GPUs; none without `pynvml` or a working driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ()
    with contextlib.suppress(nvml.NVMLError):  # no driver, or a different version
        nvml.nvmlInit()
        try:
            return tuple(_gpu(nvml, index, sysfs) for index in range(nvml.nvmlDeviceGetCount()))
        finally:
            nvml.nvmlShutdown()
    return ()


def _gpu(nvml: Any, index: int, sysfs: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    # NVML's domain has eight digits, sysfs's four.
    address = f"{os.path.basename(domain)[-4:]}:{os.path.basename(rest)}"
    node = read_number(sysfs, "bus/pci/devices", address, "numa_node")
    state = _query(nvml, "nvmlDeviceGetPerformanceState", handle)
    uuid = _text(_query(nvml, "nvmlDeviceGetUUID", handle))
    link = PcieLink(
        address=address,
        speed=_SPEEDS.get(_query(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle)),
        speed_max=_SPEEDS.get(_query(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        width=_query(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        width_max=_query(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        numa_node=node,
    )
    return Gpu(
        index=index,
        numa_node=node,
        name=_text(_query(nvml, "nvmlDeviceGetName", handle)),
        uuid=uuid.removeprefix("GPU-").replace("-", ""),
        pcie=link,
        is_idle=state is not None and state >= _IDLE_FROM,
        driver=_text(_query(nvml, "nvmlSystemGetDriverVersion")),
    )


def _query(nvml: Any, call: str, *arguments: Any) -> Any:
    """Call NVML. Return None if the GPU, such as a virtual one, does not support the call."""
    with contextlib.suppress(AttributeError, nvml.NVMLError):
        return getattr(nvml, call)(*arguments)


def _text(value: bytes | str | None) -> str:
    return value.decode("ascii", errors="replace") if isinstance(value, bytes) else value or ""


_NODE = re.compile(r"^node([0-9]+)$")
_RANGE = re.compile(r"^([0-9]{1,6})(?:-([0-9]{1,6}))?$")


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine: CPUs by NUMA node, this process's `cpus`, and `kernel`, such as (6, 12)."""

    nodes: dict[int, frozenset[int]]
    cpus: frozenset[int]
    gpus: tuple[Gpu, ...]
    kernel: tuple[int, int]
    release: str

    @property
    def own_nodes(self) -> frozenset[int]:
        return frozenset(node for node, cpus in self.nodes.items() if cpus & self.cpus)


def read_machine(sysfs: str = "/sys") -> Machine:
    """Read this machine. Never raises: unknown facts are empty, and an unknown kernel is (0, 0)."""
    release = os.uname().release
    version = re.match(r"([0-9]+)\.([0-9]+)", release)
    kernel = (int(version.group(1)), int(version.group(2))) if version else (0, 0)
    directory = os.path.join(sysfs, "devices/system/node")
    nodes = {
        int(match.group(1)): parse_cpus(read_text(directory, name, "cpulist"))
        for name in children(directory)
        if (match := _NODE.match(name))
    }
    return Machine(nodes, frozenset(os.sched_getaffinity(0)), read_gpus(sysfs), kernel, release)


def parse_cpus(text: str | None) -> frozenset[int]:
    """Parse a list such as "0-3,8"; skip malformed parts."""
    found: set[int] = set()
    for part in (text or "").split(","):
        match = _RANGE.match(part.strip())
        if match:
            first = int(match.group(1))
            found.update(range(first, int(match.group(2) or first) + 1))
    return frozenset(found)


def judge_gpus(machine: Machine) -> list[Finding]:
    """Check each GPU's link and NUMA node. Unknown facts yield no finding."""
    gpus = machine.gpus
    return [one for gpu in gpus for one in (*_judge_link(gpu), *_judge_node(gpu, machine))]


def gpu_warnings(uuid: str) -> tuple[str, ...]:
    """Return warnings about the link and NUMA node of this GPU. `uuid` is 32 hex digits."""
    machine = read_machine()
    machine = replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.uuid == uuid))
    slow = [one for one in judge_gpus(machine) if one.severity is not Severity.OK]
    return tuple(f"{one.subject}: {one.evidence}; {one.remedy}" for one in slow)


def _judge_link(gpu: Gpu) -> list[Finding]:
    link, subject = gpu.pcie, f"GPU {gpu.index}"
    if link is None or (link.speed is None and link.width is None):
        return []
    shown = f"{gpu.name or 'it'} runs at {link.current}"
    if not (link.is_slow or link.is_narrow):
        return [Finding("gpu_link", subject, Severity.OK, shown)]
    shown += f", but supports {link.maximum}"
    if gpu.is_idle and not link.is_narrow:
        shown += "; it is idle, and its link may be slow to save power"
        return [Finding("gpu_link", subject, Severity.OK, shown, "check again while it computes")]
    remedy = (
        f"reseat the GPU or use another slot; lspci -vv -s {link.address} shows LnkCap and LnkSta"
    )
    return [Finding("gpu_link", subject, Severity.WARNING, shown, remedy)]


def _judge_node(gpu: Gpu, machine: Machine) -> list[Finding]:
    node, subject = gpu.numa_node, f"GPU {gpu.index}"
    if len(machine.nodes) < 2 or node is None:
        return []
    own = ", ".join(map(str, sorted(machine.own_nodes))) or "none known"
    shown = f"on node {node}; this process may run on node {own}"
    if node in machine.own_nodes:
        return [Finding("gpu_node", subject, Severity.OK, shown)]
    remedy = (
        f"use numactl --cpunodebind={node} vllm serve …; pinned memory is on this node in any case"
    )
    return [Finding("gpu_node", subject, Severity.WARNING, shown, remedy)]
