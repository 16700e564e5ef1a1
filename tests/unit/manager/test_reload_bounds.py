# SPDX-License-Identifier: Apache-2.0
"""The ReloadScheduler's bounds: budgets, looks in one turn, fetches under way, and patience."""

from __future__ import annotations

import weakref

from .bench import keys_of
from .test_reload import CPU, POOL, ReloadRig, not_in_gpu

#: The scheduler's bounds: looks per turn, and seconds until no request overtakes another.
LOOKS_MAX = 4096
PATIENCE_S = 5.0
MIB = 1 << 20


def test_ten_thousand_waiting_requests_cost_a_bounded_number_of_looks_per_turn() -> None:
    rig = ReloadRig()
    for number in range(10_000):
        rig.queued(f"r{number}", range(3 * number, 3 * number + 3))
    rig.preempted("v", range(100_000, 100_400), lambda _: True)
    looks = 0
    while rig.holds.looks < 400 + 10_000:
        rig.turn()
        assert 0 < rig.holds.looks - looks <= LOOKS_MAX
        looks = rig.holds.looks
    assert rig.turn() == []
    assert rig.holds.looks == looks, "everybody was looked at once: nothing was there"


def test_gpu_memory_is_asked_a_bounded_number_of_times_per_turn() -> None:
    rig = ReloadRig()
    asked: list[int] = []

    def in_gpu(chunk: int) -> bool:
        asked.append(chunk)
        return chunk < 500

    rig.holds.put(POOL, range(1000))
    for number in range(8):
        rig.scheduler.follow(f"p{number}", keys_of(*range(1000)), in_gpu)
    rig.scheduler.follow("q", keys_of(*range(1000)), in_gpu, ())
    fetched: list[str] = []
    turns = 0
    while not fetched:
        before = len(asked)
        fetched, turns = rig.turn(), turns + 1
        assert 0 < len(asked) - before <= 256
    assert fetched[0] == "fetch 500", "vLLM finds the chunks before it in GPU memory"
    assert turns <= 1 + 8 * 501 // 256


class Keys(list[bytes]):
    """A list that can be seen to be forgotten."""


def test_requests_that_left_are_forgotten_behind_a_head_that_waits() -> None:
    rig = ReloadRig(queue=1)
    rig.holds.put(POOL, range(2))
    rig.queued("head", [0, 1])
    kept = []
    for number in range(100):
        keys = Keys(keys_of(100 + number))
        kept.append(weakref.ref(keys))
        rig.scheduler.follow(f"r{number}", keys, not_in_gpu, ())
        del keys
        rig.turn()
        rig.left(f"r{number}")
    rig.turn()
    assert sum(one() is not None for one in kept) <= 2
    assert len(rig.scheduler) == 1


def test_a_turn_without_progress_looks_at_few_chunks() -> None:
    rig = ReloadRig(reload=1, queue=1)
    rig.holds.put(POOL, range(4000))
    for number in range(1000):
        rig.queued(f"q{number}", [2 * number])
        rig.preempted(f"p{number}", [2 * number + 1])
    rig.turn()
    looks = rig.holds.looks
    rig.turn()
    assert rig.holds.looks - looks == 2


def test_a_long_victim_gets_its_turn_during_a_stream_of_short_ones() -> None:
    rig = ReloadRig(reload=4)
    rig.holds.put(POOL, range(1000))
    rig.preempted("s0", [100, 101])
    rig.preempted("s1", [102, 103])
    assert len(rig.turn()) == 4
    rig.preempted("long", range(6))
    first_s = None
    for tick in range(12):
        rig.now_s = float(tick)
        rig.left(f"s{tick}")
        rig.preempted(f"s{tick + 2}", [104 + 2 * tick, 105 + 2 * tick])
        if "fetch 0" in rig.turn():
            first_s = rig.now_s
    assert first_s == PATIENCE_S
    assert set(keys_of(0, 1, 2, 3)) <= set(rig.holds.kept)


