# SPDX-License-Identifier: Apache-2.0
"""This machine: NUMA nodes, where this process may run, GPUs, the kernel's version.

GPUs and their PCIe links, by NVML, where its Python module and a driver are there.

What a PCIe link runs at against what it can do, in words.

Judges GPUs: what their PCIe links run at, and whether this process is near them.

Findings: what a check saw, how bad that is, and what to do about it.
"""

from __future__ import annotations

import enum
import importlib
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from vllm_nvmeof_offload.fabric.sysfs import children, read_number, read_text
from vllm_nvmeof_offload.fabric.topology import PcieLink

__all__ = [
    "Finding",
    "Gpu",
    "Machine",
    "Severity",
    "gpu_warnings",
    "is_below",
    "judge_gpus",
    "now",
    "parse_cpus",
    "read_gpus",
    "read_machine",
    "shape",
    "worst",
]


#: GT/s a lane of each PCIe generation.
_SPEEDS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0, 7: 128.0}
#: Performance states from here on are for GPUs that have little to do: their link sleeps too.
_IDLE_FROM = 3


@dataclass(frozen=True, slots=True)
class Gpu:
    """numa_node: None where the machine has one node, or does not tell. uuid: 32 hex digits.

    pcie: its maxima are what GPU and slot can do together. is_idle: then the link may run
    slower than it can, to save power. driver: NVIDIA's version of it, such as 580.95.05.
    """

    index: int
    numa_node: int | None
    name: str = ""
    uuid: str = ""
    pcie: PcieLink | None = None
    is_idle: bool = False
    driver: str = ""


def read_gpus(sysfs: str = "/sys") -> tuple[Gpu, ...]:
    """None at all without `pynvml`, without a driver, or with one that does not answer."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()  # no driver, or another one's version
    try:
        return tuple(_gpu(nvml, index, sysfs) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, sysfs: str) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    address = _pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    node = read_number(sysfs, "bus/pci/devices", address, "numa_node")
    state = _asked(nvml, "nvmlDeviceGetPerformanceState", handle)
    link = PcieLink(
        address=address,
        speed=_SPEEDS.get(_asked(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle)),
        speed_max=_SPEEDS.get(_asked(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        width=_asked(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        width_max=_asked(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        numa_node=node,
    )
    return Gpu(
        index=index,
        numa_node=node,
        name=_text(_asked(nvml, "nvmlDeviceGetName", handle) or ""),
        uuid=_text(_asked(nvml, "nvmlDeviceGetUUID", handle) or "")
        .removeprefix("GPU-")
        .replace("-", ""),
        pcie=link,
        is_idle=state is not None and state >= _IDLE_FROM,
        driver=_text(_asked(nvml, "nvmlSystemGetDriverVersion") or ""),
    )


def _asked(nvml: Any, call: str, *arguments: Any) -> Any:
    """None where this GPU, such as a virtual one, does not answer the question."""
    try:
        return getattr(nvml, call)(*arguments)
    except (AttributeError, nvml.NVMLError):
        return None


def _text(value: bytes | str) -> str:
    return value.decode("ascii", errors="replace") if isinstance(value, bytes) else value


def _pci_address(text: str) -> str:
    domain, _, rest = text.lower().partition(":")
    # NVML gives the domain eight digits, sysfs four.
    return f"{os.path.basename(domain)[-4:]}:{os.path.basename(rest)}"


_NODE = re.compile(r"^node([0-9]+)$")
_RANGE = re.compile(r"^([0-9]{1,6})(?:-([0-9]{1,6}))?$")


@dataclass(frozen=True, slots=True)
class Machine:
    """nodes: CPUs by NUMA node. cpus: those this process may run on. kernel: (6, 12)."""

    nodes: dict[int, frozenset[int]]
    cpus: frozenset[int]
    gpus: tuple[Gpu, ...]
    kernel: tuple[int, int]
    release: str

    @property
    def own_nodes(self) -> frozenset[int]:
        """NUMA nodes that this process may run on."""
        return frozenset(node for node, cpus in self.nodes.items() if cpus & self.cpus)


def read_machine(sysfs: str = "/sys") -> Machine:
    """Never raises; what is unknown is empty, and the kernel's version (0, 0)."""
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
    """Of "0-3,8"; what makes no sense is left out."""
    found: set[int] = set()
    for part in (text or "").split(","):
        match = _RANGE.match(part.strip())
        if match:
            first = int(match.group(1))
            found.update(range(first, int(match.group(2) or first) + 1))
    return frozenset(found)


def is_below(link: PcieLink) -> bool:
    """Slower or narrower than it can be; what is not known is not."""
    slower = link.speed is not None and link.speed_max is not None and link.speed < link.speed_max
    thinner = link.width is not None and link.width_max is not None and link.width < link.width_max
    return slower or thinner


def now(link: PcieLink) -> str:
    return shape(link.speed, link.width)


def shape(speed: float | None, width: int | None) -> str:
    """Such as `32 GT/s x16`."""
    lanes = "x?" if width is None else f"x{width}"
    return f"{'unknown' if speed is None else f'{speed:g}'} GT/s {lanes}"


class Severity(enum.IntEnum):
    """The larger, the worse. The value is the exit code of a command that found it."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at, a stable word. subject: a target's path, or "host".

    evidence: what was seen, in numbers and names. remedy: empty where nothing is to be done.
    """

    check: str
    subject: str
    severity: Severity
    evidence: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.name.lower()}


def worst(findings: list[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


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
