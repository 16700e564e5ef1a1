# SPDX-License-Identifier: Apache-2.0
"""Fetches that no request wants any more, in the real core."""

from __future__ import annotations

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.protocol import CancelCommand, FetchCommand

from .bench import keys_of
from .test_holds import HoldsBench


def test_an_unsent_fetch_is_withdrawn() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    free = bench.core.gauges()["cache_slots_used"]
    bench.queued("a", 0)
    bench.core.turn()
    bench.core.reload.left("a")
    assert bench.core.take_commands() == []
    assert (bench.ended(), bench.source(0)) == ({"cancelled": 1}, Source.POOL)
    assert bench.core.gauges()["cache_slots_used"] == free - 1, "its victim is gone"
    bench.check_idle()
    bench.queued("b", 0)
    (fetch,) = bench.fetches()
    bench.done(fetch.op)
    assert bench.source(0) is Source.CPU


def test_a_cancelled_fetch_is_in_the_pool_at_once_and_frees_its_slot_at_release() -> None:
    bench = HoldsBench(cache=4, reload_cache_share=0.25)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    (fetch,) = bench.fetches()
    bench.core.reload.left("a")
    assert bench.core.take_commands() == [CancelCommand(fetch.op)]
    assert (bench.source(0), bench.ended()) == (Source.POOL, {"cancelled": 1})
    command = bench.core.prepare_load(keys_of(0))
    (chunk,) = command.chunks
    assert chunk.pool_slot == fetch.pool_slot
    assert chunk.cache_slot != fetch.cache_slot
    stored = bench.core.prepare_store(keys_of(300, 301, 302, 303)).command
    assert stored is not None
    assert fetch.cache_slot not in [c.cache_slot for c in stored.chunks]
    bench.done(command.op)
    bench.done(fetch.op)  # the read had already ended
    assert bench.slots(0) == (chunk.cache_slot, fetch.pool_slot), "its end changed nothing"
    again = bench.core.prepare_store(keys_of(304)).command
    assert again is not None
    assert again.chunks[0].cache_slot == fetch.cache_slot
    bench.done(stored.op)
    bench.done(again.op)
    bench.write_all()
    bench.check_idle()


def test_a_fetch_that_a_load_waits_for_is_not_cancelled() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    (fetch,) = bench.fetches()
    command = bench.core.prepare_load(keys_of(0))
    assert command.chunks[0].pool_slot is None
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
    first, second = bench.fetches()
    loads = bench.load([0], ok=False)
    bench.core.reload.left("waits")
    assert bench.core.take_commands() == [CancelCommand(second.op)]
    assert bench.ended() == {"used": 1, "cancelled": 1}
    for op in (second.op, first.op, loads):
        bench.done(op)
    bench.check_idle()


def test_a_second_fetch_ignores_the_reports_of_a_cancelled_first_one() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    (first,) = bench.fetches()
    bench.core.reload.left("a")
    bench.preempted("a", 0)
    bench.core.turn()
    cancel, second = bench.core.take_commands()
    assert cancel == CancelCommand(first.op)
    assert isinstance(second, FetchCommand)
    assert second.cache_slot != first.cache_slot
    bench.done(first.op, (0, CANCELLED))
    assert (bench.held(), bench.slots(0)[0]) == ([0], second.cache_slot)
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
    (first,) = bench.fetches()
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
