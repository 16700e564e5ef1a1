# SPDX-License-Identifier: Apache-2.0
"""`bench follow`: what it costs to follow another server's index, and how late it is seen.

Scans are of a table with the given entries, by the product's own code on this thread, with a new
foreign table in each round. Delays and idleness are of a real follower, a process of its own, that
follows a few live servers with small tables. Their slabs are left out: no follower opens them.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.conditions import at_start, load_average
from vllm_nvmeof_bench.follow.report import CHANGED, FIRST, IDLE, PUT, SAME, Sample
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.progress import OnProgress, progress, unheard
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.settings import check_positive, option, recorded
from vllm_nvmeof_offload.follow.owners import Owners
from vllm_nvmeof_offload.follow.scan import Scope, TargetScan
from vllm_nvmeof_offload.follow.source import QUIET_S
from vllm_nvmeof_offload.follow.start import start_follower
from vllm_nvmeof_offload.groups import GroupKind
from vllm_nvmeof_offload.native import ForeignReader, ForeignWriter
from vllm_nvmeof_offload.pool.format import (
    ENTRY_BYTES,
    LOCK_FILE,
    TABLE_FILE,
    Keyspace,
    StoredGroup,
    Superblock,
    encode_entry,
    share_tag,
    write_superblock,
)
from vllm_nvmeof_offload.pool.lock import DirectoryLock
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import KIB, MIB, slot_stride_bytes

_KEYSPACE = Keyspace.of({"model": "bench follow"}).digest
_KEY_BYTES = 32  # and a group's id
_PAYLOAD_BYTES = 4 * KIB
_EPOCH = 1
_OURS = 0  # an engine that has no directory
_PATIENCE_S = 30.0
_POLL_S = 0.0005


@dataclass(frozen=True)
class Settings:
    """small_entries: of each of the servers that a real follower follows."""

    entries: int = option(1_000_000, "Entries of the table that is scanned.", min=1)
    changed: tuple[int, ...] = option((10_000, 100_000), "Entries that change between two scans.")
    repeats: int = option(5, "Rounds of all scans.", min=1)
    puts: int = option(200, "Writes whose delay is measured.", min=1)
    idle_s: float = option(10.0, "Seconds for which an idle follower is watched.", min=0.1)
    follow_ms: float = option(100.0, "Interval of the follower's scans.", min=1)
    seed: int = option(1, "Seed of keys, of slots and of pauses.")
    directory: Path = option(
        Path("build/bench/disk"), "Directory for the tables, 64 bytes per entry.", flag="--dir"
    )
    engines: int = 4
    small_entries: int = 4096

    def __post_init__(self) -> None:
        check_positive(self, "entries", "changed", "repeats", "puts", "follow_ms")
        if max(self.changed) > self.entries:
            raise BenchError(f"not {max(self.changed)} of {self.entries} entries can change")

    @property
    def disk_bytes(self) -> int:
        return (self.entries + self.engines * self.small_entries) * ENTRY_BYTES + MIB


class _Server:
    """A made-up server that holds its directory and has a full table."""

    def __init__(self, target: Path, index: int, slots: int, dice: random.Random) -> None:
        directory = target / _KEYSPACE / f"engine-{index}" / "rank-0"
        directory.mkdir(parents=True)
        self.table = directory / TABLE_FILE
        self._dice, self._generation = dice, 0
        self._slots = slots
        self.table.write_bytes(b"".join(self._entry(slot)[1] for slot in range(slots)))
        lock = DirectoryLock.claim(directory / LOCK_FILE)
        assert lock is not None, "the directory is new"
        self._lock = lock
        self._fd = os.open(self.table, os.O_WRONLY | os.O_CLOEXEC)
        group = StoredGroup(0, GroupKind.FULL, _PAYLOAD_BYTES, 1, _PAYLOAD_BYTES)
        superblock = Superblock(
            uuid=dice.randbytes(16),
            keyspace=_KEYSPACE,
            slot_bytes=slot_stride_bytes(_PAYLOAD_BYTES),
            payload_bytes=_PAYLOAD_BYTES,
            slots=slots,
            target_index=0,
            target_count=1,
            rank=0,
            world_size=1,
            epoch=_EPOCH,
            tag=share_tag(_KEYSPACE),
            sequence=1,
            groups=(group,),
        )
        write_superblock(directory, superblock)

    def write(self, slot: int) -> bytes:
        """Write a new chunk's entry; return its key."""
        key, entry = self._entry(slot)
        os.pwrite(self._fd, entry, slot * ENTRY_BYTES)
        return key

    def write_some(self, count: int) -> None:
        for slot in self._dice.sample(range(self._slots), count):
            self.write(slot)

    def _entry(self, slot: int) -> tuple[bytes, bytes]:
        self._generation += 1
        key = self._dice.randbytes(_KEY_BYTES) + bytes(4)
        return key, encode_entry(slot, SlotIdentity(key, self._generation), _EPOCH)

    def close(self) -> None:
        os.close(self._fd)
        self._lock.release()


