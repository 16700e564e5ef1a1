# SPDX-License-Identifier: Apache-2.0
"""The lock of one rank directory: an flock, and a heartbeat for hosts that flock does not reach.

On one kernel the flock decides. It ends with its process, SIGKILL included, so a lock file that
a dead process left behind is taken over at once. Another host that has mounted the same file
system only sees the heartbeat in the file, which is why each one is fdatasync'ed. Whether that
holder is dead, only the record's changes tell (`silence`); the time in it is for people.

Heartbeats are written by another process, `python -m …pool.lock PID`. A write or an fdatasync on a
lost path waits in the kernel and cannot be killed; a server with a thread in such a call could not
be stopped. So the server sends the names of its lock files to a child through a pipe, and never
waits for the child, which has a thread per file: one that hangs holds up no other. The child opens
a file for each heartbeat, and writes only if it is the file that was locked, because another file
system with another owner may be mounted there by then. The child holds no flock, which must end
with the server.

The same child keeps the leases of regions (`lease`), and advances their permits in memory that it
shares with the server.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.child import child_command
from vllm_nvmeof_offload.errors import PoolLockedError
from vllm_nvmeof_offload.pool.folder import open_private
from vllm_nvmeof_offload.pool.format import LOCK_FILE
from vllm_nvmeof_offload.pool.lease import Keeper, Lease, PageFile, Permits
from vllm_nvmeof_offload.pool.silence import TAKEOVER_S, Silence
from vllm_nvmeof_offload.units import printable

HEARTBEAT_PERIOD_S = 5.0
#: How long a start waits for a killed process that is still blocked in the kernel.
ENDING_WAIT_S_MAX = 30.0
_SIGKILL_BIT = 1 << 8
_RECORD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock. heartbeat: Unix time on its host. boot_id: of the running kernel."""

    host: str
    pid: int
    boot_id: str
    heartbeat: float

    @staticmethod
    def myself(pid: int | None = None) -> Holder:
        """pid: of the process on this machine that holds the lock; None: this one."""
        return Holder(socket.gethostname(), pid or os.getpid(), _boot_id(), time.time())

    def __str__(self) -> str:
        return f"pid {self.pid} on host {printable(self.host)}"

    @property
    def is_foreign(self) -> bool:
        """Whether it runs on another machine, where flock does not reach.

        Containers of one machine share a kernel. Two machines may have one host name, so names
        prove nothing. After a reboot a crashed machine's own record is watched like another's,
        once.
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
        with open(open_private(path, os.O_RDONLY), "rb") as file:
            # This kernel's page cache does not see what another host writes.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            record = json.loads(file.read(_RECORD_BYTES).rstrip(b"\0 \n") or b"null")
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
    """Renew the record of process `pid` durably. OSError: ESTALE: another file is there now;
    EBUSY: another process has taken the directory over."""
    fd = open_private(Path(file.path), os.O_WRONLY)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (file.device, file.inode):
            raise OSError(errno.ESTALE, "another lock file is there now", file.path)
        found, ours = read_holder(Path(file.path)), Holder.myself(pid)
        if found is not None and (found.boot_id, found.pid) != (ours.boot_id, ours.pid):
            raise OSError(errno.EBUSY, f"{found} has taken it over from {ours}", file.path)
        _write(fd, ours.record())
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
        cls,
        path: Path,
        pid: int | None = None,
        silence: Silence | None = None,
        *,
        leased: bool = False,
        despite_flock: bool = False,
    ) -> DirectoryLock | None:
        """Claim `path`, creating it; None if a process that flock reaches holds it.

        pid: the process on whose behalf it is claimed; None: this one. silence: decides whether a
        holder on another host is dead; None: it counts as alive. leased: holders on other hosts do
        not matter, because the region has a lease. despite_flock: the lease has shown that the
        holder no longer owns the region, so a flock that it still has does not matter either.
        PoolLockedError: a live process of another host holds it. UnsettledError: `silence` cannot
        decide yet. OSError: the file cannot be opened or written.
        """
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            if not try_flock(fd, fcntl.LOCK_EX) and not despite_flock:
                os.close(fd)
                return None
            # `pool rm` may have deleted the file between open and flock. A lock on a file that
            # has lost its name keeps no process out.
            status = os.fstat(fd)
            if not os.path.samestat(status, os.stat(path, follow_symlinks=False)):
                raise OSError(errno.ESTALE, "the pool was removed at this moment", str(path))
            holder = None if leased else read_holder(path)
            foreign = holder is not None and holder.is_foreign
            if foreign and (silence is None or not silence.is_dead(path, holder, holder)):
                assert holder is not None
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
        """Remove the holder's name, if no other host has taken the file over, and unlock. An error
        is only logged: the flock ends anyway."""
        if self.fd < 0:
            return
        try:
            holder = read_holder(self.path)
            if holder is None or not holder.is_foreign:
                _write(self.fd, b" " * _RECORD_BYTES)
            # A prober that is just being started, or ending, has the descriptor too.
            fcntl.flock(self.fd, fcntl.LOCK_UN)
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
        f"{path} is held by {holder}. Two hosts that mount one xfs or ext4 destroy it: unmount it "
        f"there, or give each host its own target. If that host is gone for good, start again: a "
        f"start that sees no heartbeat for {TAKEOVER_S:.0f} s takes the directory over; or delete "
        f"{path}"
    )


def local_holder_error(path: Path) -> PoolLockedError:
    """Return the refusal for a directory that another process on this machine holds."""
    holder = read_holder(path)
    age_s = _age_s(holder)
    old = "" if age_s is None else f" (heartbeat {age_s:.0f} s old)"
    return PoolLockedError(
        f"{path} is held by {holder or 'another process on this host'}{old}. Stop it, or let this "
        f"one take the next free engine index (do not set engine_index)"
    )


def _age_s(holder: Holder | None) -> float | None:
    """Return the seconds since the last heartbeat; None: another host's clock wrote it."""
    if holder is None or holder.is_foreign:
        return None
    return max(0.0, time.time() - holder.heartbeat)


