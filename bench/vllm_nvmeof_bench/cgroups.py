# SPDX-License-Identifier: Apache-2.0
"""Finds what `throttle` needs: the disk under a path, and where groups that limit I/O are made.

Only reads, and below a root that tests can replace: /proc, /sys and the cgroup file systems.

    OffloadError
    └── ThrottleError        this machine does not let us throttle here; ends with the remedy
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_nvmeof_offload.errors import OffloadError

__all__ = [
    "ROOT",
    "Hierarchy",
    "ThrottleError",
    "device_of",
    "find_hierarchy",
    "processes_of",
    "words",
]

ROOT = Path("/")


class ThrottleError(OffloadError):
    """This machine does not let us throttle here; the message ends with the remedy."""


@dataclass(frozen=True)
class Hierarchy:
    """Where groups that limit I/O are made: `parent` is a directory of the cgroup file system.

    version: 1 or 2. mount, mount_root: where the file system lies, and which group that is.
    enables_io: the directory whose `cgroup.subtree_control` must get `+io` first, or None.
    """

    version: int
    parent: Path
    mount: Path
    mount_root: str = "/"
    enables_io: Path | None = None

    @property
    def kind(self) -> str:
        return "cgroup v1 blkio.throttle" if self.version == 1 else "cgroup v2 io.max"

    def group_of(self, pid: int | str, root: Path = ROOT) -> Path:
        """The directory of the group that a process is in.

        Raises:
            ProcessLookupError: there is no such process any more.
        """
        try:
            text = (root / f"proc/{pid}/cgroup").read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ProcessLookupError(f"no process {pid}") from None
        wanted = "blkio" if self.version == 1 else ""
        for line in text.splitlines():
            _, controllers, path = line.split(":", 2)
            if wanted in controllers.split(",") and path.startswith(self.mount_root):
                inner = self.mount / path[len(self.mount_root) :].lstrip("/")
                if inner.is_dir():
                    return inner
        return self.mount  # its group lies outside of what is mounted here


def device_of(path: Path, root: Path = ROOT) -> str:
    """The whole disk under `path`, as "MAJOR:MINOR".

    root: where /sys and /proc are looked for.

    Raises:
        ThrottleError: it lies on no disk (tmpfs, overlay, a network file system).
    """
    number = os.stat(path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    if os.major(number) == 0:  # btrfs and others number their own: ask what was mounted
        file_system, source = _mounted(name, root)
        try:
            number = os.stat(source).st_rdev if source.startswith("/dev/") else 0
        except OSError:
            number = 0
        if not number:
            raise ThrottleError(
                f"{path} is on {file_system or 'no disk'}, which no block device holds: give a "
                f"directory on a disk"
            )
        name = f"{os.major(number)}:{os.minor(number)}"
    return _whole_disk(name, root)


def _whole_disk(name: str, root: Path) -> str:
    entry = root / "sys/dev/block" / name
    if not entry.exists():
        raise ThrottleError(f"there is no block device {name}: give a directory on a disk")
    if (entry / "partition").exists():  # limits are the disk's
        return (entry.resolve().parent / "dev").read_text(encoding="ascii").strip()
    return name


def _mounted(number: str, root: Path) -> tuple[str, str]:
    """(file system, source) of the last mount of device `number`."""
    found = ("", "")
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            file_system, source = after.split()[:2]
            found = (file_system, source)
    return found


def find_hierarchy(root: Path = ROOT) -> Hierarchy:
    """Where this process can make a group that limits I/O.

    Raises:
        ThrottleError: nowhere.
    """
    mounts = _cgroup_mounts(root)
    for file_system, mount_root, mount, options in mounts:
        if file_system == "cgroup" and "blkio" in options:
            outline = Hierarchy(1, mount, mount, mount_root)
            return replace(outline, parent=outline.group_of("self", root))
    for file_system, mount_root, mount, _ in mounts:
        if file_system == "cgroup2":
            found = _with_io(Hierarchy(2, mount, mount, mount_root), root)
            if found is not None:
                return found
    raise ThrottleError(
        "no control group here limits I/O: it needs cgroup v1's blkio, or cgroup v2's io "
        "controller (write +io into /sys/fs/cgroup/cgroup.subtree_control)"
    )


def _cgroup_mounts(root: Path) -> list[tuple[str, str, Path, list[str]]]:
    """(file system, root in the hierarchy, mount point, controllers and options)."""
    found = []
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if rest[0] in ("cgroup", "cgroup2"):
            mount = root / fields[4].lstrip("/")
            found.append((rest[0], fields[3], mount, rest[-1].split(",")))
    return found


def _with_io(outline: Hierarchy, root: Path) -> Hierarchy | None:
    """The nearest group, from our own upwards, whose children may have the io controller.

    A group that holds processes can give its children no controllers, but for the top one.
    """
    place, top = outline.group_of("self", root), outline.mount
    for group in (place, *place.parents):
        if "io" in words(group / "cgroup.subtree_control"):
            return replace(outline, parent=group)
        if group == top:
            break
    return replace(outline, enables_io=top) if "io" in words(top / "cgroup.controllers") else None


def words(path: Path) -> list[str]:
    """The words of a small file; none if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def processes_of(group: int) -> list[int]:
    """Ids of all living processes of a process group, such as a server's."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found
