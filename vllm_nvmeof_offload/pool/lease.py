# SPDX-License-Identifier: Apache-2.0
"""The lock and the lease of a region: they decide which process may write there.

The lock is an flock on the empty file `lock` of a rank directory. It keeps out other processes of
this kernel, and ends with the process that holds it, even after SIGKILL. Other hosts may not see
the flock, so the directory also has a lease, a page that names its owner.

The page, 4 KiB, little endian, in the file `lease` of a rank directory::

    0   8s  magic "vNVMeLS\\0"              52   u32 pid
    8   16s owner, random; zero: none      56   16s the running kernel's boot id
    24  u64 lease generation               72   64s host, utf-8
    32  u64 beat                           136  64s name of the server, utf-8
    40  u32 period of the beat, ms         200  128s name of the engine, utf-8
    44  u32 1 if a group of hosts uses it  4092 u32 CRC-32C of bytes 0..4091
    48  u32 epoch of the region, for display

The owner's *keeper* (`keeper`) renews the page: every 5 s if only this host writes to the file
system, and every 3.3 s if a *group* of servers on several hosts does.

A claim locks the directory (`DirectoryLock`) and checks the page (`takeover`). A region can be
taken if no process has claimed it, if its last owner released it, or if the page has not changed
for `takeover_s` by the claimant's own clock. Without a group, it can also be taken if its owner was
a process of this kernel, because the owner's flock has ended with it. In a group, an unchanged page
counts even if the flock is refused: a suspended server keeps its flock, and an NFS server keeps the
flocks of a lost host. The claimant writes its own name and the next generation. In a group, it
waits until this write has completed and `settle_s` has passed, and then reads the page again: the
last of several claimants finds its own name, and the others look for another region.

The keeper reads the page before it renews it. If the page names another owner, the process has lost
the lease for good and writes nothing more. In a group, each renewal also advances the write permit,
a word of shared memory that every writer to the region checks: the time at which the renewal began,
plus a third of `takeover_s`. So a server whose renewals do not complete stops writing long before
its region can be taken. The server continues when renewals complete again, unless the region was
taken (`Keeper`).

A lease is not a fence: writes queued in the kernel may complete after a takeover (docs/sharing.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import socket
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from crc32c import crc32c

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import LEASE_FILE, LOCK_FILE, is_intact_page
from vllm_nvmeof_offload.units import PAGE_BYTES, printable

# -- locks ----------------------------------------------------------------------------

ENDING_WAIT_S_MAX = 30.0  # how long to wait for a killed process that is blocked in the kernel
_SIGKILL_BIT = 1 << 8


class FileId(NamedTuple):
    """The identity of a file, whose path may later lead to a different file."""

    device: int
    inode: int


def try_flock(fd: int, operation: int) -> bool:
    """Lock `fd` (LOCK_EX or LOCK_SH). Return False if another process holds the lock."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


@dataclass(slots=True, eq=False)
class DirectoryLock:
    """A directory's lock file, open and locked from `claim` until `release` or `abandon`. `lease`
    is the directory's lease file at the time of the claim."""

    fd: int
    directory: Path
    lease: FileId

    @classmethod
    def claim(cls, directory: Path, *, despite_flock: bool = False) -> DirectoryLock | None:
        """Lock the directory, and create its lock and lease files. Return None if another process
        holds the lock. `despite_flock` ignores that process's flock, because the lease has shown
        that the process no longer owns the region. Raises OSError if a file cannot be opened."""
        path = directory / LOCK_FILE
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            if not try_flock(fd, fcntl.LOCK_EX) and not despite_flock:
                os.close(fd)
                return None
            # `pool rm` may have deleted the file between open and flock. A lock on a deleted
            # file keeps no process out.
            if not os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                raise OSError(errno.ESTALE, "the pool has just been removed", str(path))
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
        """Unlock. Errors do not matter: the flock ends with this process."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                # A prober that is starting or exiting also holds the descriptor.
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            self.abandon()


def is_locked(directory: Path) -> bool:
    """Return whether a process that this kernel knows holds the flock. Raises OSError."""
    try:
        fd = open_private(directory / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Release the shared lock immediately: a server that starts in the meantime would find the
        # directory taken.
        if not try_flock(fd, fcntl.LOCK_SH):
            return True
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    finally:
        os.close(fd)


def is_ending(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether process `pid` exists but was killed, or its first thread has ended. In a
    container, `pid` can be the number of a different process; a claim then waits once
    unnecessarily."""
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


