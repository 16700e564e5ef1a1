# SPDX-License-Identifier: Apache-2.0
"""The stack of block devices under a mount: partitions, device mapper and md, down to disks."""

from __future__ import annotations

import os
import re

from vllm_nvmeof_offload.fabric.sysfs import children, read_number, read_text, resolve
from vllm_nvmeof_offload.fabric.topology import BlockDevice, Mount, QueueLimits

__all__ = ["block_stack", "device_of_mount", "read_limits", "read_size"]

_SECTOR_BYTES = 512  # the unit of `size`, whatever the device's logical block is
_DEVICES_MAX = 256
_MAPPER = "/dev/mapper/"


def device_of_mount(mount: Mount, sysfs: str) -> str | None:
    """sysfs directory of the block device that is mounted; None if there is none.

    btrfs and its like have a device number of their own: there the source's name tells.
    """
    if not mount.device.startswith("0:"):
        return resolve(sysfs, "dev/block", mount.device)
    if not mount.source.startswith("/dev/"):
        return None
    name = os.path.basename(mount.source)
    if mount.source.startswith(_MAPPER):
        blocks = os.path.join(sysfs, "class/block")
        for device in children(blocks):
            if device.startswith("dm-") and read_text(blocks, device, "dm/name") == name:
                return resolve(blocks, device)
    return resolve(sysfs, "class/block", name)


def block_stack(top: str, sysfs: str) -> tuple[BlockDevice, ...]:
    """`top` (a directory in sysfs) and all that lies under it, from the top down."""
    found: dict[str, BlockDevice] = {}
    waiting = [top]
    while waiting and len(found) < _DEVICES_MAX:
        path = waiting.pop(0)
        if path in found:
            continue
        below = _below(path)
        found[path] = _read_device(path, tuple(os.path.basename(one) for one in below))
        waiting += below
    return tuple(found.values())


def _below(path: str) -> list[str]:
    if os.path.exists(os.path.join(path, "partition")):
        return [os.path.dirname(path)]
    targets = [resolve(path, "slaves", name) for name in children(path, "slaves")]
    return [target for target in targets if target is not None]


def _read_device(path: str, over: tuple[str, ...]) -> BlockDevice:
    name = os.path.basename(path)
    return BlockDevice(name, _kind(path, name), path, read_size(path), read_limits(path), over)


def _kind(path: str, name: str) -> str:
    if os.path.exists(os.path.join(path, "partition")):
        return "partition"
    match = re.match(r"(dm-|md|loop)[0-9]", name)
    return match.group(1).rstrip("-") if match else "disk"


def read_size(path: str) -> int | None:
    sectors = read_number(path, "size")
    return None if sectors is None else sectors * _SECTOR_BYTES


def read_limits(path: str) -> QueueLimits:
    """Limits of a device; a partition has those of its disk."""
    if os.path.exists(os.path.join(path, "partition")):
        path = os.path.dirname(path)
    return QueueLimits(
        logical_block_bytes=read_number(path, "queue/logical_block_size"),
        max_hw_sectors_kb=read_number(path, "queue/max_hw_sectors_kb"),
        max_sectors_kb=read_number(path, "queue/max_sectors_kb"),
        dma_alignment=read_number(path, "queue/dma_alignment"),
    )
