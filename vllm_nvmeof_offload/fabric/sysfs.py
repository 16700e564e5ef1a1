# SPDX-License-Identifier: Apache-2.0
"""Reads sysfs attributes. Devices come and go meanwhile: whatever fails is None, "unknown"."""

from __future__ import annotations

import os
import re

from vllm_nvmeof_offload.fabric.topology import OFF, PcieLink

__all__ = [
    "children",
    "natural",
    "read_number",
    "read_pcie_link",
    "read_text",
    "read_timeout",
    "resolve",
]

#: No attribute is longer than a page; what is, is not one.
_BYTES_MAX = 4096
_PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_SIGNED = re.compile(r"^-?[0-9]{1,20}$")
_DECIMAL = re.compile(r"^[0-9]{1,6}(\.[0-9]{1,6})?")


def read_text(*parts: str) -> str | None:
    """An attribute without blanks around it; None where it is absent, unreadable or empty."""
    try:
        fd = os.open(os.path.join(*parts), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            raw = os.read(fd, _BYTES_MAX)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
    text = raw.decode("utf-8", errors="replace").strip().strip("\0")
    return text if text and text.isprintable() else None


def read_number(*parts: str) -> int | None:
    """A decimal number; negative ones, which sysfs uses for "none", are unknown."""
    text = read_text(*parts)
    if text is None or not _SIGNED.match(text):
        return None
    return int(text) if int(text) >= 0 else None


def read_timeout(*parts: str) -> int | None:
    """Seconds, or `OFF`."""
    text = read_text(*parts)
    if text in ("off", "-1"):
        return OFF
    return read_number(*parts) if text else None


def children(*parts: str) -> list[str]:
    """Names in a directory, in the order people count; none where it cannot be read."""
    try:
        return sorted(os.listdir(os.path.join(*parts)), key=natural)
    except (OSError, ValueError):
        return []


def natural(name: str) -> list[tuple[str, int]]:
    """Sorts nvme2 before nvme10."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", name)
    return [(text, int(number or -1)) for text, number in parts]


def resolve(*parts: str) -> str | None:
    """Where a link of sysfs leads; None if there is nothing."""
    try:
        return os.path.realpath(os.path.join(*parts), strict=True)
    except (OSError, ValueError):
        return None


def read_pcie_link(device: str) -> PcieLink | None:
    """The PCIe link of a device's directory; None if it is no PCI device.

    Attributes may be unknown, as they are for a virtual machine's devices.
    """
    path = resolve(device)
    if path is None or not _PCI_ADDRESS.match(os.path.basename(path)):
        return None
    return PcieLink(
        address=os.path.basename(path),
        speed=_speed(path, "current_link_speed"),
        speed_max=_speed(path, "max_link_speed"),
        width=read_number(path, "current_link_width") or None,
        width_max=_width_max(path),
        numa_node=read_number(path, "numa_node"),
    )


def _width_max(path: str) -> int | None:
    # 255 is what sysfs shows for a device without a link of its own.
    width = read_number(path, "max_link_width")
    return width if width and width <= 32 else None


def _speed(*parts: str) -> float | None:
    """GT/s, of "16.0 GT/s PCIe"."""
    match = _DECIMAL.match(read_text(*parts) or "")
    return float(match.group()) if match else None
