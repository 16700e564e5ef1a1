# SPDX-License-Identifier: Apache-2.0
"""One file system on two hosts: what a client of an NFS server sees of the other one's writes."""

from __future__ import annotations

import fcntl
import mmap
import os

from tests.fabric.stage import READY_S_MAX, Stage
from vllm_nvmeof_offload.units import PAGE_BYTES


def caches_apart(stage: Stage) -> None:
    """A client's page cache keeps what the other one has overwritten; O_DIRECT and flock do not."""
    shared = stage.share()
    near, far = shared.mount(1) / "page", shared.mount(2) / "page"
    writer = os.open(near, os.O_RDWR | os.O_CREAT)
    os.pwrite(writer, b"1" * 2 * PAGE_BYTES, 0)
    os.fsync(writer)
    cached = os.open(far, os.O_RDWR)
    direct = os.open(far, os.O_RDONLY | os.O_DIRECT)
    stage.equal("client 2 reads", (os.pread(cached, 1, 0), _read(direct)), (b"1", b"1"))
    os.pwrite(writer, b"2" * PAGE_BYTES, 0)
    os.fsync(writer)
    stage.equal("its page cache after a write by client 1", os.pread(cached, 1, 0), b"1")
    stage.equal("O_DIRECT", _read(direct), b"2")
    _write(near, b"3")
    stage.equal("its page cache after one with O_DIRECT", os.pread(cached, 1, 0), b"1")
    stage.equal("O_DIRECT", _read(direct), b"3")
    again = os.open(far, os.O_RDONLY)
    stage.equal("its page cache for a file that is opened again", os.pread(again, 1, 0), b"3")
    fcntl.flock(writer, fcntl.LOCK_EX)
    stage.check(not _locks(cached), "client 1 has the lock")
    fcntl.flock(writer, fcntl.LOCK_UN)
    stage.until(lambda: _locks(cached), READY_S_MAX, "client 2 has it after that")
    for fd in (writer, cached, direct, again):
        os.close(fd)


def _read(fd: int) -> bytes:
    """The first byte, read with O_DIRECT."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        assert os.preadv(fd, [page], 0) == PAGE_BYTES
        return page[:1]


def _write(path: os.PathLike[str], byte: bytes) -> None:
    """Fill the first page with O_DIRECT."""
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_DSYNC)
    with mmap.mmap(-1, PAGE_BYTES) as page:
        page[:] = byte * PAGE_BYTES
        assert os.pwrite(fd, page, 0) == PAGE_BYTES
    os.close(fd)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
