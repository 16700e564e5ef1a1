# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath follow`: the cost of following another server's index, and the delay of changes.

The cost of one scan of another server's table or log is CPU time of the product's code on this
thread, with a new foreign table in each round. Delays and the cost of idling are measured on a real
follower process. For the delays, two real writers store chunks, one with a log and one
without. All other servers are simulated: their tables and logs are real, but their slabs are empty,
because no follower opens them.

A writer, `python -m vllm_nvmeof_bench.hotpath.follow PLAN`, uses the product's pool and I/O engine,
whose table thread writes the table and the log. The process prints a line when its pool is open,
begins when it receives a line, and prints the time at which each write completed. It keeps the pool
open until its stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.home import OnProgress, home_in, progress, unheard
from vllm_nvmeof_bench.reports.follow import CHANGED, FIRST, IDLE, LOG, PUT, SAME, SCAN, Sample
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.settings import check_positive, option, recorded
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.errors import OK
from vllm_nvmeof_offload.follow.follower import (
    FOLLOW_MS,
    QUIET_S,
    Scope,
    TargetScan,
    start_follower,
)
from vllm_nvmeof_offload.follow.owners import COMPLETE, Owners
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.io.base import IoEngine, IoOp
from vllm_nvmeof_offload.io.native import choose_io_engine
from vllm_nvmeof_offload.native import ForeignReader, ForeignWriter, core
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    LOG_FILE,
    SLAB_FILE,
    TABLE_FILE,
    Keyspace,
    StoredGroup,
    Superblock,
    encode_entry,
    share_tag,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lease import DirectoryLock, Lease, Permits
from vllm_nvmeof_offload.pool.log import LOG_PAGES_MAX, RECORDS_PER_PAGE
from vllm_nvmeof_offload.pool.ownership import LOCAL
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency, place_of
from vllm_nvmeof_offload.units import KIB, MIB, PAGE_BYTES, slot_stride_bytes

KEYSPACE = Keyspace.of({"model": "bench hotpath follow"})
PAYLOAD_BYTES = 4 * KIB
_CLOSE_S_MAX = 30.0


@dataclass(frozen=True)
class Plan:
    """puts: chunks to store, at random times, puts_per_s on average. slots: slots of the pool.

    log_pages: 0: no log, so that others must scan the table.
    """

    target: str
    seed: int
    slots: int
    log_pages: int
    puts: int
    puts_per_s: float

    def key(self, number: int) -> bytes:
        """Return the key of the chunk with this number."""
        return random.Random(f"{self.seed} {number}").randbytes(32) + bytes(4)

    @property
    def disk_bytes(self) -> int:
        return self._spec().pool_bytes

    def open(self) -> Pool:
        """Open the pool in the first free directory on the target."""
        return Pool.open(self._spec())

    def _spec(self) -> PoolSpec:
        targets, size = (Path(self.target),), PAYLOAD_BYTES
        spec = PoolSpec(targets, 1, size, KEYSPACE, log_pages=self.log_pages)
        slots_bytes = self.slots * (spec.slot_bytes + ENTRY_BYTES)
        return replace(spec, pool_bytes=slots_bytes + self.log_pages * PAGE_BYTES)


