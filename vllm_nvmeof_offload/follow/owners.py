# SPDX-License-Identifier: Apache-2.0
"""The owners: other engines whose pools are entirely on our targets, and their records.

An owner is an `engine-K` directory together with its pool's uuids. Its number is part of its
chunks' places and is never reused; a pool that disappears and returns keeps its number, even with a
new follower. Each target's thread adds the regions that it finds. An owner is complete when all its
regions were scanned under the epochs in their ranks' newest superblocks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_nvmeof_offload.native import ForeignWriter, OwnerRecord
from vllm_nvmeof_offload.pool.format import Superblock, newest_of
from vllm_nvmeof_offload.protocol import TAG_BYTES
from vllm_nvmeof_offload.units import format_bytes

#: The initial capacity of the table, in rows.
ROWS_MIN = 1 << 16
#: The highest owner number for which the table has room. Numbers start at 1.
OWNERS_MAX = 8191
#: The maximum number of slots in all owners' pools, which the table can address even as it grows.
SLOTS_MAX = 1 << 28
#: The memory per followed slot: 25 bytes in the follower, and up to 96 in the table. After growing,
#: the table is three eighths full, and the old table, half as large, is kept for look-ups in
#: progress.
BYTES_PER_SLOT = 128
NONE, SCANNING, COMPLETE, DEAD = range(4)
#: The delay before a log line, because a starting server creates its regions one after another.
_PATIENCE_S = 5.0
_NO_TAG = bytes(TAG_BYTES)


class RegionName(NamedTuple):
    """The name of a region: `targets[target]/KEYSPACE/engine-ENGINE/rank-RANK`."""

    engine: int
    rank: int
    target: int


class Wanted(NamedTuple):
    """The rows that a region should have in the foreign table: the entries that owner number
    `owner` wrote in `epoch`. Unless `version` is the table's `version_of_all`, only entries written
    since `version` count."""

    owner: int
    epoch: int
    version: int


@dataclass(slots=True)
class _Part:
    """One region. `done` is the `Wanted` that its rows met after a complete scan."""

    superblock: Superblock
    is_held: bool
    done: Wanted | None = None
    rows: int = 0


class _Pool(NamedTuple):
    """The combined superblocks of an engine. `tag` is zero while the ranks' tags differ."""

    uuids: tuple[bytes, ...]
    epochs: tuple[int, ...]
    tag: bytes


@dataclass(slots=True)
class _Engine:
    """An engine. If it is not followed, `pool` is None and `left_out` is the reason and time."""

    parts: dict[tuple[int, int], _Part] = field(default_factory=dict)
    pool: _Pool | None = None
    number: int = 0
    left_out: tuple[str, float] = ("", 0.0)
    logged: str = ""

    @property
    def slots(self) -> int:
        return sum(part.superblock.slots for part in self.parts.values())