@dataclass(frozen=True, slots=True)
class LockState:
    """kind: "none" (released in order), "stale" (its process is gone), "foreign" or "live".

    "foreign": another host holds it, or held it: one look does not tell whether it still lives.

    holder: None if the lock file names no holder. heartbeat_age_s: seconds, by this host's clock;
    None: another host's clock wrote the heartbeat.
    """

    kind: str
    holder: Holder | None = None
    heartbeat_age_s: float | None = None

    @property
    def live(self) -> bool:
        return self.kind == "live"

    @property
    def may_live(self) -> bool:
        """True also for a holder on another host."""
        return self.kind in ("live", "foreign")

    def __str__(self) -> str:
        age_s, who = self.heartbeat_age_s, self.holder or "another process on this host"
        age = "" if age_s is None else f", {age_s:.0f} s ago"
        return self.kind if self.kind == "none" else f"{self.kind}: {who}{age}"


def probe_lock(directory: Path) -> LockState:
    """Return the state of the lock of `directory`, writing nothing; OSError if unreadable."""
    path = directory / LOCK_FILE
    try:
        fd = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        return LockState("none")
    try:
        if not os.pread(fd, 4096, 0).strip(b"\0 \n"):
            return LockState("none")
        holder = read_holder(path)
        # A shared flock, released at once. A server that starts in these microseconds would see
        # the directory as taken. The record is read first, so that this can only happen where a
        # name was left. A refused flock shows a live holder, whatever boot id its container has.
        if not try_flock(fd, fcntl.LOCK_SH):
            return LockState("live", holder, _age_s(holder))
        if holder is not None and holder.is_foreign:
            return LockState("foreign", holder)
        return LockState("stale", holder, _age_s(holder))
    finally:
        os.close(fd)


def watch_locks(silence: Silence, paths: Iterable[Path]) -> None:
    """Watch these lock files from now on: many together cost one wait."""
    for path in paths:
        holder = read_holder(path)
        if holder is not None and holder.is_foreign:
            silence.watch(path, holder)


