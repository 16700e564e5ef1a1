# SPDX-License-Identifier: Apache-2.0
"""A model of `native.Tiers` in plain Python: slow, and as simple as its rules allow.

It reads the same transition table, keeps every entry as an object, and finds victims by looking at
all slots. `Model` has the part of the interface that the property test plays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import vllm_nvmeof_offload.native as native
from tests.chunks import cache_slot
from vllm_nvmeof_offload.native import OwnerRecord
from vllm_nvmeof_offload.protocol import (
    EVERY_MEMBER,
    member_of,
    owner_of,
    place_of,
    slot_of,
    target_of,
)

# -- what other engines have ----------------------------------------------------------

NONE, SCANNING, COMPLETE, DEAD = range(4)
TAG = b"our weights' tag"
REFUSED_S = DISTRUSTED_S = 30.0

#: Place and generation.
Pair = tuple[int, int]


@dataclass
class ForeignModel:
    """What other engines have: their rows are lists in a dictionary.

    Which of a key's rows is borrowed is not a rule: the model is given the one that the native
    tiers took, and asserts that it may be taken. targets: that are ours. now_s: the time.
    """

    targets: int = 1
    now_s: float = 0.0
    floor: int = 0
    rows: dict[bytes, list[Pair]] = field(default_factory=dict)
    owners: dict[int, OwnerRecord] = field(default_factory=dict)
    refused: dict[Pair, float] = field(default_factory=dict)
    distrusted: dict[int, float] = field(default_factory=dict)
    ended: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    attached: dict[int, bytes] = field(default_factory=dict)  # pool uuids, by owner
    #: Owners that were used first since the attachments were taken.
    used: list[int] = field(default_factory=list)

    def accepts(self, owner: int) -> bool:
        record = self.owners.get(owner)
        if record is None or record.state not in (COMPLETE, DEAD) or record.tag != TAG:
            return False
        if self.attached.get(owner, record.pool_uuid) != record.pool_uuid:
            return False
        return record.version >= self.floor and self.now_s >= self.distrusted.get(owner, 0.0)

    def rows_of(self, key: bytes, set_size: int) -> list[Pair]:
        """The rows that may be borrowed. set_size: of the key's group."""
        return [
            (place, generation)
            for place, generation in self.rows.get(key, ())
            if self.accepts(owner_of(place))
            and target_of(place) < self.targets
            and member_of(place) in (EVERY_MEMBER, *(range(set_size) if set_size > 1 else ()))
            and self.refused.get((place, generation), 0.0) <= self.now_s
        ]

    def has_elsewhere(self, key: bytes, set_size: int) -> bool:
        """Whether an owner that lives has what may be borrowed."""
        rows = self.rows_of(key, set_size)
        return any(self.owners[owner_of(place)].state == COMPLETE for place, _ in rows)

    def use(self, owner: int) -> None:
        if owner not in self.attached:
            self.attached[owner] = self.owners[owner].pool_uuid
            self.used.append(owner)

    def take_detachments(self) -> list[int]:
        gone = [
            owner
            for owner, uuid in self.attached.items()
            if self.owners[owner].state == NONE or self.owners[owner].pool_uuid != uuid
        ]
        for owner in gone:
            del self.attached[owner]
        return gone

    def refuse(self, pair: Pair) -> None:
        self.refused[pair] = self.now_s + REFUSED_S

    def count(self, owner: int, *, ok: bool) -> None:
        """A borrow has ended, and was not cancelled."""
        self.ended[owner] += 1
        self.failed[owner] += not ok
        if self.ended[owner] >= 64 and self.failed[owner] / self.ended[owner] > 0.02:
            self.distrusted[owner] = self.now_s + DISTRUSTED_S
            self.ended[owner] = self.failed[owner] = 0
        assert self.ended[owner] < 1024, "the counts are halved then"

    def reset(self) -> None:
        self.floor += 1
        self.refused.clear()


# -- one rank, undivided slots --------------------------------------------------------

