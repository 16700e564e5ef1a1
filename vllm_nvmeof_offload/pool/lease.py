# SPDX-License-Identifier: Apache-2.0
"""The lease of a region: a page that names its owner, for file systems that several hosts write.

The page, 4 KiB, little endian, in the file `lease` of a rank directory::

    0   8s  magic "vNVMeLS\\0"              44  u32 epoch of the region, for people
    8   16s owner, random; zero: nobody    48  64s host, utf-8
    24  u64 lease generation               112 u32 pid
    32  u64 beat                           116 64s name of the server, utf-8
    40  u32 period of the beat, ms         4092 u32 CRC-32C of bytes 0..4091

Nobody compares clocks of two hosts. A claimant that sees a page unchanged for `takeover_s` on its
own clock takes the owner for dead. It writes its own name and the next generation, waits until that
write has completed and `settle_s` has passed, and reads the page again: the last of several
claimants finds its own name, and the others look for another region.

The owner's *keeper*, in the process that writes heartbeats, reads the page before it renews it. If
another owner is there, the lease is lost for as long as the process lives. With each renewal the
keeper advances the write permit, a word of shared memory that everything reads that writes to the
region: it is the time before the renewal began, plus a third of `takeover_s`. A server whose
renewals do not complete thus stops writing long before anybody takes its region. It goes on once
they do, if nobody has taken it (`Keeper`). Permits count the time for which a machine sleeps.

A lease is not a fence. What the kernel has queued may land after another owner came; see
docs/sharing.md for what that costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from crc32c import crc32c

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import LEASE_FILE, is_intact_page
from vllm_nvmeof_offload.pool.silence import POLL_S, TAKEOVER_S, Silence
from vllm_nvmeof_offload.units import PAGE_BYTES, printable

MAGIC = b"vNVMeLS\0"
OWNER_BYTES = 16
NOBODY = bytes(OWNER_BYTES)
_NAME_BYTES = 64
_PAGE = struct.Struct(f"<8s16sQQII{_NAME_BYTES}sI{_NAME_BYTES}s")
_CRC = struct.Struct("<I")
_WORD_BYTES = 8
#: A device may write less than a page at once: a damaged page is read again before that counts.
_READS = 3
#: Within the permit, a keeper renews so many times.
_BEATS_PER_PERMIT = 3


def boot_ns() -> int:
    """Return the time by the clock of permits: it counts sleep, and the native core reads it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _text(value: str) -> bytes:
    """Return what fits, cut between two characters."""
    return value.encode(errors="replace")[:_NAME_BYTES].decode(errors="ignore").encode()


@dataclass(frozen=True, slots=True)
class Leasing:
    """How a server leases its regions. name: the server's, equal at each of its starts."""

    name: str = field(default_factory=socket.gethostname)
    takeover_s: float = TAKEOVER_S
    settle_s: float = 2.0

    @property
    def permit_s(self) -> float:
        return self.takeover_s / 3

    @property
    def beat_s(self) -> float:
        """The period of renewals."""
        return self.permit_s / _BEATS_PER_PERMIT


@dataclass(frozen=True, slots=True)
class LeasePage:
    """owner: 16 bytes, `NOBODY` if it was released. generation: +1 at each claim. beat: +1 at each
    renewal. host, pid, name: for people; `name` also decides whose chunks are adopted."""

    owner: bytes
    generation: int
    beat: int
    beat_ms: int
    epoch: int
    host: str
    pid: int
    name: str

    @property
    def is_free(self) -> bool:
        return self.owner == NOBODY

    @property
    def is_intact(self) -> bool:
        return self.generation > 0

    def __str__(self) -> str:
        return f"pid {self.pid} on host {printable(self.host)}"

    def encode(self) -> bytes:
        page = bytearray(PAGE_BYTES)
        of = _text(self.host), self.pid, _text(self.name)
        numbers = self.generation, self.beat, self.beat_ms, self.epoch
        _PAGE.pack_into(page, 0, MAGIC, self.owner, *numbers, *of)
        end = PAGE_BYTES - _CRC.size
        _CRC.pack_into(page, end, crc32c(memoryview(page)[:end]))
        return bytes(page)

    @staticmethod
    def decode(page: bytes) -> LeasePage | None:
        """Return the page's content; None if it is not intact."""
        if len(page) != PAGE_BYTES or not is_intact_page(memoryview(page), MAGIC):
            return None
        _, owner, generation, beat, beat_ms, epoch, host, pid, name = _PAGE.unpack_from(page)
        texts = (one.rstrip(b"\0").decode(errors="replace") for one in (host, name))
        return LeasePage(owner, generation, beat, beat_ms, epoch, next(texts), pid, next(texts))

    @staticmethod
    def damaged(page: bytes) -> LeasePage:
        """Return what stands for a page that is not intact: it names an owner that nobody is.

        An owner that lives writes the page again soon.
        """
        owner = hashlib.sha256(page).digest()[:OWNER_BYTES]
        return LeasePage(owner, 0, 0, 0, 0, "an unknown host", 0, "")


