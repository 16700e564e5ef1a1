# SPDX-License-Identifier: Apache-2.0
"""Looks at one target's path, in a process of its own, and opens what it finds there.

`python -m vllm_nvmeof_offload.targets.prober FD`: FD is a SOCK_SEQPACKET socket, from which comes
a `ProbeJob` and to which goes a `ProbeAnswer`, with descriptors where the pool is there. Every
call here may hang in the kernel for as long as it likes: nobody waits for this process, and it
holds nothing that a server needs. A server dies with none of its threads in such a call.

The lock comes with the descriptor that is handed over: who closes that last gives it up.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.errors import PoolError
from vllm_nvmeof_offload.pool.format import Superblock, read_superblock, write_superblock
from vllm_nvmeof_offload.pool.lock import DirectoryLock, Silence, local_holder_error
from vllm_nvmeof_offload.units import PAGE_BYTES

__all__ = ["MESSAGE_BYTES_MAX", "OPENED", "ProbeAnswer", "ProbeJob", "probe"]

MESSAGE_BYTES_MAX = 64 << 10
#: What comes with the answer, in this order; the first two are one where there is no O_DIRECT.
OPENED = ("slab", "buffered slab", "table", "lock")


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """superblock: the page that should be there, as hex. pid: of the server, for the lock.

    device: st_dev of the file system that the server has open and that hangs: it is not what is
    looked for. None: the server has none open.
    """

    directory: str
    superblock: str
    direct: bool
    slab_bytes: int
    table_bytes: int
    pid: int
    device: int | None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """failure: empty where descriptors come with it. device, inode: of the lock file."""

    failure: str = ""
    device: int = 0
    inode: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(message: bytes) -> ProbeAnswer:
        """Raises ValueError: a prober of this version does not answer so.

        Whoever upgrades the package under a running server has probers of another one.
        """
        try:
            answer = ProbeAnswer(**json.loads(message))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        numbers = answer.device, answer.inode
        if isinstance(answer.failure, str) and all(type(one) is int for one in numbers):
            return answer
        raise ValueError(f"no answer: {answer}")


def probe(job: ProbeJob) -> tuple[ProbeAnswer, list[int]]:
    """Open the pool that `job` describes; an answer says why not.

    Raises:
        OSError: the file system fails.
        PoolError: another live owner, or a superblock that is not intact.
    """
    directory = Path(job.directory)
    wanted = Superblock.decode(bytes.fromhex(job.superblock))
    if job.device is not None and os.stat(directory).st_dev == job.device:
        return ProbeAnswer("the file system that hangs is still the one that is mounted"), []
    failure = _mismatch(directory, wanted)  # before anything is made in a directory of others
    if failure:
        return ProbeAnswer(failure), []
    path = directory / "lock"
    lock = Silence().settled(lambda silence: DirectoryLock.claim(path, job.pid, silence))
    if lock is None:
        raise local_holder_error(path)
    fds = _open_files(directory, direct=job.direct)
    failure = _mismatch(directory, wanted) or _too_short(job, fds)
    if failure:
        lock.release()
        return ProbeAnswer(failure), []
    _read_page(fds[0])
    if read_superblock(directory) != wanted:
        write_superblock(directory, wanted)  # it missed a reset
    return ProbeAnswer("", lock.file.device, lock.file.inode), [*fds, lock.fd]


def _mismatch(directory: Path, wanted: Superblock) -> str:
    """Why the directory does not hold this pool; empty: it does."""
    found = read_superblock(directory)
    if found is None:
        return "no pool is there"
    if found == wanted:
        return ""
    if found.epoch > wanted.epoch or (found.epoch == wanted.epoch and not found.adoptable):
        return "another server has used the pool meanwhile: it is served again after a restart"
    if replace(found, epoch=wanted.epoch, adoptable=wanted.adoptable) != wanted:
        return "another pool is there"
    return ""


def _open_files(directory: Path, *, direct: bool) -> list[int]:
    """Never creates one: what is not there was not this pool's."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    buffered = os.open(directory / "slab", flags)
    slab = os.open(directory / "slab", flags | os.O_DIRECT) if direct else buffered
    return [slab, buffered, os.open(directory / "table", flags)]


def _too_short(job: ProbeJob, fds: list[int]) -> str:
    for name, fd, wanted in (("slab", fds[0], job.slab_bytes), ("table", fds[2], job.table_bytes)):
        found = os.fstat(fd).st_size
        if found < wanted:
            return f"its {name} has {found} bytes, not {wanted}: start the server anew"
    return ""


def _read_page(fd: int) -> None:
    """From the device, not from the page cache, which outlives it."""
    os.posix_fadvise(fd, 0, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
        count = os.preadv(fd, [view], 0)
    if count != PAGE_BYTES:
        raise PoolError(f"reading the slab gives {count} bytes, not {PAGE_BYTES}")


def main() -> None:
    """See the module's docstring."""
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        parameters: dict[str, Any] = json.loads(channel.recv(MESSAGE_BYTES_MAX))
        try:
            answer, fds = probe(ProbeJob(**parameters))
        except (OSError, PoolError) as error:
            answer, fds = ProbeAnswer(str(error) or repr(error)), []
        with contextlib.suppress(OSError):  # the server has ended, or waits no more
            socket.send_fds(channel, [answer.encode()], fds)


if __name__ == "__main__":
    main()
