# SPDX-License-Identifier: Apache-2.0
"""From a target's path to all that it stands on, by sysfs and mountinfo alone.

Nothing here opens, stats or resolves the target itself, for on a hung mount that may never
return. So a target is given as an absolute path without symbolic links.
"""

from __future__ import annotations

import os

from vllm_nvmeof_offload.fabric.blocks import block_stack, device_of_mount
from vllm_nvmeof_offload.fabric.mounts import (
    MOUNTINFO,
    mount_of,
    read_mounts,
)
from vllm_nvmeof_offload.fabric.nvme import namespace_at, namespaces
from vllm_nvmeof_offload.fabric.sysfs import read_text
from vllm_nvmeof_offload.fabric.topology import (
    ABSENT,
    ControllerState,
    Mount,
    Namespace,
    TargetFabric,
)

__all__ = ["discover", "find_namespace", "mount_points_of", "read_states"]


def discover(target: str, sysfs: str = "/sys", mountinfo: str = MOUNTINFO) -> TargetFabric:
    """Find out what `target` (absolute, no links; need not exist) stands on. Never raises."""
    mount = mount_of(target, read_mounts(mountinfo))
    top = device_of_mount(mount, sysfs) if mount else None
    devices = block_stack(top, sysfs) if top else ()
    found = [namespace_at(device.path, sysfs) for device in devices if not device.over]
    return TargetFabric(
        target=target,
        mount=mount,
        devices=devices,
        namespaces=tuple(one for one in found if one is not None),
        device_gone=mount is not None and top is None and _had_device(mount, sysfs),
        sysfs=sysfs,
    )


def _had_device(mount: Mount, sysfs: str) -> bool:
    """Is there one by right? Not where there is no sysfs to see it in."""
    return not mount.device.startswith("0:") and os.path.isdir(os.path.join(sysfs, "dev/block"))


def read_states(fabric: TargetFabric) -> dict[str, ControllerState]:
    """The states now of all controllers of `fabric`, by name; two small reads for each path.

    Which controllers there are is not looked up again: after a reconnection they may have
    other names, or their names may be others', so `discover` anew when one was `ABSENT`.
    """
    states: dict[str, ControllerState] = {}
    for controller in fabric.controllers:
        directory = os.path.join(fabric.sysfs, "class/nvme", controller.name)
        state = read_text(directory, "state")
        if state is None and not os.path.isdir(directory):
            state = ABSENT
        ana = {
            path.name: read_text(path.path, "ana_state")
            for namespace in fabric.namespaces
            for path in namespace.paths
            if path.controller == controller.name
        }
        states[controller.name] = ControllerState(state, ana)
    return states


def find_namespace(
    wwid: str | None = None, uuid: str | None = None, sysfs: str = "/sys"
) -> Namespace | None:
    """The namespace that has this wwid or uuid, under whatever name it is there now.

    Give what `Namespace` had of both. Without native multipath there may be a device for each
    path: the first is returned.
    """
    for namespace in namespaces(sysfs):
        if (wwid and namespace.wwid == wwid) or (uuid and namespace.uuid == uuid):
            return namespace
    return None


def mount_points_of(
    namespace: Namespace, sysfs: str = "/sys", mountinfo: str = MOUNTINFO
) -> list[Mount]:
    """Mounts whose file system lies on `namespace`, also through partitions and dm or md."""
    found = []
    for mount in read_mounts(mountinfo):
        top = device_of_mount(mount, sysfs)
        if top and any(one.name == namespace.device for one in block_stack(top, sysfs)):
            found.append(mount)
    return found