@contextlib.contextmanager
def _table() -> Iterator[int]:
    """The memory of a foreign table."""
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _scans(settings: Settings, server: _Server, target: Path, number: int) -> Iterator[Sample]:
    """One round: a first scan, one without changes, and one for each number of changes."""
    with _table() as fd:
        table = ForeignWriter(fd, 1)
        owners = Owners(table, 1, time.monotonic)
        scope = Scope((target,), _KEYSPACE, _OURS, 1)
        scan = TargetScan(scope, 0, table, owners)

        def one(stage: str, entries: int) -> Sample:
            os.utime(server.table)  # what has not changed for long is not read
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            scan.scan()
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            return Sample(stage, number, entries, wall_s, cpu_s)

        yield one(FIRST, settings.entries)
        if table.rows != settings.entries:
            raise BenchError(f"{table.rows} of {settings.entries} entries were found")
        yield one(SAME, settings.entries)
        for entries in settings.changed:
            server.write_some(entries)
            yield one(CHANGED, entries)


class _Live:
    """A real follower of a few servers."""

    def __init__(self, settings: Settings, target: Path, reader: ForeignReader) -> None:
        self._settings, self._target, self._reader = settings, target, reader
        self._dice = random.Random(f"{settings.seed} live")
        self._servers: list[_Server] = []

    def begin(self, servers: list[_Server]) -> None:
        self._servers = servers
        rows = len(servers) * self._settings.small_entries
        self._wait(lambda: self._reader.rows == rows, "the first scan")

    def put(self, number: int) -> Sample:
        """Write an entry at any time between two scans; wait until it is seen."""
        time.sleep(self._dice.random() * self._settings.follow_ms / 1000)
        server = self._dice.choice(self._servers)
        begun_s = time.perf_counter()
        key = server.write(self._dice.randrange(self._settings.small_entries))
        self._wait(lambda: bool(self._reader.rows_of(key)), "a write")
        return Sample(PUT, number, 1, time.perf_counter() - begun_s)

    def idle(self) -> Sample:
        """The follower's CPU time while nothing changes."""
        time.sleep(2 * QUIET_S)
        clock = _cpu_clock_of(self._target)
        cpu_s, wall_s = time.clock_gettime(clock), time.perf_counter()
        time.sleep(self._settings.idle_s)
        cpu_s, wall_s = time.clock_gettime(clock) - cpu_s, time.perf_counter() - wall_s
        entries = len(self._servers) * self._settings.small_entries
        return Sample(IDLE, 0, entries, wall_s, cpu_s)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > end_s:
                raise BenchError(f"the follower has not seen {what} within {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)


def _cpu_clock_of(target: Path) -> int:
    """The CPU clock of the follower of `target`, which is nobody's child."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if bytes(target) in (process / "cmdline").read_bytes():
                return ~int(process.name) << 3 | 2  # clock_getcpuclockid(3)
    raise BenchError("the follower has ended")


def run(
    settings: Settings, home: Path, on_progress: OnProgress = unheard
) -> tuple[list[Sample], dict[str, Any]]:
    """Return samples and conditions. home: an empty directory."""
    found = {**at_start(home), "settings": recorded(settings)}
    samples: list[Sample] = []
    total = settings.repeats + settings.puts
    dice = random.Random(settings.seed)
    with contextlib.ExitStack() as open_:

        def server(target: Path, index: int, slots: int) -> _Server:
            made = _Server(target, index, slots, dice)
            open_.callback(made.close)
            return made

        on_progress(0, total, f"making a table of {settings.entries:,} entries")
        large = server(home / "large", 1, settings.entries)
        for number in range(settings.repeats):
            on_progress(number, total, f"scans, round {number + 1}")
            samples += _scans(settings, large, home / "large", number)
        target = home / "small"
        small = [
            server(target, index, settings.small_entries)
            for index in range(1, settings.engines + 1)
        ]
        fd = open_.enter_context(_table())
        pace = settings.follow_ms
        follower = start_follower([target], _KEYSPACE, _OURS, 1, fd, pace)
        open_.callback(follower.stop)
        live = _Live(settings, target, ForeignReader(fd))
        live.begin(small)
        for number in range(settings.puts):
            if number % 50 == 0:
                on_progress(settings.repeats + number, total, "delays of writes")
            samples.append(live.put(number))
        on_progress(total, total, "idle")
        samples.append(live.idle())
    found["load_average_at_end"] = load_average()
    return samples, found


def _measure(settings: Settings, json_path: Path) -> None:
    with progress() as on_progress, home_in(settings.directory, settings.disk_bytes) as home:
        dump(json_path, "follow", *run(settings, home, on_progress))


COMMANDS = (
    Command(
        "follow",
        """Measure what following another server's index costs, and when its writes are seen.

        Scans a table of a million entries in this process, and watches a follower of four small
        made-up servers. Takes a minute.
        """,
        Settings,
        _measure,
    ),
)
