# SPDX-License-Identifier: Apache-2.0
"""The follower: a process that fills the foreign table, `python -m …follow.follower SETTINGS FD`.

It is a companion (`child`), so that it does not compete with the scheduler, and opens all files
read-only. `TargetScan` finds other engines' regions on one target. A `_Region` keeps the rows of
one region, which it reads from a `Source`. The rows are hints, so no file is locked: an entry that
is being written fails its CRC and is read again in the next pass.

Most regions are idle. One call checks all idle regions' logs for new records, and only regions with
new records are read before the next discovery.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_nvmeof_offload.child import Companion, accompany, child_command
from vllm_nvmeof_offload.errors import PoolFormatError
from vllm_nvmeof_offload.follow.owners import (
    BYTES_PER_SLOT,
    ROWS_MIN,
    SLOTS_MAX,
    Owners,
    RegionName,
    Wanted,
)
from vllm_nvmeof_offload.limits import memory_bytes
from vllm_nvmeof_offload.native import ForeignRegion, ForeignWriter
from vllm_nvmeof_offload.pool.folder import Folder, open_private
from vllm_nvmeof_offload.pool.format import (
    LOG_FILE,
    SLAB_FILE,
    SUPERBLOCK_FILE,
    TABLE_FILE,
    Superblock,
    read_superblock,
)
from vllm_nvmeof_offload.pool.log import LOG_PAGES_MAX
from vllm_nvmeof_offload.pool.takeover import Takeover

#: The delay before a killed follower is replaced.
_RESTART_S = 5.0
#: The interval between scans, in milliseconds. Polling ten idle regions takes 0.34 % of a core. A
#: follower whose polls are slower waits longer, so that polling takes at most 2 %.
FOLLOW_MS = 100.0
#: Followed regions use at most 1/32 of the memory: a quarter with eight engines per host.
_MEMORY_PART = 32
#: Scans of all targets together take at most this share of a core.
_CPU_SHARE_MAX = 0.02
#: The interval between searches for engines on a target, and between probes of their locks.
DISCOVERY_S = 1.0
#: The number of idle regions examined per discovery, in rotation. Only this examination finds
#: silently replaced files and released locks.
EXAMINED = 20
#: With several ranks, an entry is offered only after this time, because the other ranks may still
#: be writing their parts.
YOUNG_S = 0.05
#: Errors that mean a region was removed or is not ours to read. After other errors its rows stay.
_GONE = frozenset(
    {errno.ENOENT, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP}
)
_PREFIX = "engine-"
#: A table that has not changed for QUIET_S is read only every QUIET_READ_S.
QUIET_S, QUIET_READ_S = 1.0, 5.0
#: A table with a log is scanned at this interval if its file has changed, in case records were
#: lost.
RESCAN_S = 30.0
#: An owner on another host syncs its table every second. Entries that it logged before we found the
#: end of its log become visible only at the next sync, so the table is scanned again after this
#: delay.
SYNCED_S = 2.0


@dataclass(frozen=True, slots=True)
class Scope:
    """The regions to follow.

    `targets` are our directories, ordered by their numbers. `keyspace` is a digest. `engine_index`
    is our engine's number; our engine is left out. The first `ranks` of each engine are followed:
    1, or the size of our largest set of ranks, because each member of a set holds chunks that the
    others lack.
    """

    targets: tuple[Path, ...]
    keyspace: str
    engine_index: int
    ranks: int


class Source:
    """Fills a region's `rows` from its files: its table, and its log if it has one.

    A scan reads the whole table, in 9 ms per million entries. A table whose file has not changed
    for a while is scanned less often, but still scanned: the kernel sets a file's time before it
    copies the bytes, so a scan that sees the new time can still miss the change.

    A region with a log is scanned once, and then its log is polled, with one read of 4 KiB if
    nothing was written. A reader that falls a lap behind detects this from the page numbers and
    scans again (`pool.log`).

    The owner writes the table entry before the log record. Another host sees the entry only after
    the owner has synced the table, so a scan there does not undo changes that the log reported
    since the previous scan.

    Files that another host writes are read with O_DIRECT, because this host's page cache may be
    stale, and are reopened to read their times, so that a network file system asks its server.
    """

    def __init__(
        self, directory: Path, superblock: Superblock, rows: ForeignRegion, table: ForeignWriter
    ) -> None:
        """Read the region in `directory` into `rows` of `table`, from the first poll on."""
        self.rows, self.superblock, self._table = rows, superblock, table
        self._table_path, self._log_path = directory / TABLE_FILE, directory / LOG_FILE
        self._pages = superblock.log_pages
        self._is_direct = superblock.is_leased  # only leased regions are written by several hosts
        self._table_fd = self._log_fd = -1
        self._scanned_s, self._scanned_ns = float("-inf"), 0  # when, and the table file's time then
        self._is_found = False  # whether the log's end is known
        self._rescan_s = float("-inf")

    def begin(self, epoch: int, from_now: bool) -> None:
        """Start over with a scan. The arguments are those of `ForeignRegion.begin`."""
        self.rows.begin(self._table, epoch, from_now)
        self._is_found = False
        self._scanned_s = float("-inf")

    def poll(self, now_s: float) -> bool:
        """Apply new entries. Return whether the log reports a new superblock. Raises OSError if a
        file cannot be read; entries already offered stay."""
        if self._log_fd < 0 and self._pages:
            with contextlib.suppress(FileNotFoundError):
                self._log_fd = _open(self._log_path, self._is_direct)
        if self._log_fd < 0:  # an older release wrote no log, or the log was removed
            self._is_found = False
            self._scan_if_due(now_s)
            return False
        if not self._is_found:
            self._find(now_s, log_is_ahead=self._is_direct)
        why = self.rows.follow_log(self._table, self._log_fd, int(now_s * 1e9))
        if why == self.rows.OVERRUN:
            self._find(now_s, log_is_ahead=False)  # the log has lost records
        elif why != self.rows.RESET:
            _check(why)
            if now_s >= self._rescan_s:
                self._rescan_s = now_s + RESCAN_S
                if self._table_ns() != self._scanned_ns:
                    self._scan(now_s, log_is_ahead=self._is_direct)
        return why == self.rows.RESET

    def log_fd(self) -> int:
        """Return the log's descriptor if `ForeignRegion.with_news` can replace a poll, or -1."""
        return self._log_fd if self._is_found and not self._is_direct else -1

    def close(self) -> None:
        """Close the files. The next poll opens the files that the path then leads to."""
        for fd in (self._table_fd, self._log_fd):
            if fd >= 0:
                os.close(fd)
        self._table_fd = self._log_fd = -1

    def _find(self, now_s: float, log_is_ahead: bool) -> None:
        """Find the log's end, then scan: each entry is in the scan or in the later log."""
        self._is_found = False
        _check(self.rows.seek_log(self._log_fd, self._pages))
        self._scan(now_s, log_is_ahead)
        self._is_found = True
        self._rescan_s = now_s + (SYNCED_S if self._is_direct else RESCAN_S)

    def _scan_if_due(self, now_s: float) -> None:
        changed_ns = self._table_ns()
        if (
            changed_ns != self._scanned_ns
            or time.time_ns() - changed_ns < QUIET_S * 1e9
            or now_s - self._scanned_s >= QUIET_READ_S
        ):
            self._scan(now_s, log_is_ahead=False)
        else:
            self.rows.ripen(self._table, int(now_s * 1e9))

    def _scan(self, now_s: float, log_is_ahead: bool) -> None:
        changed_ns = self._table_ns()
        found = self.rows.scan(self._table, self._table_fd, int(now_s * 1e9), log_is_ahead)
        _check(found)
        self._scanned_s, self._scanned_ns = now_s, changed_ns

    def _table_ns(self) -> int:
        if self._is_direct and self._table_fd >= 0:
            os.close(self._table_fd)
            self._table_fd = -1
        if self._table_fd < 0:
            self._table_fd = _open(self._table_path, self._is_direct)
        return os.fstat(self._table_fd).st_mtime_ns


