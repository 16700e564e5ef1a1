# SPDX-License-Identifier: Apache-2.0
"""The lock of one rank directory: an flock on its empty file `lock`.

On one kernel the flock decides which process may write the directory. It ends with its process,
even after SIGKILL, so a dead process's lock file keeps no other process out. Other hosts may not
see the flock. So the directory also has a lease, which names its owner (`lease`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import LEASE_FILE, LOCK_FILE

#: The time that a start waits for a killed process that is still blocked in the kernel.
ENDING_WAIT_S_MAX = 30.0
_SIGKILL_BIT = 1 << 8


class FileId(NamedTuple):
    """The identity of a file, because its path may lead to another file later."""

    device: int
    inode: int


def try_flock(fd: int, operation: int) -> bool:
    """Lock `fd` (LOCK_EX or LOCK_SH). Returns False if another process holds the lock."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


@dataclass(slots=True, eq=False)
class DirectoryLock:
    """A directory's lock file, open and locked from `claim` until `release` or `abandon`.

    `lease` is the directory's lease file at the time of the claim.
    """

    fd: int
    directory: Path
    lease: FileId

    @classmethod
    def claim(cls, directory: Path, *, despite_flock: bool = False) -> DirectoryLock | None:
        """Lock the directory. Returns None if another process holds the lock. Creates the lock and
        lease files. With `despite_flock` another process's flock is ignored, because the lease has
        shown that it no longer owns the region. Raises OSError if a file cannot be opened."""
        path = directory / LOCK_FILE
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            if not try_flock(fd, fcntl.LOCK_EX) and not despite_flock:
                os.close(fd)
                return None
            # `pool rm` may have deleted the file between open and flock. A lock on a deleted
            # file keeps no process out.
            if not os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                raise OSError(errno.ESTALE, "the pool was removed just now", str(path))
            lease = open_private(directory / LEASE_FILE, os.O_RDWR | os.O_CREAT)
            status = os.fstat(lease)
            os.close(lease)
            return cls(fd, directory, FileId(status.st_dev, status.st_ino))
        except BaseException:
            os.close(fd)
            raise

    def abandon(self) -> None:
        """Close the lock file of a lost target."""
        fd, self.fd = self.fd, -1
        with contextlib.suppress(OSError):  # a dead network mount; the descriptor is closed anyway
            os.close(fd)

    def release(self) -> None:
        """Unlock. An error does not matter: the flock ends with this process."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                # A prober that is starting or exiting also has the descriptor.
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            self.abandon()


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the flock, as far as this kernel knows. Raises OSError."""
    try:
        fd = open_private(directory / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Take a shared lock and release it at once. A server that starts in these microseconds
        # would see the directory as taken.
        if not try_flock(fd, fcntl.LOCK_SH):
            return True
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    finally:
        os.close(fd)


def is_ending(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether process `pid` exists, but was killed or has lost its first thread.

    In a container `pid` may be the number of another process. A claim then waits once in
    vain.
    """
    try:
        # The name of a process may contain any bytes.
        status = (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if facts.get("State", "").strip()[:1] in ("Z", "X"):
        return True
    pending = int(facts.get("SigPnd", "0"), 16) | int(facts.get("ShdPnd", "0"), 16)
    return bool(pending & _SIGKILL_BIT)