class PageIo(Protocol):
    """Reads and writes one page; a test's may be late."""

    def read(self) -> bytes:
        """Return the page; empty: there is none. Raises OSError."""

    def write(self, page: bytes) -> None:
        """Return when the page is durable. Raises OSError."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page that is the start of a file. Reads and writes bypass this kernel's page cache."""

    path: Path

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
        fd, _ = self._open(os.O_WRONLY | os.O_DSYNC)
        try:
            with mmap.mmap(-1, PAGE_BYTES) as buffer:
                buffer[:] = page
                if os.pwritev(fd, [buffer], 0) != PAGE_BYTES:
                    raise OSError(errno.EIO, "short write", str(self.path))
        finally:
            os.close(fd)

    def create(self) -> None:
        """Make the file if there is none; only a claim does that."""
        os.close(open_private(self.path, os.O_WRONLY | os.O_CREAT))

    def _open(self, flags: int) -> tuple[int, bool]:
        try:
            return open_private(self.path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system has no O_DIRECT
                raise
            return open_private(self.path, flags), False


def read_lease(io: PageIo) -> LeasePage | None:
    """Return the page; None: nobody has ever claimed the region. OSError: it cannot be read."""
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


def is_leased(directory: Path, silence: Silence) -> bool:
    """Return whether a region has an owner that lives, as far as `silence` has seen.

    UnsettledError: it is not known yet. OSError: the page cannot be read.
    """
    io = lease_of(directory)
    page = read_lease(io)
    if page is None or page.is_free:
        return False
    return not silence.is_dead(io.path, page, page)


def is_abandoned(directory: Path, silence: Silence) -> bool:
    """Return whether nobody renews or claims a region's lease, as far as `silence` has seen.

    False where the region has no lease. A lease that is free is watched, too: whoever has only
    locked the region may be about to claim it, or has lost it to one that has ended since.
    UnsettledError: it is not known yet. OSError: the page cannot be read.
    """
    io = lease_of(directory)
    page = read_lease(io)
    return page is not None and silence.is_dead(io.path, page, page)


def is_silent(directory: Path, silence: Silence) -> bool | None:
    """Return whether a region's owner is gone or has not been seen to renew its lease for the
    takeover's time; None: the region has no lease. OSError: the page cannot be read.
    """
    io = lease_of(directory)
    page = read_lease(io)
    if page is None:
        return None
    return page.is_free or silence.watch(io.path, page) >= silence.takeover_s


@dataclass(frozen=True, slots=True)
class LeaseState:
    """A region's lease as this process has seen it.

    kind: "free" (released in order), "live" (a beat was seen), "silent" (none was: its owner is
    dead if that goes on). unchanged_s: by this process's own clock, the seconds for which the page
    was seen unchanged.
    """

    kind: str
    page: LeasePage
    unchanged_s: float

    def __str__(self) -> str:
        page = self.page
        who = f"generation {page.generation}, epoch {page.epoch}"
        if self.kind == "free":
            return f"free; {who}; last owner {printable(page.name)}"
        seen = f"{'a beat was seen' if self.kind == 'live' else 'no beat'}"
        age = "" if self.kind == "live" else f" in {self.unchanged_s:.0f} s of watching"
        return f"{self.kind}: {printable(page.name)}, {page} ({seen}{age}); {who}"


def observe_leases(
    directories: Sequence[Path], silence: Silence | None = None
) -> dict[Path, LeaseState]:
    """Watch the leases of these directories until each has shown a beat or missed one.

    Returns those that have a lease, by directory. OSError: a page cannot be read.
    """
    silence = silence or Silence()
    found: dict[Path, LeaseState] = {}
    while True:
        waits = False
        for directory in directories:
            io = lease_of(directory)
            page = read_lease(io)
            if page is None:
                continue
            unchanged_s = silence.watch(io.path, page)
            if page.is_free:
                found[directory] = LeaseState("free", page, unchanged_s)
                continue
            moved = silence.has_moved(io.path)
            found[directory] = LeaseState("live" if moved else "silent", page, unchanged_s)
            waits |= not moved and unchanged_s < min(silence.takeover_s, 1.5 * page.beat_ms / 1000)
        if not waits:
            return found
        silence.wait(POLL_S)


def watch_leases(silence: Silence, directories: Iterable[Path]) -> None:
    """Watch the pages of these directories from now on: many together cost one wait."""
    for io in map(lease_of, directories):
        page = read_lease(io)
        if page is not None and not page.is_free:
            silence.watch(io.path, page)


# -- permits --------------------------------------------------------------------------


class Permit:
    """The word of one region: the time by `boot_ns` before which a write may start; 0: never."""

    def __init__(self, word: ctypes.c_uint64) -> None:
        self._word = word

    @property
    def address(self) -> int:
        return ctypes.addressof(self._word)

    @property
    def until_ns(self) -> int:
        return self._word.value

    @property
    def is_open(self) -> bool:
        return boot_ns() < self._word.value

    @property
    def is_lost(self) -> bool:
        return not self._word.value

    def grant(self, until_ns: int) -> None:
        """Let writes start before that time. Only a claim revives a permit that is lost."""
        self._word.value = until_ns

    def lose(self) -> None:
        self._word.value = 0

    def wait(self, wanted: Callable[[], bool]) -> bool:
        """Wait until writes may start; False: never, or not before it was not `wanted` any more."""
        while wanted() and not self.is_lost:
            if self.is_open:
                return True
            time.sleep(PERMIT_POLL_S)
        return False


#: Nothing wakes what waits for a permit.
PERMIT_POLL_S = 0.01


#: An engine's thread that hangs may look at its permit after the pool was closed.
_MAPPED: list[mmap.mmap] = []


class Permits:
    """Memory for the permits of a process's regions, which its keeper maps too."""

    def __init__(self, fd: int) -> None:
        """fd: of the memory."""
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        _MAPPED.append(self._memory)

    @classmethod
    def new(cls, count: int) -> Permits:
        """Make memory for so many permits, all lost."""
        fd = os.memfd_create("nvmeof-permits")
        os.truncate(fd, count * _WORD_BYTES)
        return cls(fd)

    def close(self) -> None:
        """Give up the descriptor; the memory stays."""
        os.close(self.fd)

    def word(self, number: int) -> Permit:
        return Permit(ctypes.c_uint64.from_buffer(self._memory, number * _WORD_BYTES))


# -- owners ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Lease:
    """A claim to a region, and then its lease. clock: as `boot_ns`.

    page: what the claim wrote; whoever knows the region's epoch sets it there. previous: the page
    that was found, which names the last owner; None: there was none. path: of the page, for
    people. number: of its permit.
    """

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
    ) -> Lease:
        """Write our name. previous: the page as it was just read, whose owner is dead or gone.

        Nothing is ours before `has_settled`. OSError: the page cannot be written.
        """
        page = LeasePage(
            owner=secrets.token_bytes(OWNER_BYTES),
            generation=1 + (previous.generation if previous is not None else 0),
            beat=0,
            beat_ms=round(1000 * leasing.beat_s),
            epoch=0,
            host=socket.gethostname(),
            pid=os.getpid(),
            name=leasing.name,
        )
        self = cls(io, leasing, permit, previous, page, clock=clock)
        begun_ns = clock()
        io.write(page.encode())
        self._written_ns = clock()
        self._took_ns = self._written_ns - begun_ns
        return self

    @classmethod
    def claim_in(cls, directory: Path, leasing: Leasing, permits: Permits, number: int) -> Lease:
        """Claim the lease of a directory whose owner is dead or gone; see `claim`."""
        io = lease_of(directory)
        io.create()
        self = cls.claim(io, leasing, permits.word(number), read_lease(io))
        self.path, self.number = io.path, number
        return self

    def has_epoch(self, epoch: int) -> None:
        """Name the region's epoch in the page from the next renewal on."""
        self.page = replace(self.page, epoch=epoch)

    @property
    def settles_ns(self) -> int:
        """The time from which the page shows whether the region is ours."""
        return self._written_ns + max(round(1e9 * self.leasing.settle_s), 2 * self._took_ns)

    def is_ours(self) -> bool:
        """Read the page back, after `settles_ns`; if it is ours, writes may start.

        OSError: it cannot be read.
        """
        begun_ns = self.clock()
        assert begun_ns >= self.settles_ns
        page = read_lease(self.io)
        if page is None or page.owner != self.page.owner:
            return False
        self.permit.grant(begun_ns + round(1e9 * self.leasing.permit_s))
        return True

    @property
    def was_of_another(self) -> bool:
        """Whether the region was another server's: what it stored there is not adopted."""
        return self.previous is not None and self.previous.name != self.page.name

    def release(self) -> None:
        """Leave the page without an owner, so that the next one need not wait; writes have ended.

        An error is only logged: the next owner waits.
        """
        self.permit.lose()
        with contextlib.suppress(OSError):
            found = read_lease(self.io)
            if found is None or found.owner != self.page.owner:
                return
            self.io.write(replace(found, owner=NOBODY).encode())
            return
        logger.info("the lease %s is left as it is: the next owner waits", self.path)