def _open(path: Path, is_direct: bool) -> int:
    return open_private(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


class _Region:
    """One region: its superblock, its lock, and, if it has an owner, its rows."""

    def __init__(self, scope: Scope, name: RegionName, space: Folder, table: ForeignWriter) -> None:
        part = f"{_PREFIX}{name.engine}/rank-{name.rank}"
        self.name = name
        self.directory, self.place = space.path / part, space.place / part
        self.superblock: Superblock | None = None
        self.is_held = False
        #: Whether to skip the region until the next discovery.
        self.has_failed = False
        #: Whether to check the superblock's file even if the region has a log.
        self.is_due = True
        #: Whether the region is idle: its entries are known, and its log reports new ones.
        self.rests = False
        self._scope, self._table = scope, table
        self._takeover = Takeover()
        self._superblock_path = self.place / SUPERBLOCK_FILE
        self._superblock_seen = (0, 0)
        self._source: Source | None = None
        self._begun: Wanted | None = None

    def read_superblock(self) -> bool:
        """Read the superblock if it was replaced; return whether it was.

        Raises: OSError: one of `_GONE` if there is none for us. PoolFormatError: the superblock is
        damaged or belongs to another region.
        """
        known = self.superblock
        is_leased = known is not None and known.is_leased
        # A log reports a new superblock's epoch at once. Checking the file accounts for most of an
        # idle region's cost, and sends a request to a network file system's server.
        if known is not None and (known.log_pages or is_leased) and not self.is_due:
            return False
        seen = _stamp_of(self._superblock_path, reopen=is_leased)
        self.is_due = False
        if seen == self._superblock_seen:
            return False
        found = read_superblock(self.place)
        ours = self._scope.keyspace, self.name.rank
        is_ours = found is not None and (found.keyspace, found.rank) == ours
        if found is None or not is_ours or found.log_pages > LOG_PAGES_MAX:
            raise PoolFormatError("another region's")
        # The superblock determines how much memory is allocated here.
        if os.stat(self.place / SLAB_FILE).st_size < found.slots * found.slot_bytes:
            raise PoolFormatError("its slab is truncated")
        self.superblock, self._superblock_seen = found, seen
        return True

    def look_at_owner(self) -> None:
        self.is_held = self._takeover.look(self.place).may_live

    def follow(self, wanted: Wanted, now_s: float) -> tuple[int, bool]:
        """Update the rows to match `wanted`. Return their number, and whether they were restarted.
        Raises OSError as `Source.poll` does."""
        takes_all = wanted.version == self._table.version_of_all
        if takes_all and self._begun is not None and self._begun.version != wanted.version:
            self.leave()  # entries that were left out now count too
        source = self._source_of(wanted.owner)
        begins = self._begun != wanted
        if begins:
            version_before = self._begun.version if self._begun is not None else 0
            source.begin(wanted.epoch, wanted.version != version_before and not takes_all)
            self._begun = wanted
        if source.poll(now_s):
            self._superblock_seen = (0, 0)  # read it regardless of its file's time
            self.is_due = True
        self.rests = not begins and not self.is_due and source.log_fd() >= 0
        return source.rows.rows, begins

    def log(self) -> tuple[ForeignRegion, int]:
        assert self._source is not None
        return self._source.rows, self._source.log_fd()

    def _source_of(self, owner: int) -> Source:
        """Return the source of this owner's rows that fits the superblock's current shape."""
        now, source = self.superblock, self._source
        assert now is not None
        belongs = self._begun is not None and self._begun.owner == owner
        if source is not None and belongs and _shape_of(source.superblock) == _shape_of(now):
            return source
        self.leave()
        # A server whose ranks share nothing cannot read another server's single copies.
        shares = self._scope.ranks > 1
        groups = [(group.group_id, group.set_size if shares else 1) for group in now.groups]
        home = owner, self.name.target, self.name.rank
        young_ns = int(YOUNG_S * 1e9) if now.world_size > 1 else 0
        rows = ForeignRegion(home, now.slots, groups, young_ns)
        self._source = source = Source(self.place, now, rows, self._table)
        return source

    def leave(self) -> None:
        self.close()
        if self._source is not None:
            self._source.begin(0, False)
        self._begun = self._source = None

    def close(self) -> None:
        self.rests = False
        if self._source is not None:
            self._source.close()


class TargetScan:
    """Follows one target's regions on a separate thread, because a target can hang."""

    def __init__(
        self,
        scope: Scope,
        target: int,
        table: ForeignWriter,
        owners: Owners,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` must be the clock of the table's readers: monotonic, in seconds."""
        self._scope = scope
        self._target = target
        self._space = Folder.nowhere(scope.targets[target] / scope.keyspace)
        self._table = table
        self._owners = owners
        self._clock = clock
        self._regions: dict[RegionName, _Region] = {}
        self._discovered_s = float("-inf")
        self._examined = 0  # idle regions examined so far
        self._changes = -1
        self._logged = ""

    def scan(self) -> float:
        """Check every region once. Return the CPU seconds used, except for regions' first scans."""
        begun_s, first_s = time.thread_time(), 0.0
        now_s = self._clock()
        self._owners.ask(self._table.version_asked)
        if now_s - self._discovered_s >= DISCOVERY_S:
            self._discovered_s = now_s
            self._discover()
        for region in self._restless():
            if not region.has_failed:
                first_s += self._look_at(region, now_s)
        self._table.scanned(int(self._clock() * 1e9))
        return time.thread_time() - begun_s - first_s

    def _restless(self) -> list[_Region]:
        regions = list(self._regions.values())
        if self._changes != self._owners.changes:
            self._changes = self._owners.changes
            return regions
        rest = [region for region in regions if region.rests]
        for at in ForeignRegion.with_news([region.log() for region in rest]):
            rest[at].rests, rest[at].is_due = False, True
        return [region for region in regions if not region.rests]

    def _due(self) -> list[_Region]:
        """Return the regions to examine: all that are not idle and, in rotation, idle ones."""
        regions = list(self._regions.values())
        rest = [region for region in regions if region.rests]
        begin, self._examined = self._examined, self._examined + EXAMINED
        turn = {(begin + at) % len(rest) for at in range(EXAMINED)} if rest else ()
        return [region for region in regions if not region.rests] + [rest[at] for at in turn]

    def _discover(self) -> None:
        """Find the regions on the target, and whether a process holds each."""
        engines: set[int] = set()
        try:
            self._space.renew()
            engines = _engines_in(self._space.place)
        except OSError as error:
            self._space.leave()  # so that a lost file system can be unmounted
            if error.errno != errno.ENOENT:
                self._log(f"{self._space.path}: {error.strerror}")
            for region in self._regions.values():
                region.close()
                region.has_failed = True
            if error.errno not in _GONE:
                return  # a target that fails is not searched, and its rows stay
        for engine in engines - {self._scope.engine_index}:
            for rank in range(self._scope.ranks):
                name = RegionName(engine, rank, self._target)
                if name not in self._regions:
                    self._regions[name] = _Region(self._scope, name, self._space, self._table)
        for region in self._due():
            region.has_failed, region.is_due = False, True
            region.close()
            try:
                Folder.open(region.directory, region.place)  # checks that it is ours
                region.read_superblock()
                region.look_at_owner()
            except (OSError, PoolFormatError) as error:
                self._fail(region, error)
            else:
                assert region.superblock is not None
                self._owners.found(region.name, region.superblock, region.is_held)

    def _look_at(self, region: _Region, now_s: float) -> float:
        """Scan one region; return the CPU seconds if this was its first scan, else 0."""
        begun_s = time.thread_time()
        try:
            if region.read_superblock():
                assert region.superblock is not None
                self._owners.found(region.name, region.superblock, region.is_held)
            wanted = self._owners.wanted(region.name)
            if wanted is None:
                region.leave()
                return 0.0
            rows, begins = region.follow(wanted, now_s)
        except (OSError, PoolFormatError) as error:
            self._fail(region, error)
            return 0.0
        self._owners.scanned(region.name, wanted, rows)
        return time.thread_time() - begun_s if begins else 0.0

    def _fail(self, region: _Region, error: OSError | PoolFormatError) -> None:
        """Forget a region that was removed; keep one that is temporarily unreadable."""
        if isinstance(error, PoolFormatError) or error.errno in _GONE:
            region.leave()
            del self._regions[region.name]
            self._owners.lost(region.name)
        else:
            region.has_failed, region.rests = True, False
            self._log(f"{region.directory}: {error.strerror}")

    def _log(self, line: str) -> None:
        if line != self._logged:
            self._logged = line
            print(f"share: {line}", file=sys.stderr, flush=True)


def _engines_in(space: Path) -> set[int]:
    names = (name for name in os.listdir(space) if name.startswith(_PREFIX))
    numbers = (name.removeprefix(_PREFIX) for name in names)
    return {int(text) for text in numbers if text.isdecimal() and str(int(text)) == text}


def _shape_of(superblock: Superblock) -> tuple[object, ...]:
    return superblock.slots, superblock.groups, superblock.log_pages, superblock.is_leased


def _stamp_of(path: Path, reopen: bool = False) -> tuple[int, int]:
    """Return a value that changes when a file is written or replaced. Raises OSError. `reopen`
    opens the file, so that a network file system asks its server, not this host's cache."""
    if reopen:
        fd = open_private(path, os.O_RDONLY)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
    else:
        status = os.stat(path, follow_symlinks=False)
    return status.st_ino, status.st_mtime_ns


def start_follower(scope: Scope, fd: int, follow_ms: float = FOLLOW_MS) -> Companion:
    """Follow the regions in `scope`. `fd` is an empty memfd, which holds a table on return; the
    caller may close it at any time. `follow_ms` is the interval between scans."""
    ForeignWriter(fd, ROWS_MIN)
    settings = {"scope": asdict(scope), "follow_ms": follow_ms}
    command = [*child_command("follow.follower"), json.dumps(settings, default=str)]
    return Companion("follower of shared pools", command, fd, _RESTART_S)


def pause_s(follow_s: float, share: float, scan_s: float) -> float:
    """Return the pause after a scan that took `scan_s` of CPU time, so that scans take at most
    `share` of a core."""
    return max(follow_s, scan_s / share)


def _run(scan: TargetScan, follow_s: float, share: float) -> None:
    """Scan one target until the process exits. `share` is the target's share of a core."""
    never = threading.Event()
    try:
        while True:
            never.wait(pause_s(follow_s, share, scan.scan()))
    finally:
        # Without these scans the table would silently become outdated, so a new follower starts.
        traceback.print_exc()
        os._exit(1)


def main(fd: int) -> None:
    """Run the follower with the settings from `start_follower`; `fd` is the table's memory."""
    found = json.loads(sys.argv[1])
    targets = tuple(map(Path, found["scope"]["targets"]))
    scope = Scope(**{**found["scope"], "targets": targets})
    table = ForeignWriter(fd, ROWS_MIN)
    slots_max = min(SLOTS_MAX, memory_bytes() // _MEMORY_PART // BYTES_PER_SLOT)
    owners = Owners(table, scope.ranks, time.monotonic, slots_max)
    for target in range(len(targets)):
        of_target = TargetScan(scope, target, table, owners)
        pace = found["follow_ms"] / 1000, _CPU_SHARE_MAX / len(targets)
        threading.Thread(target=_run, args=(of_target, *pace), daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    accompany(main)
