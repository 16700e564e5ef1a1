# SPDX-License-Identifier: Apache-2.0
"""The ReloadScheduler's bounds: budgets, looks in one turn, fetches under way, and patience."""

from __future__ import annotations

from .test_reload import CPU, POOL, Desk

#: What the scheduler promises: chunks looked at in one turn, seconds till nobody overtakes.
LOOKS_MAX = 256
PATIENCE_S = 5.0
MIB = 1 << 20


def test_ten_thousand_waiting_requests_cost_a_bounded_number_of_looks_a_turn() -> None:
    desk = Desk()
    for number in range(10_000):
        desk.queued(f"r{number}", range(3 * number, 3 * number + 3))
    desk.preempted("v", range(100_000, 100_400), lambda _: True)
    looks = 0
    while desk.shelf.looks < 400 + 10_000:
        desk.turn()
        assert 0 < desk.shelf.looks - looks <= LOOKS_MAX
        looks = desk.shelf.looks
    assert desk.turn() == []
    assert desk.shelf.looks == looks, "everybody was looked at once: nothing was there"


def test_a_stuck_turn_looks_at_little() -> None:
    desk = Desk(reload=1, queue=1)
    desk.shelf.put(POOL, range(4000))
    for number in range(1000):
        desk.queued(f"q{number}", [2 * number])
        desk.preempted(f"p{number}", [2 * number + 1])
    desk.turn()
    looks = desk.shelf.looks
    desk.turn()
    assert desk.shelf.looks - looks == 2


def test_a_long_victim_beside_a_stream_of_short_ones_gets_its_turn() -> None:
    desk = Desk(reload=4)
    desk.shelf.put(POOL, range(1000))
    desk.preempted("s0", [100, 101])
    desk.preempted("s1", [102, 103])
    assert len(desk.turn()) == 4
    desk.preempted("long", range(6))
    first_s = None
    for tick in range(12):
        desk.now_s = float(tick)
        desk.left(f"s{tick}")
        desk.preempted(f"s{tick + 2}", [104 + 2 * tick, 105 + 2 * tick])
        if "fetch 0" in desk.turn():
            first_s = desk.now_s
    assert first_s == PATIENCE_S
    assert {b"0", b"1", b"2", b"3"} <= set(desk.shelf.held)


def test_those_out_of_patience_go_in_the_order_in_which_they_were_preempted() -> None:
    desk = Desk(reload=2)
    desk.shelf.put(POOL, range(100))
    desk.preempted("first", [10, 11, 12])
    desk.now_s = 1.0
    desk.preempted("second", [20])
    desk.now_s = 7.0
    desk.preempted("third", [])
    assert desk.turn() == ["fetch 10", "fetch 11"]
    assert len(desk.scheduler) == 2, "who has no full chunk is not followed"


def test_a_budget_smaller_than_a_request_is_spent_on_its_head() -> None:
    desk = Desk(reload=2)
    desk.shelf.put(CPU, range(5))
    desk.preempted("a", range(5))
    assert desk.turn() == ["hold 0", "hold 1"]
    assert desk.turn() == []
    assert desk.left("a") == ["drop 0", "drop 1"]


def test_where_the_shelf_has_no_room_it_is_tried_again() -> None:
    desk = Desk()
    desk.shelf.put(CPU, range(3))
    desk.shelf.room = 1
    desk.preempted("a", range(3))
    assert desk.turn() == ["hold 0"]
    desk.shelf.room = 9
    assert desk.turn() == ["hold 1", "hold 2"]


def test_one_budget_may_be_off_alone() -> None:
    desk = Desk(reload=0, queue=1)
    desk.shelf.put(POOL, range(3))
    desk.queued("b", [0])
    assert desk.turn() == ["fetch 0"]
    desk.preempted("b", [0])
    assert (desk.shelf.did(), len(desk.scheduler)) == (["cancel 0"], 0)


def test_without_a_budget_nobody_is_followed() -> None:
    desk = Desk(reload=0, queue=0)
    desk.shelf.put(POOL, range(3))
    desk.preempted("a", range(3))
    desk.queued("b", range(3))
    assert (len(desk.scheduler), desk.turn(), desk.shelf.looks) == (0, [], 0)


def test_fetches_under_way_are_bounded_by_bytes_and_at_least_four() -> None:
    for slot_bytes, fetches in ((64 * MIB, 4), (32 * MIB, 8), (1024 * MIB, 4)):
        desk = Desk(slot_bytes=slot_bytes)
        desk.shelf.put(POOL, range(16))
        desk.queued("a", range(16))
        assert len(desk.turn()) == fetches
        assert desk.turn() == []
        desk.shelf.ended(0)
        assert desk.turn() == [f"fetch {fetches}"]


def test_fetches_for_the_queue_under_way_do_not_hold_up_a_reload() -> None:
    desk = Desk(slot_bytes=64 * MIB)
    desk.shelf.put(POOL, range(16))
    desk.queued("new", range(8))
    assert len(desk.turn()) == 4
    desk.preempted("victim", [10, 11])
    assert desk.turn() == ["fetch 10", "fetch 11"]


def test_cached_chunks_of_many_victims_are_held_while_fetches_wait_for_each_other() -> None:
    desk = Desk(slot_bytes=64 * MIB)
    desk.shelf.put(POOL, range(10))
    desk.shelf.put(CPU, range(10, 22))
    desk.preempted("pooled", range(10))
    desk.preempted("cached", range(10, 22))
    assert desk.turn()[8:] == [f"hold {n}" for n in range(10, 18)]


def test_looking_again_at_old_victims_leaves_looks_for_new_ones() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(8000))
    for name in range(3):
        first = 2000 * name
        desk.preempted(f"old{name}", range(first, first + 2000), lambda _: True)
    for tick in range(100):  # for 10 s, a step each 10 ms
        desk.now_s = 6.0 + 0.01 * tick
        desk.turn()
    desk.shelf.put(CPU, [9000])
    desk.preempted("new", [9000])
    log: list[str] = []
    for tick in range(300):
        desk.now_s = 7.0 + 0.01 * tick
        log += desk.turn()
    assert log == ["hold 9000"]


def test_a_victim_alone_may_use_all_the_looks_of_a_turn() -> None:
    desk = Desk(reload=300)
    desk.shelf.put(POOL, range(200))
    desk.preempted("a", range(200))
    assert len(desk.turn()) == 200
