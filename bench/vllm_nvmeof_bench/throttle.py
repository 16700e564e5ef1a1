# SPDX-License-Identifier: Apache-2.0
"""Slows down what some processes read from, or write to, one disk: a control group of its own.

The kernel's block layer does it, so that every engine is slowed alike and nothing of ours runs
in the way: cgroup v1's `blkio.throttle`, or cgroup v2's `io.max`, whichever the machine has. A
process comes in with all its threads; what it starts later comes in too. At the end all are put
back where they came from and the group is removed.

It limits reads and writes that reach the disk: O_DIRECT, and misses of the page cache (under
cgroup v1 no write from the page cache). It works in slices of about 0.1 s: what a slice allows
may pass at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from vllm_nvmeof_bench.cgroups import (
    ROOT,
    ThrottleError,
    device_of,
    find_hierarchy,
    processes_of,
    words,
)

__all__ = ["Throttle", "ThrottleError"]

_MOVE_ROUNDS_MAX = 20
_REMOVE_TRIES_MAX = 50
_REMOVE_PAUSE_S = 0.02


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        return [int(word) for word in words(self._group / "cgroup.procs")]

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
