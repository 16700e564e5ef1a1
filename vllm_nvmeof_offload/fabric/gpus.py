# SPDX-License-Identifier: Apache-2.0
"""GPUs and their PCIe links, by NVML, where its Python module and a driver are there."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_offload.fabric.sysfs import read_number
from vllm_nvmeof_offload.fabric.topology import PcieLink

__all__ = ["Gpu", "read_gpus"]

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
