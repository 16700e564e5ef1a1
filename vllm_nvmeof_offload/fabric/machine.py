# SPDX-License-Identifier: Apache-2.0
"""This machine: NUMA nodes, where this process may run, GPUs, the kernel's version."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass

from vllm_nvmeof_offload.fabric.sysfs import children, read_number, read_text

__all__ = ["Gpu", "Machine", "parse_cpus", "read_machine"]

_NODE = re.compile(r"^node([0-9]+)$")
_RANGE = re.compile(r"^([0-9]{1,6})(?:-([0-9]{1,6}))?$")


@dataclass(frozen=True, slots=True)
class Gpu:
    """numa_node: None where the machine has one node, or does not tell."""

    index: int
    numa_node: int | None


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
    return Machine(nodes, frozenset(os.sched_getaffinity(0)), _gpus(sysfs), kernel, release)


def parse_cpus(text: str | None) -> frozenset[int]:
    """Of "0-3,8"; what makes no sense is left out."""
    found: set[int] = set()
    for part in (text or "").split(","):
        match = _RANGE.match(part.strip())
        if match:
            first = int(match.group(1))
            found.update(range(first, int(match.group(2) or first) + 1))
    return frozenset(found)


def _gpus(sysfs: str) -> tuple[Gpu, ...]:
    """GPUs by NVML, where it is there."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()  # no driver, or another one's version
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
        addresses = [nvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()
    return tuple(Gpu(index, _node_of(sysfs, address)) for index, address in enumerate(addresses))


def _node_of(sysfs: str, address: bytes | str) -> int | None:
    text = address.decode("ascii") if isinstance(address, bytes) else address
    domain, _, rest = text.lower().partition(":")
    # NVML gives the domain eight digits, sysfs four.
    return read_number(sysfs, "bus/pci/devices", f"{domain[-4:]}:{rest}", "numa_node")
