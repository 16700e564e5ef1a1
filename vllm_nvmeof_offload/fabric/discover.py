# SPDX-License-Identifier: Apache-2.0
"""From a target's path to all that it stands on, by sysfs and mountinfo alone.

Nothing here opens, stats or resolves the target itself, for on a hung mount that may never
return. So a target is given as an absolute path without symbolic links.

The mount table, and which mount a path is on, without touching any mounted file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from vllm_nvmeof_offload.fabric.sysfs import (
    block_stack,
    device_of_mount,
    namespace_at,
    namespaces,
    read_text,
)
from vllm_nvmeof_offload.fabric.topology import (
    ABSENT,
    ControllerState,
    Mount,
    Namespace,
    TargetFabric,
)

__all__ = [
    "MOUNTINFO",
    "discover",
    "find_namespace",
    "mount_of",
    "mount_points_of",
    "parse_mountinfo",
    "read_mounts",
    "read_states",
]


MOUNTINFO = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")
_DEVICE = re.compile(r"^[0-9]+:[0-9]+$")
_NUMBER = re.compile(r"^[0-9]{1,20}$")


def read_mounts(mountinfo: str = MOUNTINFO) -> list[Mount]:
    """The mount table; empty where it cannot be read."""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return parse_mountinfo(file.read())
    except OSError:
        return []


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse /proc/<pid>/mountinfo (proc_pid_mountinfo(5)); a line that is none is left out."""
    found = (_parse_line(line) for line in text.split("\n"))
    return [mount for mount in found if mount is not None]


def _parse_line(line: str) -> Mount | None:
    # Between the options and "-" come any number of optional fields.
    before, dash, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(rest) < 3:
        return None
    if not (_NUMBER.match(fields[0]) and _NUMBER.match(fields[1]) and _DEVICE.match(fields[2])):
        return None
    return Mount(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        device=fields[2],
        root=_unescape(fields[3]),
        point=_unescape(fields[4]),
        options=tuple(fields[5].split(",")),
        file_system=_unescape(rest[0]),
        source=_unescape(rest[1]),
        super_options=tuple(rest[2].split(",")),
    )


def _unescape(field: str) -> str:
    r"""Undo the kernel's \040 for blank, tab, newline, backslash and "#".

    It escapes bytes, each below 128, so that each is one character here too.
    """
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8) & 0xFF), field)


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a look-up of `path` ends on.

    path: absolute, without links. It is walked as the kernel does, from the root through the
    mounts on top of it: the longest mount point alone would find mounts that others hide.
    """
    path = os.path.normpath(path)
    ids = {mount.mount_id for mount in mounts}
    roots = [
        mount
        for mount in mounts
        if mount.point == "/" and (mount.parent_id not in ids or mount.parent_id == mount.mount_id)
    ]
    if not roots:
        return None
    here, left = roots[0], list(mounts)
    while True:
        # Each is taken once, so that a table that makes no sense has an end too.
        left = [mount for mount in left if mount is not here]
        on_top = [
            mount
            for mount in left
            if mount.parent_id == here.mount_id and _covers(mount.point, path)
        ]
        if not on_top:
            return here
        here = min(on_top, key=lambda mount: len(mount.point))


def _covers(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


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
