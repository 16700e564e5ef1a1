# SPDX-License-Identifier: Apache-2.0
"""Eviction orders in the native tiers, when a chunk counts as used, and provisional chunks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lru_policy import LruPolicy
from vllm_nvmeof_offload.manager.eviction import EvictionPolicy
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.protocol import place_of

STORE, LOAD, WRITE = 0, 1, 2
#: Uses count from here on: `uses_` in native/tiers/tiers.h.
FIRST = 1 << 32
#: Requests beyond the first that count: `kCreditedMax` in native/tiers/eviction.h.
CREDITED_MAX = 3


class Newest(LruPolicy):
    """Most recently used first."""

    def peek(self) -> int | None:
        return max(self.inside, key=lambda slot: self._used[slot], default=None)


def key(number: int) -> bytes:
    return b"%04d" % number + bytes(4)  # group 0


def keys_of(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


class Server:
    """Tiers whose ops end at once."""

    def __init__(self, cache: int, pool: Sequence[int], **options: Any) -> None:
        self.tiers = Tiers(cache, list(pool), key_bytes=8, **{"writes": bool(pool), **options})
        self.generation = 0
        self.written = 0

    def store(self, *numbers: int, how: int | None = None) -> list[int]:
        """how: of `plan_store`, for all. Returns the chunks that left both tiers."""
        before = {entry[4] for entry in self.tiers.entries()}
        wanted = None if how is None else np.full(len(numbers), how, np.uint8)
        plan = self.tiers.plan_store(keys_of(*numbers), wanted, self.generation)
        batch, self.generation = plan[0], plan[3]
        self.tiers.report(STORE, batch)
        self.write()
        gone = before - {entry[4] for entry in self.tiers.entries()}
        return sorted(int(key[:4]) for key in gone)

    def load(self, *numbers: int, land_max: int = 0) -> None:
        self.tiers.report(LOAD, self.tiers.plan_load(keys_of(*numbers), land_max))
        self.write()

    def write(self) -> None:
        self.tiers.drain()
        while len(batch := self.tiers.take_writes()):
            self.tiers.report(WRITE, batch)
            self.written += len(batch)
            self.tiers.drain()

    def found(self) -> list[tuple[int, bool, bool]]:
        return sorted((int(e[4][:4]), e[2] >= 0, e[3] >= 0) for e in self.tiers.entries())

    def has(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.tiers.lookup(key(number))]


OPTIONS = st.fixed_dictionaries(
    {
        "credit": st.sampled_from([0, 3, 20]),
        "demotes": st.booleans(),
        "writes_max": st.integers(1, 4),
        "clean_min": st.integers(1, 3),
    }
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["store", "load", "ended", "reset"]), st.integers(0, 25), st.integers(1, 6)
    ),
    max_size=60,
)


@settings(deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 6), max_size=3), OPTIONS, CALLS)
def test_lru_called_in_python_and_the_native_one_are_the_same_order(
    cache: int, pool: list[int], options: dict[str, Any], calls: list[tuple[str, int, int]]
) -> None:
    called = 0

    def make(used: Sequence[int]) -> EvictionPolicy:
        nonlocal called
        called += 1
        return LruPolicy(used)

    pair = Server(cache, pool, **options), Server(cache, pool, policy=make, **options)
    for name, first, count in calls:
        for server in pair:
            tiers, numbers = server.tiers, range(first, first + count)
            if name == "store":
                server.store(*numbers)
            elif name == "load":
                hits = [number for number in numbers if tiers.lookup(key(number))]
                server.load(*hits, land_max=count)
            elif name == "ended":
                tiers.touch(keys_of(*numbers), ended=True)
            elif first == 0:
                tiers.reset()
        assert pair[0].found() == pair[1].found()
    assert called


def test_a_users_policy_decides_in_both_tiers() -> None:
    server = Server(3, [], policy=Newest)
    assert [server.store(number) for number in (1, 2, 3, 4)] == [[], [], [], [3]]
    pooled = Server(1, [3], policy=Newest)
    assert [pooled.store(number) for number in (1, 2, 3, 4)] == [[], [], [], [3]]


def test_a_users_policy_reads_integers_and_cannot_write_them() -> None:
    made: list[Sequence[int]] = []

    def make(used: Sequence[int]) -> EvictionPolicy:
        made.append(used)
        return LruPolicy(used)

    server = Server(2, [4, 0, 1], policy=make)
    assert [len(used) for used in made] == [2, 2, 4, 1], "none is made without slots"
    server.store(1)
    server.tiers.touch(keys_of(1))
    assert sorted(made[0]) == [0, FIRST + 2]
    assert {type(time) for used in made for time in used} == {int}
    with pytest.raises(TypeError):
        made[0][0] = 7  # type: ignore[index]
    server.tiers.reset()
    assert [len(used) for used in made[4:]] == [2, 2, 4, 1], "made again"


def test_what_a_users_policy_raises_is_raised() -> None:
    class Raising(LruPolicy):
        def admit(self, slot: int) -> None:
            raise KeyError(f"slot {slot}")

    with pytest.raises(KeyError, match="slot 0"):
        Server(2, [], policy=Raising).store(1)


@pytest.mark.parametrize("gives", [-1, 0, 1, 99, None, "0"])
def test_a_slot_that_is_in_use_or_none_is_not_taken_from_a_users_policy(gives: object) -> None:
    """Slot 1 is evictable, slot 0 is being loaded."""

    class Wrong(LruPolicy):
        def victim(self) -> int | None:
            return gives if self.inside else None  # type: ignore[return-value]

    server = Server(2, [], policy=Wrong)
    server.store(1, 2)
    pinned = server.tiers.plan_load(keys_of(1), 0)
    if gives == 1:
        assert server.store(3) == [2]
    elif gives is None:
        assert server.store(3) == [], "no slot, so it is not stored"
    else:
        with pytest.raises((ValueError, RuntimeError)):
            server.store(3)
    server.tiers.report(LOAD, pinned)


# -- when a chunk counts as used ----------------------------------------------------------


class Clock:
    """The times of use that a policy of the CPU tier reads."""

    def __init__(self, **options: Any) -> None:
        made: list[Sequence[int]] = []

        def make(used: Sequence[int]) -> EvictionPolicy:
            made.append(used)
            return LruPolicy(used)

        self.server = Server(4, [40], policy=make, **options)
        self.cache, _, self.pool = made

    def used(self, number: int) -> tuple[int | None, int | None]:
        """When the chunk counts as last used in the CPU tier, and in the pool, from `FIRST` on."""
        (entry,) = (e for e in self.server.tiers.entries() if e[4] == key(number))
        cached = self.cache[entry[2]] - FIRST if entry[2] >= 0 else None
        pooled = self.pool[entry[3] - place_of(0, 0)] - FIRST if entry[3] >= 0 else None
        return cached, pooled


@pytest.mark.parametrize("credit", [0, 2, 8])
def test_each_return_is_worth_the_credit_in_the_cpu_tier_only(credit: int) -> None:
    clock = Clock(credit=credit)
    clock.server.store(0, 1, 2, 3)
    rng, now, returns, last = random.Random(credit), 4, [0] * 4, [4, 3, 2, 1]
    for _ in range(60):
        number, ended = rng.randrange(4), rng.random() < 0.5
        before = clock.used(number)[0]
        assert before is not None
        fresh = returns[number] == 0
        clock.server.tiers.touch([key(number)], ended=ended)
        now += 1
        returns[number] += ended
        last[number] = now
        credited = min(CREDITED_MAX, max(0, returns[number] - 1))
        cached, pooled = clock.used(number)
        assert (cached, pooled) == (now + credited * credit, now)
        assert fresh or now + credited * credit > before, "policies rely on it"
    for number in range(4):
        assert clock.used(number)[1] == last[number]


def test_a_chunk_keeps_its_count_of_returns_in_the_other_tier() -> None:
    clock = Clock(credit=4)
    clock.server.store(1)
    for _ in range(3):
        clock.server.tiers.touch(keys_of(1), ended=True)
    assert clock.used(1) == (4 + 2 * 4, 4)
    for number in range(10, 30):
        clock.server.store(number)
    cached, pooled = clock.used(1)
    assert (cached, pooled) == (None, 4), "it is only in the pool"
    clock.server.load(1, land_max=1)
    cached, pooled = clock.used(1)
    assert pooled is not None and cached == pooled + 2 * 4


def test_a_slots_next_chunk_begins_without_returns() -> None:
    clock = Clock(credit=4)
    clock.server.store(1, 2, 3, 4)
    for _ in range(3):
        clock.server.tiers.touch(keys_of(1, 2, 3, 4), ended=True)
    slot = {e[4]: e[2] for e in clock.server.tiers.entries()}[key(4)]
    clock.server.store(5)
    entry = {e[4]: e[2] for e in clock.server.tiers.entries()}[key(5)]
    assert entry == slot, "the tail went first"
    cached, pooled = clock.used(5)
    assert cached == pooled


def test_adopted_chunks_are_as_old_as_their_order() -> None:
    server = Server(1, [3])
    places = np.array([place_of(0, slot) for slot in (2, 0, 1)])
    server.tiers.adopt(places, np.array([7, 8, 9], np.uint64), b"".join(keys_of(1, 2, 3)))
    assert [server.store(number)[-1] for number in (11, 12, 13, 14)] == [1, 2, 3, 11]


MAKERS: list[Callable[[Sequence[int]], EvictionPolicy] | None] = [None, LruPolicy, Newest]


@pytest.mark.parametrize("make", MAKERS)
def test_a_pinned_chunk_is_never_evicted(
    make: Callable[[Sequence[int]], EvictionPolicy] | None,
) -> None:
    server = Server(3, [], policy=make)
    server.store(1, 2, 3)
    load = server.tiers.plan_load(keys_of(1, 3), 0)
    assert server.store(4, 5) == [2], "5 found no slot"
    server.tiers.report(LOAD, load)


# -- provisional chunks: not written, and evicted first once superseded ---------------

PROVISIONALLY = 2


def four_slots(**options: Any) -> Server:
    return Server(4, [8], **options)


def test_what_is_superseded_is_evicted_before_everything_older() -> None:
    server = four_slots(writes_max=8)
    server.store(0, 1)
    server.store(2, 3, how=PROVISIONALLY)
    server.tiers.supersede(keys_of(3, 0))
    server.tiers.touch(keys_of(3))
    server.store(4)
    assert server.has(0, 1, 2, 3, 4) == [0, 1, 2, 4]
    assert server.tiers.take_counts()[5] == 1


def test_what_is_superseded_leaves_from_its_end_on() -> None:
    server = four_slots(writes_max=8)
    server.store(0, 1, 2, how=PROVISIONALLY)
    server.tiers.supersede(keys_of(0, 1, 2))
    server.store(3, 4, 5)
    assert server.has(0, 1, 2) == [0]


def test_a_boundary_that_is_lost_before_it_is_written_is_a_refused_write() -> None:
    server = four_slots(writes_max=8)
    server.store(0, 1, how=PROVISIONALLY)
    server.store(2, 3)
    server.store(4)
    counts = server.tiers.take_counts()
    assert server.has(0, 1, 2, 3, 4) == [0, 2, 3, 4]
    assert (counts[2], counts[5]) == (1, 0), "nothing has superseded it"


def test_what_is_not_written_yet_is_not_cooled() -> None:
    waiting = four_slots(writes_max=0)
    waiting.store(0, 1, 2, 3)
    waiting.tiers.cool(keys_of(0))
    waiting.tiers.set_usable(0, False)  # otherwise nothing of it is evicted
    waiting.store(4)
    assert waiting.has(0, 1, 2, 3, 4) == [0, 1, 2, 4]
    off = four_slots(writes=False)
    off.store(0, 1, 2, 3)
    off.tiers.cool(keys_of(0))
    off.store(4)
    assert off.has(0, 1, 2, 3, 4) == [0, 1, 2, 4], "there is no pool to go to"


def test_written_on_eviction_what_is_cooled_is_demoted_next() -> None:
    server = four_slots(writes_max=8, demotes=True, clean_min=1)
    server.store(0, 1, 2)
    server.tiers.cool(keys_of(2))
    server.store(3)
    assert server.written == 1
    server.store(4)
    assert [server.tiers.lookup(key) for key in keys_of(0, 1, 2, 3, 4)] == [1, 1, 2, 1, 1]


def test_written_on_eviction_only_what_is_kept_is_demoted() -> None:
    server = four_slots(writes_max=8, demotes=True, clean_min=1)
    server.store(0, 1, how=PROVISIONALLY)
    server.store(2, 3)
    server.tiers.keep(keys_of(1))
    server.store(4)
    server.store(5)
    assert not server.has(0)
    assert server.written > 0
