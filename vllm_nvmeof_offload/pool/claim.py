# SPDX-License-Identifier: Apache-2.0
"""The claim of one rank's directories, `target/keyspace/engine-K/rank-R`, on every target."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError, PoolFormatError, PoolLockedError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.heartbeat import ServerHeartbeat
from vllm_nvmeof_offload.pool.lock import DirectoryLock, local_holder_error
from vllm_nvmeof_offload.pool.slab import make_directory, open_private
from vllm_nvmeof_offload.pool.superblock import Superblock, read_superblock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.keyspace import Keyspace

__all__ = ["ENGINES_MAX", "Claim"]

logger = logging.getLogger(LOGGER_NAME)

#: Engines of one keyspace on one set of targets, each with its own directories.
ENGINES_MAX = 64


class Claim:
    """Locked directories, one a target, in the order of the targets; a heartbeat keeps them."""

    def __init__(
        self, engine_index: int, directories: tuple[Path, ...], locks: list[DirectoryLock]
    ) -> None:
        self.engine_index = engine_index
        self.directories = directories
        #: By target; None: it is gone, and its lock with it.
        self._locks: list[DirectoryLock | None] = [*locks]
        self._heartbeat = ServerHeartbeat(lambda: filter(None, self._locks))

    @classmethod
    def make(
        cls, targets: Sequence[Path], keyspace: Keyspace, rank: int, engine_index: int | None
    ) -> Claim:
        """Claim engine `engine_index`, or the first one that nobody on this machine holds.

        Raises:
            PoolLockedError: a live process holds it, here (by index) or on another host.
            PoolError: a directory cannot be made or locked.
        """
        candidates = range(ENGINES_MAX) if engine_index is None else [engine_index]
        for index in candidates:
            directories = tuple(
                _make_directories(target, keyspace, index, rank) for target in targets
            )
            locks, busy = _lock_all(directories)
            if locks is not None:
                return cls(index, directories, locks)
            assert busy is not None
            if engine_index is not None:
                raise local_holder_error(busy)
        raise PoolLockedError(
            f"all {ENGINES_MAX} engine directories in {targets[0]} are held by live processes"
        )

    def read_superblock(self, index: int) -> Superblock | None:
        """The superblock on target `index`; None (with a warning) if it is not usable."""
        directory = self.directories[index]
        try:
            return read_superblock(directory)
        except PoolFormatError as error:
            logger.warning("%s/superblock: %s; starting empty", directory, error)
            return None

    def device(self, index: int) -> int | None:
        """st_dev of what target `index` is locked on; None: it is gone."""
        lock = self._locks[index]
        return None if lock is None else lock.file.device

    def exchange_lock(self, index: int, lock: DirectoryLock | None) -> DirectoryLock | None:
        """Put a new lock in the place of target `index`'s, which is returned."""
        old, self._locks[index] = self._locks[index], lock
        return old

    def release(self, keep_descriptors: bool = False) -> None:
        """Let go. `keep_descriptors`: something hangs in the kernel; the flock then stays."""
        self._heartbeat.stop()
        if not keep_descriptors:
            for lock in filter(None, self._locks):
                lock.release()


def _make_directories(target: Path, keyspace: Keyspace, engine: int, rank: int) -> Path:
    try:
        target.mkdir(0o700, parents=True, exist_ok=True)
        space = target / keyspace.digest
        make_directory(space)
        _name_keyspace(space, keyspace)
        make_directory(space / f"engine-{engine}")
        directory = space / f"engine-{engine}" / f"rank-{rank}"
        make_directory(directory)
    except OSError as error:
        raise PoolError(
            f"target {target} cannot be used: {error}; choose a directory that is writable"
        ) from error
    return directory


def _name_keyspace(space: Path, keyspace: Keyspace) -> None:
    """Leave the facts beside the digest, for people and for `pool du`; nobody relies on it."""
    path = space / "keyspace.json"
    if path.exists():
        return
    with contextlib.suppress(OSError):
        fd = open_private(path, os.O_WRONLY)
        try:
            os.write(fd, keyspace.canonical.encode() + b"\n")
        finally:
            os.close(fd)


def _lock_all(directories: Sequence[Path]) -> tuple[list[DirectoryLock] | None, Path | None]:
    """Lock all; or give back what was taken and return the lock file that is busy."""
    locks: list[DirectoryLock] = []
    try:
        for directory in directories:
            lock = DirectoryLock.claim(directory / "lock")
            if lock is None:
                for taken in locks:
                    taken.release()
                return None, directory / "lock"
            locks.append(lock)
    except BaseException as error:
        for taken in locks:
            taken.release()
        if isinstance(error, OSError):
            raise PoolError(f"cannot lock {directory / 'lock'}: {error}") from error
        raise
    return locks, None
