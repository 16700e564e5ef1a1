# SPDX-License-Identifier: Apache-2.0
"""The claim of one rank's directories, `target/keyspace/engine-K/rank-R`, on every target.

Which engine a directory `engine-K` belongs to, so that all ranks of one engine share one.

Each rank claims its own directory, in a process of its own. Two servers that start at the same
time would otherwise each get some ranks' directories of both, and adopt nothing. So ranks claim
one at a time, and leave their engine's name in `engine-K/owner`; who finds another name there
goes on to the next directory if any rank of that engine still lives. The name of a dead engine
means nothing.

Holders of a lock that were killed and are not gone yet.

A flock ends with the last thread of its process, and a thread that waits in the kernel for a
slow device outlives SIGKILL until the device has answered. A supervisor starts the next server
at once: it is to find the pool of the one that died, and not to take another directory, empty,
on a disk that may be full.

What pool to open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import PoolError, PoolFormatError, PoolLockedError
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.format import ENTRY_BYTES, Superblock, read_superblock
from vllm_nvmeof_offload.pool.heartbeat import ServerHeartbeat
from vllm_nvmeof_offload.pool.lock import (
    DirectoryLock,
    Holder,
    Silence,
    UnsettledError,
    foreign_holder_error,
    local_holder_error,
    probe_lock,
    read_holder,
)
from vllm_nvmeof_offload.pool.slab import make_directory, open_private
from vllm_nvmeof_offload.pool.survey import disk_bytes, find
from vllm_nvmeof_offload.units import slot_stride_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from vllm_nvmeof_offload.pool.keyspace import Keyspace
    from vllm_nvmeof_offload.pool.lock import Silence

__all__ = [
    "ENDING_WAIT_S_MAX",
    "ENGINES_MAX",
    "OWNER_FILE",
    "Claim",
    "PoolSpec",
    "bytes_of_others",
    "bytes_of_pools",
    "ending_holder",
    "held_by_another",
    "is_ending",
    "one_at_a_time",
    "read_owner",
    "write_owner",
]


OWNER_FILE = "owner"
CLAIM_WAIT_S_MAX = 30.0
_ENGINE_POLL_S = 0.01
_OWNER_BYTES = 256


@contextlib.contextmanager
def one_at_a_time(spaces: Sequence[Path]) -> Iterator[None]:
    """Keep other claims in these keyspaces out meanwhile: an flock on the directories.

    Raises:
        OSError: a directory cannot be opened or locked.
        PoolError: somebody else has been claiming for too long.
    """
    with contextlib.ExitStack() as stack:
        # In one order everywhere, or two servers would wait for each other.
        for space in sorted({os.path.realpath(space) for space in spaces}):
            fd = os.open(space, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            _lock(fd, space)
        yield


def _lock(fd: int, space: str) -> None:
    limit_s = time.monotonic() + CLAIM_WAIT_S_MAX
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > limit_s:
            raise PoolError(
                f"another server has been claiming a directory in {space} for "
                f"{CLAIM_WAIT_S_MAX:.0f} s: its storage hangs, or it was stopped; end it first"
            )
        time.sleep(_ENGINE_POLL_S)


def held_by_another(directory: Path, engine: str, rank: int, silence: Silence) -> bool:
    """Whether ranks of another engine live in `directory`, apart from `rank`'s, which is locked.

    Raises:
        OSError: a lock file cannot be read.
        PoolLockedError: they live on another host.
        UnsettledError: `silence` cannot tell yet whether they do.
    """
    if read_owner(directory) == engine:
        return False
    for sibling in sorted(directory.glob("rank-*")):
        if sibling.name == f"rank-{rank}":
            continue
        state = probe_lock(sibling)
        path, holder = sibling / "lock", state.holder
        if state.kind == "old" and holder is not None and silence.is_dead(path, holder):
            continue
        if not state.live and state.kind != "old":
            continue
        if holder is not None and not holder.shares_kernel_with(Holder.myself()):
            raise foreign_holder_error(path, holder, state.heartbeat_age_s or 0.0)
        return True
    return False


def bytes_of_pools(targets: Sequence[Path]) -> int:
    """Bytes on `targets` that rank directories occupy. No other file there is looked at.

    Raises:
        PoolError: a directory cannot be listed.
    """
    return sum(disk_bytes(one.path) for one in find([x for x in targets if x.is_dir()]))


def bytes_of_others(targets: Sequence[Path], server: str = "") -> int:
    """Bytes on `targets` that belong to engines that live, but to none of `server`'s.

    server: what the names of its engines have before the slash.

    Raises:
        PoolError: a directory cannot be listed.
        OSError: a lock file cannot be read.
    """
    return sum(
        disk_bytes(one.path)
        for one in find([target for target in targets if target.is_dir()])
        if probe_lock(one.path).live
        and not (server and read_owner(one.path.parent).partition("/")[0] == server)
    )


def read_owner(directory: Path) -> str:
    """The engine that was the last to claim `directory`; "": none that has a name."""
    try:
        with (directory / OWNER_FILE).open("rb") as file:
            return file.read(_OWNER_BYTES).decode(errors="replace").strip("\0 ")
    except OSError:
        return ""


def write_owner(directory: Path, engine: str) -> None:
    """Name the engine that has claimed `directory`, in place: a full disk has room for that.

    Raises:
        OSError: it cannot be written.
    """
    fd = open_private(directory / OWNER_FILE, os.O_WRONLY)
    try:
        os.pwrite(fd, engine.encode()[:_OWNER_BYTES].ljust(_OWNER_BYTES), 0)
    finally:
        os.close(fd)


#: For how long a claim waits for them; the device may never answer.
ENDING_WAIT_S_MAX = 30.0
_PROC = Path("/proc")
_SIGKILL_BIT = 1 << 8


def ending_holder(engines: Sequence[Path]) -> Path | None:
    """Return a rank directory below `engines` whose holder is ending; None if there is none.

    Ask it of directories that are held: a name that a dead process left behind says nothing.
    """
    me = Holder.myself()
    for rank in (rank for engine in engines for rank in sorted(engine.glob("rank-*"))):
        holder = read_holder(rank / "lock")
        if holder is not None and holder.shares_kernel_with(me) and is_ending(holder.pid):
            return rank
    return None


def is_ending(pid: int, proc: Path = _PROC) -> bool:
    """Whether process `pid` has been killed, or its first thread has ended, and it is there yet.

    In a container it may be the number of another process than was meant; then a claim waits
    once, and goes on.
    """
    try:
        # The name of a process is bytes, whatever they are.
        status = (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if facts.get("State", "").strip()[:1] in ("Z", "X"):
        return True
    pending = int(facts.get("SigPnd", "0"), 16) | int(facts.get("ShdPnd", "0"), 16)
    return bool(pending & _SIGKILL_BIT)


@dataclass(frozen=True)
class PoolSpec:
    """What to open.

    targets: directories that exist or can be made. pool_bytes: this rank's share over all
    targets. payload_bytes: of one slot. engine_index: None takes the first free one, of replica
    r of n: r, r + n, r + 2n, … engine: the same on all ranks of one engine, which share an
    engine directory; "": the rank shares with whom it finds.
    o_direct: "on" fails where "auto" falls back to buffered I/O. adopt: False voids what is
    there. adoptable: may a later start adopt what is written from now on?
    """

    targets: tuple[Path, ...]
    pool_bytes: int
    payload_bytes: int
    keyspace: Keyspace
    rank: int = 0
    world_size: int = 1
    engine_index: int | None = None
    engine: str = ""
    replica: int = 0
    replicas: int = 1
    o_direct: str = "auto"
    adopt: bool = True
    adoptable: bool = True

    def __post_init__(self) -> None:
        assert self.targets
        assert self.payload_bytes > 0
        assert 0 <= self.replica < self.replicas
        assert self.o_direct in ("auto", "on", "off")

    @property
    def slot_bytes(self) -> int:
        return slot_stride_bytes(self.payload_bytes)

    @property
    def slots_per_target(self) -> int:
        """How many slots `pool_bytes` buys on each target, table entries included."""
        return self.pool_bytes // len(self.targets) // (self.slot_bytes + ENTRY_BYTES)


logger = logging.getLogger(LOGGER_NAME)

#: Engines of one keyspace on one set of targets, each with its own directories.
ENGINES_MAX = 64
_POLL_S = 0.1


class Claim:
    """Locked directories, one a target, in the order of the targets; a heartbeat keeps them."""

    def __init__(
        self, engine_index: int, directories: tuple[Path, ...], locks: list[DirectoryLock]
    ) -> None:
        self.engine_index = engine_index
        self.directories = directories
        #: By target; None: it is gone, and its lock with it.
        self._locks: list[DirectoryLock | None] = [*locks]
        self._heartbeat = ServerHeartbeat(lambda: filter(None, self._locks))

    @classmethod
    def make(cls, spec: PoolSpec) -> Claim:
        """Claim engine `spec.engine_index`, or the first one that no other engine holds.

        One that is held by a process which was killed and is ending is waited for.

        Raises:
            PoolLockedError: a live process holds it, here (by index) or on another host.
            PoolError: a directory cannot be made or locked.
        """
        spaces = [_make_keyspace(target, spec.keyspace) for target in spec.targets]
        deadline = time.monotonic() + ENDING_WAIT_S_MAX
        told = False
        silence = Silence()
        while True:
            try:
                with one_at_a_time(spaces):
                    waits = time.monotonic() < deadline
                    return cls._first_free(spec, spaces, silence, waits=waits)
            except UnsettledError:
                pass  # other ranks may claim theirs meanwhile
            except _EndingError as error:
                if not told:
                    logger.warning("%s; waiting %.0f s at most", error, ENDING_WAIT_S_MAX)
                told = True
            except OSError as error:
                raise PoolError(f"cannot claim a directory in {spaces[0]}: {error}") from error
            time.sleep(_POLL_S)

    @classmethod
    def _first_free(
        cls, spec: PoolSpec, spaces: Sequence[Path], silence: Silence, *, waits: bool
    ) -> Claim:
        """waits: stop at one whose holder is ending, by `_EndingError`, instead of passing it."""
        for index in _candidates(spec, spaces[0]):
            engines = [space / f"engine-{index}" for space in spaces]
            which = "rank-*" if spec.engine else f"rank-{spec.rank}"
            silence.watch(_locks(engines, which))
            if spec.engine and any(
                held_by_another(one, spec.engine, spec.rank, silence) for one in engines
            ):
                _stop_at_ending(engines, waits=waits)
                continue
            directories = tuple(_make_rank(one, spec.rank) for one in engines)
            locks, busy = _lock_all(directories, silence)
            if locks is not None:
                _name_owner(engines, spec.engine, locks)
                return cls(index, directories, locks)
            assert busy is not None
            _stop_at_ending(engines, waits=waits)
            if spec.engine_index is not None:
                raise local_holder_error(busy)
        raise PoolLockedError(
            f"all {ENGINES_MAX} engine directories in {spaces[0].parent} are held by live processes"
        )

    def read_superblock(self, index: int) -> Superblock | None:
        """The superblock on target `index`; None (with a warning) if it is not usable."""
        directory = self.directories[index]
        try:
            return read_superblock(directory)
        except PoolFormatError as error:
            logger.warning("%s/superblock: %s; starting empty", directory, error)
            return None

    def device(self, index: int) -> int | None:
        """st_dev of what target `index` is locked on; None: it is gone."""
        lock = self._locks[index]
        return None if lock is None else lock.file.device

    def exchange_lock(self, index: int, lock: DirectoryLock | None) -> DirectoryLock | None:
        """Put a new lock in the place of target `index`'s, which is returned."""
        old, self._locks[index] = self._locks[index], lock
        return old

    def release(self, keep_descriptors: bool = False) -> None:
        """Let go. `keep_descriptors`: something hangs in the kernel; the flock then stays."""
        self._heartbeat.stop()
        if not keep_descriptors:
            for lock in filter(None, self._locks):
                lock.release()


