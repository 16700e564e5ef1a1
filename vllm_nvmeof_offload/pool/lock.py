# SPDX-License-Identifier: Apache-2.0
"""The lock of one rank directory: an flock, and a heartbeat for hosts that flock does not reach.

On one kernel the flock decides. It ends with its process, SIGKILL included, so a lock file that
a dead process left behind is taken over at once. Another host that has mounted the same file
system only sees the heartbeat in the file, which is why each one is fdatasync'ed.

Two hosts' clocks may be hours apart, so the age of a heartbeat does not prove a death. A live
holder renews its record, and that can be observed: the record is read again after more than a
heartbeat's period by this host's clock. A record that has not changed names a dead holder.

Heartbeats are written by another process, `python -m …pool.lock PID`. A write or an fdatasync on a
lost path waits in the kernel and cannot be killed; a server with a thread in such a call could not
be stopped. So the server sends the names of its lock files to a child through a pipe, and never
waits for the child, which has a thread per file: one that hangs holds up no other. The child opens
a file for each heartbeat, and writes only if it is the file that was locked, because another file
system with another owner may be mounted there by then. The child holds no flock, which must end
with the server.

The child leaves the work to a child of its own and ends. vLLM ends an engine by killing all
processes below it one by one, and its API server hangs for ever if a listed process ends before
its turn (psutil raises `NoSuchProcess`), as ours would, which ends when its worker does. It has
a session of its own, because Ctrl-C reaches the whole process group of a console, and heartbeats
must go on while the server drains.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.child import child_command
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool.format import LOCK_FILE

HEARTBEAT_PERIOD_S = 5.0
#: A holder on another host whose heartbeat is older than this may be dead; `Silence` decides.
HEARTBEAT_STALE_S = 30.0
#: A record that has not changed for this long names a dead holder.
SILENCE_S = HEARTBEAT_PERIOD_S + 1.0
#: Interval at which a claim looks again at what it waits for.
POLL_S = 0.05
#: How long a start waits for a killed process that is still blocked in the kernel.
ENDING_WAIT_S_MAX = 30.0
_SIGKILL_BIT = 1 << 8
_RECORD_BYTES = 512

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock. heartbeat: Unix time, seconds. boot_id: of the running kernel."""

    host: str
    pid: int
    boot_id: str
    heartbeat: float

    @staticmethod
    def myself(pid: int | None = None) -> Holder:
        """pid: of the process on this machine that holds the lock; None: this one."""
        return Holder(socket.gethostname(), pid or os.getpid(), _boot_id(), time.time())

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"

    @property
    def age_s(self) -> float:
        """Seconds since the heartbeat, by this host's clock."""
        return time.time() - self.heartbeat

    @property
    def is_foreign(self) -> bool:
        """Whether it runs on another machine, where flock does not reach.

        Containers of one machine share a kernel. Two machines may have one host name, so names
        prove nothing. After a reboot the heartbeat's age decides, so that a crashed machine waits
        for it once.
        """
        return self.boot_id != _boot_id()

    def record(self) -> bytes:
        """Return the content of the lock file."""
        return json.dumps(asdict(self)).encode().ljust(_RECORD_BYTES)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown-{os.getpid()}"