def test_victims_past_their_patience_are_served_in_order_of_preemption() -> None:
    rig = ReloadRig(reload=2)
    rig.holds.put(POOL, range(100))
    rig.preempted("first", [10, 11, 12])
    rig.now_s = 1.0
    rig.preempted("second", [20])
    rig.now_s = 7.0
    rig.preempted("third", [])
    assert rig.turn() == ["fetch 10", "fetch 11"]
    assert len(rig.scheduler) == 2, "a request without a full chunk is not followed"


def test_a_budget_smaller_than_a_request_is_spent_on_its_head() -> None:
    rig = ReloadRig(reload=2)
    rig.holds.put(CPU, range(5))
    rig.preempted("a", range(5))
    assert rig.turn() == ["hold 0", "hold 1"]
    assert rig.turn() == []
    assert rig.left("a") == ["drop 0", "drop 1"]


def test_a_hold_or_fetch_without_room_is_tried_again() -> None:
    rig = ReloadRig()
    rig.holds.put(CPU, range(3))
    rig.holds.room = 1
    rig.preempted("a", range(3))
    assert rig.turn() == ["hold 0"]
    rig.holds.room = 9
    assert rig.turn() == ["hold 1", "hold 2"]


def test_one_budget_can_be_off_while_the_other_is_on() -> None:
    rig = ReloadRig(reload=0, queue=1)
    rig.holds.put(POOL, range(3))
    rig.queued("b", [0])
    assert rig.turn() == ["fetch 0"]
    rig.preempted("b", [0])
    assert (rig.holds.did(), len(rig.scheduler)) == (["cancel 0"], 0)


def test_without_a_budget_no_request_is_followed() -> None:
    rig = ReloadRig(reload=0, queue=0)
    rig.holds.put(POOL, range(3))
    rig.preempted("a", range(3))
    rig.queued("b", range(3))
    assert (len(rig.scheduler), rig.turn(), rig.holds.looks) == (0, [], 0)


def test_fetches_under_way_are_bounded_by_bytes_and_at_least_four() -> None:
    for slot_bytes, fetches in ((64 * MIB, 4), (32 * MIB, 8), (1024 * MIB, 4)):
        rig = ReloadRig(slot_bytes=slot_bytes)
        rig.holds.put(POOL, range(16))
        rig.queued("a", range(16))
        assert len(rig.turn()) == fetches
        assert rig.turn() == []
        rig.holds.ended(0)
        assert rig.turn() == [f"fetch {fetches}"]


def test_fetches_for_the_queue_do_not_delay_a_reload() -> None:
    rig = ReloadRig(slot_bytes=64 * MIB)
    rig.holds.put(POOL, range(16))
    rig.queued("new", range(8))
    assert len(rig.turn()) == 4
    rig.preempted("victim", [10, 11])
    assert rig.turn() == ["fetch 10", "fetch 11"]


def test_cached_chunks_of_many_victims_are_held_while_fetches_wait_for_each_other() -> None:
    rig = ReloadRig(slot_bytes=64 * MIB)
    rig.holds.put(POOL, range(10))
    rig.holds.put(CPU, range(10, 22))
    rig.preempted("pooled", range(10))
    rig.preempted("cached", range(10, 22))
    assert rig.turn()[8:] == [f"hold {n}" for n in range(10, 18)]


def test_looking_again_at_old_victims_leaves_looks_for_new_ones() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, range(8000))
    for name in range(3):
        first = 2000 * name
        rig.preempted(f"old{name}", range(first, first + 2000), lambda _: True)
    for tick in range(100):  # for 10 s, a step each 10 ms
        rig.now_s = 6.0 + 0.01 * tick
        rig.turn()
    rig.holds.put(CPU, [9000])
    rig.preempted("new", [9000])
    log: list[str] = []
    for tick in range(300):
        rig.now_s = 7.0 + 0.01 * tick
        log += rig.turn()
    assert log == ["hold 9000"]


def test_a_single_victim_may_use_all_looks_of_a_turn() -> None:
    rig = ReloadRig(reload=300)
    rig.holds.put(POOL, range(200))
    rig.preempted("a", range(200))
    assert len(rig.turn()) == 200
