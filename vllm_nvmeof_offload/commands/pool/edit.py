# SPDX-License-Identifier: Apache-2.0
"""Edits pools on disk that no live server holds: removes them, or prefills their slabs.

Removal deletes only files of ours. Prefill writes zeros where a slab was never written, because
the first write into preallocated space also changes the file system's extents and runs at about
half the speed of later ones. A hole reads as zeros, so no readable byte changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_nvmeof_offload.commands.pool.offline import OfflineRank, Progress, held_survey, open_rank
from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.format import is_superblock
from vllm_nvmeof_offload.pool.ownership import OWNER_FILE, hold
from vllm_nvmeof_offload.pool.recovery import written_slots
from vllm_nvmeof_offload.pool.survey import disk_bytes
from vllm_nvmeof_offload.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.survey import RankDirectory, Surveyed

#: In the order of removal: without its superblock a directory is empty to the next start. The
#: lock is removed last, and only with the directory.
_FILES = ("superblock", "superblock.new", "table", "slab", "probe")
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Removed:
    """freed_bytes: allocated by the deleted files. left: names of files that are not ours."""

    directory: str
    freed_bytes: int
    left: tuple[str, ...]


def check_ours(paths: Iterable[Path]) -> None:
    """Raise PoolError for a rank directory that has files but no superblock of this program.

    A superblock of any version proves that the files are ours, even if it is damaged.
    """
    for path in paths:
        try:
            proven = is_superblock(path / "superblock") or is_superblock(path / "superblock.new")
        except OSError as error:
            raise PoolError(f"cannot read {path / 'superblock'}: {error}") from error
        if not proven and any(_size(path / name) for name in _FILES):
            raise PoolError(
                f"{path} has no superblock of this program, so nothing proves that its files are "
                f"ours: look at them, and delete the directory by hand"
            )


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_size
    return 0


def remove(directories: Sequence[RankDirectory]) -> list[Removed]:
    """Delete `directories`, and the directories above that are empty afterwards.

    Nothing is deleted unless all are ours and none is held.

    Raises:
        PoolLockedError: a live process holds one; it is named.
        PoolError: `check_ours`, or a file cannot be deleted.
    """
    paths = [directory.path for directory in directories]
    check_ours(paths)  # before a lock file is made where it should not be
    removed = []
    with hold(paths):
        for path in paths:
            try:
                removed.append(_remove(path))
            except OSError as error:
                raise PoolError(f"cannot remove {path}: {error}") from error
    for directory in directories:
        _remove_parents(directory)
    return removed


def _remove(path: Path) -> Removed:
    freed = disk_bytes(path, _FILES.__contains__)
    for name in _FILES:
        if _is_file(path / name):
            (path / name).unlink()
    left = sorted(set(os.listdir(path)) - {_LOCK})
    if not left:
        # We hold the lock; a process that opened it just now sees that it has lost its name.
        (path / _LOCK).unlink()
        path.rmdir()
    return Removed(str(path), freed, tuple(left))


def _is_file(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def _remove_parents(directory: RankDirectory) -> None:
    """Delete the engine and keyspace directories if nothing else is in them."""
    engine, space = directory.path.parents[:2]
    facts = space / "keyspace.json"
    owner = engine / OWNER_FILE
    with contextlib.suppress(OSError):
        if os.listdir(engine) == [owner.name] and _is_file(owner):
            owner.unlink()
        engine.rmdir()
        if os.listdir(space) == [facts.name] and _is_file(facts):
            facts.unlink()
        space.rmdir()


_WRITE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Prefilled:
    """slots: of this directory. filled: how many of them this command wrote with zeros."""

    directory: str
    slots: int
    filled: int
    written_bytes: int


def prefill(
    directories: Sequence[RankDirectory], on_progress: Progress | None = None
) -> list[Prefilled]:
    """Fill the never-written slots of `directories`; on_progress counts bytes.

    Raises:
        PoolLockedError: a live process holds one of them.
        PoolError: one has no usable superblock, or cannot be written (such as no space).
    """
    with held_survey(directories, writable=True) as all_surveyed:
        return [_prefill(one, on_progress) for one in all_surveyed]


def _prefill(surveyed: Surveyed, on_progress: Progress | None) -> Prefilled:
    with open_rank(surveyed) as rank:
        slots = min(rank.superblock.slots, rank.slab_slots)
        indices = np.arange(slots)
        holes = np.setdiff1d(
            indices, written_slots(rank.slab_fd, indices, rank.superblock.slot_bytes)
        ).tolist()
        written_bytes = len(holes) * rank.superblock.slot_bytes
        try:
            _fill(rank, holes, on_progress)
        except OSError as error:
            raise PoolError(f"cannot fill {surveyed.path / 'slab'}: {error}") from error
    return Prefilled(str(surveyed.path), slots, len(holes), written_bytes)


def _fill(rank: OfflineRank, holes: Sequence[int], on_progress: Progress | None) -> None:
    slot_bytes = rank.superblock.slot_bytes
    zeros = memoryview(mmap.mmap(-1, min(slot_bytes, _WRITE_BYTES)))
    path, flags = rank.surveyed.path / "slab", os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        fd = os.open(path, flags)
    try:
        for done, index in enumerate(holes, 1):
            position, end = index * slot_bytes, (index + 1) * slot_bytes
            while position < end:
                position += _write_some(fd, zeros[: end - position], position)
            if on_progress is not None:
                on_progress(rank.surveyed.directory, done * slot_bytes, len(holes) * slot_bytes)
        if holes:
            os.fsync(fd)
    finally:
        os.close(fd)


def _write_some(fd: int, zeros: memoryview, position: int) -> int:
    """Write some of `zeros`, buffered from now on if O_DIRECT is refused; return how many bytes."""
    try:
        count = os.pwritev(fd, [zeros], position)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # without O_DIRECT
        count = os.pwritev(fd, [zeros], position)
    if count == 0:
        raise OSError(errno.EIO, "no progress")
    return count
