# SPDX-License-Identifier: Apache-2.0
"""Removes pools: only files of ours, only where no live server holds them."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.engines import OWNER_FILE
from vllm_nvmeof_offload.pool.holders import hold
from vllm_nvmeof_offload.pool.superblock import is_superblock
from vllm_nvmeof_offload.pool.survey import disk_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.survey import RankDirectory

__all__ = ["Removed", "check_ours", "check_ours_at", "remove"]

#: In the order of removal: without its superblock a directory is empty to the next start. The
#: lock goes last, and only with the directory.
_FILES = ("superblock", "superblock.new", "table", "slab", "probe")
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Removed:
    """freed_bytes: what the deleted files had allocated. left: what is not ours, and stays."""

    path: Path
    freed_bytes: int
    left: tuple[str, ...]


def check_ours(directories: Sequence[RankDirectory]) -> None:
    """`check_ours_at` each of `directories`."""
    for directory in directories:
        check_ours_at(directory.path)


def check_ours_at(path: Path) -> None:
    """Refuse a directory that no superblock of ours vouches for.

    Raises:
        PoolError: it has neither our superblock (of any version, damaged or not) nor is empty.
    """
    try:
        vouched = is_superblock(path / "superblock") or is_superblock(path / "superblock.new")
    except OSError as error:
        raise PoolError(f"cannot read {path / 'superblock'}: {error}") from error
    if not vouched and any(_size(path / name) for name in _FILES):
        raise PoolError(
            f"{path} has no superblock of this program, so nothing proves that its files are "
            f"ours: look at them, and delete the directory by hand"
        )


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def remove(directories: Sequence[RankDirectory]) -> list[Removed]:
    """Delete `directories`, and the directories above that this leaves empty.

    Nothing is deleted unless all are ours and none is held.

    Raises:
        PoolLockedError: a live process holds one; it is named.
        PoolError: `check_ours`, or a file cannot be deleted.
    """
    check_ours(directories)  # before a lock file is made where it should not be
    removed = []
    with hold([directory.path for directory in directories]):
        for directory in directories:
            try:
                removed.append(_remove(directory.path))
            except OSError as error:
                raise PoolError(f"cannot remove {directory.path}: {error}") from error
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
        # We hold the lock; who opened it just now sees that it has lost its name.
        (path / _LOCK).unlink()
        path.rmdir()
    return Removed(path, freed, tuple(left))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _remove_parents(directory: RankDirectory) -> None:
    """Engine and keyspace directories, if nothing else is in them."""
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