TABLE = {
    (state, event): after
    for state, event, after in re.findall(
        r"^STEP\((\w+), (\w+), (\w+)\)$",
        (Path(native.__file__).parent / "common/transitions.def").read_text(),
        re.MULTILINE,
    )
}
STATES = (
    *("ABSENT", "STORING", "CACHED", "WRITING", "BOTH", "POOLED", "FETCHING", "BORROWING"),
    "DOOMED",
)
OK, STALE, CANCELLED, RELEASED = 0, 3, 5, 6
FAILURES_MAX = 3
#: Before every use: what is to be evicted before everything else.
COLD = -1000
#: A chunk that others gave up is written if so many requests have used it here.
USES_MIN = 2
EIO, ENOSPC = 5, 28


class Need(NamedTuple):
    """The slot that a chunk needs: the size of the set of ranks that divides it, and the member."""

    key: bytes
    set_size: int = 1
    member: int = EVERY_MEMBER


@dataclass(eq=False)
class Chunk:
    key: bytes
    generation: int
    state: str = "ABSENT"
    cache: int | None = None
    place: int | None = None
    #: Not to be written while another living engine has it.
    deduped: bool = False

    def on(self, event: str) -> str:
        self.state = TABLE[self.state, event]
        return self.state

    @property
    def in_cache(self) -> bool:
        return self.state in ("STORING", "CACHED", "WRITING", "BOTH", "FETCHING", "BORROWING")


@dataclass(eq=False)
class Slot:
    """users: operations on it. chunk: whose entry names it; None with users: it is an orphan.

    row, member: of slots that may be divided, in `MembersModel`.
    """

    number: int
    chunk: Chunk | None = None
    users: int = 0
    retired: bool = False
    used: int = 0
    wanted: int = 0  # when its chunk began to wait for its write; 0: it does not
    stay: str = ""  # "provisional", "superseded", or to be kept
    requests: int = 0  # that used its chunk and have ended
    row: int = 0
    member: int = EVERY_MEMBER

    @property
    def free(self) -> bool:
        return self.chunk is None and not self.users and not self.retired

    @property
    def orphan(self) -> bool:
        return self.chunk is None and self.users > 0 and not self.retired


@dataclass(eq=False)
class Row:
    chunk: Chunk
    cache: int | None
    place: int | None
    filling: bool
    code: int = OK
    error: int = 0
    outcomes: int = 1
    releases: int = 1


