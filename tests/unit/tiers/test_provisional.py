# SPDX-License-Identifier: Apache-2.0
"""Provisional chunks: what decode leaves behind is not written, and is evicted first once a later
boundary is there, unless it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.native import _tiers_mutants as tests_build  # type: ignore[attr-defined]

from .test_policies import STORE, WRITE, keys_of

KEPT, PROVISIONALLY = 1, 2


class Server:
    """Four cache slots, and stores and writes that end at once."""

    def __init__(self, make: Any = Tiers, **options: Any) -> None:
        self.tiers = make(4, [8], key_bytes=8, **options)
        self.generation = 0
        self.written = 0

    def store(self, *numbers: int, how: int = KEPT) -> None:
        wanted = np.full(len(numbers), how, np.uint8)
        plan = self.tiers.plan_store(keys_of(*numbers), wanted, self.generation)
        batch, self.generation = plan[0], plan[3]
        self.tiers.report(STORE, batch)
        self.write()

    def write(self) -> None:
        self.tiers.drain()
        batch = self.tiers.take_writes()
        self.tiers.report(WRITE, batch)
        self.written += len(batch)

    def has(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.tiers.lookup(keys_of(number)[0])]


def test_a_provisional_chunk_is_written_only_once_it_is_kept() -> None:
    server = Server(writes_max=8)
    server.store(0, 1, how=PROVISIONALLY)
    assert (server.written, server.tiers.backlog) == (0, 0)
    server.tiers.keep(keys_of(1, 7))
    server.write()
    assert server.written == 1


def test_what_is_superseded_is_evicted_before_everything_older() -> None:
    server = Server(writes_max=8)
    server.store(0, 1)
    server.store(2, 3, how=PROVISIONALLY)
    server.tiers.supersede(keys_of(3, 0))
    server.tiers.touch(keys_of(3))
    server.store(4)
    assert server.has(0, 1, 2, 3, 4) == [0, 1, 2, 4]
    assert server.tiers.take_counts()[5] == 1


def test_what_is_cooled_leaves_first_and_is_still_in_the_pool() -> None:
    server = Server(writes_max=8)
    server.store(0, 1, 2, 3)
    server.tiers.cool(keys_of(2, 9))
    server.store(4)
    assert [server.tiers.lookup(key) for key in keys_of(0, 1, 2, 3, 4)] == [1, 1, 2, 1, 1]
    server.tiers.touch(keys_of(2))  # it is in the pool only, and others go by age again
    server.store(5)
    assert [server.tiers.lookup(key) for key in keys_of(0, 1, 3)] == [1, 1, 2]


def test_what_is_cooled_leaves_from_its_end_on() -> None:
    server = Server(writes_max=8)
    server.store(0, 1, 2, 3)
    server.tiers.cool(keys_of(0, 1, 2, 3))
    server.store(4, 5)
    assert [server.tiers.lookup(key) for key in keys_of(0, 1, 2, 3)] == [1, 1, 2, 2]


def test_what_is_superseded_leaves_from_its_end_on() -> None:
    server = Server(writes_max=8)
    server.store(0, 1, 2, how=PROVISIONALLY)
    server.tiers.supersede(keys_of(0, 1, 2))
    server.store(3, 4, 5)
    assert server.has(0, 1, 2) == [0]


def test_what_several_requests_have_used_is_not_cooled() -> None:
    server = Server(writes_max=8)
    server.store(0, 1)
    server.tiers.touch(keys_of(0, 1), ended=True)
    server.tiers.touch(keys_of(0), ended=True)
    server.store(2, 3)
    server.tiers.cool(keys_of(0, 1))
    server.store(4)
    assert [server.tiers.lookup(key) for key in keys_of(0, 1, 2, 3)] == [1, 2, 1, 1]


def test_a_boundary_that_is_lost_before_it_is_written_is_a_refused_write() -> None:
    server = Server(writes_max=8)
    server.store(0, 1, how=PROVISIONALLY)
    server.store(2, 3)
    server.store(4)
    counts = server.tiers.take_counts()
    assert server.has(0, 1, 2, 3, 4) == [0, 2, 3, 4]
    assert (counts[2], counts[5]) == (1, 0), "nothing has superseded it"


def test_what_is_not_written_yet_is_not_cooled() -> None:
    waiting = Server(writes_max=0)
    waiting.store(0, 1, 2, 3)
    waiting.tiers.cool(keys_of(0))
    waiting.tiers.set_usable(0, False)  # otherwise nothing of it is evicted
    waiting.store(4)
    assert waiting.has(0, 1, 2, 3, 4) == [0, 1, 2, 4]
    off = Server(writes=False)
    off.store(0, 1, 2, 3)
    off.tiers.cool(keys_of(0))
    off.store(4)
    assert off.has(0, 1, 2, 3, 4) == [0, 1, 2, 4], "there is no pool to go to"


def test_written_on_eviction_what_is_cooled_is_demoted_next() -> None:
    server = Server(writes_max=8, demotes=True, clean_min=1)
    server.store(0, 1, 2)
    server.tiers.cool(keys_of(2))
    server.store(3)
    assert server.written == 1
    server.store(4)
    assert [server.tiers.lookup(key) for key in keys_of(0, 1, 2, 3, 4)] == [1, 1, 2, 1, 1]


@pytest.mark.parametrize("use", ["store", "load", "keep"])
def test_a_chunk_that_is_of_use_to_others_is_kept(use: str) -> None:
    server = Server(writes_max=8)
    server.store(0, how=PROVISIONALLY)
    server.tiers.supersede(keys_of(0))
    if use == "store":
        server.store(0)
    elif use == "load":
        server.tiers.report(1, server.tiers.plan_load(keys_of(0), 0))
    else:
        server.tiers.keep(keys_of(0))
    server.write()
    assert server.written == 1
    server.store(1, 2, 3, 4)
    assert server.has(0) == [0]


def test_a_provisional_offer_does_not_lower_what_is_kept() -> None:
    server = Server(writes_max=0)
    server.store(0)
    server.store(0, how=PROVISIONALLY)
    server.tiers.supersede(keys_of(0))
    assert server.tiers.backlog == 1
    server.store(1, 2, 3)
    server.tiers.touch(keys_of(0))
    server.tiers.set_usable(0, False)
    server.store(4)
    assert server.has(0, 1, 2, 3, 4) == [0, 1, 2, 4]


def test_written_on_eviction_only_what_is_kept_is_demoted() -> None:
    server = Server(writes_max=8, demotes=True, clean_min=1)
    server.store(0, 1, how=PROVISIONALLY)
    server.store(2, 3)
    server.tiers.keep(keys_of(1))
    server.store(4)
    server.store(5)
    assert not server.has(0)
    assert server.written > 0


@pytest.fixture
def _written_at_once() -> Iterator[None]:
    tests_build.set_mutant("provisional_is_written_at_once")
    yield
    tests_build.set_mutant("")


@pytest.mark.usefixtures("_written_at_once")
def test_the_rule_can_be_broken() -> None:
    server = Server(tests_build.Tiers, writes_max=8)
    server.store(0, how=PROVISIONALLY)
    assert server.written == 1
