# SPDX-License-Identifier: Apache-2.0
"""`store_threshold`: a chunk is offloaded when it is seen for the n-th time."""

from __future__ import annotations

from vllm_nvmeof_offload.manager.stores import StoreThreshold

from .bench import Bench, keys_of


def test_a_chunk_is_stored_when_seen_the_nth_time() -> None:
    bench = Bench(cache=8, store_threshold=3)
    for _ in range(2):
        plan = bench.core.prepare_store(keys_of(1, 2))
        assert (plan.command, plan.refused) == (None, [])
    assert bench.stored(1, 2, 3) == [1, 2]
    assert bench.core.counters["unstored_chunks", "below_threshold"] == 5
    assert bench.hits([1, 2, 3]) == [1, 2]


def test_what_finds_no_room_does_not_count_as_below_the_threshold() -> None:
    bench = Bench(cache=1, store_threshold=2)
    bench.core.prepare_store(keys_of(1, 2))
    plan = bench.core.prepare_store(keys_of(1, 2, 3))
    assert plan.refused == keys_of(2)
    assert bench.core.counters["unstored_chunks", "below_threshold"] == 3, "1 and 2 at first, and 3"


def test_a_threshold_of_one_stores_at_once_and_keeps_no_table() -> None:
    threshold = StoreThreshold(1, 8)
    assert threshold.see(keys_of(1, 2)) is None, "all are due"
    assert len(threshold) == 0
    assert Bench(store_threshold=1).stored(1) == [1]


def test_a_key_twice_in_one_request_counts_once() -> None:
    bench = Bench(store_threshold=2)
    assert bench.stored(1, 1) == []
    assert bench.stored(1, 1) == [1]


def test_keys_seen_often_enough_are_stored_at_once_after_a_reset() -> None:
    bench = Bench(store_threshold=2)
    bench.core.prepare_store(keys_of(1))
    bench.store(1)
    bench.core.reset()
    bench.store(1)


def test_the_table_is_bounded_and_keeps_the_last_seen_keys() -> None:
    threshold = StoreThreshold(2, 100)
    for number in range(20_000):
        assert due(threshold, number, -1) == [False, number > 0]
        assert len(threshold) < 100 + 1024
    assert due(threshold, 19_999, 3) == [True, False], "forgotten in between"
    due(threshold, *range(50_000, 55_000))
    assert len(threshold) == 100


def due(threshold: StoreThreshold, *numbers: int) -> list[bool]:
    found = threshold.see(keys_of(*numbers))
    assert found is not None
    return [bool(one) for one in found]