def read_holder(path: Path) -> Holder | None:
    """Return the holder that a lock file names; None if it names none."""
    try:
        with path.open("rb") as file:
            # This kernel's page cache does not see what another host writes.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            record = json.loads(file.read().rstrip(b"\0 \n") or b"null")
        host, boot_id = str(record["host"]), str(record["boot_id"])
        return Holder(host, int(record["pid"]), boot_id, float(record["heartbeat"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class LockFile(NamedTuple):
    """One lock file; another file may have the same path by now."""

    path: str
    device: int
    inode: int


def write_record(file: LockFile, pid: int) -> None:
    """Renew the record of process `pid` durably. OSError ESTALE: another file is there now."""
    fd = os.open(file.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (file.device, file.inode):
            raise OSError(errno.ESTALE, "another lock file is there now", file.path)
        _write(fd, Holder.myself(pid).record())
    finally:
        os.close(fd)


def _write(fd: int, record: bytes) -> None:
    os.pwrite(fd, record, 0)
    os.fdatasync(fd)


def try_flock(fd: int, operation: int) -> bool:
    """Lock `fd` (LOCK_EX or LOCK_SH); False if another process holds it."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


@dataclass(slots=True, eq=False)
class DirectoryLock:
    """A claimed lock file, open and locked. `claim` makes one; `release` or `abandon` ends it."""

    fd: int
    file: LockFile

    @property
    def path(self) -> Path:
        return Path(self.file.path)

    @classmethod
    def claim(
        cls, path: Path, pid: int | None = None, silence: Silence | None = None
    ) -> DirectoryLock | None:
        """Claim `path`, creating it; None if a process on this machine holds it.

        pid: the process on whose behalf it is claimed; None: this one. silence: decides whether
        a holder on another host is dead; None: it counts as alive, whatever its heartbeat's age.
        PoolLockedError: a live process of another host holds it. UnsettledError: `silence` cannot
        decide yet. OSError: the file cannot be opened or written.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not try_flock(fd, fcntl.LOCK_EX):
                os.close(fd)
                return None
            # `pool rm` may have deleted the file between open and flock. A lock on a file that
            # has lost its name keeps no process out.
            status = os.fstat(fd)
            if not os.path.samestat(status, os.stat(path, follow_symlinks=False)):
                raise OSError(errno.ESTALE, "the pool was removed at this moment", str(path))
            holder = read_holder(path)
            if holder is not None and holder.is_foreign:
                old = holder.age_s >= HEARTBEAT_STALE_S
                if not (old and silence is not None and silence.is_dead(path, holder)):
                    raise foreign_holder_error(path, holder)
            _write(fd, Holder.myself(pid).record())
            return cls(fd, LockFile(str(path), status.st_dev, status.st_ino))
        except BaseException:
            os.close(fd)
            raise

    def abandon(self) -> None:
        """Close a file whose target is gone, without a write to it."""
        fd, self.fd = self.fd, -1
        with contextlib.suppress(OSError):  # a dead network mount; the descriptor goes anyway
            os.close(fd)

    def release(self) -> None:
        """Remove the holder's name and unlock. An error is only logged: the flock ends anyway."""
        if self.fd < 0:
            return
        try:
            _write(self.fd, b" " * _RECORD_BYTES)
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, error)
            # A target that does not answer: nothing is lost, the flock ends with this process.
            logger.info(
                "lock %s is left as it is (%s): the next start takes it over", self.path, reason
            )
        self.abandon()


def is_ending(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether process `pid` exists, but was killed or has lost its first thread.

    In a container `pid` may be the number of another process than was meant; then a claim waits
    once, and goes on.
    """
    try:
        # The name of a process may be any bytes.
        status = (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if facts.get("State", "").strip()[:1] in ("Z", "X"):
        return True
    pending = int(facts.get("SigPnd", "0"), 16) | int(facts.get("ShdPnd", "0"), 16)
    return bool(pending & _SIGKILL_BIT)


def foreign_holder_error(path: Path, holder: Holder) -> PoolLockedError:
    """Return the refusal for a live owner on another host."""
    return PoolLockedError(
        f"{path} is held by {holder}, whose heartbeat is {max(holder.age_s, 0):.0f} s old. Two "
        f"hosts that mount one xfs or ext4 destroy it: unmount it there, or give each host its own "
        f"target. If that host is gone for good, wait {HEARTBEAT_STALE_S:.0f} s after its last "
        f"heartbeat, or delete {path}"
    )


def local_holder_error(path: Path) -> PoolLockedError:
    """Return the refusal for a directory that another process on this machine holds."""
    holder = read_holder(path)
    old = f" (heartbeat {max(holder.age_s, 0):.0f} s old)" if holder else ""
    return PoolLockedError(
        f"{path} is held by {holder or 'another process on this host'}{old}. Stop it, or let this "
        f"one take the next free engine index (do not set engine_index)"
    )


@dataclass(frozen=True, slots=True)
class LockState:
    """kind: "none" (released in order), "stale" (its process is gone), "old" or "live".

    "old": the holder is on another host, and its heartbeat is old by this host's clock. It is
    dead, or the clocks are apart: a claim waits for another heartbeat to find out.

    holder: None if the lock file names no holder. heartbeat_age_s: seconds.
    """

    kind: str
    holder: Holder | None = None
    heartbeat_age_s: float | None = None

    @property
    def live(self) -> bool:
        return self.kind == "live"

    @property
    def may_live(self) -> bool:
        """True also if only the clocks may be apart."""
        return self.kind in ("live", "old")

    def __str__(self) -> str:
        who = self.holder or "another process on this host"
        return self.kind if self.kind == "none" else f"{self.kind}: {who}"


def probe_lock(directory: Path) -> LockState:
    """Return the state of the lock of `directory`, writing nothing; OSError if unreadable."""
    path = directory / LOCK_FILE
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return LockState("none")
    try:
        if not os.pread(fd, 4096, 0).strip(b"\0 \n"):
            return LockState("none")
        holder = read_holder(path)
        age_s = holder.age_s if holder is not None else None
        if holder is not None and holder.is_foreign:
            kind = "live" if holder.age_s < HEARTBEAT_STALE_S else "old"
            return LockState(kind, holder, age_s)
        # A shared flock, released at once. A server that starts in these microseconds would see
        # the directory as taken. The record is read first, so that this can only happen where a
        # killed server left its name.
        stale = try_flock(fd, fcntl.LOCK_SH)
        return LockState("stale" if stale else "live", holder, age_s)
    finally:
        os.close(fd)


class UnsettledError(Exception):
    """A record has not been watched for long enough: try again in a moment."""


@dataclass
class Silence:
    """Finds dead holders on other hosts: their records, and since when each has been watched."""

    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    _watched: dict[Path, tuple[Holder, float]] = field(default_factory=dict)
    _logged: bool = False

    def watch(self, paths: Iterable[Path]) -> None:
        """Watch these lock files from now on: many together cost one wait."""
        for path in paths:
            holder = read_holder(path)
            if holder is not None and holder.is_foreign:
                self._watched.setdefault(path, (holder, self.clock()))

    def is_dead(self, path: Path, holder: Holder) -> bool:
        """Return whether `holder`, just read from `path`, is dead; UnsettledError: unknown yet."""
        first, since_s = self._watched.setdefault(path, (holder, self.clock()))
        if holder != first:
            return False
        if self.clock() - since_s >= SILENCE_S:
            return True
        if not self._logged:
            logger.warning(
                "%s names %s, whose heartbeat is old by this host's clock; "
                "waiting %.0f s for another heartbeat before taking it over",
                *(path, holder, SILENCE_S),
            )
            self._logged = True
        raise UnsettledError

    def settled(self, ask: Callable[[Silence], _T]) -> _T:
        """Call `ask` until it returns: at most `SILENCE_S` for all lock files watched before."""
        while True:
            try:
                return ask(self)
            except UnsettledError:
                self.wait(POLL_S)


_END_S_MAX = 0.5
#: More than `_END_S_MAX`. Only a child that cannot start (Python's own files hang) takes longer.
_STOP_S_MAX = 2.0


class Heartbeat:
    """The lock owner's side: a daemon thread that touches no target.

    The child starts at the first heartbeat, so a lock that is held for a moment needs none.
    """

    def __init__(
        self, locks: Callable[[], Iterable[DirectoryLock]], period_s: float = HEARTBEAT_PERIOD_S
    ) -> None:
        """locks: called for each heartbeat."""
        self._locks = locks
        self._period_s = period_s
        self._stop = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="pool-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; a write that hangs ends when the kernel lets it, and no other follows."""
        self._stop.set()
        self._thread.join(_STOP_S_MAX)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._beat()
            except OSError as error:
                # The flocks still hold; only other hosts see an older heartbeat.
                logger.warning("heartbeat of the pool's directories failed: %s", error)
        self._end_child()

    def _beat(self) -> None:
        if self._child is None:
            # cwd="/": a working directory could hang, or keep a target from being unmounted.
            command, pipe = [*child_command("pool.lock"), str(os.getpid())], subprocess.PIPE
            self._child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, cwd="/", bufsize=0, start_new_session=True
            )
            self._child.wait()  # it leaves the work to a child of its own
            if self._stop.is_set():  # while it started; the locks may be released by now
                return
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        # At most one pipe's content waits; less than PIPE_BUF is written whole or not at all.
        for lock in self._locks():
            line = json.dumps(lock.file).encode() + b"\n"
            try:
                os.write(self._child.stdin.fileno(), line)
            except BlockingIOError:
                continue
            except BrokenPipeError:  # the child was killed; the next heartbeat starts another
                self._end_child()
                return

    def _end_child(self) -> None:
        """Close the child's input, at the end of which it ends; wait a moment for that."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin and child.stdout
            child.stdin.close()
            ended = select.poll()  # `select.select` refuses descriptors from 1024 on
            ended.register(child.stdout, select.POLLIN)
            ended.poll(_END_S_MAX * 1000)
            child.stdout.close()


def _renew(file: LockFile, pid: int, due: threading.Event) -> None:
    """Renew one lock file whenever it is due; runs on a thread of the child."""
    failing = False
    while True:
        due.wait()
        due.clear()
        try:
            write_record(file, pid)
            failing = False
        except OSError as error:
            if not failing:  # logged once, until it works again
                print(f"heartbeat of {file.path} failed: {error}", file=sys.stderr)
            failing = True


def main(pid: int) -> None:
    """Renew each lock file that a line on stdin names, for process `pid`, which holds it."""
    if os.fork():
        os._exit(0)
    due: dict[LockFile, threading.Event] = {}
    for line in sys.stdin.buffer:
        file = LockFile(*json.loads(line))
        if file not in due:
            due[file] = threading.Event()
            threading.Thread(target=_renew, args=(file, pid, due[file]), daemon=True).start()
        due[file].set()
    os._exit(0)  # does not wait for threads that hang


if __name__ == "__main__":
    main(int(sys.argv[1]))
