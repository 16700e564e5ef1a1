# SPDX-License-Identifier: Apache-2.0
"""The lock of one rank directory: an flock, and a heartbeat for hosts that flock cannot see.

On one kernel the flock decides: it goes with its process, SIGKILL included, so a lock file
left behind by a dead process is simply taken over. Another host that has mounted the same
file system is seen by the heartbeat alone, which is why it is fdatasync'ed.

Who holds a rank directory, asked from outside; and holding some of them for a repair.

Whether a holder on another host is dead, where its heartbeat is old by this host's clock.

Two hosts' clocks may be hours apart, so the age of a heartbeat proves no death. A live holder
renews its record, and that can be seen: the record is read again after more than a heartbeat's
period, timed by this host alone. A record that has not changed by then names a dead holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.names import LOGGER_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = [
    "HEARTBEAT_PERIOD_S",
    "HEARTBEAT_STALE_S",
    "SILENCE_S",
    "DirectoryLock",
    "Heartbeat",
    "Holder",
    "LockFile",
    "LockState",
    "Silence",
    "UnsettledError",
    "foreign_holder_error",
    "give_to_owner",
    "hold",
    "local_holder_error",
    "probe_lock",
    "read_holder",
    "write_record",
]


logger = logging.getLogger(LOGGER_NAME)

HEARTBEAT_PERIOD_S = 5.0
#: A foreign holder whose heartbeat is older than this may be dead; see `silence`.
HEARTBEAT_STALE_S = 30.0
_RECORD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock. heartbeat: Unix time, seconds. boot_id: of the running kernel."""

    host: str
    pid: int
    boot_id: str
    heartbeat: float

    @staticmethod
    def myself(pid: int | None = None) -> Holder:
        """pid: of the process on this machine that holds it; None: this one."""
        return Holder(socket.gethostname(), pid or os.getpid(), _boot_id(), time.time())

    def record(self) -> bytes:
        """What the lock file holds."""
        return json.dumps(asdict(self)).encode().ljust(_RECORD_BYTES)

    def shares_kernel_with(self, other: Holder) -> bool:
        """True where flock already decides: the same machine, in containers too.

        Host names do not tell: two machines may have one. After a reboot the heartbeat's age
        decides, so that a crashed machine waits for it once.
        """
        return self.boot_id == other.boot_id


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def read_holder(path: Path) -> Holder | None:
    """Return the holder that a lock file names; None if it names nobody."""
    try:
        with path.open("rb") as file:
            # This kernel's page cache does not see what another host writes.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            record = json.loads(file.read().rstrip(b"\0 \n") or b"null")
        return Holder(
            str(record["host"]),
            int(record["pid"]),
            str(record["boot_id"]),
            float(record["heartbeat"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class LockFile:
    """Which file: by its path there may be another one by now."""

    path: str
    device: int
    inode: int


def write_record(file: LockFile, pid: int) -> None:
    """Renew the record of process `pid` in its lock file, durably.

    Raises:
        OSError: it cannot be written; ESTALE if another file is there now.
    """
    fd = os.open(file.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (file.device, file.inode):
            raise OSError(errno.ESTALE, "another lock file is there now", file.path)
        os.pwrite(fd, Holder.myself(pid).record(), 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)


class DirectoryLock:
    """A claimed lock file. `claim` makes one, `release` gives it up."""

    def __init__(self, fd: int, file: LockFile) -> None:
        """Take over a locked descriptor; `claim` makes one."""
        self.fd = fd
        self.file = file

    @property
    def path(self) -> Path:
        return Path(self.file.path)

    @classmethod
    def claim(
        cls, path: Path, pid: int | None = None, silence: Silence | None = None
    ) -> DirectoryLock | None:
        """Claim `path`, creating it; None if a process on this machine holds it.

        pid: on whose behalf; None: this process's. silence: tells whether a holder on another
        host is dead; None: none is, whatever its heartbeat's age.

        Raises:
            PoolLockedError: a live process of another host holds it.
            UnsettledError: `silence` cannot tell yet.
            OSError: the file cannot be opened or written.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                os.close(fd)
                return None
            # `pool rm` may have deleted the file between open and flock: a lock on a file
            # that has no name any more keeps nobody out.
            status = os.fstat(fd)
            if not os.path.samestat(status, os.stat(path, follow_symlinks=False)):
                raise OSError(errno.ESTALE, "the pool was removed at this moment", str(path))
            holder = read_holder(path)
            me = Holder.myself(pid)
            if holder is not None and not holder.shares_kernel_with(me):
                age_s = me.heartbeat - holder.heartbeat
                old = age_s >= HEARTBEAT_STALE_S
                if not (old and silence is not None and silence.is_dead(path, holder)):
                    raise foreign_holder_error(path, holder, age_s)
            lock = cls(fd, LockFile(str(path), status.st_dev, status.st_ino))
            lock.beat(pid)
            return lock
        except BaseException:
            os.close(fd)
            raise

    def beat(self, pid: int | None = None) -> None:
        """Write the holder's record, durable. OSError if it cannot be written."""
        os.pwrite(self.fd, Holder.myself(pid).record(), 0)
        os.fdatasync(self.fd)

    def abandon(self) -> None:
        """Let go of a file whose target is gone, writing nothing there."""
        fd, self.fd = self.fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)

    def release(self) -> None:
        """Name nobody in the file and let go; an error matters to nobody, the flock goes anyway."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            os.pwrite(fd, b" " * _RECORD_BYTES, 0)
            os.fdatasync(fd)
        except OSError as error:
            what = self.path, errno.errorcode.get(error.errno or 0, error)
            # A target that does not answer: nothing is lost, the flock goes with us.
            logger.info("lock %s is left as it is (%s): the next start takes it over", *what)
        with contextlib.suppress(OSError):  # a dead network mount; the descriptor goes anyway
            os.close(fd)


def foreign_holder_error(path: Path, holder: Holder, age_s: float) -> PoolLockedError:
    """The refusal for a live owner on another host."""
    return PoolLockedError(
        f"{path} is held by pid {holder.pid} on host {holder.host}, whose heartbeat is "
        f"{max(age_s, 0):.0f} s old. Two hosts that mount one xfs or ext4 destroy it: unmount it "
        f"there, or give each host its own target. If that host is gone for good, wait "
        f"{HEARTBEAT_STALE_S:.0f} s after its last heartbeat, or delete {path}"
    )


def local_holder_error(path: Path) -> PoolLockedError:
    """The refusal for a directory that another process on this machine holds."""
    holder = read_holder(path)
    who = "another process on this host"
    if holder is not None:
        age_s = max(time.time() - holder.heartbeat, 0)
        who = f"pid {holder.pid} on host {holder.host} (heartbeat {age_s:.0f} s old)"
    return PoolLockedError(
        f"{path} is held by {who}. Stop it, or let this one take the next free engine index "
        f"(do not set engine_index)"
    )


class Heartbeat:
    """A daemon thread that renews a command's locks; servers have `pool.heartbeat`."""

    def __init__(
        self, beats: list[Callable[[], None]], period_s: float = HEARTBEAT_PERIOD_S
    ) -> None:
        self._beats = beats
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            for beat in self._beats:
                try:
                    beat()
                except OSError as error:
                    # The flock still holds; only foreign hosts see less of us.
                    logger.warning("heartbeat of a pool directory failed: %s", error)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Stop; False if the thread hangs in the kernel (its descriptors must stay open)."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


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


_T = TypeVar("_T")

SILENCE_S = HEARTBEAT_PERIOD_S + 1.0
_POLL_S = 0.1


class UnsettledError(Exception):
    """A record has not been watched for long enough: try again in a moment."""


class Silence:
    """Records of holders on other hosts, and since when each of them has been watched."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._wait = wait
        self._watched: dict[Path, tuple[Holder, float]] = {}
        self._said = False

    def watch(self, paths: Iterable[Path]) -> None:
        """Watch these lock files from now on: many together cost one wait."""
        me = Holder.myself()
        for path in paths:
            holder = read_holder(path)
            if holder is not None and not holder.shares_kernel_with(me):
                self._watched.setdefault(path, (holder, self._clock()))

    def is_dead(self, path: Path, holder: Holder) -> bool:
        """Whether `holder`, read just now from `path`, has been silent; False: it has beaten.

        Raises:
            UnsettledError: it has not been watched for `SILENCE_S` yet.
        """
        first, since_s = self._watched.setdefault(path, (holder, self._clock()))
        if holder != first:
            return False
        if self._clock() - since_s >= SILENCE_S:
            return True
        if not self._said:
            logger.warning(
                "%s names pid %d on host %s, whose heartbeat is old by this host's clock; "
                "waiting %.0f s for another heartbeat before taking it over",
                *(path, holder.pid, holder.host, SILENCE_S),
            )
            self._said = True
        raise UnsettledError

    def settled(self, ask: Callable[[Silence], _T]) -> _T:
        """Ask until there is an answer; `SILENCE_S` for the lock files watched before it."""
        while True:
            try:
                return ask(self)
            except UnsettledError:
                self._wait(_POLL_S)
