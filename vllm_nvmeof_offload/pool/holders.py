# SPDX-License-Identifier: Apache-2.0
"""Who holds a rank directory, asked from outside; and holding some of them for a repair."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.pool.lock import (
    HEARTBEAT_STALE_S,
    DirectoryLock,
    Heartbeat,
    Holder,
    read_holder,
)
from vllm_nvmeof_offload.pool.silence import Silence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["LockState", "give_to_owner", "hold", "probe_lock"]


@dataclass(frozen=True, slots=True)
class LockState:
    """kind: "none" (given up in order), "stale" (its process is gone), "old" or "live".

    "old": it is on another host, and its heartbeat is old by this host's clock. It is dead, or
    the clocks are apart: a claim waits for another heartbeat to find out.

    holder: None where the lock file names nobody who can be read. heartbeat_age_s: seconds.
    """

    kind: str
    holder: Holder | None = None
    heartbeat_age_s: float | None = None

    @property
    def live(self) -> bool:
        return self.kind == "live"

    @property
    def may_live(self) -> bool:
        """True also where only the clocks may be apart."""
        return self.kind in ("live", "old")

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        if self.holder is None:
            return f"{self.kind}: another process on this host"
        return f"{self.kind}: pid {self.holder.pid} on host {self.holder.host}"


def probe_lock(directory: Path) -> LockState:
    """Say who holds `directory`, writing nothing.

    Raises:
        OSError: the lock file cannot be read.
    """
    path = directory / "lock"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return LockState("none")
    try:
        if not os.pread(fd, 4096, 0).strip(b"\0 \n"):
            return LockState("none")
        holder = read_holder(path)
        age_s = time.time() - holder.heartbeat if holder is not None else None
        if holder is not None and not holder.shares_kernel_with(Holder.myself()):
            assert age_s is not None
            return LockState("live" if age_s < HEARTBEAT_STALE_S else "old", holder, age_s)
        # A shared flock, given back at once. A server that starts in these microseconds would
        # see the directory as taken; the record is looked at first, so that this can only
        # happen where a killed server left its name.
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return LockState("live", holder, age_s)
        return LockState("stale", holder, age_s)
    finally:
        os.close(fd)


@contextlib.contextmanager
def hold(directories: Sequence[Path]) -> Iterator[None]:
    """Hold all of `directories`, heartbeat included, so that no server can start on them.

    Raises:
        PoolLockedError: a live process holds one; it is named. None is held then.
        PoolError: a lock file cannot be opened or written.
    """
    with contextlib.ExitStack() as stack:
        locks = []
        silence = Silence()
        silence.watch(directory / "lock" for directory in directories)
        for directory in directories:
            try:
                lock = silence.settled(partial(DirectoryLock.claim, directory / "lock", None))
            except OSError as error:
                raise PoolError(f"cannot lock {directory / 'lock'}: {error}") from error
            if lock is None:
                raise PoolLockedError(
                    f"{directory} is in use ({probe_lock(directory)}): stop that server first"
                )
            stack.callback(lock.release)
            locks.append(lock)
            give_to_owner(directory / "lock")
        heartbeat = Heartbeat([lock.beat for lock in locks])
        # The callbacks run in the reverse order: no beat may follow a release.
        stack.callback(heartbeat.stop)
        yield


def give_to_owner(path: Path) -> None:
    """Let a file that root has made anew belong to its directory's owner, who must open it."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        with contextlib.suppress(OSError):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