class Keeper:
    """Renews one lease and advances its permit. One thread; every call may wait for the disk.

    A permit is open for a third of the takeover after a renewal began that found our name. A page
    that is silent for the whole takeover may be claimed. A keeper without a renewal for that long
    is *late*: it opens no permit, and obeys any other owner. Its own name there is either unclaimed
    or a slow write of its own that has replaced a claim. So it claims again, in two steps of half a
    takeover (`_wait_ns`):

    1. It only reads. An owner that lives replaces a page of a lower generation than its own,
       because no claim writes one while that owner renews.
    2. It writes the next generation, which every other owner obeys, and waits. If its name is there
       at the end, nobody else has found theirs for longer than a permit lasts.

    The second wait follows each write that ends half a takeover after the last renewal began, which
    may have replaced such a claim. So no two permits are open at once, unless a claimant stalls
    between its read and its write for longer than it lets its claim settle.
    """

    def __init__(
        self,
        io: PageIo,
        owner: bytes,
        takeover_s: float,
        permit: Permit,
        clock: Callable[[], int] = boot_ns,
    ) -> None:
        self._io = io
        self._owner = owner
        self._takeover_ns = round(1e9 * takeover_s)
        self._permit_ns = self._takeover_ns // 3
        self._wait_ns = self._takeover_ns // 2
        self._permit = permit
        self._clock = clock
        #: The newest page of ours that was seen or written.
        self._page: LeasePage | None = None
        #: When the last renewal began that found our name, and ended before it was late.
        self._renewed_ns = permit.until_ns - self._permit_ns
        #: When our name was first found late, and no other since; 0: it was not.
        self._watched_ns = 0
        #: Renewals that begin earlier permit nothing.
        self._opens_ns = 0

    def renew(self, epoch: int) -> None:
        """Renew once, put the page back or claim it again; nothing if the lease is lost.

        OSError: the page cannot be read or written.
        """
        begun_ns = self._clock()
        if self._permit.is_lost:
            return
        found = read_lease(self._io)
        is_late = self._is_late()
        newest = 0 if self._page is None else self._page.generation
        is_ours = False
        if found is not None and found.is_intact:
            is_ours = found.owner == self._owner and found.generation >= newest
            if found.owner != self._owner and (is_late or found.generation >= newest):
                self._permit.lose()
                return
        if is_ours:
            self._page = found
        if self._page is None:
            raise OSError(errno.EIO, "no owner is named, or the page is damaged")
        claims = is_late and is_ours
        self._watched_ns = (self._watched_ns or self._clock()) if claims else 0
        if claims and begun_ns < self._watched_ns + self._wait_ns:
            return
        newest, beat = self._page.generation + claims, self._page.beat + 1
        self._page = replace(self._page, generation=newest, beat=beat, epoch=epoch)
        self._io.write(self._page.encode())
        written_ns = self._clock()
        if written_ns >= self._renewed_ns + self._wait_ns:
            self._opens_ns = written_ns + self._wait_ns
        if claims or (is_ours and not self._is_late()):
            self._renewed_ns = begun_ns
            if begun_ns >= self._opens_ns:
                self._permit.grant(begun_ns + self._permit_ns)

    def _is_late(self) -> bool:
        return self._clock() - self._renewed_ns >= self._takeover_ns
