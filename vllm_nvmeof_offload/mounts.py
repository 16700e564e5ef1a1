# SPDX-License-Identifier: Apache-2.0
"""The mount table of this process.

This module never opens, stats or resolves a listed path: on a hung mount the call may never return.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

MOUNTINFO = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")
#: A line of /proc/<pid>/mountinfo. Any number of optional fields precedes the "-".
_MOUNT = re.compile(
    r"([0-9]{1,20}) ([0-9]{1,20}) ([0-9]+:[0-9]+) ([^ ]*) ([^ ]*) ([^ -][^ ]*)(?: [^ ]*)*?"
    r" - ([^ ]*) ([^ ]*) ([^ ]*)"
)


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo. `super_options` are the options of the file system. `device` is
    "major:minor", with major 0 if there is no single block device."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    point: str
    options: tuple[str, ...]
    file_system: str
    source: str
    super_options: tuple[str, ...]


def read_mounts(mountinfo: str = MOUNTINFO) -> list[Mount]:
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return parse_mountinfo(file.read())
    except OSError:
        return []


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse /proc/<pid>/mountinfo (proc_pid_mountinfo(5)); skip malformed lines."""
    return [
        Mount(
            mount_id=int(line[1]),
            parent_id=int(line[2]),
            device=line[3],
            root=_unescape(line[4]),
            point=_unescape(line[5]),
            options=tuple(line[6].split(",")),
            file_system=_unescape(line[7]),
            source=_unescape(line[8]),
            super_options=tuple(line[9].split(",")),
        )
        for line in map(_MOUNT.match, text.split("\n"))
        if line
    ]


def _unescape(field: str) -> str:
    r"""Undo the kernel's escapes, such as \040 for a space. Escaped bytes are below 128."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8) & 0xFF), field)


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that contains `path` (absolute, without symbolic links). The walk starts at
    the root, because another mount can hide the mount with the longest match."""
    path = os.path.normpath(path)
    ids = {mount.mount_id for mount in mounts}
    roots = (
        mount
        for mount in mounts
        if mount.point == "/" and (mount.parent_id not in ids or mount.parent_id == mount.mount_id)
    )
    here, left = next(roots, None), list(mounts)
    while here is not None:
        # Each mount is used once, so that the walk ends even for an inconsistent table.
        left.remove(here)
        on_top = [
            mount
            for mount in left
            if mount.parent_id == here.mount_id
            and (path == mount.point or path.startswith(mount.point.rstrip("/") + "/"))
        ]
        if not on_top:
            break
        here = min(on_top, key=lambda mount: len(mount.point))
    return here