# -- pages ----------------------------------------------------------------------------

MAGIC = b"vNVMeLS\0"
OWNER_BYTES = 16
NOBODY = bytes(OWNER_BYTES)
_NAME_BYTES = 64
_ENGINE_BYTES = 128
_PAGE = struct.Struct(f"<8s16sQQIIII16s{_NAME_BYTES}s{_NAME_BYTES}s{_ENGINE_BYTES}s")
_CRC = struct.Struct("<I")
_WORD_BYTES = 8
_READS = 3  # attempts before a page counts as damaged: a device may write it in parts
_BEATS_PER_PERMIT = 3  # the number of renewals of a group's region within one permit
TAKEOVER_S = 30.0
_BEATS_PER_TAKEOVER = 6  # renewals within `TAKEOVER_S` without a group


def boot_ns() -> int:
    """Return the time by the permits' clock, which includes suspend. Native code reads it too."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> bytes:
    """Return 16 bytes that identify the running kernel; containers on one machine share them. Host
    names prove nothing, because two machines may have the same name."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return os.getpid().to_bytes(16)


def _text(value: str, size: int = _NAME_BYTES) -> bytes:
    """Encode `value`, truncated between characters if it does not fit into `size` bytes."""
    return value.encode(errors="replace")[:size].decode(errors="ignore").encode()


@dataclass(frozen=True, slots=True)
class Leasing:
    """The terms of a server's leases. `name` is the server's, the same at each start. `in_group`
    states whether servers on other hosts write to the same file system."""

    name: str = field(default_factory=socket.gethostname)
    takeover_s: float = TAKEOVER_S
    settle_s: float = 2.0
    in_group: bool = True

    @property
    def permit_s(self) -> float:
        return self.takeover_s / 3

    @property
    def beat_s(self) -> float:
        """The interval between renewals."""
        if self.in_group:
            return self.permit_s / _BEATS_PER_PERMIT
        return self.takeover_s / _BEATS_PER_TAKEOVER


@dataclass(frozen=True, slots=True)
class LeasePage:
    """A lease page. `owner` is 16 bytes, `NOBODY` after a release. `generation` grows by 1 with
    each claim, `beat` with each renewal. `boot` is as in `boot_id`. `host`, `pid` and `name` are
    for display; in a group `name` also decides whose chunks are adopted. `engine` is the same on
    all ranks of one engine, or empty if it has no name."""

    owner: bytes
    generation: int
    beat: int
    beat_ms: int
    epoch: int
    host: str
    pid: int
    name: str
    in_group: bool = True
    boot: bytes = bytes(16)
    engine: str = ""

    @property
    def is_free(self) -> bool:
        return self.owner == NOBODY

    @property
    def is_intact(self) -> bool:
        return self.generation > 0

    @property
    def died_here(self) -> bool:
        """Whether this kernel ran the owner, so that a free flock proves that it has exited."""
        return not self.in_group and self.boot == boot_id()

    def __str__(self) -> str:
        return f"pid {self.pid} on host {printable(self.host)}"

    def encode(self) -> bytes:
        page = bytearray(PAGE_BYTES)
        numbers = self.generation, self.beat, self.beat_ms, self.in_group, self.epoch, self.pid
        names = _text(self.host), _text(self.name), _text(self.engine, _ENGINE_BYTES)
        _PAGE.pack_into(page, 0, MAGIC, self.owner, *numbers, self.boot, *names)
        end = PAGE_BYTES - _CRC.size
        _CRC.pack_into(page, end, crc32c(memoryview(page)[:end]))
        return bytes(page)

    @staticmethod
    def decode(page: bytes) -> LeasePage | None:
        """Return the page's content, or None if it is not intact."""
        if len(page) != PAGE_BYTES or not is_intact_page(memoryview(page), MAGIC):
            return None
        _, owner, generation, beat, beat_ms, in_group, epoch, pid, boot, *names = _PAGE.unpack_from(
            page
        )
        host, name, engine = (one.rstrip(b"\0").decode(errors="replace") for one in names)
        who = host, pid, name, bool(in_group), boot, engine
        return LeasePage(owner, generation, beat, beat_ms, epoch, *who)

    @staticmethod
    def damaged(page: bytes) -> LeasePage:
        """Return a stand-in for a damaged page, with an owner that no process has. A live owner
        soon rewrites the page."""
        owner = hashlib.sha256(page).digest()[:OWNER_BYTES]
        return LeasePage(owner, 0, 0, 0, 0, "an unknown host", 0, "")