def _locks(engines: Sequence[Path], ranks: str) -> list[Path]:
    """Lock files of `ranks`, a name or a pattern; no directory is listed for a name."""
    if "*" not in ranks:
        return [one / ranks / "lock" for one in engines]
    return [lock for one in engines for lock in sorted(one.glob(f"{ranks}/lock"))]


class _EndingError(Exception):
    """A directory is worth waiting for."""


def _stop_at_ending(engines: Sequence[Path], *, waits: bool) -> None:
    rank = ending_holder(engines) if waits else None
    if rank is not None:
        raise _EndingError(f"{rank} is held by a process that was killed and has not ended yet")


def _candidates(spec: PoolSpec, space: Path) -> Iterable[int]:
    """Engine indices in the order to try: first where other ranks of this engine are."""
    if spec.engine_index is not None:
        return [spec.engine_index]
    ours = []
    if spec.engine:
        every = range(ENGINES_MAX)
        ours = [i for i in every if read_owner(space / f"engine-{i}") == spec.engine]
    return [*ours, *range(spec.replica, ENGINES_MAX, spec.replicas)]


def _make_keyspace(target: Path, keyspace: Keyspace) -> Path:
    space = target / keyspace.digest
    try:
        target.mkdir(0o700, parents=True, exist_ok=True)
        make_directory(space)
        _name_keyspace(space, keyspace)
    except OSError as error:
        raise _unusable(target, error) from error
    return space


