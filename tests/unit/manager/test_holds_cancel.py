# SPDX-License-Identifier: Apache-2.0
"""Fetches that no request wants any more, in the real core."""

from __future__ import annotations

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.protocol import CancelCommand, Command, FetchCommand

from .bench import keys_of, numbers_of
from .test_holds import HoldsBench


def cancels(commands: list[Command]) -> list[tuple[int, list[int]]]:
    """The cancellations: (op, its rows). There is nothing else."""
    found = []
    for command in commands:
        assert isinstance(command, CancelCommand) and command.indexes is not None
        found.append((command.target_op, command.indexes.tolist()))
    return found


def test_an_unsent_fetch_is_dropped() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    free = bench.core.gauges()["slots_used", "cache"]
    bench.queued("a", 0)
    bench.core.turn()
    bench.core.reload.left("a")
    assert bench.core.take_commands() == []
    assert (bench.ended(), bench.source(0)) == ({"cancelled": 1}, Source.POOL)
    assert bench.core.gauges()["slots_used", "cache"] == free - 1, "its victim is gone"
    bench.check_idle()
    bench.queued("b", 0)
    fetch = bench.fetch()
    bench.done(fetch.op)
    assert bench.source(0) is Source.CPU


def test_a_cancelled_fetch_is_in_the_pool_at_once_and_frees_its_slot_at_release() -> None:
    bench = HoldsBench(cache=4, reload_cache_share=0.25)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.core.reload.left("a")
    assert cancels(bench.core.take_commands()) == [(fetch.op, [0])]
    assert (bench.source(0), bench.ended()) == (Source.POOL, {"cancelled": 1})
    command = bench.load(0)
    (place,), (slot,) = command.batch.places, command.batch.cache
    assert place == fetch.batch.places[0]
    assert slot != fetch.batch.cache[0]
    stored = bench.core.prepare_store(keys_of(300, 301, 302, 303)).command
    assert stored is not None
    assert fetch.batch.cache[0] not in stored.batch.cache
    bench.done(command.op)
    bench.done(fetch.op)  # the read had already ended
    assert bench.slots(0) == (slot, place), "its end changed nothing"
    again = bench.core.prepare_store(keys_of(304)).command
    assert again is not None
    assert again.batch.cache[0] == fetch.batch.cache[0]
    bench.done(stored.op)
    bench.done(again.op)
    bench.write_all()
    bench.check_idle()


def test_a_fetch_that_a_load_waits_for_is_not_cancelled() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    command = bench.load(0)
    assert command.batch.places[0] == -1
    bench.core.reload.left("a")
    assert (bench.core.take_commands(), bench.ended()) == ([], {"used": 1})
    bench.done(fetch.op)
    bench.done(command.op)
    assert bench.source(0) is Source.CPU
    bench.check_idle()


def test_a_fetch_that_another_request_loads_is_not_cancelled() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0, 1)
    bench.queued("waits", 0, 1)
    fetch = bench.fetch()
    loads = bench.load(0).op
    bench.core.reload.left("waits")
    assert cancels(bench.core.take_commands()) == [(fetch.op, [1])]
    assert bench.ended() == {"used": 1, "cancelled": 1}
    bench.done(fetch.op, (1, CANCELLED))
    bench.done(loads)
    assert (bench.source(0), bench.source(1)) == (Source.CPU, Source.POOL)
    bench.check_idle()


def test_a_dropped_fetch_leaves_the_others_of_its_step() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0, 1, 2)
    for name in range(3):
        bench.queued(str(name), name)
    bench.core.turn()
    bench.core.reload.left("1")
    fetch = bench.fetch()
    assert numbers_of(fetch.batch.keys) == [0, 2]
    bench.done(fetch.op)
    assert [bench.source(n) for n in range(3)] == [Source.CPU, Source.POOL, Source.CPU]
    for name in range(3):
        bench.core.reload.left(str(name))
    bench.check_idle()


def test_a_load_that_took_an_unsent_fetch_is_all_that_waits_for_it() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.queued("a", 0)
    bench.core.turn()
    loads = bench.load(0).op
    bench.core.reload.left("a")
    bench.preempted("b", 0)  # holds the chunk, and is not what fetches it
    fetch = bench.fetch()
    bench.done(fetch.op)
    bench.done(loads)
    assert bench.source(0) is Source.CPU
    bench.core.reload.left("b")
    assert bench.ended() == {"used": 1}
    bench.check_idle()


def test_a_second_fetch_ignores_the_reports_of_a_cancelled_first_one() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    first = bench.fetch()
    bench.core.reload.left("a")
    bench.preempted("a", 0)
    bench.core.turn()
    cancel, second = bench.core.take_commands()
    assert cancels([cancel]) == [(first.op, [0])]
    assert isinstance(second, FetchCommand)
    assert second.batch.cache[0] != first.batch.cache[0]
    bench.done(first.op, (0, CANCELLED))
    assert (bench.held(), bench.slots(0)[0]) == ([0], second.batch.cache[0])
    assert bench.core.find(keys_of(0)).leading_cpu == 0, "it is being read still"
    bench.done(second.op)
    assert bench.core.find(keys_of(0)).leading_cpu == 1
    bench.core.reload.left("a")
    assert bench.ended() == {"cancelled": 1, "wasted": 1}
    bench.check_idle()


def test_a_read_that_was_cancelled_and_failed_dooms_the_chunk() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    first = bench.fetch()
    bench.core.reload.left("a")
    bench.preempted("b", 0)
    bench.core.turn()
    second = bench.core.take_commands()[1]
    assert isinstance(second, FetchCommand)
    bench.done(first.op, (0, CHECKSUM_MISMATCH))
    assert (bench.source(0), bench.held()) == (None, [])
    bench.done(second.op)
    bench.core.reload.left("b")
    assert bench.ended() == {"cancelled": 1, "failed": 1}
    bench.check_idle()
