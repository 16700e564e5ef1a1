# SPDX-License-Identifier: Apache-2.0
"""The claim of one rank's directories, `target/keyspace/engine-K/rank-R`, on every target."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError, PoolFormatError, PoolLockedError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool import ending
from vllm_nvmeof_offload.pool.engines import (
    held_by_another,
    one_at_a_time,
    read_owner,
    write_owner,
)
from vllm_nvmeof_offload.pool.heartbeat import ServerHeartbeat
from vllm_nvmeof_offload.pool.lock import DirectoryLock, local_holder_error
from vllm_nvmeof_offload.pool.silence import Silence, UnsettledError
from vllm_nvmeof_offload.pool.slab import make_directory, open_private
from vllm_nvmeof_offload.pool.superblock import Superblock, read_superblock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.keyspace import Keyspace
    from vllm_nvmeof_offload.pool.spec import PoolSpec

__all__ = ["ENGINES_MAX", "Claim"]

logger = logging.getLogger(LOGGER_NAME)

#: Engines of one keyspace on one set of targets, each with its own directories.
ENGINES_MAX = 64
_POLL_S = 0.1


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
    def make(cls, spec: PoolSpec) -> Claim:
        """Claim engine `spec.engine_index`, or the first one that no other engine holds.

        One that is held by a process which was killed and is ending is waited for.

        Raises:
            PoolLockedError: a live process holds it, here (by index) or on another host.
            PoolError: a directory cannot be made or locked.
        """
        spaces = [_make_keyspace(target, spec.keyspace) for target in spec.targets]
        deadline = time.monotonic() + ending.ENDING_WAIT_S_MAX
        told = False
        silence = Silence()
        while True:
            try:
                with one_at_a_time(spaces):
                    waits = time.monotonic() < deadline
                    return cls._first_free(spec, spaces, silence, waits=waits)
            except UnsettledError:
                pass  # other ranks may claim theirs meanwhile
            except _EndingError as error:
                if not told:
                    logger.warning("%s; waiting %.0f s at most", error, ending.ENDING_WAIT_S_MAX)
                told = True
            except OSError as error:
                raise PoolError(f"cannot claim a directory in {spaces[0]}: {error}") from error
            time.sleep(_POLL_S)

    @classmethod
    def _first_free(
        cls, spec: PoolSpec, spaces: Sequence[Path], silence: Silence, *, waits: bool
    ) -> Claim:
        """waits: stop at one whose holder is ending, by `_EndingError`, instead of passing it."""
        for index in _candidates(spec, spaces[0]):
            engines = [space / f"engine-{index}" for space in spaces]
            which = "rank-*" if spec.engine else f"rank-{spec.rank}"
            silence.watch(_locks(engines, which))
            if spec.engine and any(
                held_by_another(one, spec.engine, spec.rank, silence) for one in engines
            ):
                _stop_at_ending(engines, waits=waits)
                continue
            directories = tuple(_make_rank(one, spec.rank) for one in engines)
            locks, busy = _lock_all(directories, silence)
            if locks is not None:
                _name_owner(engines, spec.engine, locks)
                return cls(index, directories, locks)
            assert busy is not None
            _stop_at_ending(engines, waits=waits)
            if spec.engine_index is not None:
                raise local_holder_error(busy)
        raise PoolLockedError(
            f"all {ENGINES_MAX} engine directories in {spaces[0].parent} are held by live processes"
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


def _locks(engines: Sequence[Path], ranks: str) -> list[Path]:
    """Lock files of `ranks`, a name or a pattern; no directory is listed for a name."""
    if "*" not in ranks:
        return [one / ranks / "lock" for one in engines]
    return [lock for one in engines for lock in sorted(one.glob(f"{ranks}/lock"))]


class _EndingError(Exception):
    """A directory is worth waiting for."""


def _stop_at_ending(engines: Sequence[Path], *, waits: bool) -> None:
    rank = ending.ending_holder(engines) if waits else None
    if rank is not None:
        raise _EndingError(f"{rank} is held by a process that was killed and has not ended yet")


def _candidates(spec: PoolSpec, space: Path) -> Iterable[int]:
    """Engine indices in the order to try: first where other ranks of this engine are."""
    if spec.engine_index is not None:
        return [spec.engine_index]
    ours = []
    if spec.engine:
        every = range(ENGINES_MAX)
        ours = [i for i in every if read_owner(space / f"engine-{i}") == spec.engine]
    return [*ours, *range(spec.replica, ENGINES_MAX, spec.replicas)]


def _make_keyspace(target: Path, keyspace: Keyspace) -> Path:
    space = target / keyspace.digest
    try:
        target.mkdir(0o700, parents=True, exist_ok=True)
        make_directory(space)
        _name_keyspace(space, keyspace)
    except OSError as error:
        raise _unusable(target, error) from error
    return space


def _make_rank(engine: Path, rank: int) -> Path:
    directory = engine / f"rank-{rank}"
    try:
        make_directory(engine)
        make_directory(directory)
    except OSError as error:
        raise _unusable(engine.parents[1], error) from error
    return directory


def _unusable(target: Path, error: OSError) -> PoolError:
    return PoolError(
        f"target {target} cannot be used: {error}; choose a directory that is writable"
    )


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


def _name_owner(engines: Sequence[Path], name: str, locks: Sequence[DirectoryLock]) -> None:
    """Leave the engine's name, if it has one, for the claims of its other ranks."""
    try:
        for engine in engines if name else ():
            if read_owner(engine) != name:
                write_owner(engine, name)
    except OSError:
        for lock in locks:
            lock.release()
        raise


def _lock_all(
    directories: Sequence[Path], silence: Silence
) -> tuple[list[DirectoryLock] | None, Path | None]:
    """Lock all; or give back what was taken and return the lock file that is busy."""
    locks: list[DirectoryLock] = []
    try:
        for directory in directories:
            lock = DirectoryLock.claim(directory / "lock", silence=silence)
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
