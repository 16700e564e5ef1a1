# SPDX-License-Identifier: Apache-2.0
"""vLLM's look-ups, key by key: whatever lists they are said to go along, they answer alike."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.native import LookUps, Tiers

from .test_side_by_side import CALLS, KEYS, Pair

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
