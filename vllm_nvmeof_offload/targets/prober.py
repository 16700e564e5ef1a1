# SPDX-License-Identifier: Apache-2.0
"""Opens the pool on one target's path in a child process: `python -m …targets.prober FD`.

The process receives a `ProbeRequest` on FD, a SOCK_SEQPACKET socket, and sends a `ProbeAnswer`,
with open descriptors, including the lock's, if it found the pool. Each probe is a separate process,
which can be killed when it hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.folder import Folder, open_private
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    LOCK_FILE,
    LOG_FILE,
    SLAB_FILE,
    TABLE_FILE,
    Superblock,
    read_superblock,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lease import DirectoryLock, lease_of, read_lease
from vllm_nvmeof_offload.pool.ownership import busy_error
from vllm_nvmeof_offload.pool.slab import read_page
from vllm_nvmeof_offload.units import PAGE_BYTES

MESSAGE_BYTES_MAX = 64 << 10
#: The descriptors sent on success: slab, buffered slab, table, log, lock, directory. The first two
#: are the same open file unless the slab is open for O_DIRECT.
DESCRIPTORS = 6
_USED = "another server has used the pool meanwhile; restart this server to use the pool again"


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The pool to look for in `directory`.

    `superblock` is the expected page, in hex. `owner` is the owner that the lease must name.
    `device` is the st_dev of the hung file system that the server has open, which must not be
    opened again; None if there is none. `in_group` is whether a group's hosts write the pool.
    """

    directory: str
    superblock: str
    direct: bool
    owner: str
    device: int | None
    in_group: bool = False


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The result of a probe. `failure` is empty if descriptors are attached. `device` and `inode`
    identify the lease file."""

    failure: str = ""
    device: int = 0
    inode: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(message: bytes) -> ProbeAnswer:
        """Parse an answer. A malformed one becomes a failure: after an upgrade of the package, a
        running server's probers have a different version."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            answer = ProbeAnswer(**json.loads(message))
            numbers = answer.device, answer.inode
            if isinstance(answer.failure, str) and all(type(one) is int for one in numbers):
                return answer
        return ProbeAnswer("its prober runs another version of this package: restart the server")


def probe(request: ProbeRequest) -> tuple[ProbeAnswer, list[int]]:
    """Open the requested pool. Raises PoolError if it cannot be served, OSError if the file system
    fails. Only here does a running server resolve the directory's path again; owner, mode and uuid
    prove that it leads to the same pool."""
    expected = Superblock.decode(bytes.fromhex(request.superblock))
    if request.device is not None and os.stat(request.directory).st_dev == request.device:
        raise PoolError("the hung file system is still mounted")
    folder = Folder.open(Path(request.directory))
    directory = folder.place
    # Check before the claim, which creates a lock file even in another pool's directory.
    _check_superblock(directory, expected)
    lock = DirectoryLock.claim(folder.path)
    if lock is None:
        raise busy_error(folder.path / LOCK_FILE)
    # Create no files: if one is missing, this is not our pool.
    flags, direct = os.O_RDWR, os.O_RDWR | os.O_DIRECT
    buffered = open_private(directory / SLAB_FILE, flags)
    slab = open_private(directory / SLAB_FILE, direct) if request.direct else buffered
    table = open_private(directory / TABLE_FILE, flags)
    log_is_direct = request.in_group and request.direct
    log = open_private(directory / LOG_FILE, direct if log_is_direct else flags)
    try:
        if not os.path.samestat(os.stat(directory / LOCK_FILE), os.fstat(lock.fd)):
            raise PoolError("the pool was replaced just now")
        _check_lease(directory, request.owner)
        _check_superblock(directory, expected)
        _check_size("slab", slab, expected.slots * expected.slot_bytes)
        _check_size("table", table, expected.slots * ENTRY_BYTES)
        _check_size("log", log, expected.log_pages * PAGE_BYTES)
    except PoolError:
        lock.release()
        raise
    # Read from the device, not from the page cache, which outlives the device.
    os.posix_fadvise(slab, 0, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
    read_page(slab)
    if read_superblock(directory) != expected:
        write_superblock(directory, expected)  # the target missed a reset
    answer = ProbeAnswer("", *lock.lease)
    return answer, [slab, buffered, table, log, lock.fd, os.dup(folder.fd)]


def _check_superblock(directory: Path, expected: Superblock) -> None:
    """Raise PoolError if the directory does not hold the pool."""
    found = read_superblock(directory)
    if found is None:
        raise PoolError("it holds no pool")
    if found == expected:
        return
    shape = replace(found, epoch=expected.epoch, tag=expected.tag, sequence=expected.sequence)
    lease = {"shared": expected.shared, "lease_generation": expected.lease_generation}
    if replace(shape, **lease) != expected:  # type: ignore[arg-type]
        raise PoolError("it holds another pool")
    used = found.sequence >= expected.sequence
    if used or found.lease_generation > expected.lease_generation:
        raise PoolError(_USED)


def _check_lease(directory: Path, owner: str) -> None:
    """Raise PoolError if the lease names another owner. The keeper rewrites a damaged page."""
    page = read_lease(lease_of(directory))
    if page is not None and page.is_intact and page.owner.hex() != owner:
        raise PoolError(_USED if page.is_free else f"it is held by {page}; {_USED}")


def _check_size(name: str, fd: int, expected: int) -> None:
    found = os.fstat(fd).st_size
    if found < expected:
        raise PoolError(f"its {name} has {found} bytes, not {expected}: restart the server")


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        request = ProbeRequest(**json.loads(channel.recv(MESSAGE_BYTES_MAX)))
        try:
            answer, fds = probe(request)
        except (OSError, PoolError) as error:
            answer, fds = ProbeAnswer(str(error) or repr(error)), []
        with contextlib.suppress(OSError):  # the server has ended, or no longer waits
            socket.send_fds(channel, [answer.encode()], fds)


if __name__ == "__main__":
    main()