class PageIo(Protocol):
    """An interface to one page; a test's implementation may be slow."""

    def read(self) -> bytes:
        """Return the page, empty if there is none. Raises OSError."""

    def write(self, page: bytes) -> None:
        """Write the page, and return when it is durable. Raises OSError."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """The page at the start of a file. Reads and writes bypass this kernel's page cache. Unless
    `file` is None, no other file is accessed, because a different file system, with a different
    owner, may have been mounted at the path."""

    path: Path
    file: FileId | None = None

    def read(self) -> bytes:
        try:
            fd, direct = self._open(os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                if not direct:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                return page[: os.preadv(fd, [page], 0)]
        finally:
            os.close(fd)

    def write(self, page: bytes) -> None:
        fd, _ = self._open(os.O_WRONLY)
        try:
            with mmap.mmap(-1, PAGE_BYTES) as buffer:
                buffer[:] = page
                if os.pwritev(fd, [buffer], 0) != PAGE_BYTES:
                    raise OSError(errno.EIO, "short write", str(self.path))
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def _open(self, flags: int) -> tuple[int, bool]:
        try:
            fd, direct = open_private(self.path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system has no O_DIRECT
                raise
            fd, direct = open_private(self.path, flags), False
        status = os.fstat(fd)
        if self.file not in (None, (status.st_dev, status.st_ino)):
            os.close(fd)
            raise OSError(errno.ESTALE, "the path now refers to a different file", str(self.path))
        return fd, direct


def read_lease(io: PageIo) -> LeasePage | None:
    """Return the page, or None if the region was never claimed. Raises OSError if unreadable."""
    for _ in range(_READS):
        raw = io.read()
        if not any(raw):
            return None
        found = LeasePage.decode(raw)
        if found is not None:
            return found
    return LeasePage.damaged(raw)


def lease_of(directory: Path) -> PageFile:
    return PageFile(directory / LEASE_FILE)


# -- permits --------------------------------------------------------------------------


class Permit:
    """The write permit of one region: the `boot_ns` time before which a write may start, or 0 for
    never. Without a group, `is_limited` is False: writes may start until the lease is lost."""

    def __init__(self, word: ctypes.c_uint64, *, is_limited: bool = True) -> None:
        self._word = word
        self.is_limited = is_limited

    @property
    def address(self) -> int:
        """The permit's address for the I/O engine, or 0 if the engine need not check it."""
        return ctypes.addressof(self._word) if self.is_limited else 0

    @property
    def until_ns(self) -> int:
        return self._word.value

    @property
    def is_open(self) -> bool:
        return not self.is_lost and (not self.is_limited or boot_ns() < self._word.value)

    @property
    def is_lost(self) -> bool:
        return not self._word.value

    def grant(self, until_ns: int) -> None:
        """Allow writes to start before `until_ns`. Only a claim revives a lost permit."""
        self._word.value = until_ns

    def lose(self) -> None:
        self._word.value = 0

    def wait(self, wanted: Callable[[], bool]) -> bool:
        """Wait until writes may start. Return False if they never may or are no longer `wanted`."""
        while wanted() and not self.is_lost:
            if self.is_open:
                return True
            time.sleep(PERMIT_POLL_S)
        return False


PERMIT_POLL_S = 0.01  # the interval at which a waiting writer checks its permit


#: Never unmapped: a hung I/O thread may still read a limited permit after the pool is closed.
_MAPPED: list[mmap.mmap] = []


