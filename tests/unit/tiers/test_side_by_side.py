# SPDX-License-Identifier: Apache-2.0
"""The native tiers and the model, given the same calls, hold the same chunks in the same slots."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.native import Batch, Foreign, ForeignWriter, LookUps, OwnerRecord, Tiers
from vllm_nvmeof_offload.protocol import EVERY_MEMBER, owned_by, owner_of, place_of

from .model import (
    CANCELLED,
    COMPLETE,
    DEAD,
    EIO,
    ENOSPC,
    NONE,
    OK,
    RELEASED,
    SCANNING,
    STALE,
    STATES,
    TAG,
    ForeignModel,
    MembersModel,
    Model,
    Row,
)
from .model import Pair as ForeignPair

KEPT, PROVISIONALLY = 1, 2
KINDS = ("store", "load", "write", "fetch")
GROUP_IDS = (5, 0)
#: Two groups, and one that is not offloaded.
KEYS = [bytes([n]) * 4 + (0, 0, 5, 0, 5, 5, 0, 9)[n % 8].to_bytes(4, "big") for n in range(24)]
CODES = (OK, OK, OK, OK, 1, STALE, CANCELLED)
SLOT_ERRNOS = [number in (EIO, ENOSPC) for number in range(134)]


class Others:
    """Other engines, as the follower writes them into the table, and as the model has them."""

    def __init__(self, set_sizes: Sequence[int]) -> None:
        fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
        self.writer = ForeignWriter(fd, 1)
        self.native = Foreign(fd)
        os.close(fd)  # both have their own
        self.native.set_tag(TAG)
        self.native.set_time(0.0)
        self.model = ForeignModel()
        self._set_sizes = set_sizes
        self._generation = 1 << 40
        self._slots = 0

    def offer(self, rng: random.Random) -> None:
        """An owner, who may be unknown yet, has some chunks: their records never change."""
        owner, first = rng.randint(1, 3), rng.randrange(len(KEYS))
        for key in KEYS[first : first + rng.randint(1, 6)]:
            rows = self.model.rows.setdefault(key, [])
            if any(owner_of(place) == owner for place, _ in rows):
                continue
            self._generation += 1
            self._slots += 1
            target = rng.choice((0, 0, 0, 1))  # of which there is one
            place = owned_by(owner, place_of(target, self._slots, self._member(key)))
            rows.append((place, self._generation))
            self.writer.put(key, place, self._generation)

    def withdraw(self, rng: random.Random) -> None:
        key = rng.choice(KEYS)
        for place, generation in self.model.rows.pop(key, []):
            assert self.writer.remove(key, place, generation)

    def change(self, rng: random.Random) -> None:
        """An owner's state, weights, rows or directory change."""
        owner = rng.randint(1, 3)
        record = OwnerRecord(
            version=max(0, self.model.floor - rng.choice((0, 0, 0, 1))),
            tag=TAG if rng.random() < 0.8 else bytes(16),
            pool_uuid=bytes([owner, rng.choice((0, 0, 0, 0, 1))] * 8),
            engine_index=owner + 4,
            state=rng.choice((COMPLETE, COMPLETE, COMPLETE, COMPLETE, DEAD, SCANNING, NONE)),
            rows=rng.randrange(9),
        )
        self.writer.set_owner(owner, record)
        self.model.owners[owner] = record

    def wait(self, rng: random.Random) -> None:
        self.model.now_s += rng.uniform(0, 20)
        self.native.set_time(self.model.now_s)

    def attach(self) -> None:
        """Those that were used are attached, and those that are gone are detached."""
        taken = self.native.take_attachments()
        assert [owner for owner, _, _ in taken] == self.model.used
        for owner, engine_index, pool_uuid in taken:
            assert engine_index == owner + 4
            assert pool_uuid == self.model.attached[owner]
        self.model.used.clear()
        assert sorted(self.native.take_detachments()) == sorted(self.model.take_detachments())
        for owner in self.model.owners:
            assert self.native.accepts(owner) == self.model.accepts(owner)

    def _member(self, key: bytes) -> int:
        """The same of all owners, but for one that no set has."""
        number = KEYS.index(key)
        if not self._set_sizes or number % 3 == 0:
            return EVERY_MEMBER
        return number % 5


