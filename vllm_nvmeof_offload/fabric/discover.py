# SPDX-License-Identifier: Apache-2.0
"""Discovers the devices under a target's path, using only sysfs and the mount table.

Nothing here opens, stats or resolves the target itself, because that may never return on a hung
mount. A target is therefore given as an absolute path without symbolic links.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from vllm_nvmeof_offload.fabric.sysfs import block_stack, device_of_mount, namespace_at, read_text
from vllm_nvmeof_offload.fabric.topology import ABSENT, ControllerState, Mount, TargetFabric

MOUNTINFO = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")
_DEVICE = re.compile(r"^[0-9]+:[0-9]+$")
_NUMBER = re.compile(r"^[0-9]{1,20}$")


def read_mounts(mountinfo: str = MOUNTINFO) -> list[Mount]:
    """Return the mount table; empty if it cannot be read."""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return parse_mountinfo(file.read())
    except OSError:
        return []


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse /proc/<pid>/mountinfo (proc_pid_mountinfo(5)); skip malformed lines."""
    found = (_parse_line(line) for line in text.split("\n"))
    return [mount for mount in found if mount is not None]


def _parse_line(line: str) -> Mount | None:
    # Any number of optional fields precede the "-".
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
    r"""Undo the kernel's escapes, such as \040 for a blank; the escaped bytes are below 128."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8) & 0xFF), field)


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that a look-up of `path` (absolute, without links) ends on.

    The walk follows the mounts from the root; the longest mount point may be hidden by another.
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
        # Each mount is taken once, so that the walk ends for a table that makes no sense.
        left = [mount for mount in left if mount is not here]
        on_top = [
            mount
            for mount in left
            if mount.parent_id == here.mount_id
            and (path == mount.point or path.startswith(mount.point.rstrip("/") + "/"))
        ]
        if not on_top:
            return here
        here = min(on_top, key=lambda mount: len(mount.point))


def discover(target: str, sysfs: str = "/sys", mountinfo: str = MOUNTINFO) -> TargetFabric:
    """Discover the devices under `target` (absolute, no links; need not exist). Never raises."""
    mount = mount_of(target, read_mounts(mountinfo))
    top = device_of_mount(mount, sysfs) if mount else None
    devices = block_stack(top, sysfs) if top else ()
    found = [namespace_at(device.path, sysfs) for device in devices if not device.over]
    return TargetFabric(
        target=target,
        mount=mount,
        devices=devices,
        namespaces=tuple(one for one in found if one is not None),
        # Without a sysfs there is nothing that could show the device.
        device_gone=mount is not None
        and top is None
        and not mount.device.startswith("0:")
        and os.path.isdir(os.path.join(sysfs, "dev/block")),
        sysfs=sysfs,
    )


def read_states(fabric: TargetFabric) -> dict[str, ControllerState]:
    """Return the current states of the controllers of `fabric`, by name; two reads per path.

    The list of controllers is not read again. Reconnected controllers may have other names, and
    other controllers theirs: call `discover` again when one is `ABSENT`.
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
