# SPDX-License-Identifier: Apache-2.0
"""Ownership of rank directories `target/keyspace/engine-K/rank-R`: claims of servers, and repairs.

`engine-K` is an *instance*: the ranks of one vLLM engine share it. Each rank claims its own
directory in a process of its own. Two servers that start at the same time would otherwise each
get some ranks' directories of both instances, and adopt nothing. So ranks claim one at a time,
and leave their engine's name in `engine-K/owner`; a rank that finds another name there goes on to
the next instance if any rank of that engine still lives. The name of a dead engine means nothing.

A flock ends with the last thread of its process, and a thread that waits in the kernel for a slow
device outlives SIGKILL until the device has answered. A supervisor starts the next server at
once. That server should find the pool of the killed one, rather than take another instance,
empty, on a disk that may be full. So a claim waits for a holder that is ending.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError
from vllm_nvmeof_offload.groups import GroupKind, RankGroup
from vllm_nvmeof_offload.pool.folder import make_directory, open_private
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    GROUPS_MAX,
    LEASE_FILE,
    LOCK_FILE,
    Keyspace,
    StoredGroup,
)
from vllm_nvmeof_offload.pool.lease import (
    Lease,
    Leasing,
    Permit,
    Permits,
    is_abandoned,
    is_leased,
    lease_of,
    read_lease,
    watch_leases,
)
from vllm_nvmeof_offload.pool.lock import (
    ENDING_WAIT_S_MAX,
    DirectoryLock,
    Heartbeat,
    foreign_holder_error,
    is_ending,
    local_holder_error,
    probe_lock,
    read_holder,
    try_flock,
    watch_locks,
)
from vllm_nvmeof_offload.pool.log import log_pages_of
from vllm_nvmeof_offload.pool.silence import POLL_S, Silence, UnsettledError
from vllm_nvmeof_offload.pool.survey import FACTS_FILE, disk_bytes, find
from vllm_nvmeof_offload.units import PAGE_BYTES, slot_stride_bytes

#: Instances of one keyspace on one set of targets.
INSTANCES_MAX = 64
OWNER_FILE = "owner"
_OWNER_BYTES = 256
#: A claim waits this long for another claim, and this long for a holder that is ending: its
#: device may never answer.
CLAIM_WAIT_S_MAX = 30.0


@dataclass(frozen=True)
class PoolSpec:
    """The pool to open.

    targets: directories that exist or can be made. pool_bytes: this rank's share over all
    targets. payload_bytes: of the longest group. groups: whose chunks are stored; empty: one,
    with the id 0. engine_index: the instance; None: the first free one, of
    replica r of n: r, r + n, r + 2n, … engine: the same on all ranks of one engine, which share
    an instance; empty: the rank shares an instance with any rank it finds.
    o_direct: "on" fails where "auto" falls back to buffered I/O. adopt: False voids what is
    stored. named: False voids it too, and no superblock names what is written from now on, so
    that no later start adopts it. leasing: servers on other hosts use the same file system, so
    that each region has a lease, its log bypasses the page cache (where the slab does), and its
    table is synced every second; None: one kernel has it, and locks are enough. log_pages: of the
    log on each target; None: by the pool's size.
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
    named: bool = True
    groups: tuple[RankGroup, ...] = ()
    leasing: Leasing | None = None
    log_pages: int | None = None

    def __post_init__(self) -> None:
        assert self.targets and self.payload_bytes > 0
        assert self.payload_bytes == max(group.payload_bytes for group in self.group_table)
        assert len(self.group_table) <= GROUPS_MAX
        assert 0 <= self.replica < self.replicas
        assert self.o_direct in ("auto", "on", "off")

    @property
    def group_table(self) -> tuple[StoredGroup, ...]:
        """The groups as superblocks list them."""
        size = self.payload_bytes
        one = StoredGroup(0, GroupKind.FULL, size, blocks_per_chunk=1, block_bytes=size)
        return tuple(map(StoredGroup.of, self.groups)) or (one,)

    @property
    def slot_bytes(self) -> int:
        return slot_stride_bytes(self.payload_bytes)

    @property
    def slots_per_target(self) -> int:
        """The slots that `pool_bytes` buys on each target, with table entries, beside the log."""
        left = self.pool_bytes // len(self.targets) - self.log_pages_per_target * PAGE_BYTES
        return left // (self.slot_bytes + ENTRY_BYTES)

    @property
    def log_pages_per_target(self) -> int:
        """The pages of the log on each target; 0: none."""
        if self.log_pages is not None:
            return self.log_pages
        return log_pages_of(self.pool_bytes // len(self.targets))


class Claim:
    """Locked directories, one per target, in the order of the targets, with a heartbeat.

    leases: by target; empty: the regions have none.
    """

    def __init__(
        self,
        engine_index: int,
        directories: tuple[Path, ...],
        locks: list[DirectoryLock],
        leases: Sequence[Lease] = (),
        permits: Permits | None = None,
    ) -> None:
        self.engine_index = engine_index
        self.directories = directories
        #: By target; None: the target is away. The pool exchanges them.
        self.locks: list[DirectoryLock | None] = [*locks]
        self.leases = tuple(leases)
        self._permits = permits
        self._heartbeat = Heartbeat(
            lambda: filter(None, self.locks), leases=self.leases, permits=permits
        )

    def has_epoch(self, epoch: int) -> None:
        """Name the regions' epoch in their leases."""
        for lease in self.leases:
            lease.has_epoch(epoch)

    @property
    def permits(self) -> tuple[Permit | None, ...]:
        """By target, what says whether the region may be written now; None: always."""
        none: tuple[Permit | None, ...] = (None,) * len(self.directories)
        return tuple(lease.permit for lease in self.leases) or none

    @property
    def lease_generations(self) -> tuple[int, ...]:
        """By target, the generation of the region's lease; 0: it has none."""
        generations = tuple(lease.page.generation for lease in self.leases)
        return generations or (0,) * len(self.directories)

    def await_permits(self) -> None:
        """Wait until the regions may be written. PoolError: a lease was lost meanwhile."""
        for lease in self.leases:
            if not lease.permit.wait(lambda: True):
                raise PoolError(
                    f"the lease {lease.path} was lost during the start: another server has taken "
                    "it; start again"
                )

    @property
    def was_of_another(self) -> bool:
        """Whether another server had one of the regions last."""
        return any(lease.was_of_another for lease in self.leases)

    @classmethod
    def make(cls, spec: PoolSpec) -> Claim:
        """Claim instance `spec.engine_index`, or the first one that no other engine holds.

        A killed process that still holds one while it ends is waited for. PoolLockedError: a live
        process holds it, here (by index) or on another host. PoolError: a directory cannot be
        made or locked.
        """
        spaces = [_make_keyspace(target, spec.keyspace) for target in spec.targets]
        deadline = time.monotonic() + ENDING_WAIT_S_MAX
        logged = False
        silence = Silence() if spec.leasing is None else Silence(spec.leasing.takeover_s)
        permits = None if spec.leasing is None else Permits.new(len(spec.targets))
        while True:
            try:
                with one_at_a_time(spaces):
                    waits = time.monotonic() < deadline
                    found = _first_free(spec, spaces, silence, permits, waits=waits)
                if _have_settled(found.leases):
                    return cls(
                        found.engine_index, found.directories, found.locks, found.leases, permits
                    )
                found.undo()  # another one has claimed it at the same time: look for another
            except UnsettledError:
                pass  # other ranks may claim theirs meanwhile
            except _EndingError as error:
                if not logged:
                    logger.warning("%s; waiting %.0f s at most", error, ENDING_WAIT_S_MAX)
                logged = True
            except OSError as error:
                raise PoolError(f"cannot claim a directory in {spaces[0]}: {error}") from error
            time.sleep(POLL_S)

    def release(self, keep_descriptors: bool = False) -> None:
        """Unlock. keep_descriptors: something hangs in the kernel; the flocks then stay."""
        self._heartbeat.stop()
        if self._permits is not None:
            self._permits.close()
        if keep_descriptors:
            for lease in self.leases:
                lease.permit.lose()
        else:
            _release(filter(None, self.locks), self.leases)


class _Found(NamedTuple):
    """An instance whose directories are locked and whose leases, if any, are to settle."""

    engine_index: int
    directories: tuple[Path, ...]
    locks: list[DirectoryLock]
    leases: list[Lease]

    def undo(self) -> None:
        _release(self.locks, self.leases)


def _release(locks: Iterable[DirectoryLock], leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.release()
    for lock in locks:
        lock.release()


def _first_free(
    spec: PoolSpec,
    spaces: Sequence[Path],
    silence: Silence,
    permits: Permits | None,
    *,
    waits: bool,
) -> _Found:
    """waits: raise `_EndingError` at an instance whose holder is ending; else pass over it."""
    for index in _candidates(spec, spaces[0]):
        instances = [space / f"engine-{index}" for space in spaces]
        ours = [instance / f"rank-{spec.rank}" for instance in instances]
        ranks = [rank for one in instances for rank in _ranks(one)] if spec.engine else ours
        if permits is None:
            watch_locks(silence, (rank / LOCK_FILE for rank in ranks))
        else:
            watch_leases(silence, {*ours, *ranks})
        busy = None
        if not (spec.engine and any(_held_by_another(one, spec, silence) for one in instances)):
            for target, instance, rank in zip(spec.targets, instances, ours, strict=True):
                with _refusing(target):
                    make_directory(instance)
                    make_directory(rank)
            found = _lock_all(ours, [spec.leasing] * len(ours), silence, permits)
            if not isinstance(found, Path):
                locks, leases = found
                _name_owner(instances, spec.engine, [*locks, *leases])
                return _Found(index, tuple(ours), locks, leases)
            busy = found
        ending = _ending_holder(instances) if waits else None
        if ending is not None:
            raise _EndingError(
                f"{ending} is held by a process that was killed and has not ended yet"
            )
        if busy is not None and spec.engine_index is not None:
            raise _busy_error(busy)
    raise PoolLockedError(
        f"all {INSTANCES_MAX} engine directories in {spaces[0].parent} are held by live processes"
    )


def _busy_error(busy: Path) -> PoolLockedError:
    """busy: a lock file, or a lease."""
    if busy.name == LOCK_FILE:
        return local_holder_error(busy)
    return PoolLockedError(
        f"{busy} names {read_lease(lease_of(busy.parent))}, which lives: stop it, or let this one "
        f"take the next free engine index (do not set engine_index)"
    )


def _have_settled(leases: Sequence[Lease]) -> bool:
    """Wait until the pages show which claim was the last; return whether ours was, in all."""
    while any(lease.clock() < lease.settles_ns for lease in leases):
        time.sleep(POLL_S)
    return all(lease.is_ours() for lease in leases)


class _EndingError(Exception):
    """The holder of a directory is ending: wait for the directory."""


def _candidates(spec: PoolSpec, space: Path) -> Iterable[int]:
    """Return instances in the order to try: first those where other ranks of the engine are.

    With leases: then those that this server had before, those without an owner, and the others,
    of which the file system has seen the oldest sign of life first.
    """
    if spec.engine_index is not None:
        return [spec.engine_index]
    every = range(INSTANCES_MAX) if spec.engine else ()
    ours = [i for i in every if read_owner(space / f"engine-{i}") == spec.engine]
    others = range(spec.replica, INSTANCES_MAX, spec.replicas)
    if spec.leasing is None:
        return [*ours, *others]
    name = spec.leasing.name
    return [*ours, *sorted(others, key=lambda i: _leased_order(space, i, spec.rank, name))]


def _leased_order(space: Path, index: int, rank: int, name: str) -> tuple[int, int]:
    io = lease_of(space / f"engine-{index}" / f"rank-{rank}")
    page = read_lease(io)
    if page is None:
        return 1, index
    if page.name == name:
        return 0, index
    return (1, index) if page.is_free else (2, os.stat(io.path).st_mtime_ns)


def _ranks(instance: Path) -> list[Path]:
    return sorted(instance.glob("rank-*"))


@contextlib.contextmanager
def _refusing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PoolError(
            f"target {target} cannot be used: {error}; choose a directory that is writable"
        ) from error


def _make_keyspace(target: Path, keyspace: Keyspace) -> Path:
    space = target / keyspace.digest
    with _refusing(target):
        target.mkdir(0o700, parents=True, exist_ok=True)
        make_directory(space)
        facts = space / FACTS_FILE
        if not facts.exists():
            # For people and for `pool ls`; nothing relies on the file.
            with (
                contextlib.suppress(OSError),
                open(open_private(facts, os.O_WRONLY | os.O_CREAT), "wb") as file,
            ):
                file.write(keyspace.canonical.encode() + b"\n")
    return space


def read_owner(instance: Path) -> str:
    """Return the engine that was the last to claim `instance`; empty: none that has a name."""
    try:
        with open(open_private(instance / OWNER_FILE, os.O_RDONLY), "rb") as file:
            return file.read(_OWNER_BYTES).decode(errors="replace").strip("\0 ")
    except OSError:
        return ""


def _name_owner(
    instances: Sequence[Path], name: str, held: Sequence[DirectoryLock | Lease]
) -> None:
    """Leave the engine's name for claims of its other ranks, in place: the disk may be full."""
    try:
        for instance in instances if name else ():
            if read_owner(instance) != name:
                owner = name.encode()[:_OWNER_BYTES].ljust(_OWNER_BYTES)
                fd = open_private(instance / OWNER_FILE, os.O_WRONLY | os.O_CREAT)
                with open(fd, "wb") as file:
                    file.write(owner)
                    file.flush()
                    os.fsync(file.fileno())  # for claims on other hosts
    except OSError:
        for one in held:
            one.release()
        raise


def _lock_all(
    directories: Sequence[Path],
    leasings: Sequence[Leasing | None],
    silence: Silence,
    permits: Permits | None,
) -> tuple[list[DirectoryLock], list[Lease]] | Path:
    """Lock all, and claim their leases; or none, and return the file that shows who is busy.

    leasings: by directory; None: it has no lease. permits: words for the leases, by directory.
    """
    locks: list[DirectoryLock] = []
    leases: list[Lease] = []
    with contextlib.ExitStack() as undo:
        for directory, leasing in zip(directories, leasings, strict=True):
            path = directory / LOCK_FILE
            leased = leasing is not None
            try:
                lock = DirectoryLock.claim(path, silence=silence, leased=leased)
                if lock is None and leased and is_abandoned(directory, silence):
                    # A server that was stopped keeps its flock, and an NFS server keeps the flocks
                    # of a lost host. The lease decides; the others who claim now settle by it too.
                    lock = DirectoryLock.claim(path, leased=True, despite_flock=True)
            except OSError as error:
                raise PoolError(f"cannot lock {path}: {error}") from error
            if lock is None:
                return path
            undo.callback(lock.release)
            locks.append(lock)
        for directory, leasing in zip(directories, leasings, strict=True):
            if leasing is not None and is_leased(directory, silence):
                return directory / LEASE_FILE
        for number, leasing in enumerate(leasings):
            if leasing is not None:
                assert permits is not None
                leases.append(Lease.claim_in(directories[number], leasing, permits, number))
                undo.callback(leases[-1].release)
        undo.pop_all()
    return locks, leases


@contextlib.contextmanager
def one_at_a_time(spaces: Sequence[Path]) -> Iterator[None]:
    """Keep other claims in these keyspaces out meanwhile, with an flock on the directories."""
    limit_s = time.monotonic() + CLAIM_WAIT_S_MAX
    with contextlib.ExitStack() as stack:
        # In one order everywhere, or two servers would wait for each other.
        for space in sorted({os.path.realpath(space) for space in spaces}):
            fd = os.open(space, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            while not try_flock(fd, fcntl.LOCK_EX):
                if time.monotonic() > limit_s:
                    raise PoolError(
                        f"another server has been claiming a directory in {space} for "
                        f"{CLAIM_WAIT_S_MAX:.0f} s: its storage hangs, or it was stopped; "
                        f"end it first"
                    )
                time.sleep(POLL_S)
        yield


def _held_by_another(instance: Path, spec: PoolSpec, silence: Silence) -> bool:
    """Return whether ranks of another engine live in `instance`, apart from the one of `spec`.

    PoolLockedError: they live on another host. UnsettledError: `silence` cannot decide yet.
    """
    if read_owner(instance) == spec.engine:
        return False
    for sibling in _ranks(instance):
        if sibling.name == f"rank-{spec.rank}":
            continue
        state, path = probe_lock(sibling), sibling / LOCK_FILE
        holder = state.holder
        if spec.leasing is not None and is_abandoned(sibling, silence):
            continue  # whatever its flock says
        if state.live or (spec.leasing is not None and is_leased(sibling, silence)):
            return True
        if spec.leasing is not None or holder is None or not holder.is_foreign:
            continue
        if not silence.is_dead(path, holder, holder):
            raise foreign_holder_error(path, holder)
    return False


def _ending_holder(instances: Sequence[Path]) -> Path | None:
    """Return a rank directory in held `instances` whose holder is ending; None if there is none.

    In an instance that is not held, the name that a dead process left behind means nothing.
    """
    for rank in (rank for instance in instances for rank in _ranks(instance)):
        holder = read_holder(rank / LOCK_FILE)
        if holder is not None and not holder.is_foreign and is_ending(holder.pid):
            return rank
    return None


@contextlib.contextmanager
def hold(directories: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Hold all of `directories` for a repair, with a heartbeat, so that no server starts on them.

    A lease is claimed in the name of its last owner, who then still adopts what is there. Call what
    is yielded before each change: it waits until every lease permits writes, and raises
    PoolLockedError once another process has one, because this one was stopped for too long.

    PoolLockedError: a live process holds one; it is named. None is held then. PoolError: a lock
    file cannot be opened or written.
    """
    silence = Silence()
    leasings = [_last_leasing(directory) for directory in directories]
    watch_locks(silence, (directory / LOCK_FILE for directory in directories))
    watch_leases(silence, directories)
    permits = Permits.new(len(directories)) if any(leasings) else None
    found = silence.settled(partial(_lock_all, directories, leasings, permits=permits))
    if isinstance(found, Path):
        raise PoolLockedError(
            f"{found.parent} is in use ({probe_lock(found.parent)}): stop that server first"
        )
    locks, leases = found
    held = _have_settled(leases)
    heartbeat = Heartbeat(lambda: locks, leases=leases, permits=permits)
    try:
        if not held:
            raise PoolLockedError(f"{directories[0]} was claimed by another process just now")
        for lock in locks:
            give_to_owner(lock.path)
        yield partial(_wait_for_permits, leases)
    finally:
        heartbeat.stop()  # no heartbeat may follow a release
        _release(locks, leases)
        if permits is not None:
            permits.close()


def _wait_for_permits(leases: Sequence[Lease]) -> None:
    """Wait until writes under all these leases may start. PoolLockedError: one is lost."""
    for lease in leases:
        if not lease.permit.wait(lambda: True):
            raise PoolLockedError(
                f"{lease.path.parent} is another process's now: this one did not renew its lease "
                f"for {lease.leasing.takeover_s:.0f} s; nothing more was changed there, so run the "
                f"command again"
            )


def _last_leasing(directory: Path) -> Leasing | None:
    """Return how the last owner leased the region; None: it has no lease."""
    page = read_lease(lease_of(directory))
    return None if page is None else Leasing(page.name)


def give_to_owner(path: Path) -> None:
    """Let a file that root has created belong to its directory's owner, who must open it."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        with contextlib.suppress(OSError):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def usable_bytes(targets: Sequence[Path], server: str = "") -> int:
    """Return the bytes of the pools on `targets` that this server may use again."""
    return max(0, bytes_of_pools(targets) - bytes_of_others(targets, server))


def bytes_of_pools(targets: Sequence[Path]) -> int:
    """Return the bytes of this user's rank directories on `targets`; looks at no other file."""
    return sum(disk_bytes(one.path) for one in find(filter(Path.is_dir, targets), ours=True))


def bytes_of_others(targets: Sequence[Path], server: str = "") -> int:
    """Return the bytes on `targets` that belong to this user's live engines, but `server`'s.

    What another host has held counts: it may live. server: the part of its engines' names before
    the slash.
    """
    return sum(
        disk_bytes(one.path)
        for one in find(filter(Path.is_dir, targets), ours=True)
        if probe_lock(one.path).may_live
        and not (server and read_owner(one.path.parent).partition("/")[0] == server)
    )