class Pair:
    """Both, and the ops under way: (kind, native batch, the model's rows, rows that are done)."""

    def __init__(
        self,
        cache_slots: int,
        pool_slots: int,
        set_sizes: Sequence[int] = (),
        sample_every: int = 1,
        *,
        shares: bool = False,
    ) -> None:
        self.others = Others(set_sizes) if shares else None
        self.native = Tiers(
            cache_slots,
            [pool_slots],
            key_bytes=8,
            group_ids=GROUP_IDS,
            writes=pool_slots > 0,
            writes_max=3,
            slot_errnos=SLOT_ERRNOS,
            set_sizes=set_sizes,
            equal_min=0,
            sample_every=sample_every,
            foreign=self.others.native if self.others is not None else None,
        )
        self.model = Model(cache_slots, pool_slots, 3, GROUP_IDS)
        if set_sizes:
            slots = cache_slots, pool_slots
            self.model = MembersModel(*slots, GROUP_IDS, set_sizes, sample_every)
        if self.others is not None:
            self.model.foreign = self.others.model
        self.ops: list[tuple[str, Batch, list[Row]]] = []
        self.generation = 100

    def play(self, name: str, seed: int) -> None:
        rng = random.Random(seed)
        if name in OTHERS:
            getattr(self.others, name)(rng)
        else:
            getattr(self, name)(rng)
        self.native.drain()
        self.see()
        self.model.drain()
        self.compare()
        if self.others is not None:
            self.others.attach()

    def see(self) -> None:
        """The model takes the free slots that the native tiers have taken."""
        if isinstance(self.model, MembersModel):
            for _, _, cache, place, key in self.native.entries():
                self.model.given[True, key] = cache
                self.model.given[False, key] = place

    # -- calls ------------------------------------------------------------------------

    def store(self, rng: random.Random) -> None:
        keys = self._run(rng)
        wanted, provisional = None, []
        if rng.random() < 0.5:
            wanted = np.array([rng.randint(KEPT, PROVISIONALLY) for _ in keys], np.uint8)
            provisional = [keys[at] for at in np.flatnonzero(wanted == PROVISIONALLY)]
        order = self._order(rng, keys)
        batch, _, refused, after = self.native.plan_store(keys, wanted, self.generation, order)
        self.see()
        rows, also_refused = self.model.plan_store(keys, self.generation, provisional)
        self.generation = after
        assert [keys[at] for at in refused] == also_refused
        self._begin("store", batch, rows, keys, order)

    def keep(self, rng: random.Random) -> None:
        keys = self._run(rng)
        self.native.keep(keys)
        self.model.keep(keys)

    def supersede(self, rng: random.Random) -> None:
        keys = self._run(rng)
        self.native.supersede(keys)
        self.model.supersede(keys)

    def cool(self, rng: random.Random) -> None:
        keys = self._run(rng)
        self.native.cool(keys)
        self.model.cool(keys)

    def load(self, rng: random.Random) -> None:
        gone_too = rng.random() < 0.2  # since their look-up
        keys = [key for key in self._run(rng) if gone_too or self.model.lookup(key)]
        if keys:
            land_max, order = rng.randrange(4), self._order(rng, keys)
            batch = self.native.plan_load(keys, land_max, order)
            self.see()
            rows = self.model.plan_load(keys, land_max, _borrowed(batch))
            self._begin("load", batch, rows, keys, order)

    def end(self, rng: random.Random) -> None:
        """Some requests that used these chunks have ended."""
        keys = list(self._run(rng) if rng.random() < 0.3 else KEYS)
        if keys and rng.random() < 0.3:  # some were loaded, and then stored
            keys += rng.choices(keys, k=2)
        for _ in range(rng.randint(1, 3)):
            self.native.touch(keys, ended=True)
            self.model.touch(keys, ended=True)

    def fetch(self, rng: random.Random) -> None:
        pooled = [key for key in KEYS if self.model.lookup(key) > 1]
        if not pooled:
            return
        key = rng.choice(pooled)
        found = self.native.begin_fetch(key, 0)
        self.see()
        batch = self.native.take_fetches(0)
        row = self.model.fetch(key, _borrowed(batch))
        assert (found is None) == (row is None)
        if row is not None:
            self._begin("fetch", batch, [row])

    def cancel(self, rng: random.Random) -> None:
        """Take a fetch off its entry; its report still comes."""
        fetches = [
            (batch, rows[0])
            for kind, batch, rows in self.ops
            if kind == "fetch" and rows[0].outcomes and rows[0].filling
        ]
        live = [(batch, row) for batch, row in fetches if self.model.holds(row)]
        if live:
            batch, row = rng.choice(live)
            self.native.detach(batch, 0)
            self.model.detach(row)

    def write(self, rng: random.Random) -> None:
        batch, rows = self.native.take_writes(), self.model.writes
        self.model.writes = []
        self._begin("write", batch, rows)

    def report(self, rng: random.Random) -> None:
        """Some rows of an op have their outcome, their release, or both."""
        if not self.ops:
            return
        kind, batch, rows = rng.choice(self.ops)
        indexes, codes, errors, released = [], [], [], []
        for index, row in enumerate(rows):
            if not row.releases or rng.random() < 0.4:
                continue
            code = rng.choice(CODES) if row.outcomes else RELEASED
            error = rng.choice((EIO, ENOSPC)) if code == 1 else 0
            free = code in (OK, RELEASED) or rng.random() < 0.7
            self.model.report(kind, row, code, error, released=free)
            indexes.append(index)
            codes.append(code)
            errors.append(error)
            released.append(free)
        if indexes:
            self.native.report(
                KINDS.index(kind),
                batch,
                np.array(indexes, np.uint32),
                np.array(codes, np.uint8),
                np.array(errors, np.int16),
                np.array(released, np.uint8),
            )
        self.ops = [op for op in self.ops if any(row.releases for row in op[2])]

    def reset(self, rng: random.Random) -> None:
        if rng.random() < 0.2:
            self.native.reset()
            self.model.reset()

    # -- helpers ----------------------------------------------------------------------

    def _run(self, rng: random.Random) -> list[bytes]:
        first = rng.randrange(len(KEYS))
        return KEYS[first : first + rng.randint(1, 6)]

    def _order(self, rng: random.Random, keys: list[bytes]) -> npt.NDArray[np.uint32] | None:
        """By key, its place in vLLM's list; None: the keys have its order."""
        return None if rng.random() < 0.5 else np.array(rng.sample(range(99), len(keys)), np.uint32)

    def _begin(
        self,
        kind: str,
        batch: Batch,
        rows: list[Row],
        keys: Sequence[bytes] = (),
        order: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        if order is not None:
            rows.sort(key=lambda row: order[keys.index(row.chunk.key)])
        chunks = [row.chunk for row in rows]
        assert batch.groups.tolist() == [self.model.group(chunk.key) or 0 for chunk in chunks]
        assert batch.keys == b"".join(chunk.key for chunk in chunks)
        assert batch.generations.tolist() == [chunk.generation for chunk in chunks]
        assert [slot >= 0 for slot in batch.cache] == [row.cache is not None for row in rows]
        if isinstance(self.model, MembersModel):
            assert batch.cache.tolist() == [-1 if row.cache is None else row.cache for row in rows]
            assert batch.places.tolist() == [-1 if row.place is None else row.place for row in rows]
        # Which free slot is taken is not a rule.
        assert [place >= 0 for place in batch.places] == [row.place is not None for row in rows]
        if rows:
            self.ops.append((kind, batch, rows))

    def compare(self) -> None:
        ours = {
            key: (STATES[state], generation, cache >= 0, place >= 0)
            for state, generation, cache, place, key in self.native.entries()
        }
        theirs = {
            chunk.key: (
                chunk.state,
                chunk.generation,
                chunk.cache is not None,
                chunk.place is not None,
            )
            for chunk in self.model.chunks.values()
        }
        assert ours == theirs
        assert self.native.writes_pending == self.model.pending
        assert self.native.backlog == sum(bool(slot.wanted) for slot in self.model.cache)
        assert self.native.cache_taken == self.model.rows_taken(self.model.cache)
        assert self.native.pool_taken == self.model.rows_taken(self.model.pool)
        assert self.native.cache_in_use == sum(slot.users > 0 for slot in self.model.cache)
        assert self.native.cache_orphans == sum(slot.orphan for slot in self.model.cache)
        assert self.native.pool_orphans == sum(slot.orphan for slot in self.model.pool)
        retired = {slot.row for slot in self.model.pool if slot.retired}
        assert self.native.pool_retired == len(retired)
        found = [self.model.lookup(key) for key in KEYS]
        assert [self.native.lookup(key) for key in KEYS] == found
        assert list(self.native.present(KEYS)) == [source > 0 for source in found]


def _borrowed(batch: Batch) -> dict[bytes, ForeignPair]:
    """The rows of other engines that were taken, by key."""
    return {
        batch.key(at): (place, batch.generation(at))
        for at, place in enumerate(batch.places.tolist())
        if place >= 0 and owner_of(place)
    }


CALL_NAMES = (
    *("store", "keep", "supersede", "cool", "load", "end", "fetch", "cancel"),
    *("write", "report", "report", "report", "reset"),
)
#: What other engines do.
OTHERS = ("offer", "withdraw", "change", "wait")
USES = ("load", "fetch", "end")
CALLS = st.tuples(st.sampled_from(CALL_NAMES), st.integers(0, 1 << 32))
SHARED_CALLS = st.tuples(
    st.sampled_from((*CALL_NAMES, *OTHERS, *USES, "offer", "change")),
    st.integers(0, 1 << 32),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10), st.lists(CALLS, max_size=80))
