# SPDX-License-Identifier: Apache-2.0
"""Ownership of rank directories `target/keyspace/engine-K/rank-R`: claims by servers, and repairs.

`engine-K` is an *instance*, which the ranks of one vLLM engine share. Each rank claims its own
directory in its own process. Without coordination, two servers that start together could each get
some rank directories of two instances, and adopt nothing. So ranks claim one at a time, and their
leases name their engine. If an instance has a live rank of another engine, a rank tries the next
instance. The name of a dead engine is ignored.

An flock ends with the last thread of its process, and a thread that waits in the kernel for a slow
device outlives SIGKILL until the device answers. A supervisor may start the next server at once.
That server should get the killed server's pool rather than an empty instance on a disk that may be
full, so a claim waits for a holder that is exiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import PoolError, PoolLockedError, as_pool_error
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
from vllm_nvmeof_offload.pool.keeper import Region, keep
from vllm_nvmeof_offload.pool.lease import (
    ENDING_WAIT_S_MAX,
    TAKEOVER_S,
    DirectoryLock,
    Lease,
    LeasePage,
    Leasing,
    Permit,
    Permits,
    boot_id,
    is_ending,
    is_locked,
    lease_of,
    read_lease,
    try_flock,
)
from vllm_nvmeof_offload.pool.log import log_pages_of
from vllm_nvmeof_offload.pool.survey import FACTS_FILE, disk_bytes, find
from vllm_nvmeof_offload.pool.takeover import POLL_S, Takeover, UnsettledError
from vllm_nvmeof_offload.units import PAGE_BYTES, slot_stride_bytes

INSTANCES_MAX = 64  # the maximum number of instances of one keyspace on one set of targets
LOCAL = Leasing(in_group=False)  # the leasing for a file system to which only this host writes
CLAIM_WAIT_S_MAX = 30.0  # how long to wait for another claim, whose device may never answer


@dataclass(frozen=True)
class PoolSpec:
    """The pool to open.

    `targets` are directories that exist or can be created. `pool_bytes` is this rank's share over
    all targets. `payload_bytes` is the length of the longest group's payload. `groups` are the
    groups with stored chunks; if empty, one group with id 0. `engine_index` is the instance; None
    selects the first free one of r, r + n, r + 2n, … for replica r of n. The ranks of the engine
    that `engine` names share an instance; if `engine` is empty, any ranks do. If `o_direct` is
    "on", an error is raised where "auto" falls back to buffered I/O. If `adopt` is False, stored
    chunks are ignored. If `named` is False, they are ignored too, and no superblock names the epoch
    of new chunks, so that no later start adopts these. In a group (`leasing`), servers on other
    hosts use the same file system: a region is written under permits, its log bypasses the page
    cache if the slab does, and its table is synced every second. `log_pages` is the length of the
    log on each target; None derives it from the pool's size.
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
    leasing: Leasing = LOCAL
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
        """The slots per target that fit into `pool_bytes`, with their table entries and a log."""
        left = self.pool_bytes // len(self.targets) - self.log_pages_per_target * PAGE_BYTES
        return left // (self.slot_bytes + ENTRY_BYTES)

    @property
    def log_pages_per_target(self) -> int:
        """The pages of the log on each target, or 0 if there is none."""
        if self.log_pages is not None:
            return self.log_pages
        return log_pages_of(self.pool_bytes // len(self.targets))


class Claim:
    """The regions that we own, in the order of the targets, and their keeper."""

    def __init__(self, engine_index: int, regions: Sequence[Region], permits: Permits) -> None:
        self.engine_index = engine_index
        self.regions = tuple(regions)
        self.directories = tuple(region.lease.path.parent for region in regions)
        self._permits = permits
        self._keeper = keep(regions, permits)

    def has_epoch(self, epoch: int) -> None:
        for region in self.regions:
            region.lease.has_epoch(epoch)

    @property
    def permits(self) -> tuple[Permit, ...]:
        """The permits to write the regions, by target."""
        return tuple(region.lease.permit for region in self.regions)

    @property
    def lease_generations(self) -> tuple[int, ...]:
        """The generations of the regions' leases by target, or 0 without a group."""
        leases = (region.lease for region in self.regions)
        return tuple(one.page.generation if one.leasing.in_group else 0 for one in leases)

    def await_permits(self) -> None:
        """Wait until the regions may be written. Raises PoolLockedError if a lease was lost."""
        for lease in (region.lease for region in self.regions):
            if not lease.permit.wait(lambda: True):
                raise PoolLockedError(
                    f"{lease.path.parent} now belongs to another process: this process did not "
                    f"renew its lease for {lease.leasing.takeover_s:.0f} s, lost it, and has "
                    f"written nothing since; restart this server"
                )

    @property
    def was_of_another(self) -> bool:
        """Whether another server in the group was the last owner of one of the regions."""
        return any(region.lease.was_of_another for region in self.regions)

    @classmethod
    def make(cls, spec: PoolSpec) -> Claim:
        """Claim instance `spec.engine_index`, or the first one that no other engine holds, and wait
        for killed processes that still hold it. Raises PoolLockedError if live processes hold the
        instance in `spec`, or all instances, or if a host outside our group holds one. Raises
        PoolError if a directory cannot be created or locked."""
        spaces = [_make_keyspace(target, spec.keyspace) for target in spec.targets]
        deadline = time.monotonic() + ENDING_WAIT_S_MAX
        logged = False
        takeover = Takeover(spec.leasing.takeover_s)
        permits = Permits.new(len(spec.targets))
        while True:
            try:
                with one_at_a_time(spaces):
                    waits = time.monotonic() < deadline
                    index, regions = _first_free(spec, spaces, takeover, permits, waits=waits)
                if _have_settled(regions):
                    return cls(index, regions, permits)
                # Another server claimed it at the same time: try the next one.
            except UnsettledError:
                pass  # other ranks may claim in the pause below
            except _EndingError as error:
                if not logged:
                    logger.warning("%s; waiting up to %.0f s", error, ENDING_WAIT_S_MAX)
                logged = True
            except OSError as error:
                raise PoolError(f"cannot claim a directory in {spaces[0]}: {error}") from error
            time.sleep(POLL_S)

    def release(self, keep_descriptors: bool = False) -> None:
        """Release the regions. `keep_descriptors` keeps the flocks, for a thread that hangs."""
        self._keeper.stop()
        self._permits.close()
        if keep_descriptors:
            for permit in self.permits:
                permit.lose()
        else:
            _release(self.regions)


def _release(regions: Iterable[Region]) -> None:
    for region in regions:
        region.release()


def _first_free(
    spec: PoolSpec, spaces: Sequence[Path], takeover: Takeover, permits: Permits, *, waits: bool
) -> tuple[int, list[Region]]:
    """Return an instance, and our regions in it, whose leases must still settle. If `waits`, raise
    `_EndingError` at an instance with an exiting holder; otherwise skip it."""
    for index in _candidates(spec, spaces[0]):
        instances = [space / f"engine-{index}" for space in spaces]
        ours = [instance / f"rank-{spec.rank}" for instance in instances]
        takeover.watch({*ours, *(rank for one in instances for rank in _ranks(one))})
        busy = None
        if not (spec.engine and any(_held_by_another(one, spec, takeover) for one in instances)):
            for target, instance, rank in zip(spec.targets, instances, ours, strict=True):
                with _usable(target):
                    make_directory(instance)
                    make_directory(rank)
            found = _claim_all(ours, [spec.leasing] * len(ours), takeover, permits, spec.engine)
            if not isinstance(found, Path):
                return index, found
            busy = found
        ending = _ending_holder(instances) if waits else None
        if ending is not None:
            raise _EndingError(
                f"{ending} is held by a process that was killed and has not exited yet"
            )
        if busy is not None and spec.engine_index is not None:
            raise busy_error(busy)
    raise PoolLockedError(
        f"all {INSTANCES_MAX} engine directories in {spaces[0].parent} are held by live processes"
    )


def busy_error(busy: Path) -> PoolLockedError:
    """Return the error for a region that a live process holds. `busy` is its lock file or lease.
    The lease's age is shown only if its time was set by this host's clock."""
    io = lease_of(busy.parent)
    page = read_lease(io)
    age = ""
    if page is not None and not page.in_group:
        age = f" (renewed {max(0.0, time.time() - os.stat(io.path).st_mtime):.0f} s ago)"
    return PoolLockedError(
        f"{busy} is held by {page or 'another process on this host'}{age}, which is still running: "
        "stop that process first"
    )


def _foreign_error(path: Path, page: LeasePage) -> PoolLockedError:
    """Return the error for a live owner on another host that is not in our group."""
    return PoolLockedError(
        f"{path} is held by {page}. Two hosts that mount one xfs or ext4 file system corrupt it: "
        f"unmount it there, or give each host its own target. If that host is gone for good, "
        f"delete {path}, or start again: a start that sees no renewal for {TAKEOVER_S:.0f} s takes "
        f"the directory over"
    )


def _have_settled(regions: Sequence[Region]) -> bool:
    """Wait until the pages show which claims have won. Return whether all of ours have. If not, or
    if a page cannot be read (OSError), release all claims."""
    leases = [region.lease for region in regions]
    are_ours = False
    try:
        while any(lease.clock() < lease.settles_ns for lease in leases):
            time.sleep(POLL_S)
        are_ours = all(lease.is_ours() for lease in leases)
    finally:
        if not are_ours:
            _release(regions)
    return are_ours


class _EndingError(Exception):
    """The holder of a directory is exiting, so the caller must wait for the directory."""


def _candidates(spec: PoolSpec, space: Path) -> Iterable[int]:
    """Return instances in the order to try. The engine's own instances are first. In a group, the
    instances that this server held follow, then those without an owner, and last the others, least
    recently renewed first."""
    if spec.engine_index is not None:
        return [spec.engine_index]
    every = range(INSTANCES_MAX) if spec.engine else ()
    ours = [i for i in every if spec.engine in _engines_in(space / f"engine-{i}")]
    others = range(spec.replica, INSTANCES_MAX, spec.replicas)
    if not spec.leasing.in_group:
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


def _engines_in(instance: Path) -> set[str]:
    """Return the engines that last claimed the regions of an instance."""
    found = set()
    for rank in _ranks(instance):
        with contextlib.suppress(OSError):  # the instance may be unusable here
            page = read_lease(lease_of(rank))
            found |= set() if page is None else {page.engine}
    return found


def _usable(target: Path) -> AbstractContextManager[None]:
    return as_pool_error(f"target {target} cannot be used", "choose a writable directory")


def _make_keyspace(target: Path, keyspace: Keyspace) -> Path:
    space = target / keyspace.digest
    with _usable(target):
        target.mkdir(0o700, parents=True, exist_ok=True)
        make_directory(space)
        facts = space / FACTS_FILE
        if not facts.exists():
            # For display and `pool ls`; nothing relies on the file.
            with (
                contextlib.suppress(OSError),
                open(open_private(facts, os.O_WRONLY | os.O_CREAT), "wb") as file,
            ):
                file.write(keyspace.canonical.encode() + b"\n")
    return space


def _claim_all(
    directories: Sequence[Path],
    leasings: Sequence[Leasing],
    takeover: Takeover,
    permits: Permits,
    engine: str = "",
) -> list[Region] | Path:
    """Claim all of these regions. If one has a live owner, claim none, and return the file that
    names the owner. `permits` has one per directory. `engine` is the engine's name in the
    leases."""
    locks: list[DirectoryLock] = []
    regions: list[Region] = []
    with contextlib.ExitStack() as undo:
        for directory, leasing in zip(directories, leasings, strict=True):
            with as_pool_error(f"cannot lock {directory / LOCK_FILE}"):
                lock = _lock(directory, leasing, takeover)
            if isinstance(lock, Path):
                return lock
            undo.callback(lock.release)
            locks.append(lock)
        for number, (lock, leasing) in enumerate(zip(locks, leasings, strict=True)):
            lease = Lease.claim_in(lock.directory, leasing, permits, number, engine)
            regions.append(Region(lock, lease))
            undo.callback(regions[-1].release)
        undo.pop_all()
    return regions


def _lock(directory: Path, leasing: Leasing, takeover: Takeover) -> DirectoryLock | Path:
    """Lock a region whose owner is dead or gone (see `lease`), or return the file that names a live
    owner. Raises PoolLockedError for a live owner on another host outside our group, UnsettledError
    if the owner's state is not known yet, and OSError if a file cannot be opened."""
    io, lock = lease_of(directory), DirectoryLock.claim(directory)
    with contextlib.ExitStack() as undo:
        undo.callback(lock.release if lock is not None else lambda: None)
        page = read_lease(io)
        if lock is None:
            # A free page is watched too: a process that has only locked the region may be about to
            # claim it, or may have lost it to one that has since exited.
            if not leasing.in_group or page is None or not takeover.is_dead(io.path, page):
                return directory / LOCK_FILE
            # The lease also decides between other concurrent claims.
            lock = DirectoryLock.claim(directory, despite_flock=True)
            assert lock is not None
        elif page is None or page.is_free or page.died_here or takeover.is_dead(io.path, page):
            pass
        elif leasing.in_group:
            return directory / LEASE_FILE
        else:
            raise _foreign_error(io.path, page)
        undo.pop_all()
        return lock


@contextlib.contextmanager
def one_at_a_time(spaces: Sequence[Path]) -> Iterator[None]:
    """Exclude concurrent claims in these keyspaces with an flock on their directories."""
    limit_s = time.monotonic() + CLAIM_WAIT_S_MAX
    with contextlib.ExitStack() as stack:
        # Use one order everywhere, or two servers could wait for each other.
        for space in sorted({os.path.realpath(space) for space in spaces}):
            fd = os.open(space, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            while not try_flock(fd, fcntl.LOCK_EX):
                if time.monotonic() > limit_s:
                    raise PoolError(
                        f"another server has been claiming a directory in {space} for "
                        f"{CLAIM_WAIT_S_MAX:.0f} s: its storage hangs, or it is suspended; "
                        f"kill it first"
                    )
                time.sleep(POLL_S)
        yield


def _held_by_another(instance: Path, spec: PoolSpec, takeover: Takeover) -> bool:
    """Return whether live ranks of an engine other than `spec`'s hold regions in `instance`. Raises
    PoolLockedError if they are on another host, and UnsettledError if that is not known yet."""
    for sibling in _ranks(instance):
        if sibling.name == f"rank-{spec.rank}":
            continue
        state, path = takeover.look(sibling), lease_of(sibling).path
        if not state.may_live or state.page is None or state.page.engine == spec.engine:
            continue
        if state.kind == "silent" and takeover.is_dead(path, state.page):
            continue
        if spec.leasing.in_group or is_locked(sibling):
            return True
        raise _foreign_error(path, state.page)
    return False


def _ending_holder(instances: Sequence[Path]) -> Path | None:
    """Return a rank directory in `instances` whose holder is exiting, or None. Pass only instances
    that are held: elsewhere, the pid that a dead owner left proves nothing."""
    for rank in (rank for instance in instances for rank in _ranks(instance)):
        page = read_lease(lease_of(rank))
        if page is not None and not page.is_free and page.boot == boot_id() and is_ending(page.pid):
            return rank
    return None


@contextlib.contextmanager
def hold(directories: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Hold all of `directories` for a repair, so that no server starts on them.

    Leases are claimed in the name of their last owner, which can then still adopt the chunks. Call
    the yielded function before each change. It waits until every lease permits writes, and raises
    PoolLockedError if another process took a lease because this one was suspended for too long.

    Raises PoolLockedError, naming the holder, if a live process holds a directory; then none is
    held. Raises PoolError if a lock file cannot be opened or written.
    """
    if not directories:
        yield lambda: None
        return
    takeover, permits = Takeover(), Permits.new(len(directories))
    leasings = [_last_leasing(directory) for directory in directories]
    takeover.watch(directories)
    found = takeover.settled(partial(_claim_all, directories, leasings, takeover, permits))
    if isinstance(found, Path):
        state = takeover.look(found.parent)
        raise PoolLockedError(f"{found.parent} is in use ({state}): stop that server first")
    if not _have_settled(found):
        raise PoolLockedError(f"another process has just claimed {directories[0]}")
    claim = Claim(0, found, permits)
    try:
        for directory, name in itertools.product(directories, (LOCK_FILE, LEASE_FILE)):
            give_to_owner(directory / name)
        yield claim.await_permits
    finally:
        claim.release()


def _last_leasing(directory: Path) -> Leasing:
    page = read_lease(lease_of(directory))
    return LOCAL if page is None or not page.in_group else Leasing(page.name)


def give_to_owner(path: Path) -> None:
    """Give a file that root created to its directory's owner, who must be able to open it."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        with contextlib.suppress(OSError):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def usable_bytes(targets: Sequence[Path], server: str = "") -> int:
    """Return the bytes of this user's pools on `targets` that this server may use again. Pools of
    live engines are left out, except those whose engine's name has `server` before the slash. A
    directory last held by another host counts as live, because that host may be running."""
    takeover, total = Takeover(), 0
    for one in find(filter(Path.is_dir, targets), ours=True):
        state = takeover.look(one.path)
        engine = "" if state.page is None else state.page.engine
        if not state.may_live or (server and engine.partition("/")[0] == server):
            total += disk_bytes(one.path)
    return total
