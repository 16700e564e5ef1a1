# SPDX-License-Identifier: Apache-2.0
"""One rank directory on one target: its files, modes, preallocation and O_DIRECT probe.

Mechanism alone: what the directory should hold is `pool.Pool`'s decision.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES
from vllm_nvmeof_offload.units import KIB, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Slab", "make_directory", "probe_o_direct", "read_o_direct"]

logger = logging.getLogger(LOGGER_NAME)

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
#: Left free on a full file system for superblocks and directories.
_SPARE_BYTES = 64 * KIB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


def make_directory(path: Path) -> None:
    """Make `path` (0700) if it is not there; tighten it, with a warning, if it is wider.

    Raises:
        OSError: it cannot be made, or is a link, or belongs to another user: who owns it could
            put chunks of their own into it, and checksums do not tell by whom bytes were written.
    """
    try:
        path.mkdir(0o700)
    except FileExistsError:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _tighten(fd, path, 0o700)
        finally:
            os.close(fd)


def _tighten(fd: int, path: Path, mode: int) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        why = f"belongs to uid {status.st_uid}, this runs as uid {os.geteuid()}: chown or remove it"
        raise PermissionError(errno.EPERM, why, str(path))
    found = stat.S_IMODE(status.st_mode)
    if found & ~mode:
        logger.warning("%s has mode %o; KV cache is private: setting %o", path, found, mode)
        os.fchmod(fd, found & mode)


def open_private(path: Path, flags: int) -> int:
    """Open a file of ours (created 0600, tightened to it). Returns the descriptor."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _tighten(fd, path, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Slab:
    """Slab and table files of one rank directory. Buffered descriptors until `use_direct`."""

    def __init__(self, directory: Path, fds: tuple[int, int] | None = None) -> None:
        """Open both files, creating them. OSError if they cannot be opened.

        fds: of slab and table, opened by somebody else; -1: there are none.
        """
        self.directory = directory
        self.direct = False
        #: Whole entries that the table had when it was opened: fewer than there should be is
        #: damage, which preallocation would hide behind zeros.
        self.table_slots_found = 0
        if fds is not None:
            self._buffered_fd, self.table_fd = fds
            self.fd = self._buffered_fd
            return
        self._buffered_fd = open_private(directory / "slab", os.O_RDWR)
        try:
            self.table_fd = open_private(directory / "table", os.O_RDWR)
        except BaseException:
            os.close(self._buffered_fd)
            raise
        self.fd = self._buffered_fd
        self.table_slots_found = os.fstat(self.table_fd).st_size // ENTRY_BYTES

    @property
    def is_open(self) -> bool:
        return self.fd >= 0

    @property
    def header_fd(self) -> int:
        """Buffered, for reading header pages into any memory."""
        return self._buffered_fd

    def wipe(self) -> None:
        """Forget everything: after this no old header and no old entry can be read."""
        for name in ("superblock", "superblock.new"):
            (self.directory / name).unlink(missing_ok=True)
        os.ftruncate(self.table_fd, 0)
        os.ftruncate(self._buffered_fd, 0)

    def allocate(self, slots: int, slot_bytes: int) -> int:
        """Reserve space for `slots` slots; return for how many there is space.

        Never cuts what is there: `cut` does that, once all targets are known.

        Raises:
            OSError: for another reason than a lack of space.
        """
        slab_bytes = os.fstat(self._buffered_fd).st_size
        table_bytes = os.fstat(self.table_fd).st_size
        # What an earlier process had reserved is not given up because the disk is full now.
        present = min(slab_bytes // slot_bytes, table_bytes // ENTRY_BYTES)
        count = slots
        while count > 0:
            try:
                reserve(self.table_fd, count * ENTRY_BYTES)
                reserve(self._buffered_fd, count * slot_bytes)
                if self._free_bytes() >= _SPARE_BYTES or count <= present:
                    return count
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                if count <= present:
                    present = 0  # it was sparse
            # What a failed reservation took goes back before the free space is asked for.
            os.ftruncate(self._buffered_fd, slab_bytes)
            os.ftruncate(self.table_fd, table_bytes)
            held = os.fstat(self._buffered_fd).st_blocks * 512
            fits = (held + self._free_bytes() - _SPARE_BYTES) // (slot_bytes + ENTRY_BYTES)
            count = max(min(fits, count - max(1, count // 16)), min(present, count - 1))
        return 0

    def _free_bytes(self) -> int:
        status = os.fstatvfs(self._buffered_fd)
        return status.f_bavail * status.f_frsize

    def cut(self, slots: int, slot_bytes: int) -> None:
        """Give both files exactly the length of `slots` slots."""
        os.ftruncate(self.table_fd, slots * ENTRY_BYTES)
        os.ftruncate(self._buffered_fd, slots * slot_bytes)

    def sync(self) -> None:
        os.fsync(self.table_fd)
        os.fsync(self._buffered_fd)

    def use_direct(self) -> None:
        """Open the slab for O_DIRECT. OSError if the file system refuses."""
        flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(self.directory / "slab", flags)
        self.direct = True

    def close(self) -> None:
        """Close all files, also where a dead mount answers with an error."""
        for fd in {self.fd, self._buffered_fd, self.table_fd}:
            with contextlib.suppress(OSError):
                os.close(fd)


def reserve(fd: int, size: int) -> None:
    """Allocate the file's first `size` bytes, keeping what is there.

    Raw fallocate(2): glibc's posix_fallocate would write zeros, for minutes, where the file
    system has none. There the file is made sparse instead, and ENOSPC can come from a write.
    """
    while _libc.fallocate(fd, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in _NO_FALLOCATE:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def read_o_direct(path: Path) -> None:
    """Read one aligned page of a file with O_DIRECT. OSError if it does not work there."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
            _expect_page(lambda: os.preadv(fd, [view], 0))
    finally:
        os.close(fd)


def probe_o_direct(directory: Path) -> None:
    """Write and read one aligned page with O_DIRECT in `directory`.

    Raises:
        OSError: it does not work there (EINVAL, most often).
        PoolError: it reads something other than what was written.
    """
    path = directory / "probe"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
    page = mmap.mmap(-1, 2 * PAGE_BYTES)
    wanted = os.urandom(PAGE_BYTES)
    page[:PAGE_BYTES] = wanted
    view = memoryview(page)
    fd = -1
    try:
        fd = os.open(path, flags, 0o600)
        _expect_page(lambda: os.pwritev(fd, [view[:PAGE_BYTES]], PAGE_BYTES))
        _expect_page(lambda: os.preadv(fd, [view[PAGE_BYTES:]], PAGE_BYTES))
        if view[PAGE_BYTES:] != wanted:
            raise PoolError(f"{directory}: O_DIRECT reads back other bytes than were written")
    finally:
        if fd >= 0:
            os.close(fd)
        path.unlink(missing_ok=True)
        view.release()
        page.close()


def _expect_page(transfer: Callable[[], int]) -> None:
    if transfer() != PAGE_BYTES:
        raise OSError(errno.EIO, "short O_DIRECT transfer")
