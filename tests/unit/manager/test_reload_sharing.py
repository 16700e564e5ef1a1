# SPDX-License-Identifier: Apache-2.0
"""The ReloadScheduler beside others: GPU memory that changes, probes, resets, fetch limits."""

from __future__ import annotations

from vllm_nvmeof_offload.manager.hold_and_prefetch import Reason

from .bench import keys_of
from .test_reload import CPU, POOL, Desk

MIB = 1 << 20


def test_what_left_gpu_memory_altogether_is_fetched_after_the_next_look_up() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(4))
    desk.preempted("a", range(4), lambda _: True)
    assert desk.turn() == []
    desk.scheduler.looked_up("a", 4)
    assert desk.turn() == [], "all of it is there still"
    desk.scheduler.looked_up("a", 0)
    assert desk.turn() == ["fetch 0", "fetch 1", "fetch 2", "fetch 3"]
    looks = desk.shelf.looks
    desk.scheduler.looked_up("a", 0)
    assert (desk.turn(), desk.shelf.looks) == ([], looks), "once"


def test_what_left_gpu_memory_at_its_tail_is_fetched_after_the_next_look_up() -> None:
    """vLLM evicts a request's last blocks first: this is how it usually goes."""
    desk = Desk()
    desk.shelf.put(POOL, range(4))
    desk.scheduler.follow("a", keys_of(*range(4)), lambda _: True, ())
    assert desk.turn() == []
    desk.scheduler.looked_up("a", 3)
    assert desk.turn() == ["fetch 3"]
    desk.scheduler.looked_up("a", 1)
    assert desk.turn() == ["fetch 1", "fetch 2"]


def test_a_victim_behind_the_head_is_fetched_for_when_its_blocks_are_overwritten() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(4))
    in_gpu = {0, 1, 2, 3}
    desk.preempted("a", range(4), lambda chunk: chunk in in_gpu)
    assert desk.turn() == []
    in_gpu -= {2, 3}
    log: list[str] = []
    for second in range(30):
        desk.now_s = float(second)
        log += desk.turn()
    assert log == ["fetch 2", "fetch 3"]


def test_a_look_up_of_others_and_of_unfollowed_requests_changes_nothing() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(2))
    desk.queued("a", range(2))
    desk.scheduler.looked_up("b", 0)
    desk.scheduler.looked_up("a", 0)
    assert desk.turn() == ["fetch 0", "fetch 1"]
    desk.scheduler.looked_up("a", 0)
    assert desk.turn() == []


def test_a_request_looked_up_anew_keeps_its_place_in_the_queue() -> None:
    desk = Desk(queue=1)
    desk.shelf.put(POOL, range(3))
    desk.scheduler.follow("a", keys_of(0), lambda _: True, ())
    assert desk.turn() == []
    desk.queued("b", [1])
    desk.scheduler.looked_up("a", 0)
    assert desk.turn() == ["fetch 0"]


def test_reset_forgets_everybody_and_a_victim_after_it_is_followed_again() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(4))
    desk.preempted("a", [0, 1])
    desk.queued("b", [2])
    desk.turn()
    for key in list(desk.shelf.held):
        desk.shelf.lose(key)  # the real one lets go of all that it holds
    desk.scheduler.reset()
    desk.shelf.put(None, range(4))
    assert (len(desk.scheduler), desk.turn(), desk.left("a", "b")) == (0, [], [])
    desk.shelf.put(CPU, [0])
    desk.preempted("a", [0, 1])
    assert desk.turn() == ["hold 0"]
    assert desk.left("a") == ["drop 0"]


def test_reset_between_two_turns_leaves_nobody_in_line() -> None:
    desk = Desk(queue=1)
    desk.shelf.put(POOL, range(4))
    desk.queued("a", [0])
    desk.queued("b", [1])
    assert desk.turn() == ["fetch 0"]
    desk.shelf.lose(b"0")
    desk.scheduler.reset()
    desk.queued("b", [2])  # the same name, anew
    assert desk.turn() == ["fetch 2"]
    desk.scheduler.looked_up("a", 0)
    assert desk.turn() == []


def test_a_probe_reads_a_few_pool_only_chunks_and_one_is_under_way_at_a_time() -> None:
    desk = Desk()
    desk.shelf.put(POOL, range(20))
    desk.shelf.put(CPU, [1])
    desk.scheduler.probe(keys_of(*range(20)))
    assert desk.turn() == ["fetch 0", "fetch 2", "fetch 3"]
    desk.scheduler.probe(keys_of(*range(10, 20)))
    assert desk.turn() == []
    desk.shelf.ended(0, 2, 3)
    desk.scheduler.probe(keys_of(*range(10, 20)))
    assert len(desk.turn()) == 4


def test_a_probe_leaves_alone_what_is_held_and_what_is_nowhere() -> None:
    desk = Desk()
    desk.shelf.put(POOL, [0, 2])
    desk.preempted("a", [0])
    assert desk.turn() == ["fetch 0"]
    desk.scheduler.probe(keys_of(0, 1, 2))
    assert desk.turn() == ["fetch 2"]


def test_who_wants_a_chunk_that_a_probe_is_reading_needs_no_fetch_of_its_own() -> None:
    desk = Desk()
    desk.shelf.put(POOL, [0])
    desk.scheduler.probe(keys_of(0))
    assert desk.turn() == ["fetch 0"]
    desk.preempted("a", [0])
    assert desk.turn() == []
    desk.shelf.ended(0)
    assert desk.left("a") == []
    assert set(desk.shelf.counts.values()) == {0}


def test_a_chunk_that_failed_under_one_is_held_anew_for_another() -> None:
    desk = Desk()
    desk.shelf.put(POOL, [0])
    desk.preempted("a", [0])
    assert desk.turn() == ["fetch 0"]
    desk.shelf.lose(b"0")
    desk.shelf.put(CPU, [0])  # stored again by somebody else
    desk.preempted("b", [0])
    assert desk.turn() == ["hold 0"]
    assert desk.left("a") == []
    assert desk.left("b") == ["drop 0"]
    assert desk.shelf.counts[Reason.RELOAD] == 0
