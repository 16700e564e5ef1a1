# SPDX-License-Identifier: Apache-2.0
"""The slab, table and log of one rank directory: opening, modes, preallocation, O_DIRECT."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.limits import space_bytes
from vllm_nvmeof_offload.pool.folder import Folder, open_private
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    LOG_FILE,
    SESSIONS_FILE,
    SESSIONS_TEMPORARY,
    SLAB_FILE,
    SUPERBLOCK_FILE,
    SUPERBLOCK_TEMPORARY,
    TABLE_FILE,
)
from vllm_nvmeof_offload.units import PAGE_BYTES

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


class Slab:
    """The slab, table and log of one rank directory. I/O is buffered until `use_direct`."""

    def __init__(
        self,
        directory: Path,
        fds: tuple[int, int, int, int] | None = None,
        direct: bool = False,
        folder: Folder | None = None,
    ) -> None:
        """Open or create all files, or use `fds`: slab, buffered slab, table and log. The slab of a
        lost target has no files: its `fds` are -1, and it has no folder."""
        self.directory = directory
        #: `directory`, held open. All files are opened through it.
        self.folder = Folder.open(directory) if fds is None else folder
        self.direct = direct
        #: The number of complete entries in the table when it was opened. A table that is too short
        #: is damaged, but preallocation would hide that by adding zeros.
        self.table_slots_found = 0
        #: `buffered_fd` reads header pages into any memory; `fd` may need aligned memory.
        if fds is not None:
            self.fd, self.buffered_fd, self.table_fd, self.log_fd = fds
            return
        with contextlib.ExitStack() as undo:

            def open_file(name: str) -> int:
                fd = open_private(self.place / name, os.O_RDWR | os.O_CREAT)
                undo.callback(os.close, fd)
                return fd

            self.fd = self.buffered_fd = open_file(SLAB_FILE)
            self.table_fd, self.log_fd = open_file(TABLE_FILE), open_file(LOG_FILE)
            undo.pop_all()
        self.table_slots_found = os.fstat(self.table_fd).st_size // ENTRY_BYTES

    @property
    def place(self) -> Path:
        """The path through which the directory's files are opened."""
        assert self.folder is not None
        return self.folder.place

    @property
    def is_open(self) -> bool:
        return self.fd >= 0

    def wipe(self) -> None:
        """Remove all content, so that no old header or entry can be read."""
        for name in (SUPERBLOCK_FILE, SUPERBLOCK_TEMPORARY, SESSIONS_FILE, SESSIONS_TEMPORARY):
            (self.place / name).unlink(missing_ok=True)
        for fd in (self.log_fd, self.table_fd, self.buffered_fd):
            os.ftruncate(fd, 0)

    def allocate_log(self, pages: int) -> int:
        """Reserve space for a log. Return its number of pages, or 0 if there is no space. A log of
        a different size is emptied, because readers would not find its pages."""
        size = pages * PAGE_BYTES
        if os.fstat(self.log_fd).st_size != size:
            os.ftruncate(self.log_fd, 0)
        try:
            if pages:
                reserve(self.log_fd, size)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            os.ftruncate(self.log_fd, 0)
            return 0
        return pages

    def allocate(self, slots: int, slot_bytes: int) -> int:
        """Reserve space for `slots` slots without cutting existing ones. Return the number that fit
        while enough space stays free."""
        slab_bytes = os.fstat(self.buffered_fd).st_size
        table_bytes = os.fstat(self.table_fd).st_size
        # Slots reserved by an earlier process are kept even if the disk is full now.
        present = min(slab_bytes // slot_bytes, table_bytes // ENTRY_BYTES)
        kept = space_bytes(self.directory)[1]
        # Decide before the first byte, so that no other service finds its disk full, even briefly.
        count = min(slots, max(present, self._fitting(slot_bytes, kept)))
        while count > 0:
            try:
                reserve(self.table_fd, count * ENTRY_BYTES)
                reserve(self.buffered_fd, count * slot_bytes)
                if self._free_bytes() >= kept or count <= present:
                    return count
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                if count <= present:
                    present = 0  # the file was sparse
            # Undo the failed reservation before reading the free space.
            os.ftruncate(self.buffered_fd, slab_bytes)
            os.ftruncate(self.table_fd, table_bytes)
            fits = self._fitting(slot_bytes, kept)
            count = max(min(fits, count - max(1, count // 16)), min(present, count - 1))
        return 0

    def _fitting(self, slot_bytes: int, kept: int) -> int:
        """Return how many slots fit, including existing ones, if `kept` bytes stay free."""
        held = os.fstat(self.buffered_fd).st_blocks * 512
        return max(0, held + self._free_bytes() - kept) // (slot_bytes + ENTRY_BYTES)

    def _free_bytes(self) -> int:
        status = os.fstatvfs(self.buffered_fd)
        return status.f_bavail * status.f_frsize

    def cut(self, slots: int, slot_bytes: int) -> None:
        """Truncate slab and table to `slots` slots, durably. All targets have the same number."""
        os.ftruncate(self.table_fd, slots * ENTRY_BYTES)
        os.ftruncate(self.buffered_fd, slots * slot_bytes)
        os.fsync(self.table_fd)
        os.fsync(self.buffered_fd)

    def use_direct(self) -> None:
        """Open the slab for O_DIRECT, after a probe. A full disk has no room for the probe's file;
        reading the slab's first page then decides. Raises the errors of `probe_o_direct`."""
        try:
            probe_o_direct(self.place)
            full = False
        except OSError as error:
            full = error.errno in NO_SPACE
            if not full:
                raise
        fd = open_private(self.place / SLAB_FILE, os.O_RDWR | os.O_DIRECT)
        try:
            if full:
                read_page(fd)
        except BaseException:
            os.close(fd)
            raise
        self.fd, self.direct = fd, True

    def use_direct_log(self) -> None:
        """Open the log for O_DIRECT, like the slab. Raises OSError if that fails."""
        fd = open_private(self.place / LOG_FILE, os.O_RDWR | os.O_DIRECT)
        os.close(self.log_fd)
        self.log_fd = fd

    def close(self) -> None:
        """Close all files; a dead mount may answer with an error, which is ignored."""
        for fd in {self.fd, self.buffered_fd, self.table_fd, self.log_fd}:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.folder = None


def reserve(fd: int, size: int) -> None:
    """Allocate the file's first `size` bytes, keeping their content. Calls fallocate(2) itself: on
    a file system without it, glibc's posix_fallocate would write zeros for minutes. There, the file
    becomes sparse instead, and a later write can fail with ENOSPC."""
    while _libc.fallocate(fd, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in _NO_FALLOCATE:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def probe_o_direct(directory: Path) -> None:
    """Write and read one aligned page with O_DIRECT in `directory`. Raises OSError if that fails
    (usually EINVAL), and PoolError if different bytes are read back."""
    path = directory / "probe"
    written = os.urandom(PAGE_BYTES)
    with mmap.mmap(-1, PAGE_BYTES) as page:
        page[:] = written
        fd = -1
        try:
            fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
            _expect_page(os.pwritev(fd, [page], PAGE_BYTES))
            page[:] = bytes(PAGE_BYTES)
            _expect_page(os.preadv(fd, [page], PAGE_BYTES))
            if page[:] != written:
                where = os.path.realpath(directory)
                raise PoolError(f"{where}: O_DIRECT does not read back what was written")
        finally:
            if fd >= 0:
                os.close(fd)
            path.unlink(missing_ok=True)


def read_page(fd: int) -> None:
    """Read a slab's first page, to check that it is readable. Raises OSError if not."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        _expect_page(os.preadv(fd, [page], 0))


def _expect_page(count: int) -> None:
    if count != PAGE_BYTES:
        raise OSError(errno.EIO, "short O_DIRECT transfer")