@dataclass
class Model:
    """One rank, plain LRU, write-through, one target.

    foreign: what other engines have; None: nothing is shared.
    """

    cache_slots: int
    pool_slots: int
    writes_max: int
    group_ids: Sequence[int] = (0,)
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    uses: int = 0
    arrivals: int = 0
    pending: int = 0
    writes: list[Row] = field(default_factory=list)
    failed_reads: dict[int, int] = field(default_factory=dict)
    failed_writes: dict[int, int] = field(default_factory=dict)
    foreign: ForeignModel | None = None
    #: Chunks that were not written because others have them, and those that became wanted later.
    deduped: int = 0
    wanted_later: int = 0

    def __post_init__(self) -> None:
        self.cache = [Slot(number, row=number) for number in range(self.cache_slots)]
        self.pool = [Slot(place_of(0, row), row=row) for row in range(self.pool_slots)]

    def rows_taken(self, slots: list[Slot]) -> int:
        return sum(not slot.free for slot in slots)

    # -- look-ups ---------------------------------------------------------------------

    def lookup(self, key: bytes) -> int:
        chunk = self.chunks.get(key)
        if chunk is None:
            return 3 if self.foreign_rows(key) else 0
        return 1 if chunk.in_cache else 2

    def foreign_rows(self, key: bytes) -> list[Pair]:
        """What may be borrowed of other engines."""
        if self.foreign is None or self.group(key) is None:
            return []
        return self.foreign.rows_of(key, self._set_size(key))

    def touch(self, keys: Sequence[bytes], *, ended: bool = False) -> None:
        for at, key in reversed(list(enumerate(keys))):
            self.uses += 1
            chunk = self.chunks.get(key)
            if chunk is not None:
                for slot in self._slots(chunk):
                    if slot.stay != "superseded":
                        slot.used = self.uses
                        slot.requests += ended and key not in keys[at + 1 :]
                self._want_if_lost(chunk)

    def _want_if_lost(self, chunk: Chunk) -> None:
        if not chunk.deduped or chunk.state != "CACHED" or not self.pool_slots:
            return
        assert chunk.cache is not None
        slot = self._cache_at(chunk.cache)
        if slot.stay or slot.requests < USES_MIN or self._is_elsewhere(chunk.key):
            return
        chunk.deduped = False
        self._want(slot)
        self.wanted_later += 1

    def _is_elsewhere(self, key: bytes) -> bool:
        if self.foreign is None or self.group(key) is None:
            return False
        return self.foreign.has_elsewhere(key, self._set_size(key))

    # -- plans ------------------------------------------------------------------------

    def plan_store(
        self, keys: Sequence[bytes], generation: int, provisional: Collection[bytes] = ()
    ) -> tuple[list[Row], list[bytes]]:
        """(rows in the order of the keys, the keys that were refused)."""
        self.keep([key for key in keys if key not in provisional])
        new = [key for key in keys if key not in self.chunks and self.group(key) is not None]
        spared: set[bytes] = set()
        if len(new) > self.cache_slots - self.rows_taken(self.cache):
            self.touch(keys)
            spared = set(keys)
        rows: list[Row] = []
        for key in new:
            need = self._need_of_store(key)
            slot = self._take(self.cache, need, spared, is_store=True)
            if slot is None and spared:
                spared = set()
                slot = self._take(self.cache, need, spared, is_store=True)
            if slot is None:
                break
            generation += 1
            chunk = self.chunks[key] = Chunk(key, generation, deduped=self._is_elsewhere(key))
            chunk.on("STORE_BEGIN")
            self._give(chunk, slot, None)
            slot.stay = "provisional" if key in provisional else ""
            rows.append(self._row(chunk, chunk.cache, None, True))
        self.touch(keys)
        return rows, new[len(rows) :]

    def group(self, key: bytes) -> int | None:
        """The position of the key's group."""
        number = int.from_bytes(key[-4:], "big")
        return self.group_ids.index(number) if number in self.group_ids else None

    def keep(self, keys: Sequence[bytes]) -> None:
        for slot in self._unkept(keys):
            slot.stay = ""
            self.uses += 1
            slot.used = self.uses
            if slot.chunk is not None and slot.chunk.state == "CACHED":
                self._want_or_dedupe(slot)

    def supersede(self, keys: Sequence[bytes]) -> None:
        for at, key in enumerate(keys):
            for slot in self._unkept([key]):
                if slot.stay == "provisional":
                    slot.stay, slot.used = "superseded", COLD + len(keys) - at

    def cool(self, keys: Sequence[bytes]) -> None:
        for at, key in enumerate(keys if self.pool_slots else ()):
            chunk = self.chunks.get(key)
            slot = next((one for one in self.cache if chunk and one.chunk is chunk), None)
            if slot is not None and not slot.wanted and slot.requests <= 1:
                slot.used = COLD + len(keys) - at

    def plan_load(
        self, keys: Sequence[bytes], land_max: int, borrowed: Mapping[bytes, Pair]
    ) -> list[Row]:
        """borrowed: the rows of other engines that are taken."""
        self.keep(keys)
        self.touch(keys)
        newest = self.uses
        rows = []
        for key in keys:
            chunk = self.chunks.get(key)
            if chunk is None:
                rows.append(self._foreign_row(key, borrowed))
                continue
            where = (chunk.cache, None) if chunk.in_cache else (None, chunk.place)
            rows.append(self._row(chunk, *where, False))
        for at, row in enumerate(rows):
            if row.place is None or not land_max:
                continue
            slot = self._take(self.cache, self._need_of_read(row.chunk.key, row.place), set())
            if slot is None:
                break
            land_max -= 1
            if owner_of(row.place):
                self._borrow(row.chunk, slot, newest - at)
            else:
                self._fill(row.chunk, slot)
            row.cache, row.filling = slot.number, True
            slot.users += 1
        return rows

    def fetch(self, key: bytes, borrowed: Mapping[bytes, Pair]) -> Row | None:
        if key not in self.chunks:
            return self._fetch_foreign(key, borrowed)
        chunk = self.chunks[key]
        pool_slot = self._pool_slot(chunk)
        pool_slot.users += 1
        assert chunk.place is not None
        slot = self._take(self.cache, self._need_of_read(key, chunk.place), set())
        if slot is None:
            pool_slot.users -= 1
            return None
        self._fill(chunk, slot)
        slot.users += 1
        return Row(chunk, slot.number, chunk.place, True)

    def _foreign_row(self, key: bytes, borrowed: Mapping[bytes, Pair]) -> Row:
        """Of a key without an entry: another engine's chunk, or one that is gone."""
        able = self.foreign_rows(key)
        if not able:
            assert key not in borrowed
            return Row(Chunk(key, 0), None, None, False)
        place, generation = borrowed[key]
        assert (place, generation) in able
        assert self.foreign is not None
        self.foreign.use(owner_of(place))
        return Row(Chunk(key, generation), None, place, False)

    def _fetch_foreign(self, key: bytes, borrowed: Mapping[bytes, Pair]) -> Row | None:
        able = self.foreign_rows(key)
        if not able:
            return None
        # Without a row, none of the native tiers' choices is known: any needs an evictable slot.
        place, _ = borrowed.get(key, able[0])
        slot = self._take(self.cache, self._need_of_read(key, place), set())
        if slot is None:
            return None
        row = self._foreign_row(key, borrowed)
        self.uses += 1
        self._borrow(row.chunk, slot, self.uses)
        row.cache, row.filling = slot.number, True
        slot.users += 1
        return row

    def _borrow(self, chunk: Chunk, slot: Slot, used: int) -> None:
        self.chunks[chunk.key] = chunk
        self._give(chunk, slot, None)
        slot.used = used
        chunk.deduped = True
        chunk.on("BORROW_BEGIN")

    def detach(self, row: Row) -> None:
        self._cancelled(row.chunk)
        row.filling = False

    def _cancelled(self, chunk: Chunk) -> None:
        self._leave_cache(chunk)
        if chunk.on("FETCH_CANCELLED") == "ABSENT":
            del self.chunks[chunk.key]

    def holds(self, row: Row) -> bool:
        return self._live(row.chunk)

    def drain(self) -> None:
        while self.pending < self.writes_max:
            waiting = [slot for slot in self.cache if slot.wanted]
            ready = [slot for slot in waiting if self._evictable(slot) or self._waits(slot)]
            if not ready:
                return
            slot = min(ready, key=lambda one: one.wanted)
            chunk = slot.chunk
            assert chunk is not None
            pool_slot = self._take(self.pool, self._need_of_write(chunk), set())
            if pool_slot is None:
                return
            slot.wanted = 0
            pool_slot.used, pool_slot.requests = slot.used, slot.requests
            self._give(chunk, None, pool_slot)
            chunk.on("WRITE_BEGIN")
            self.writes.append(self._row(chunk, chunk.cache, chunk.place, False))
            self.pending += 1

    # -- facts ------------------------------------------------------------------------

    def report(self, kind: str, row: Row, code: int, error: int, *, released: bool) -> None:
        if code != RELEASED:
            row.outcomes -= 1
            row.code, row.error = code, error
            if code:
                self._fails(kind, row)
            self._decide(kind, row)
        if released or code == RELEASED:
            row.releases -= 1
            if row.cache is not None:
                self._cache_at(row.cache).users -= 1
            if row.place is not None and not owner_of(row.place):
                self._pool_at(row.place).users -= 1

    def reset(self) -> None:
        for row in self.writes:
            assert row.cache is not None
            assert row.place is not None
            self._cache_at(row.cache).users -= 1
            self._pool_at(row.place).users -= 1
            self.pending -= 1
        self.writes.clear()
        for chunk in list(self.chunks.values()):
            self._forget(chunk)
        self.failed_reads.clear()
        self.failed_writes.clear()
        if self.foreign is not None:
            self.foreign.reset()

    # -- helpers ----------------------------------------------------------------------

    def _fails(self, kind: str, row: Row) -> None:
        chunk, live = row.chunk, self._live(row.chunk)
        if kind == "write" or (row.code == CANCELLED and kind != "store"):
            return
        retire = False
        if row.place is not None and owner_of(row.place):
            assert self.foreign is not None
            self.foreign.refuse((row.place, chunk.generation))
        elif row.place is not None:
            retire = self._worn(self.failed_reads, row)
        if not live:
            return
        if row.code == STALE and row.place is None and kind == "load":
            if chunk.state in ("POOLED", "FETCHING", "STORING", "BORROWING"):
                return
            if chunk.state == "BOTH":
                chunk.on("CACHE_LOST")
                self._leave_cache(chunk)
                return
        chunk.on("DOOM")
        self._forget(chunk, retire=retire)

    def _decide(self, kind: str, row: Row) -> None:
        chunk, ok = row.chunk, row.code == OK
        if kind == "write":
            self.pending -= 1
            if not self._live(chunk):
                return
            if ok:
                self.failed_writes.pop(row.place or 0, None)
                chunk.on("WRITTEN")
            else:
                chunk.on("WRITE_FAILED")
                worn = self._worn(self.failed_writes, row) or row.error == ENOSPC
                self._leave_pool(chunk, retire=worn)
            return
        if row.place is not None and owner_of(row.place):
            assert self.foreign is not None
            if row.code != CANCELLED:
                self.foreign.count(owner_of(row.place), ok=ok)
        elif ok and row.place is not None:
            self.failed_reads.pop(row.place, None)
        if not self._live(chunk) or not row.filling:
            return
        if kind == "store":
            chunk.on("COPIED")
            assert chunk.cache is not None
            if not self._cache_at(chunk.cache).stay:
                self._want_or_dedupe(self._cache_at(chunk.cache))
            return
        if not ok:
            self._cancelled(chunk)
            return
        chunk.on("FETCHED")
        if row.place is not None and owner_of(row.place) and self.pool_slots:
            self.deduped += 1

    def _want_or_dedupe(self, slot: Slot) -> None:
        if slot.chunk is not None and slot.chunk.deduped:
            self.deduped += bool(self.pool_slots)
        else:
            self._want(slot)

    def _want(self, slot: Slot) -> None:
        self.arrivals += 1
        if self.pool_slots:
            slot.wanted = self.arrivals

    def _unkept(self, keys: Sequence[bytes]) -> list[Slot]:
        chunks = [self.chunks[key] for key in keys if key in self.chunks]
        slots = [self._cache_at(chunk.cache) for chunk in chunks if chunk.cache is not None]
        return [slot for slot in slots if slot.stay]

    def _worn(self, failures: dict[int, int], row: Row) -> bool:
        assert row.place is not None
        if row.code == 1 and row.error == EIO:
            failures[row.place] = failures.get(row.place, 0) + 1
        return failures.get(row.place, 0) >= FAILURES_MAX

    def _live(self, chunk: Chunk) -> bool:
        return self.chunks.get(chunk.key) is chunk

    def _row(self, chunk: Chunk, cache: int | None, place: int | None, filling: bool) -> Row:
        if cache is not None:
            self._cache_at(cache).users += 1
        if place is not None:
            assert target_of(place) == 0
            self._pool_at(place).users += 1
        return Row(chunk, cache, place, filling)

    def _slots(self, chunk: Chunk) -> list[Slot]:
        found = [] if chunk.cache is None else [self._cache_at(chunk.cache)]
        return found + ([] if chunk.place is None else [self._pool_slot(chunk)])

    def _pool_slot(self, chunk: Chunk) -> Slot:
        assert chunk.place is not None
        return self._pool_at(chunk.place)

    def _pool_at(self, place: int) -> Slot:
        return self.pool[slot_of(place)]

    def _cache_at(self, number: int) -> Slot:
        return self.cache[number]

    def _need_of_store(self, key: bytes) -> Need:
        return Need(key)

    def _set_size(self, key: bytes) -> int:
        """Of the set of ranks that may divide the key's slot."""
        return 1

    def _need_of_write(self, chunk: Chunk) -> Need:
        """Of a chunk that has a cache slot, in the pool."""
        assert chunk.cache is not None
        return self._need(chunk.key, self._cache_at(chunk.cache).member)

    def _need_of_read(self, key: bytes, place: int) -> Need:
        """Of a chunk at this place of a pool, in the CPU tier."""
        return self._need(key, member_of(place))

    def _need(self, key: bytes, member: int) -> Need:
        whole = member == EVERY_MEMBER
        return Need(key) if whole else Need(key, self._set_size(key), member)

    def _give(self, chunk: Chunk, cache: Slot | None, pool: Slot | None) -> None:
        if cache is not None:
            chunk.cache, cache.chunk = cache.number, chunk
        if pool is not None:
            chunk.place, pool.chunk = pool.number, chunk

    def _fill(self, chunk: Chunk, slot: Slot) -> None:
        pool_slot = self._pool_slot(chunk)
        slot.used, slot.requests = pool_slot.used, pool_slot.requests
        self._give(chunk, slot, None)
        chunk.on("FETCH_BEGIN")

    def _waits(self, slot: Slot) -> bool:
        """Written through, a chunk waits for its write whether or not it is evictable."""
        return bool(slot.wanted) and slot.chunk is not None and slot.chunk.state == "CACHED"

    def _evictable(self, slot: Slot) -> bool:
        chunk = slot.chunk
        if chunk is None or slot.users:
            return False
        states = ("CACHED", "BOTH") if slot in self.cache else ("POOLED", "BOTH")
        return chunk.state in states

    def _take(
        self, slots: list[Slot], need: Need, spared: set[bytes], *, is_store: bool = False
    ) -> Slot | None:
        """Any free slot, or the one whose chunk was used longest ago."""
        if free := [slot for slot in slots if slot.free]:
            return free[0]
        for able in self._victims(slots, spared, is_store=is_store):
            if able:
                self._evict(able[0])
                return able[0]
        return None

    def _victims(
        self, slots: list[Slot], spared: set[bytes], *, is_store: bool
    ) -> list[list[Slot]]:
        """Those that are evictable without a loss; then those that wait to be written, if they
        would wait for ever."""
        able = [s for s in slots if self._evictable(s) and s.chunk and s.chunk.key not in spared]
        able.sort(key=lambda one: (one.used, slots.index(one)))
        clean = [slot for slot in able if not slot.wanted]
        retired = {slot.row for slot in self.pool if slot.retired}
        waits_for_ever = is_store and len(retired) == self.pool_slots
        return [clean, [slot for slot in able if slot.wanted]] if waits_for_ever else [clean]

    def _evict(self, slot: Slot) -> None:
        chunk = slot.chunk
        assert chunk is not None
        if slot in self.cache:
            self._leave_cache(chunk)
            event = "EVICT_CACHE"
        else:
            self._leave_pool(chunk)
            event = "EVICT_POOL"
        if chunk.on(event) == "ABSENT":
            del self.chunks[chunk.key]

    def _leave_cache(self, chunk: Chunk) -> None:
        assert chunk.cache is not None
        slot = self._cache_at(chunk.cache)
        slot.chunk, slot.wanted, slot.stay, chunk.cache = None, 0, "", None
        slot.requests = 0

    def _leave_pool(self, chunk: Chunk, *, retire: bool = False) -> None:
        slot = self._pool_slot(chunk)
        slot.chunk, slot.retired, chunk.place = None, slot.retired or retire, None
        slot.requests = 0

    def _forget(self, chunk: Chunk, *, retire: bool = False) -> None:
        if chunk.cache is not None:
            self._leave_cache(chunk)
        if chunk.place is not None:
            self._leave_pool(chunk, retire=retire)
        del self.chunks[chunk.key]