def test_native_tiers_do_what_the_model_does(
    cache_slots: int, pool_slots: int, calls: list[tuple[str, int]]
) -> None:
    pair = Pair(cache_slots, pool_slots)
    for name, seed in calls:
        pair.play(name, seed)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10), st.lists(SHARED_CALLS, max_size=80))
def test_other_engines_chunks_are_borrowed_as_in_the_model(
    cache_slots: int, pool_slots: int, calls: list[tuple[str, int]]
) -> None:
    pair = Pair(cache_slots, pool_slots, shares=True)
    for name, seed in calls:
        pair.play(name, seed)


SET_SIZES = st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((2, 3)))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 5),
    SET_SIZES,
    st.integers(1, 4),
    st.lists(CALLS, max_size=80),
)
def test_slots_are_divided_among_members_as_in_the_model(
    cache_slots: int,
    pool_slots: int,
    set_sizes: tuple[int, int],
    sample_every: int,
    calls: list[tuple[str, int]],
) -> None:
    pair = Pair(cache_slots, pool_slots, set_sizes, sample_every)
    for name, seed in calls:
        pair.play(name, seed)


NAMES = (
    *("store", "store", "keep", "supersede", "load", "load", "fetch", "fetch", "cancel"),
    *("cool", "end"),
    *("write", "report", "report", "report", "reset"),
)


