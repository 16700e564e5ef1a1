# SPDX-License-Identifier: Apache-2.0
"""Slots over several targets: none is handed out twice, none is lost, a retired one stays away."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.native import Batch, Tiers
from vllm_nvmeof_offload.protocol import place_of, slot_of, target_of

from .model import CANCELLED, EIO, ENOSPC, OK, RELEASED, STALE

KINDS = ("store", "load", "write", "fetch")
KEYS = [bytes([number]) * 4 + bytes(4) for number in range(24)]
CODES = (OK, OK, OK, OK, 1, STALE, CANCELLED)
Identity = tuple[bytes, int]


class Life:
    """Tiers, and by this test's own account the slots that rows under way use."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cache_slots = rng.randint(1, 8)
        self.pool_slots = [rng.randint(0, 4) for _ in range(rng.randint(1, 3))]
        self.tiers = Tiers(
            self.cache_slots,
            self.pool_slots,
            key_bytes=8,
            writes_max=3,
            demotes=rng.random() < 0.3,
            clean_min=2,
            slot_errnos=[number in (EIO, ENOSPC) for number in range(134)],
        )
        self.generation = 100
        self.ops: list[tuple[str, Batch, dict[int, bool]]] = []  # rows owed: has it its outcome?
        self.retired: set[int] = set()
        places = [place_of(t, s) for t, n in enumerate(self.pool_slots) for s in range(n)]
        adopted = rng.sample(places, rng.randint(0, len(places)))[: len(KEYS)]
        self.tiers.adopt(
            np.array(adopted, np.int64),
            np.arange(1, len(adopted) + 1, dtype=np.uint64),
            b"".join(KEYS[: len(adopted)]),
        )

    def play(self, name: str) -> None:
        getattr(self, name)()
        self.tiers.drain()
        self.check()

    def begin(self, kind: str, batch: Batch) -> None:
        if len(batch):
            assert not self.retired & set(batch.places.tolist())
            self.ops.append((kind, batch, dict.fromkeys(range(len(batch)), False)))

    def store(self) -> None:
        first = self.rng.randrange(len(KEYS))
        keys = KEYS[first : first + self.rng.randint(1, 5)]
        batch, _, _, self.generation = self.tiers.plan_store(keys, None, self.generation)
        self.begin("store", batch)

    def load(self) -> None:
        keys = [key for key in KEYS if self.tiers.lookup(key) and self.rng.random() < 0.3]
        if keys:
            self.begin("load", self.tiers.plan_load(keys, self.rng.randrange(4)))

    def fetch(self) -> None:
        pooled = [key for key in KEYS if self.tiers.lookup(key) == 2]
        if pooled and self.tiers.begin_fetch(self.rng.choice(pooled), 0):
            self.begin("fetch", self.tiers.take_fetches(0))

    def write(self) -> None:
        self.begin("write", self.tiers.take_writes())

    def report(self) -> None:
        if not self.ops:
            return
        kind, batch, owed = self.rng.choice(self.ops)
        row = self.rng.choice(list(owed))
        code = RELEASED if owed[row] else self.rng.choice(CODES)
        errno = self.rng.choice((EIO, ENOSPC)) if code == 1 else 0
        free = code in (OK, RELEASED) or self.rng.random() < 0.6
        place = int(batch.places[row])
        full = kind == "write" and errno == ENOSPC
        if full and any(entry[3] == place for entry in self.tiers.entries()):
            self.retired.add(place)
        before = self.tiers.pool_retired
        self.tiers.report(
            KINDS.index(kind),
            batch,
            np.array([row], np.uint32),
            np.array([code], np.uint8),
            np.array([errno], np.int16),
            np.array([free], np.uint8),
        )
        if self.tiers.pool_retired > before:
            self.retired.add(place)
        owed[row] = True
        if free:
            del owed[row]
        self.ops = [op for op in self.ops if op[2]]

    def reset(self) -> None:
        if self.rng.random() < 0.2:
            self.tiers.reset()

    def used(self, column: str) -> dict[int, Identity]:
        """Slots of this tier that rows under way use; of each, all are of one identity."""
        found: dict[int, Identity] = {}
        for _, batch, owed in self.ops:
            slots = getattr(batch, column)
            for row in owed:
                if slots[row] >= 0:
                    identity = batch.key(row), batch.generation(row)
                    assert found.setdefault(int(slots[row]), identity) == identity
        return found

    def check(self) -> None:
        entries = self.tiers.entries()
        cached = {entry[2]: (entry[4], entry[1]) for entry in entries if entry[2] >= 0}
        pooled = {entry[3]: (entry[4], entry[1]) for entry in entries if entry[3] >= 0}
        assert len(cached) == sum(entry[2] >= 0 for entry in entries)
        assert len(pooled) == sum(entry[3] >= 0 for entry in entries)
        assert all(slot < self.cache_slots for slot in cached)
        assert all(slot_of(p) < self.pool_slots[target_of(p)] for p in pooled)
        assert not self.retired & pooled.keys()
        readers, writers = self.used("cache"), self.used("places")
        for mine, used in ((cached, readers), (pooled, writers)):
            assert all(mine[slot] == used[slot] for slot in mine.keys() & used.keys())
        if not self.tiers.writes_intended:  # their slots have users too
            self.check_counts(set(cached), set(readers), set(pooled), set(writers))

    def check_counts(
        self, cached: set[int], cache_used: set[int], pooled: set[int], pool_used: set[int]
    ) -> None:
        tiers = self.tiers
        assert tiers.cache_taken == len(cached | cache_used)
        assert tiers.cache_orphans == len(cache_used - cached)
        assert tiers.cache_in_use == len(cache_used)
        assert tiers.pool_retired == len(self.retired)
        assert tiers.pool_taken == len(pooled | pool_used | self.retired)
        assert tiers.pool_orphans == len(pool_used - pooled - self.retired)


NAMES = ("store", "store", "load", "fetch", "write", "write", *["report"] * 6, "reset")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32), st.lists(st.sampled_from(NAMES), max_size=120))
def test_no_slot_is_handed_out_twice_or_lost(seed: int, names: list[str]) -> None:
    life = Life(random.Random(seed))
    life.check()
    for name in names:
        life.play(name)


def test_long_lives() -> None:
    retired = 0
    for seed in range(60):
        rng = random.Random(seed)
        life = Life(rng)
        for _ in range(300):
            life.play(rng.choice(NAMES))
        retired += len(life.retired)
    assert retired > 10


@pytest.mark.parametrize(
    "places", [[place_of(0, 1), place_of(0, 1)], [place_of(0, 2)], [place_of(1, 1)]]
)
def test_adopting_a_slot_twice_or_out_of_range_is_an_assertion(places: list[int]) -> None:
    tiers = Tiers(1, [2, 1], key_bytes=8)
    generations = np.arange(len(places), dtype=np.uint64)
    with pytest.raises(AssertionError, match="adopted"):
        tiers.adopt(np.array(places), generations, b"".join(KEYS[: len(places)]))


def test_adopting_after_slots_were_taken_is_an_assertion() -> None:
    tiers = Tiers(1, [2], key_bytes=8)
    tiers.report(0, tiers.plan_store(KEYS[:1], None, 0)[0])
    tiers.drain()
    assert len(tiers.take_writes()) == 1
    with pytest.raises(AssertionError, match="adopted"):
        tiers.adopt(np.array([place_of(0, 1)]), np.ones(1, np.uint64), KEYS[1])
