# SPDX-License-Identifier: Apache-2.0
"""The ReloadScheduler with changing GPU memory, probes, resets and other requests."""

from __future__ import annotations

from vllm_nvmeof_offload.manager.hold_and_prefetch import Reason

from .bench import keys_of
from .test_reload import CPU, POOL, ReloadRig

MIB = 1 << 20


def test_chunks_that_all_left_gpu_memory_are_fetched_after_the_next_look_up() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, range(4))
    rig.preempted("a", range(4), lambda _: True)
    assert rig.turn() == []
    rig.scheduler.looked_up("a", 4)
    assert rig.turn() == [], "all of it is there still"
    rig.scheduler.looked_up("a", 0)
    assert rig.turn() == ["fetch 0", "fetch 1", "fetch 2", "fetch 3"]
    looks = rig.holds.looks
    rig.scheduler.looked_up("a", 0)
    assert (rig.turn(), rig.holds.looks) == ([], looks), "once"


def test_chunks_of_a_tail_that_left_gpu_memory_are_fetched_after_the_next_look_up() -> None:
    """vLLM evicts a request's last blocks first: this is how it usually goes."""
    rig = ReloadRig()
    rig.holds.put(POOL, range(4))
    rig.scheduler.follow("a", keys_of(*range(4)), lambda _: True, ())
    assert rig.turn() == []
    rig.scheduler.looked_up("a", 3)
    assert rig.turn() == ["fetch 3"]
    rig.scheduler.looked_up("a", 1)
    assert rig.turn() == ["fetch 1", "fetch 2"]


def test_a_victim_behind_the_head_is_fetched_for_when_its_blocks_are_overwritten() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, range(4))
    in_gpu = {0, 1, 2, 3}
    rig.preempted("a", range(4), lambda chunk: chunk in in_gpu)
    assert rig.turn() == []
    in_gpu -= {2, 3}
    log: list[str] = []
    for second in range(30):
        rig.now_s = float(second)
        log += rig.turn()
    assert log == ["fetch 2", "fetch 3"]


def test_look_ups_of_other_and_unfollowed_requests_change_nothing() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, range(2))
    rig.queued("a", range(2))
    rig.scheduler.looked_up("b", 0)
    rig.scheduler.looked_up("a", 0)
    assert rig.turn() == ["fetch 0", "fetch 1"]
    rig.scheduler.looked_up("a", 0)
    assert rig.turn() == []


def test_a_request_looked_up_again_keeps_its_place_in_the_queue() -> None:
    rig = ReloadRig(queue=1)
    rig.holds.put(POOL, range(3))
    rig.scheduler.follow("a", keys_of(0), lambda _: True, ())
    assert rig.turn() == []
    rig.queued("b", [1])
    rig.scheduler.looked_up("a", 0)
    assert rig.turn() == ["fetch 0"]


def test_reset_forgets_all_requests_and_later_victims_are_followed() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, range(4))
    rig.preempted("a", [0, 1])
    rig.queued("b", [2])
    rig.turn()
    for key in list(rig.holds.kept):
        rig.holds.lose(key)  # the real one releases everything that it holds
    rig.scheduler.reset()
    rig.holds.put(0, range(4))
    assert (len(rig.scheduler), rig.turn(), rig.left("a", "b")) == (0, [], [])
    rig.holds.put(CPU, [0])
    rig.preempted("a", [0, 1])
    assert rig.turn() == ["hold 0"]
    assert rig.left("a") == ["drop 0"]


def test_reset_between_two_turns_empties_the_line() -> None:
    rig = ReloadRig(queue=1)
    rig.holds.put(POOL, range(4))
    rig.queued("a", [0])
    rig.queued("b", [1])
    assert rig.turn() == ["fetch 0"]
    rig.holds.lose(*keys_of(0))
    rig.scheduler.reset()
    rig.queued("b", [2])  # the same name again
    assert rig.turn() == ["fetch 2"]
    rig.scheduler.looked_up("a", 0)
    assert rig.turn() == []


def test_a_probe_reads_a_few_pool_only_chunks_and_one_is_under_way_at_a_time() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, range(20))
    rig.holds.put(CPU, [1])
    rig.scheduler.probe(keys_of(*range(20)))
    assert rig.turn() == ["fetch 0", "fetch 2", "fetch 3"]
    rig.scheduler.probe(keys_of(*range(10, 20)))
    assert rig.turn() == []
    rig.holds.ended(0, 2, 3)
    rig.scheduler.probe(keys_of(*range(10, 20)))
    assert len(rig.turn()) == 4


def test_a_probe_skips_held_and_missing_chunks() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, [0, 2])
    rig.preempted("a", [0])
    assert rig.turn() == ["fetch 0"]
    rig.scheduler.probe(keys_of(0, 1, 2))
    assert rig.turn() == ["fetch 2"]


def test_a_request_reuses_the_read_of_a_probe() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, [0])
    rig.scheduler.probe(keys_of(0))
    assert rig.turn() == ["fetch 0"]
    rig.preempted("a", [0])
    assert rig.turn() == []
    rig.holds.ended(0)
    assert rig.left("a") == []
    assert set(rig.holds.counts.values()) == {0}


def test_a_chunk_that_failed_for_one_request_is_held_again_for_another() -> None:
    rig = ReloadRig()
    rig.holds.put(POOL, [0])
    rig.preempted("a", [0])
    assert rig.turn() == ["fetch 0"]
    rig.holds.lose(*keys_of(0))
    rig.holds.put(CPU, [0])  # stored again by another request
    rig.preempted("b", [0])
    assert rig.turn() == ["hold 0"]
    assert rig.left("a") == []
    assert rig.left("b") == ["drop 0"]
    assert rig.holds.counts[Reason.RELOAD] == 0