_END_S_MAX = 0.5
#: More than `_END_S_MAX`. Only a child that cannot start (Python's own files hang) takes longer.
_STOP_S_MAX = 2.0


class Heartbeat:
    """The lock owner's side: a daemon thread that touches no target.

    The child starts at the first heartbeat, so a lock that is held for a moment needs none.
    """

    def __init__(
        self,
        locks: Callable[[], Iterable[DirectoryLock]],
        period_s: float = HEARTBEAT_PERIOD_S,
        leases: Sequence[Lease] = (),
        permits: Permits | None = None,
    ) -> None:
        """locks: called for each heartbeat. leases: renewed as often as they need it; their
        permits are in `permits`.
        """
        self._locks = locks
        self._leases = leases
        self._permits = permits
        self._period_s = min([period_s, *(lease.leasing.beat_s for lease in leases)])
        self._stop = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="pool-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; a write that hangs ends when the kernel lets it, and no other follows."""
        self._stop.set()
        self._thread.join(_STOP_S_MAX)

    def _run(self) -> None:
        wait_s = 0.0 if self._leases else self._period_s  # a permit runs out soon
        while not self._stop.wait(wait_s):
            wait_s = self._period_s
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
            memory = [] if self._permits is None else [self._permits.fd]
            self._child = subprocess.Popen(
                [*command, *map(str, memory)],
                stdin=pipe,
                stdout=pipe,
                cwd="/",
                bufsize=0,
                start_new_session=True,
                pass_fds=memory,
            )
            self._child.wait()  # it leaves the work to a child of its own
            if self._stop.is_set():  # while it started; the locks may be released by now
                return
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        # At most one pipe's content waits; less than PIPE_BUF is written whole or not at all.
        messages: list[Any] = [lock.file for lock in self._locks()]
        messages += map(_order, self._leases)
        for message in messages:
            line = json.dumps(message).encode() + b"\n"
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


def _order(lease: Lease) -> dict[str, Any]:
    """What the child needs to know to renew a lease."""
    return {
        "path": str(lease.path),
        "owner": lease.page.owner.hex(),
        "takeover_s": lease.leasing.takeover_s,
        "permit": lease.number,
        "epoch": lease.page.epoch,
    }


class _Renewed:
    """A file that the child renews whenever it is due, on a thread of its own."""

    def __init__(self, what: str, renew: Callable[[Any], None]) -> None:
        self._what = what
        self._renew = renew
        self._due = threading.Event()
        self._message: Any = None
        threading.Thread(target=self._run, daemon=True).start()

    def is_due(self, message: Any) -> None:
        self._message = message
        self._due.set()

    def _run(self) -> None:
        failing = False
        while True:
            self._due.wait()
            self._due.clear()
            try:
                self._renew(self._message)
                failing = False
            except OSError as error:
                if not failing:  # logged once, until it works again
                    print(f"heartbeat of {self._what} failed: {error}", file=sys.stderr)
                failing = True


def _writing(file: LockFile, pid: int) -> Callable[[Any], None]:
    return lambda _: write_record(file, pid)


def _renewing(keeper: Keeper) -> Callable[[Any], None]:
    return lambda order: keeper.renew(order["epoch"])


def main(pid: int, permits: Permits | None) -> None:
    """Renew what each line on stdin names, for process `pid`, which holds it: a lock file, or a
    lease with its permit in `permits`."""
    if os.fork():
        os._exit(0)
    known: dict[Any, _Renewed] = {}
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if isinstance(message, list):
            name: Any = LockFile(*message)
            if name not in known:
                known[name] = _Renewed(name.path, _writing(name, pid))
        else:
            name = message["owner"]
            if name not in known:
                assert permits is not None
                keeper = Keeper(
                    PageFile(Path(message["path"])),
                    bytes.fromhex(name),
                    message["takeover_s"],
                    permits.word(message["permit"]),
                )
                known[name] = _Renewed(message["path"], _renewing(keeper))
        known[name].is_due(message)
    os._exit(0)  # does not wait for threads that hang


if __name__ == "__main__":
    main(int(sys.argv[1]), Permits(int(sys.argv[2])) if len(sys.argv) > 2 else None)
