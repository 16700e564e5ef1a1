# SPDX-License-Identifier: Apache-2.0
"""Limit the reads and writes of some processes on one disk with a new control group.

The kernel's block layer applies the limit, by cgroup v1's `blkio.throttle` or cgroup v2's `io.max`,
so that every engine is slowed alike. A process is added with all its threads and later children. At
the end all processes are moved back to their earlier groups, and the group is removed.

The limit applies to reads and writes that reach the disk: with O_DIRECT, or on a miss in the page
cache (but with cgroup v1 not to writes from the page cache). In each of the kernel's slices of
about 0.1 s, the slice's bytes can pass at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Self

from vllm_nvmeof_bench.servers.server import process_stats
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.fabric import device_of_mount
from vllm_nvmeof_offload.mounts import Mount, read_mounts

#: The root directory of /proc, /sys and the cgroup file systems; tests replace it.
ROOT = Path("/")
_MEMBERS = "cgroup.procs"
_MOVE_ROUNDS_MAX = 20
_REMOVE_TRIES_MAX = 50
_REMOVE_PAUSE_S = 0.02


class ThrottleError(OffloadError):
    """An error on a machine that cannot throttle; the message ends with the remedy."""


@dataclass(frozen=True)
class Hierarchy:
    """A location for groups that limit I/O: below `parent`, in cgroups of `version` 1 or 2.

    mount, mount_root: mount point of the cgroup file system, and the group at its root. enables_io:
    a directory to whose `cgroup.subtree_control` `+io` must first be written, or None.
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
        """Return the directory of a process's group; raise ProcessLookupError if the process has
        exited."""
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
        return self.mount  # its group is outside the mounted subtree


