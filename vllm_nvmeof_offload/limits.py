# SPDX-License-Identifier: Apache-2.0
"""The memory and disk space that this process may use on its machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_nvmeof_offload.mounts import mount_of, read_mounts
from vllm_nvmeof_offload.units import GIB, KIB

#: A pool leaves a twentieth of the file system free, but not less than the minimum, and not more
#: than the maximum or a tenth of the file system.
_FREE_BYTES_MIN, _FREE_BYTES_MAX = GIB, 64 * GIB
#: The minimum for the root file system, which also holds logs, package caches and other data.
_FREE_BYTES_MIN_ROOT = 4 * GIB
_FREE_SHARE, _FREE_SHARE_MAX = 20, 10
#: Room for superblocks and directories on the smallest file systems.
_FREE_BYTES_LEAST = 64 * KIB

#: File systems whose subvolumes are mounted with different roots.
_HAS_SUBVOLUMES = frozenset({"btrfs", "bcachefs"})

_CGROUP_MEMORY = (
    # Files with the limit and usage, and memory.stat's reclaimable part, for cgroup v2 and v1.
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_bytes() -> int:
    """Return the machine's memory in bytes or, if lower, the lowest limit of our control groups."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _cgroup_limits())])


def memory_left_bytes() -> int:
    """Return the bytes that this process may still allocate within its control groups' limits.
    Reclaimable page cache counts as free. Without a limit, the result is `memory_bytes`."""
    return min([memory_bytes(), *(limit - used for limit, used in _cgroup_limits())])


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage in bytes of each control group that limits our memory."""
    for folder in _cgroup_folders():
        for limit_file, use_file, reclaimable in _CGROUP_MEMORY:
            try:
                limit = int((folder / limit_file).read_text())  # ValueError: "max"
                used = int((folder / use_file).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):
                continue
            cached = dict(line.split(" ", 1) for line in lines).get(reclaimable, "0")
            yield limit, max(0, used - int(cached))


def _cgroup_folders() -> Iterator[Path]:
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    paths = {}  # by version
    for line in own:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup2" if not controllers else "cgroup"] = path
    for mount in read_mounts():
        kind, point = mount.file_system, Path(mount.point)
        if kind not in paths or (kind == "cgroup" and "memory" not in mount.super_options):
            continue
        # In a container, the group itself can be the root of the mount.
        inside = Path(os.path.relpath(paths[kind], mount.root))
        folder = point if ".." in inside.parts else point / inside
        while True:
            yield folder
            if folder == point:
                break
            folder = folder.parent


def is_on_root(path: Path) -> bool:
    """Return whether files at `path` are on the root file system or, because a directory of another
    file system is mounted there, may be on the root file system of a container's host."""
    place = existing(path)
    if place.stat().st_dev == os.stat("/").st_dev:
        return True
    mount = mount_of(os.path.realpath(place), read_mounts())
    # The mount shows a directory of a larger file system, perhaps of the host's root.
    return mount is not None and mount.root != "/" and mount.file_system not in _HAS_SUBVOLUMES


def existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.is_dir())


def space_bytes(path: Path) -> tuple[int, int]:
    """Return the free bytes on `path`'s file system, and the bytes that a pool must leave free."""
    place = existing(path)
    status = os.statvfs(place)
    size = status.f_blocks * status.f_frsize
    least = _FREE_BYTES_MIN_ROOT if is_on_root(place) else _FREE_BYTES_MIN
    kept = min(max(size // _FREE_SHARE, least), _FREE_BYTES_MAX, size // _FREE_SHARE_MAX)
    return status.f_bavail * status.f_frsize, max(kept, _FREE_BYTES_LEAST)
