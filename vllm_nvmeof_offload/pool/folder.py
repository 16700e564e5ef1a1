# SPDX-License-Identifier: Apache-2.0
"""Directories and files under a target that only their owner can have written.

A user who owns a target, or may rename entries in it, can replace our files and directories at any
time, even by links or pipes. Checksums do not prove who wrote the bytes. So every file is opened by
`open_private`, which checks the owner and never waits. A running server opens files through a
`Folder`: the descriptor of a directory that was found and checked once, whatever its path leads to
later. Paths are resolved only at a start, by a prober (`targets.prober`), and by the follower at
each discovery, because the follower must not prevent an unmount.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from pathlib import Path

from vllm_nvmeof_offload import logger

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """A directory that is held open while the object is referenced. `path` is for display. `place`
    leads through the descriptor, as openat(2) does, and is valid only while the object exists."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path = fd, path
        self.place = Path(f"/proc/self/fd/{fd}")
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def nowhere(cls, path: Path) -> Folder:
        """Return a folder that leads nowhere until `renew` is called."""
        return cls(os.open("/dev/null", os.O_PATH | os.O_CLOEXEC), path)

    @classmethod
    def open(cls, path: Path, place: Path | None = None) -> Folder:
        """Open the directory `path`, or `place`, which leads to it through another folder. Raises
        OSError if it is not a directory, belongs to another user, or is writable by others."""
        folder = cls(os.open(place or path, _DIRECTORY), path)
        _check(folder.fd, os.fstat(folder.fd), path, None)
        return folder

    def renew(self) -> None:
        """Reopen the path, so that `place` leads to the directory found now. Raises as `open`."""
        found = Folder.open(self.path)
        os.dup2(found.fd, self.fd, inheritable=False)

    def leave(self) -> None:
        """Close the directory until `renew` reopens it."""
        nowhere = Folder.nowhere(self.path)
        os.dup2(nowhere.fd, self.fd, inheritable=False)


def make_directory(path: Path) -> None:
    """Create `path` (0700) if it does not exist; narrow a wider mode, with a warning. Raises
    OSError if it cannot be created, is a link, or belongs to another user."""
    try:
        path.mkdir(0o700)
    except FileExistsError:
        fd = os.open(path, _DIRECTORY)
        try:
            _check(fd, os.fstat(fd), path, 0o700)
        finally:
            os.close(fd)


def open_private(path: Path, flags: int) -> int:
    """Open a file that only its owner can write; `O_CREAT` creates it with mode 0600. A wider mode
    is narrowed, with a warning, unless the file is opened only for reading. The file must belong to
    this user; if this user is root, it may also belong to the directory's owner. Never waits for
    another process. Raises OSError, with EPERM for a pipe or another user's file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EPERM
            raise OSError(number, "not a regular file", _shown(path))
        owner = os.stat(path.parent).st_uid if os.geteuid() == 0 else None
        _check(fd, status, path, 0o600 if flags & os.O_ACCMODE else None, owner)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(
    fd: int, status: os.stat_result, path: Path, mode: int | None, owner: int | None = None
) -> None:
    """Check the owner, and narrow the mode to `mode`. If `mode` is None, change nothing and refuse
    a file that others can write. `owner` may own the file, in addition to this user."""
    uid, found = status.st_uid, stat.S_IMODE(status.st_mode)
    if uid not in (os.geteuid(), owner):
        why = f"belongs to uid {uid}, not to uid {os.geteuid()}: chown or remove it"
        raise PermissionError(errno.EPERM, why, _shown(path))
    if mode is None and found & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"other users can write it (mode {found:o})"
        raise PermissionError(errno.EPERM, why, _shown(path))
    if mode is not None and found & ~mode:
        logger.warning("%s has mode %o; KV cache is private: setting %o", _shown(path), found, mode)
        os.fchmod(fd, found & mode)


def _shown(path: Path) -> str:
    """Resolve a path for display, because it may lead through a descriptor."""
    return os.path.join(os.path.realpath(path.parent), path.name)