# -- slots that may be divided among the members of a set of ranks --------------------

#: In a part that is wanted: any member.
ANY = 254
#: Victims, by member, among which a part that suits is looked for.
VICTIMS_PER_MEMBER = 4


class MembersModel(Model):
    """Tiers whose slots may be divided among the members of a set of ranks.

    Which free slot is taken is not a rule: the model takes the one that the native tiers took, and
    asserts that it was free. Which chunks are evicted is a rule. set_sizes: by group. sample_every:
    one chunk of so many is stored by all ranks.
    """

    def __init__(
        self,
        cache_slots: int,
        pool_slots: int,
        group_ids: Sequence[int],
        set_sizes: Sequence[int],
        sample_every: int,
    ) -> None:
        self.set_sizes = set_sizes
        self.sample_every = sample_every
        self.stored: Counter[int] = Counter()  # by group
        #: The cache columns and places that the native tiers have given these chunks.
        self.given: dict[tuple[bool, bytes], int] = {}
        super().__init__(cache_slots, pool_slots, 3, group_ids)
        members = range(max(set_sizes))
        for row in range(cache_slots):
            self.cache[row].row = row
        for row in range(pool_slots):
            self.pool[row].row = row
        self.cache += [
            Slot(cache_slot(row, member), row=row, member=member)
            for row in range(cache_slots)
            for member in members
        ]
        self.pool += [
            Slot(place_of(0, row, member), row=row, member=member)
            for row in range(pool_slots)
            for member in members
        ]
        self._cached = {slot.number: slot for slot in self.cache}
        self._pooled = {slot.number: slot for slot in self.pool}
        #: For how many members a row is divided, by tier and row.
        self.divided: dict[tuple[bool, int], int] = {}

    # -- hooks of the model -----------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self.stored.clear()

    def rows_taken(self, slots: list[Slot]) -> int:
        return len({slot.row for slot in slots if not slot.free})

    def _cache_at(self, number: int) -> Slot:
        return self._cached[number]

    def _pool_at(self, place: int) -> Slot:
        return self._pooled[place]

    def _need_of_store(self, key: bytes) -> Need:
        group = self.group(key)
        assert group is not None
        if self.set_sizes[group] == 1:
            return Need(key)
        self.stored[group] += 1
        is_sample = self.stored[group] % self.sample_every == 0
        return Need(key) if is_sample else Need(key, self.set_sizes[group], ANY)

    def _set_size(self, key: bytes) -> int:
        group = self.group(key)
        assert group is not None
        return self.set_sizes[group]

    def _take(
        self, slots: list[Slot], need: Need, spared: set[bytes], *, is_store: bool = False
    ) -> Slot | None:
        able: list[Slot] = []
        for victims in self._victims(slots, spared, is_store=is_store):
            able += victims
            if self._free(slots, need) or self._make_room(slots, need, victims, able):
                break
        else:
            return None
        in_cache = slots is self.cache
        slot = (self._cached if in_cache else self._pooled)[self.given[in_cache, need.key]]
        assert slot in self._free(slots, need)
        if slot.member != EVERY_MEMBER:
            self.divided[slots is self.cache, slot.row] = need.set_size
        return slot

    # -- rows and parts ---------------------------------------------------------------

    def _in_row(self, slots: list[Slot], row: int) -> list[Slot]:
        """The whole slot, then its parts."""
        return [slot for slot in slots if slot.row == row]

    def _free(self, slots: list[Slot], need: Need) -> list[Slot]:
        """The slots that `need` may take: parts of divided rows, else of free rows."""
        parts, whole = [], []
        for row in {slot.row for slot in slots}:
            mine = self._in_row(slots, row)
            fitting = [slot for slot in mine if slot.free and self._fits(slot, need)]
            if all(slot.free for slot in mine):
                whole += fitting
            elif mine[0].free and self.divided[slots is self.cache, row] == need.set_size:
                parts += fitting if need.set_size > 1 else []
        return parts or whole

    def _fits(self, slot: Slot, need: Need) -> bool:
        if EVERY_MEMBER in (slot.member, need.member):
            return slot.member == need.member
        return slot.member < need.set_size and need.member in (ANY, slot.member)

    def _suits(self, slots: list[Slot], victim: Slot, need: Need) -> bool:
        """Whether `need` can be met once the victim is free."""
        if all(slot is victim or slot.free for slot in self._in_row(slots, victim.row)):
            return True
        same = self.divided[slots is self.cache, victim.row] == need.set_size
        return same and need.set_size > 1 and self._fits(victim, need)

    def _make_room(
        self, slots: list[Slot], need: Need, victims: list[Slot], able: list[Slot]
    ) -> bool:
        """Evict one of the victims, or all that is in a row of one of them, if it is `able`."""
        window = 1 if need.member == EVERY_MEMBER else VICTIMS_PER_MEMBER * need.set_size
        coming = iter(victims)
        passed: list[Slot] = []
        rows = 0
        while True:
            victim = next(coming, None) if len(passed) - rows < window else None
            if victim is not None and self._suits(slots, victim, need):
                self._evict(victim)
                return True
            if victim is not None:
                passed.append(victim)
            elif rows < len(passed):
                taken = [s for s in self._in_row(slots, passed[rows].row) if not s.free]
                if all(slot in able for slot in taken):
                    for slot in taken:
                        self._evict(slot)
                    return True
                rows += 1
            else:
                return False