def _make_rank(engine: Path, rank: int) -> Path:
    directory = engine / f"rank-{rank}"
    try:
        make_directory(engine)
        make_directory(directory)
    except OSError as error:
        raise _unusable(engine.parents[1], error) from error
    return directory


def _unusable(target: Path, error: OSError) -> PoolError:
    return PoolError(
        f"target {target} cannot be used: {error}; choose a directory that is writable"
    )


def _name_keyspace(space: Path, keyspace: Keyspace) -> None:
    """Leave the facts beside the digest, for people and for `pool du`; nobody relies on it."""
    path = space / "keyspace.json"
    if path.exists():
        return
    with contextlib.suppress(OSError):
        fd = open_private(path, os.O_WRONLY)
        try:
            os.write(fd, keyspace.canonical.encode() + b"\n")
        finally:
            os.close(fd)


def _name_owner(engines: Sequence[Path], name: str, locks: Sequence[DirectoryLock]) -> None:
    """Leave the engine's name, if it has one, for the claims of its other ranks."""
    try:
        for engine in engines if name else ():
            if read_owner(engine) != name:
                write_owner(engine, name)
    except OSError:
        for lock in locks:
            lock.release()
        raise


def _lock_all(
    directories: Sequence[Path], silence: Silence
) -> tuple[list[DirectoryLock] | None, Path | None]:
    """Lock all; or give back what was taken and return the lock file that is busy."""
    locks: list[DirectoryLock] = []
    try:
        for directory in directories:
            lock = DirectoryLock.claim(directory / "lock", silence=silence)
            if lock is None:
                for taken in locks:
                    taken.release()
                return None, directory / "lock"
            locks.append(lock)
    except BaseException as error:
        for taken in locks:
            taken.release()
        if isinstance(error, OSError):
            raise PoolError(f"cannot lock {directory / 'lock'}: {error}") from error
        raise
    return locks, None