def device_of(path: Path, root: Path = ROOT) -> str:
    """Return the whole disk that holds `path` as "MAJOR:MINOR"; raise ThrottleError if `path` is
    not on a disk (tmpfs, overlay, a network file system)."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = root / "sys/dev/block" / number
    if os.major(device) == 0:  # btrfs and others use virtual numbers: find the mounted device
        mount = next((one for one in reversed(_mounts(root)) if one.device == number), None)
        found = device_of_mount(mount, str(root / "sys")) if mount else None
        if found is None:
            raise ThrottleError(
                f"{path} is on {mount.file_system if mount else 'no disk'}, which no block device "
                "holds: give a directory on a disk"
            )
        entry = Path(found)
    if not entry.exists():
        raise ThrottleError(f"there is no block device {number}: give a directory on a disk")
    if (entry / "partition").exists():  # limits apply to the whole disk
        entry = entry.resolve().parent
    return (entry / "dev").read_text(encoding="ascii").strip()


def _mounts(root: Path) -> list[Mount]:
    return read_mounts(str(root / "proc/self/mountinfo"))


def find_hierarchy(root: Path = ROOT) -> Hierarchy:
    """Return a location where this process can create a group that limits I/O; raise ThrottleError
    if there is none."""
    mounts = sorted(_mounts(root), key=attrgetter("file_system"))  # v1 first
    for mount in mounts:
        place = root / mount.point.lstrip("/")
        if mount.file_system == "cgroup" and "blkio" in mount.super_options:
            outline = Hierarchy(1, place, place, mount.root)
            return replace(outline, parent=outline.group_of("self", root))
        if mount.file_system == "cgroup2" and (
            found := _with_io(Hierarchy(2, place, place, mount.root), root)
        ):
            return found
    raise ThrottleError(
        "no control group here limits I/O: it needs cgroup v1's blkio, or cgroup v2's io "
        "controller (write +io into /sys/fs/cgroup/cgroup.subtree_control)"
    )


def _with_io(outline: Hierarchy, root: Path) -> Hierarchy | None:
    """Return the nearest group, from our own upwards, whose children can use the io controller.
    Only the root can enable controllers for its children while it has processes."""
    place, top = outline.group_of("self", root), outline.mount
    for group in (place, *place.parents):
        if "io" in _words(group / "cgroup.subtree_control"):
            return replace(outline, parent=group)
        if group == top:
            break
    return replace(outline, enables_io=top) if "io" in _words(top / "cgroup.controllers") else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _write_if_possible(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text, encoding="ascii")


def processes_of(group: int) -> list[int]:
    """Return the IDs of the processes in a process group that have not exited."""
    return [pid for pid, fields in process_stats(group) if fields[0] not in "ZX"]


class Throttle:
    """A control group with limits on the disk of `path`. Use it as a context manager.

        with Throttle(directory, read_bytes_per_s=50_000_000) as throttle:
            throttle.add(os.getpid())             # or throttle.add_group(server.pid)
            throttle.limit(read_bytes_per_s=10_000_000)   # at any time

    Raises: ThrottleError: there is no disk or no control group, or permission is denied.
    """

    def __init__(
        self,
        path: Path,
        read_bytes_per_s: int | None = None,
        write_bytes_per_s: int | None = None,
        root: Path = ROOT,
    ) -> None:
        self.device = device_of(path, root)
        self._hierarchy = find_hierarchy(root)
        #: The kind of limit, for messages and conditions.
        self.kind = self._hierarchy.kind
        self._root = root
        self._group = self._hierarchy.parent / f"vllm-nvmeof-throttle-{os.getpid()}-{id(self):x}"
        self._limits = (read_bytes_per_s, write_bytes_per_s)
        self._origins: dict[int, Path] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo, self._permitted():
            if self._hierarchy.enables_io is not None:
                control = self._hierarchy.enables_io / "cgroup.subtree_control"
                control.write_text("+io\n", encoding="ascii")
                undo.callback(_write_if_possible, control, "-io\n")
            self._group.mkdir()
            undo.callback(self._remove)
            self.limit(*self._limits)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def limit(
        self, read_bytes_per_s: int | None = None, write_bytes_per_s: int | None = None
    ) -> None:
        """Set both limits; None: no limit."""
        limits = {"read": read_bytes_per_s, "write": write_bytes_per_s}
        assert all(value is None or value > 0 for value in limits.values())
        lines = {"io.max": " ".join(f"{k[0]}bps={value or 'max'}" for k, value in limits.items())}
        if self._hierarchy.version == 1:
            lines = {
                f"blkio.throttle.{what}_bps_device": str(value or 0)
                for what, value in limits.items()
            }
        with self._permitted():
            for name, line in lines.items():
                (self._group / name).write_text(f"{self.device} {line}\n", encoding="ascii")

    def add(self, *pids: int) -> None:
        """Add processes, each with all its threads and later children."""
        for pid in pids:
            # A process that has exited needs no limit.
            with self._permitted(), contextlib.suppress(ProcessLookupError):
                origin = self._hierarchy.group_of(pid, self._root)
                (self._group / _MEMBERS).write_text(f"{pid}\n", encoding="ascii")
                self._origins.setdefault(pid, origin)

    def add_group(self, group: int) -> None:
        """Add all processes of a group, including those that they start meanwhile."""
        for _ in range(_MOVE_ROUNDS_MAX):
            missing = set(processes_of(group)) - set(self._members())
            if not missing:
                return
            self.add(*missing)
        raise ThrottleError(f"process group {group} starts processes too fast to throttle it")

    def _members(self) -> list[int]:
        return [int(word) for word in _words(self._group / _MEMBERS)]

    def _remove(self) -> None:
        """Move all processes back, then remove the group. Processes started within it move to the
        first process's earlier group."""
        default = next(iter(self._origins.values()), self._hierarchy.parent)
        for _ in range(_REMOVE_TRIES_MAX):
            for pid in self._members():
                _write_if_possible(self._origins.get(pid, default) / _MEMBERS, f"{pid}\n")
            try:
                self._group.rmdir()
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    return
                time.sleep(_REMOVE_PAUSE_S)  # the kernel is still removing an exited process

    @contextlib.contextmanager
    def _permitted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "run as root, or delegate a group to this user (systemd: Delegate=io)"
            if error.errno == errno.EROFS:
                remedy = "the control groups are mounted read-only: run outside this container"
            if error.errno in (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP):
                remedy = f"the kernel cannot throttle device {self.device}: give another directory"
            where = f"{self.kind} in {self._hierarchy.parent}"
            raise ThrottleError(f"{where}: {error.strerror}: {remedy}") from None