class Owner:
    """A handle for a writer's process. Created by `owner`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait_ready(self) -> None:
        """Wait until the pool is open; raise BenchError if the process exits."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise BenchError("a server that stores chunks has exited")

    def begin(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def completed_s(self) -> list[float]:
        """Return the times by `time.monotonic` at which the writes completed; end the process."""
        written: list[float] = json.loads(self._process.communicate()[0] or "[]")
        return written


@contextmanager
def owner(plan: Plan) -> Iterator[Owner]:
    """Run a writer in a process of its own; kill it at the end."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(plan))]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        yield Owner(process)
    finally:
        process.kill()
        process.wait()


def _write(plan: Plan, engine: IoEngine, address: int) -> Iterator[float]:
    dice = random.Random(plan.seed)
    for number in range(plan.puts):
        time.sleep(2 * dice.random() / plan.puts_per_s)
        what = SlotIdentity(plan.key(number), number + 1), PAYLOAD_BYTES, engine.stamp
        kind = OpKind.WRITE, Urgency.WRITE
        place = place_of(0, number % plan.slots)
        engine.submit([IoOp(number + 1, *kind, place, address, *what)])
        while not (ended := engine.poll()):
            select.select([engine.fileno()], [], [], 1.0)
        yield time.monotonic()
        assert ended[0].outcome == OK, ended[0].outcome


def main(plan: Plan) -> None:
    pool = plan.open()
    memory = mmap.mmap(-1, pool.slot_bytes)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    engine, _ = choose_io_engine("auto", pool, memoryview(memory), address, TUNING)
    print("ready", flush=True)
    if sys.stdin.readline():
        print(json.dumps(list(_write(plan, engine, address))), flush=True)
        sys.stdin.read()
    engine.close(_CLOSE_S_MAX)
    pool.close()


_LOG_PAGES = {SCAN: 0, LOG: LOG_PAGES_MAX}
_KEY_BYTES = 32  # followed by the ID of a group
_EPOCH = 1
_OURS = 999  # an engine that has no directory
_PATIENCE_S = 120.0
_POLL_S = 0.001
#: The most writes that may be in flight, or not yet found, at once.
_WINDOW = 64
Table = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Settings:
    """small_slots: number of slots in the pool of each writer."""

    entries: int = option(1_000_000, "Entries of each table.", min=1)
    changed: tuple[int, ...] = option((10_000, 50_000), "Entries that change between two scans.")
    repeats: int = option(5, "Rounds of all scans.", min=1)
    puts: int = option(500, "Writes per server whose delay is measured.", min=1)
    puts_per_s: float = option(20.0, "Writes per second and server.", min=1)
    regions: tuple[int, ...] = option((1, 10, 100), "Regions that an idle follower follows.")
    idle_entries: int = option(100_000, "Entries per region of an idle follower.", min=1)
    idle_s: float = option(20.0, "Seconds for which an idle follower is measured.", min=0.1)
    follow_ms: float = option(FOLLOW_MS, "Milliseconds between the follower's scans.", min=1)
    seed: int = option(1, "Seed for keys, slots and pauses.")
    directory: Path = option(
        Path("build/bench/disk"), "Directory for tables and logs.", flag="--dir"
    )
    small_slots: int = 256

    def __post_init__(self) -> None:
        check_positive(
            self, "entries", "changed", "repeats", "puts", "puts_per_s", "regions", "follow_ms"
        )
        lap = LOG_PAGES_MAX * RECORDS_PER_PAGE
        most = min(self.entries, lap - RECORDS_PER_PAGE)
        if max(self.changed) > most:
            raise BenchError(f"{max(self.changed)} of {self.entries} entries cannot change")

    @property
    def disk_bytes(self) -> int:
        large, idle = (
            entries * ENTRY_BYTES + LOG_PAGES_MAX * PAGE_BYTES + MIB
            for entries in (self.entries, min(self.entries, self.idle_entries))
        )
        small = sum(self.plan(Path(), by).disk_bytes + MIB for by in _LOG_PAGES)
        return len(_LOG_PAGES) * large + sum(self.regions) * idle + small

    def plan(self, target: Path, by: str) -> Plan:
        """Return the plan of a server whose writes are found by scans or by its log, as in `by`."""
        rate = self.puts, self.puts_per_s
        seed = 2 * self.seed + (by == LOG)
        return Plan(str(target), seed, self.small_slots, _LOG_PAGES[by], *rate)


class _Server:
    """A simulated server that has claimed its directory and has a full table."""

    def __init__(self, target: Path, index: int, table: Table, log_pages: int, seed: str) -> None:
        """Create the server's files. table: uint8[n, 64] from `_made_up_table`."""
        directory = target / KEYSPACE.digest / f"engine-{index}" / "rank-0"
        directory.mkdir(parents=True)
        self.table = directory / TABLE_FILE
        self._dice = random.Random(seed)
        self._slots = self._generation = len(table)
        table.tofile(self.table)
        lock = DirectoryLock.claim(directory)
        assert lock is not None, "the directory is new"
        Lease.claim_in(directory, LOCAL, Permits.new(1), 0)
        self._lock = lock
        self._fd = os.open(self.table, os.O_WRONLY | os.O_CLOEXEC)
        with (directory / LOG_FILE).open("wb") as log:
            log.truncate(log_pages * PAGE_BYTES)
            self._log = core.LogWriter(log_pages, log_pages, 0, log.fileno())
        size = PAYLOAD_BYTES
        superblock = Superblock(
            uuid=self._dice.randbytes(16),
            keyspace=KEYSPACE.digest,
            slot_bytes=slot_stride_bytes(size),
            payload_bytes=size,
            slots=len(table),
            target_index=0,
            target_count=1,
            rank=0,
            world_size=1,
            epoch=_EPOCH,
            tag=share_tag(KEYSPACE.digest),
            sequence=1,
            groups=(StoredGroup(0, GroupKind.FULL, size, 1, size),),
            log_pages=log_pages,
        )
        with (directory / SLAB_FILE).open("wb") as slab:
            slab.truncate(superblock.slots * superblock.slot_bytes)
        write_superblock(directory, superblock)

    def write_some(self, count: int) -> None:
        """Store new chunks in `count` slots: first write their entries, then their log records."""
        records = []
        for slot in self._dice.sample(range(self._slots), count):
            self._generation += 1
            identity = _identity(self._dice, self._generation)
            os.pwrite(self._fd, encode_entry(slot, identity, _EPOCH), slot * ENTRY_BYTES)
            records.append((slot, identity.key, identity.generation, _EPOCH, False))
        for record in records:
            self._log.put(*record)
        self._log.flush()

    def close(self) -> None:
        os.close(self._fd)
        self._lock.release()


def _identity(dice: random.Random, generation: int) -> SlotIdentity:
    return SlotIdentity(dice.randbytes(_KEY_BYTES) + bytes(4), generation)


def _made_up_table(slots: int, dice: random.Random) -> Table:
    entries = (encode_entry(slot, _identity(dice, slot + 1), _EPOCH) for slot in range(slots))
    return np.frombuffer(b"".join(entries), np.uint8).reshape(slots, ENTRY_BYTES)


def _with_other_keys(table: Table, dice: random.Random) -> Table:
    """Flip the same bits in every key and every checksum; checksums are linear, so they match."""
    first, second = (encode_entry(0, _identity(dice, 1), _EPOCH) for _ in range(2))
    return table ^ (np.frombuffer(first, np.uint8) ^ np.frombuffer(second, np.uint8))


@contextlib.contextmanager
def _table() -> Iterator[int]:
    """Create memory for a foreign table."""
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _looks(
    settings: Settings, by: str, server: _Server, target: Path, number: int
) -> Iterator[Sample]:
    """Measure one round: a first scan, a scan without changes, and one per number of changes."""
    with _table() as fd:
        table = ForeignWriter(fd, 1)
        owners = Owners(table, 1, time.monotonic)
        scope = Scope((target,), KEYSPACE.digest, _OURS, 1)
        # With a stopped clock, neither a search for servers nor a full scan becomes due.
        scan = TargetScan(scope, 0, table, owners, lambda: 0.0)

        def one(stage: str, entries: int) -> Sample:
            os.utime(server.table)  # tables that have not changed for long are not read
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            scan.scan()
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            return Sample(stage, number, entries, wall_s, cpu_s, by)

        yield one(FIRST, settings.entries)
        if table.rows != settings.entries:
            raise BenchError(f"{table.rows} of {settings.entries} entries were found")
        yield one(SAME, settings.entries)
        for entries in settings.changed:
            server.write_some(entries)
            yield one(CHANGED, entries)


class _Live:
    """A real follower and its foreign table."""

    def __init__(self, target: Path, fd: int, follow_ms: float) -> None:
        follower = start_follower(Scope((target,), KEYSPACE.digest, _OURS, 1), fd, follow_ms)
        self._target, self.stop = target, follower.stop
        self.reader = ForeignReader(fd)

    def wait_complete(self, owners: int) -> None:
        """Wait until the tables of this many servers are complete."""
        numbers = range(1, owners + 1)
        end_s = time.monotonic() + _PATIENCE_S
        while any(self.reader.owner(number).state != COMPLETE for number in numbers):
            _check_patience(end_s, "all tables")
            time.sleep(_POLL_S)

    def idle(self, seconds: float) -> tuple[float, float]:
        """Return the elapsed seconds and the follower's CPU seconds of a period without changes."""
        time.sleep(2 * QUIET_S)
        clock = _cpu_clock_of(self._target)
        cpu_s, wall_s = time.clock_gettime(clock), time.perf_counter()
        time.sleep(seconds)
        return time.perf_counter() - wall_s, time.clock_gettime(clock) - cpu_s


def _check_patience(end_s: float, what: str) -> None:
    if time.monotonic() > end_s:
        raise BenchError(f"the follower did not find {what} within {_PATIENCE_S:.0f} s")


def _cpu_clock_of(target: Path) -> int:
    """Return the CPU clock of the process that follows `target`; it is not a child process."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if bytes(target) in (process / "cmdline").read_bytes():
                return ~int(process.name) << 3 | 2  # clock_getcpuclockid(3)
    raise BenchError("the follower has exited")


@contextlib.contextmanager
def _following(target: Path, follow_ms: float) -> Iterator[_Live]:
    with _table() as fd:
        live = _Live(target, fd, follow_ms)
        try:
            yield live
        finally:
            live.stop()


class _Arrivals:
    """The times at which a reader found each of the chunks that one server stored."""

    def __init__(self, plan: Plan, by: str, writer: Owner) -> None:
        self.by, self.writer = by, writer
        self._keys = [plan.key(number) for number in range(plan.puts)]
        self._found_s = [0.0] * plan.puts
        self._next = 0

    def look(self, has: Callable[[bytes], object]) -> bool:
        """Look for the next chunks; return whether all chunks have been found."""
        for number in range(self._next, min(self._next + _WINDOW, len(self._keys))):
            if not self._found_s[number] and has(self._keys[number]):
                self._found_s[number] = time.monotonic()
        while self._next < len(self._keys) and self._found_s[self._next]:
            self._next += 1
        return self._next == len(self._keys)

    def samples(self) -> Iterator[Sample]:
        """Yield delays; 0 for a chunk that was found before its server knew it was written."""
        written_s = self.writer.completed_s()
        if len(written_s) != len(self._found_s):
            raise BenchError("a server that stores chunks has failed")
        for number, (found, written) in enumerate(zip(self._found_s, written_s, strict=True)):
            yield Sample(PUT, number, 1, max(0.0, found - written), None, self.by)


def _delays(settings: Settings, target: Path) -> Iterator[Sample]:
    """Measure delays: two servers store chunks independently, and this process looks for them."""
    with contextlib.ExitStack() as open_:
        arrivals = []
        for by in _LOG_PAGES:
            plan = settings.plan(target, by)
            writer = open_.enter_context(owner(plan))
            writer.wait_ready()  # before the next starts: each claims the next directory
            arrivals.append(_Arrivals(plan, by, writer))
        live = open_.enter_context(_following(target, settings.follow_ms))
        live.wait_complete(len(arrivals))
        for one in arrivals:
            one.writer.begin()
        end_s = time.monotonic() + _PATIENCE_S + 2 * settings.puts / settings.puts_per_s
        while sum(one.look(live.reader.rows_of) for one in arrivals) < len(arrivals):
            _check_patience(end_s, "a write")
            time.sleep(_POLL_S)
        for one in arrivals:
            yield from one.samples()


def run(
    settings: Settings, home: Path, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Return samples and conditions. home: an empty directory."""
    found = {**at_start(home), "settings": recorded(settings)}
    samples: list[Sample] = []
    total = settings.repeats + len(settings.regions) + 1
    dice = random.Random(settings.seed)
    with contextlib.ExitStack() as open_:

        def server(target: Path, index: int, entries: Table, by: str) -> _Server:
            made = _Server(target, index, entries, _LOG_PAGES[by], f"{settings.seed} {index}")
            open_.callback(made.close)
            return made

        on_progress(0, total, f"making tables of {settings.entries:,} entries")
        entries = _made_up_table(settings.entries, dice)
        large = {by: server(home / by, 1, entries, by) for by in _LOG_PAGES}
        for number in range(settings.repeats):
            on_progress(number, total, f"scans, round {number + 1}")
            for by, one in large.items():
                samples += _looks(settings, by, one, home / by, number)
        on_progress(settings.repeats, total, "delays of writes")
        samples += _delays(settings, home / "small")
        few = entries[: settings.idle_entries]
        for at, regions in enumerate(settings.regions):
            on_progress(settings.repeats + 1 + at, total, f"idle, {regions} regions")
            target = home / f"idle-{at}-of-{regions}"
            for index in range(1, regions + 1):
                server(target, index, _with_other_keys(few, dice), LOG)
            with _following(target, settings.follow_ms) as live:
                live.wait_complete(regions)
                wall_s, cpu_s = live.idle(settings.idle_s)
            samples.append(Sample(IDLE, 0, len(few), wall_s, cpu_s, LOG, regions))
    found["load_average_at_end"] = load_average()
    return samples, found


def _measure(settings: Settings, json_path: Path) -> None:
    with progress() as on_progress, home_in(settings.directory, settings.disk_bytes) as home:
        dump(json_path, "follow", *run(settings, home, on_progress))


COMMANDS = (
    Command(
        "follow",
        """Measure the cost of following another server's index, and the delay of its writes.

        Reads the table and log of a server with a million entries in this process. Also measures a
        follower of two servers that store chunks, and of up to 100 idle ones. Takes two minutes.
        """,
        Settings,
        _measure,
    ),
)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