class Owners:
    """All owners. Thread-safe; no call waits for a target."""

    def __init__(
        self,
        table: ForeignWriter,
        ranks: int,
        clock: Callable[[], float],
        slots_max: int = SLOTS_MAX,
    ) -> None:
        """Follow the first `ranks` of each engine. `clock` is monotonic, in seconds. `slots_max`
        bounds all owners together; an engine with more slots than are left is not followed. The
        owners of an earlier follower are absent until they are found again."""
        self._table = table
        self._ranks = ranks
        self._slots_max = slots_max
        self._clock = clock
        self._lock = threading.Lock()
        self._version = table.version_asked
        #: Incremented whenever an answer from `wanted` can change.
        self.changes = 0
        self._engines: dict[int, _Engine] = {}
        self._numbers: dict[tuple[int, tuple[bytes, ...]], int] = {}
        self._former: dict[tuple[int, bytes], int] = {}  # by engine and first rank's uuid
        self._written: dict[int, tuple[object, ...]] = {}
        self._last = 0
        while self._last < OWNERS_MAX and any(table.owner(self._last + 1).pool_uuid):
            self._last += 1
            old = table.owner(self._last)
            self._former[old.engine_index, old.pool_uuid] = self._last
            gone = OwnerRecord(old.version, old.tag, old.pool_uuid, old.engine_index, NONE, 0)
            table.set_owner(self._last, gone)

    def ask(self, version: int) -> None:
        with self._lock:
            if version != self._version:
                self._version = version
                self.changes += 1
                for engine in self._engines:
                    self._settle(engine)

    def found(self, region: RegionName, superblock: Superblock, is_held: bool) -> None:
        """Add or update a region on a target. `is_held` is whether a process holds it."""
        with self._lock:
            parts = self._engines.setdefault(region.engine, _Engine()).parts
            part = parts.setdefault(region[1:], _Part(superblock, is_held))
            part.superblock, part.is_held = superblock, is_held
            self._settle(region.engine)

    def lost(self, region: RegionName) -> None:
        with self._lock:
            engine = self._engines.get(region.engine)
            if engine is not None and engine.parts.pop(region[1:], None) is not None:
                self._settle(region.engine)
                if not engine.parts:
                    del self._engines[region.engine]

    def wanted(self, region: RegionName) -> Wanted | None:
        """Return the rows that the region should have; None if it has no owner."""
        with self._lock:
            engine = self._engines.get(region.engine)
            return None if engine is None else self._wanted(engine, region.rank)

    def scanned(self, region: RegionName, done: Wanted, rows: int) -> None:
        """Record that a complete scan has put the rows of `done` into the table."""
        with self._lock:
            engine = self._engines[region.engine]
            part = engine.parts[region[1:]]
            part.rows = rows
            if part.done != done:
                part.done = done
                self._settle(region.engine)

    def _wanted(self, engine: _Engine, rank: int) -> Wanted | None:
        pool = engine.pool
        if pool is None or rank >= len(pool.epochs):
            return None
        return Wanted(engine.number, pool.epochs[rank], self._version)

    def _settle(self, index: int) -> None:
        """Update the engine's owner, and write its record if that has changed."""
        engine = self._engines[index]
        pool, why_not = _pool_of(engine.parts, self._ranks)
        others = (one for one in self._engines.values() if one is not engine and one.pool)
        slots = engine.slots + sum(one.slots for one in others)
        if pool is not None and slots > self._slots_max:
            need, room = engine.slots * BYTES_PER_SLOT, self._slots_max * BYTES_PER_SLOT
            why_not = f"following its slots may take {format_bytes(need)} of memory, "
            why_not += f"and all followed engines together may take {format_bytes(room)}"
            pool = None
        self.changes += pool != engine.pool
        if engine.pool is not None and (pool is None or pool.uuids != engine.pool.uuids):
            self._write(index, engine, engine.pool, NONE)
            engine.pool = None
        self._log(index, engine, why_not)
        if pool is None:
            return
        number = self._number((index, pool.uuids))
        if number == 0:
            self._log(index, engine, f"all {OWNERS_MAX} owner numbers have been used")
            return
        engine.pool, engine.number = pool, number
        parts = engine.parts.items()
        if any(part.done != self._wanted(engine, rank) for (rank, _), part in parts):
            state = SCANNING
        else:
            state = COMPLETE if any(part.is_held for _, part in parts) else DEAD
        self._write(index, engine, pool, state)

    def _number(self, owner: tuple[int, tuple[bytes, ...]]) -> int:
        """Return the owner's number, or 0 if all numbers are used."""
        index, uuids = owner
        former = 0 if owner in self._numbers else self._former.pop((index, uuids[0]), 0)
        if former:
            self._numbers[owner] = former
        elif owner not in self._numbers and self._last < OWNERS_MAX:
            self._last += 1
            self._numbers[owner] = self._last
        return self._numbers.get(owner, 0)

    def _write(self, index: int, engine: _Engine, pool: _Pool, state: int) -> None:
        rows = sum(part.rows for part in engine.parts.values()) if state != NONE else 0
        record = self._version, pool.tag, pool.uuids[0], index, state, rows
        if self._written.get(engine.number) != record:
            self._written[engine.number] = record
            self._table.set_owner(engine.number, OwnerRecord(*record))

    def _log(self, index: int, engine: _Engine, why_not: str) -> None:
        """Log once why an engine is not followed, if the reason persists."""
        if engine.left_out[0] != why_not:
            engine.left_out = why_not, self._clock()
        is_old = self._clock() - engine.left_out[1] >= _PATIENCE_S
        if why_not and is_old and engine.logged != why_not:
            engine.logged = why_not
            print(f"share: engine-{index} is not read: {why_not}", file=sys.stderr, flush=True)


def _pool_of(parts: Mapping[tuple[int, int], _Part], ranks: int) -> tuple[_Pool | None, str]:
    """Return the combined superblocks, or why no chunk of the engine can be read."""
    world_size = max((part.superblock.world_size for part in parts.values()), default=1)
    newest: list[Superblock] = []
    for rank in range(min(ranks, world_size)):
        all_of = [part.superblock for (one, _), part in parts.items() if one == rank]
        if not all_of:
            return None, f"rank {rank} has nothing on our targets"
        count = all_of[0].target_count
        if sorted(one.target_index for one in all_of) != list(range(count)):
            return None, f"its pool is on {count} targets, and {len(all_of)} of them are ours"
        if len({one.uuid for one in all_of}) > 1:
            return None, "its targets hold parts of different pools"
        last = newest_of(all_of)
        if last is None:
            return None, "its superblocks contradict each other"
        newest.append(last)
    tags = {one.tag for one in newest}
    tag = newest[0].tag if len(tags) == 1 else _NO_TAG
    return _Pool(tuple(one.uuid for one in newest), tuple(one.epoch for one in newest), tag), ""
