# SPDX-License-Identifier: Apache-2.0
"""Limits what some processes read from, or write to, one disk, with a control group of its own.

The kernel's block layer limits, so that every engine is slowed alike and nothing of ours runs in
the way: cgroup v1's `blkio.throttle`, or cgroup v2's `io.max`, whichever the machine has. A
process joins with all its threads and with what it starts later. At the end all processes return
to their earlier groups and the group is removed.

The limit holds for reads and writes that reach the disk: O_DIRECT, and misses of the page cache
(under cgroup v1 no write from the page cache). The kernel works in slices of about 0.1 s: what a
slice allows may pass at once.

    OffloadError
    └── ThrottleError        this machine cannot throttle here; ends with the remedy
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from vllm_nvmeof_offload.errors import OffloadError

#: Tests replace it: /proc, /sys and the cgroup file systems are found below it.
ROOT = Path("/")
_MOVE_ROUNDS_MAX = 20
_REMOVE_TRIES_MAX = 50
_REMOVE_PAUSE_S = 0.02


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
        ThrottleError: no disk is below it (tmpfs, overlay, a network file system).
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
        if "io" in _words(group / "cgroup.subtree_control"):
            return replace(outline, parent=group)
        if group == top:
            break
    return replace(outline, enables_io=top) if "io" in _words(top / "cgroup.controllers") else None


def _words(path: Path) -> list[str]:
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


class Throttle:
    """A group with limits on the disk under `path`. Use it as a context manager.

        with Throttle(directory, read_bytes_per_s=50_000_000) as throttle:
            throttle.add(os.getpid())             # or throttle.add_group(server.pid)
            throttle.limit(read_bytes_per_s=10_000_000)   # at any time

    Raises:
        ThrottleError: no disk, no control groups, or not permitted.
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
        self._root = root
        self._group = self._hierarchy.parent / f"vllm-nvmeof-throttle-{os.getpid()}-{id(self):x}"
        self._limits = (read_bytes_per_s, write_bytes_per_s)
        self._origins: dict[int, Path] = {}
        self._enabled_io = False

    @property
    def kind(self) -> str:
        """What limits, for people and for a file's conditions."""
        return self._hierarchy.kind

    def __enter__(self) -> Self:
        try:
            self._enable_io()
            self._group.mkdir()
            self.limit(*self._limits)
        except OSError as error:
            self._remove()
            raise self._denied(error) from None
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._empty()
        self._remove()

    def limit(
        self, read_bytes_per_s: int | None = None, write_bytes_per_s: int | None = None
    ) -> None:
        """Set both limits; None: none."""
        limits = {"read": read_bytes_per_s, "write": write_bytes_per_s}
        assert all(value is None or value > 0 for value in limits.values())
        try:
            if self._hierarchy.version == 1:
                for what, value in limits.items():
                    file_path = self._group / f"blkio.throttle.{what}_bps_device"
                    file_path.write_text(f"{self.device} {value or 0}\n", encoding="ascii")
                return
            words = [f"{what[0]}bps={value or 'max'}" for what, value in limits.items()]
            line = f"{self.device} {' '.join(words)}\n"
            (self._group / "io.max").write_text(line, encoding="ascii")
        except OSError as error:
            raise self._denied(error) from None

    def add(self, *pids: int) -> None:
        """Take in processes, each with all its threads and what it starts from now on."""
        for pid in pids:
            try:
                origin = self._hierarchy.group_of(pid, self._root)
                self._move(pid, self._group)
            except ProcessLookupError:
                continue  # it has ended meanwhile
            except OSError as error:
                raise self._denied(error) from None
            self._origins.setdefault(pid, origin)

    def add_group(self, group: int) -> None:
        """Take in a process group whole: it may start processes while we look."""
        for _ in range(_MOVE_ROUNDS_MAX):
            missing = set(processes_of(group)) - set(self._members())
            if not missing:
                return
            self.add(*missing)
        raise ThrottleError(f"process group {group} starts processes too fast to throttle it")

    def _members(self) -> list[int]:
        return [int(word) for word in _words(self._group / "cgroup.procs")]

    def _move(self, pid: int, group: Path) -> None:
        (group / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")

    def _empty(self) -> None:
        """Put everyone back; a child that came in with its parent goes where the first was."""
        default = next(iter(self._origins.values()), self._hierarchy.parent)
        for _ in range(_MOVE_ROUNDS_MAX):
            members = self._members()
            if not members:
                return
            for pid in members:
                with contextlib.suppress(OSError):
                    self._move(pid, self._origins.get(pid, default))

    def _enable_io(self) -> None:
        top = self._hierarchy.enables_io
        if top is not None:
            (top / "cgroup.subtree_control").write_text("+io\n", encoding="ascii")
            self._enabled_io = True

    def _remove(self) -> None:
        for _ in range(_REMOVE_TRIES_MAX):
            try:
                self._group.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    break
                time.sleep(_REMOVE_PAUSE_S)  # an ended process is still being taken down
            else:
                break
        top = self._hierarchy.enables_io
        if self._enabled_io and top is not None:
            with contextlib.suppress(OSError):
                (top / "cgroup.subtree_control").write_text("-io\n", encoding="ascii")
            self._enabled_io = False

    def _denied(self, error: OSError) -> ThrottleError:
        remedy = "run as root, or give this user a group of its own (systemd: Delegate=io)"
        if error.errno == errno.EROFS:
            remedy = "the control groups are mounted read-only: run outside of this container"
        if error.errno in (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP):
            remedy = f"the kernel does not throttle device {self.device}: give another directory"
        return ThrottleError(f"{self.kind} in {self._group.parent}: {error.strerror}: {remedy}")