def test_long_lives_end_alike() -> None:
    """Longer than hypothesis draws lists, so that both tiers are full most of the time."""
    for seed in range(100):
        rng = random.Random(seed)
        pair = Pair(rng.randint(2, 8), rng.randint(1, 10))
        for _ in range(200):
            pair.play(rng.choice(NAMES), rng.randrange(1 << 32))


def test_long_lives_with_members_end_alike() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        set_sizes = rng.choice((1, 2, 3)), rng.choice((2, 3, 4))
        slots = rng.randint(1, 5), rng.randint(1, 5)
        pair = Pair(*slots, set_sizes, rng.randint(2, 8))
        for _ in range(200):
            pair.play(rng.choice(NAMES), rng.randrange(1 << 32))


def test_long_lives_beside_other_engines_end_alike() -> None:
    borrowed = deduped = wanted_later = 0
    names = (
        *(*NAMES, *OTHERS, *USES, *USES[:2], "load", "load", "write"),
        *("offer", "offer", "offer", "offer", "change", "report", "report", "report", "report"),
        *("report", "end", "end", "end", "end", "end", "end"),
    )
    for seed in range(100):
        rng = random.Random(seed)
        set_sizes = rng.choice(((), (rng.choice((1, 2, 3)), rng.choice((2, 3, 4)))))
        pair = Pair(rng.randint(1, 8), rng.randint(1, 10), set_sizes, 4, shares=True)
        for _ in range(200):
            pair.play(rng.choice(names), rng.randrange(1 << 32))
        *_, by_loads, not_written = pair.native.take_counts()
        assert not_written == pair.model.deduped
        borrowed, deduped = borrowed + by_loads, deduped + not_written
        wanted_later += pair.model.wanted_later
    assert min(borrowed / 3, deduped) > 80, "otherwise little of it was played"
    assert wanted_later > 15, "others had given up what was used here"


# -- vLLM's look-ups: whatever lists they are said to go along, they answer alike -----

CPU, POOL = 1, 2


def context(sources: int) -> Any:
    """A request's, whose filter allows these sources."""
    return SimpleNamespace(load_tier_filter=sources)


