# SPDX-License-Identifier: Apache-2.0
"""This machine: NUMA nodes, where this process may run, GPUs, the kernel's version."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from vllm_nvmeof_offload.fabric.gpus import Gpu, read_gpus
from vllm_nvmeof_offload.fabric.sysfs import children, read_text

__all__ = ["Gpu", "Machine", "parse_cpus", "read_machine"]

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