class Permits:
    """The memory of a process's permits, which its keeper maps too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def new(cls, count: int) -> Permits:
        """Create memory for `count` permits, all lost."""
        fd = os.memfd_create("nvmeof-permits")
        os.truncate(fd, count * _WORD_BYTES)
        return cls(fd)

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped while permits use it."""
        os.close(self.fd)

    def word(self, number: int, *, is_limited: bool = True) -> Permit:
        if is_limited:
            _MAPPED.append(self._memory)
        word = ctypes.c_uint64.from_buffer(self._memory, number * _WORD_BYTES)
        return Permit(word, is_limited=is_limited)


# -- owners ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Lease:
    """A claim to a region. It becomes the region's lease when `is_ours` is true. `page` is the page
    that the claim wrote; `has_epoch` sets its epoch. `previous` is the page that the claim found,
    which names the last owner, or None. `path` is the page's path, and `number` is its permit's
    number."""

    io: PageIo
    leasing: Leasing
    permit: Permit
    previous: LeasePage | None
    page: LeasePage
    path: Path = Path()
    number: int = 0
    clock: Callable[[], int] = boot_ns
    _written_ns: int = 0
    _took_ns: int = 0

    @classmethod
    def claim(
        cls,
        io: PageIo,
        leasing: Leasing,
        permit: Permit,
        previous: LeasePage | None,
        clock: Callable[[], int] = boot_ns,
        engine: str = "",
    ) -> Lease:
        """Write our name into the page. The region is ours only when `is_ours` is true. `previous`
        is the page just read, whose owner is dead or gone. Raises OSError if the write fails."""
        page = LeasePage(
            owner=secrets.token_bytes(OWNER_BYTES),
            generation=1 + (previous.generation if previous is not None else 0),
            beat=0,
            beat_ms=round(1000 * leasing.beat_s),
            epoch=0,
            host=socket.gethostname(),
            pid=os.getpid(),
            name=leasing.name,
            in_group=leasing.in_group,
            boot=boot_id(),
            engine=engine,
        )
        self = cls(io, leasing, permit, previous, page, clock=clock)
        begun_ns = clock()
        io.write(page.encode())
        self._written_ns = clock()
        self._took_ns = self._written_ns - begun_ns
        return self

    @classmethod
    def claim_in(
        cls, directory: Path, leasing: Leasing, permits: Permits, number: int, engine: str = ""
    ) -> Lease:
        """Claim the lease of a directory that we have locked; see `claim`."""
        io, permit = lease_of(directory), permits.word(number, is_limited=leasing.in_group)
        self = cls.claim(io, leasing, permit, read_lease(io), engine=engine)
        self.path, self.number = io.path, number
        return self

    def has_epoch(self, epoch: int) -> None:
        """Set the region's epoch, which the next renewal writes to the page."""
        self.page = replace(self.page, epoch=epoch)

    @property
    def settles_ns(self) -> int:
        """The time from which the page shows whether the region is ours."""
        if not self.leasing.in_group:
            return self._written_ns  # the flock keeps others out
        return self._written_ns + max(round(1e9 * self.leasing.settle_s), 2 * self._took_ns)

    def is_ours(self) -> bool:
        """Return whether the page, read back after `settles_ns`, names us; if so, writes may start.
        Raises OSError if the page cannot be read."""
        begun_ns = self.clock()
        assert begun_ns >= self.settles_ns
        page = read_lease(self.io)
        if page is None or page.owner != self.page.owner:
            return False
        self.permit.grant(begun_ns + round(1e9 * self.leasing.permit_s))
        return True

    @property
    def was_of_another(self) -> bool:
        """Whether the region belonged to another server in the group; if so, nothing is adopted."""
        previous = self.previous if self.leasing.in_group else None
        return previous is not None and previous.name != self.page.name

    def release(self, file: FileId | None = None) -> None:
        """Clear the owner in the page, so that the next owner need not wait. Call this after all
        writes have ended. `file` is as in `PageFile`. An error is only logged: the next start takes
        the region over."""
        self.permit.lose()
        io = self.io if file is None else PageFile(self.path, file)
        try:
            found = read_lease(io)
            if found is not None and found.owner == self.page.owner:
                io.write(replace(found, owner=NOBODY, epoch=self.page.epoch).encode())
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, error)
            # The target does not answer, but nothing is lost.
            logger.info(
                "cannot release lease %s (%s): the next start takes it over", self.path, reason
            )