def look_ups_in(tiers: Tiers) -> LookUps:
    return LookUps(tiers, lambda sources: sources, "hit", "miss")


class Walk:
    """One request's look-ups along lists of keys: up, down, in jumps, and of keys in no list."""

    def __init__(self, tiers: Tiers, rng: random.Random) -> None:
        self._rng, self._tiers = rng, tiers
        self._look_ups = look_ups_in(tiers)
        self._begin()

    def _begin(self) -> None:
        rng = self._rng
        self._lists = [rng.choices(KEYS, k=rng.randint(0, 60)) for _ in range(rng.randint(0, 3))]
        self._sources, self._allowed = rng.randint(0, 3), rng.randint(0, 3)
        self._context = context(self._allowed)
        self._look_ups.begin(self._sources, self._lists)
        self._hits: list[bytes] = []
        self._misses: list[bytes] = []

    def _run(self) -> list[bytes]:
        rng = self._rng
        along = [one for one in self._lists if one]
        if not along or rng.random() < 0.2:
            return [bytes(bytearray(rng.choice(KEYS)))]  # another object
        one = rng.choice(along)
        if rng.random() < 0.1:  # vLLM adds to it; nothing else is promised
            rng.choice((one.append, one.remove))(rng.choice(one))
        first = rng.randint(0, len(one))
        return one[first : first + rng.randint(1, 40)][:: rng.choice((1, -1))]

    def go_on(self) -> None:
        for key in self._run():
            found = self._look_ups.lookup(key, self._context)
            hits = self._tiers.lookup(key, self._sources & self._allowed) > 0
            assert found == ("hit" if hits else "miss")
            (self._hits if hits else self._misses).append(key)
        if self._rng.random() < 0.3:
            assert self._look_ups.end() == (self._hits, self._misses)
            self._begin()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10), st.integers(), st.lists(CALLS, max_size=60))
def test_a_look_up_answers_along_lists_as_alone(
    cache_slots: int, pool_slots: int, seed: int, calls: list[tuple[str, int]]
) -> None:
    pair = Pair(cache_slots, pool_slots)
    walk = Walk(pair.native, random.Random(seed))
    for name, number in calls:
        pair.play(name, number)
        walk.go_on()


def stored(*numbers: int) -> Tiers:
    """Tiers that have these keys in memory."""
    tiers = Tiers(8, [8], key_bytes=8, group_ids=(5, 0))
    batch, *_ = tiers.plan_store([KEYS[number] for number in numbers], None, 0)
    tiers.report(0, batch)
    return tiers


def test_look_ups_outside_a_requests_are_counted_and_not_listed() -> None:
    look_ups = look_ups_in(stored(0))
    assert look_ups.lookup(KEYS[0], context(CPU)) == "hit"
    assert look_ups.lookup(KEYS[0], context(POOL)) == "miss"
    look_ups.begin(CPU | POOL, [])
    assert look_ups.end() == ([], [])
    assert look_ups.take_counts() == [1, 1, 0, 0]
    assert look_ups.take_counts() == [0, 0, 0, 0]


def test_the_sources_of_a_look_up_end_with_it() -> None:
    look_ups, request = look_ups_in(stored(0)), context(CPU | POOL)
    look_ups.begin(POOL, [])
    assert look_ups.lookup(KEYS[0], request) == "miss"
    look_ups.end()
    assert look_ups.lookup(KEYS[0], request) == "hit"
    look_ups.begin(POOL, [])
    assert look_ups.lookup(KEYS[0], request) == "miss"


def test_a_call_that_is_no_look_up_raises() -> None:
    look_ups, request = look_ups_in(stored(0)), context(CPU)
    look_ups.begin(CPU, [[b"short", 1, *KEYS]])
    with pytest.raises(ValueError, match="same number of bytes"):
        look_ups.lookup(b"short", request)
    with pytest.raises(ValueError, match="same number of bytes"):
        look_ups.lookup("a text", request)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a key and a request's context"):
        look_ups.lookup(KEYS[0])  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="load_tier_filter"):
        look_ups.lookup(KEYS[0], None)
    assert [look_ups.lookup(key, request) for key in KEYS[:2]] == ["hit", "miss"]
    with pytest.raises(RuntimeError):
        look_ups.begin(CPU, [KEYS[0]])  # type: ignore[list-item]
