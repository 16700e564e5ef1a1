# SPDX-License-Identifier: Apache-2.0
"""The core's stores, loads and evictions. Races are the simulator's (tests/sim)."""

from __future__ import annotations

import errno

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, io_error
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.protocol import (
    OpReport,
    ReleaseReport,
)

from .bench import Bench, keys_of


def test_prepare_store_gives_the_subset_that_fits_in_order() -> None:
    bench = Bench(cache=3, pool=0)
    plan = bench.core.prepare_store(keys_of(1, 2, 2, 3, 4, 5))
    assert plan.stored == tuple(keys_of(1, 2, 3))
    assert plan.refused == 2
    assert plan.command is not None
    assert [chunk.identity.key for chunk in plan.command.chunks] == keys_of(1, 2, 3)
    full = bench.core.prepare_store(keys_of(6))
    assert (full.command, full.stored, full.refused) == (None, (), 1)
    again = bench.core.prepare_store(keys_of(1, 2))
    assert (again.command, again.refused) == (None, 0), "a present chunk is neither new nor refused"


def test_a_store_in_flight_is_a_hit_and_its_failure_a_miss() -> None:
    bench = Bench()
    plan = bench.core.prepare_store(keys_of(1, 2))
    assert bench.core.lookup(b"1") is Source.CPU
    assert plan.command is not None
    bench.done(plan.command.op, (1, io_error(errno.EFAULT)))
    assert bench.hits([1, 2]) == [1]


def test_the_head_of_a_prefix_outlives_its_tail() -> None:
    bench = Bench(cache=4, pool=0)
    bench.store(1, 2, 3, 4)
    evicted: list[bytes] = []
    for number in (5, 6, 7):
        plan = bench.core.prepare_store(keys_of(number))
        evicted += plan.evicted
    assert evicted == keys_of(4, 3, 2)
    assert bench.hits(range(1, 8)) == [1, 5, 6, 7]


def test_writing_a_prefix_does_not_reverse_its_eviction_order() -> None:
    bench = Bench(cache=4, pool=4)
    bench.store(1, 2, 3, 4)
    bench.write_all()
    plan = bench.core.prepare_store(keys_of(5, 6))
    sources = [bench.core.lookup(key) for key in keys_of(1, 2, 3, 4)]
    assert sources == [Source.CPU, Source.CPU, Source.POOL, Source.POOL]
    assert plan.command is not None
    bench.done(plan.command.op)
    bench.write_all()
    assert bench.hits([1, 2, 3, 4]) == [1, 2], "the pool gives up the tail first, too"


def test_a_touched_prefix_outlives_an_older_one() -> None:
    bench = Bench(cache=4, pool=0)
    bench.store(1, 2)
    bench.store(3, 4)
    bench.core.ended(keys_of(1, 2))
    assert bench.core.prepare_store(keys_of(5, 6)).evicted == tuple(keys_of(4, 3))


def test_pinned_entries_stay() -> None:
    bench = Bench(cache=2, pool=0)
    bench.store(1, 2)
    load = bench.core.prepare_load(keys_of(1))
    plan = bench.core.prepare_store(keys_of(3, 4))
    assert plan.evicted == tuple(keys_of(2))
    assert (plan.stored, plan.refused) == (tuple(keys_of(3)), 1)
    bench.done(load.op)
    assert bench.core.prepare_store(keys_of(4)).evicted == tuple(keys_of(1))


def test_a_key_evicted_between_stores_is_still_reported() -> None:
    bench = Bench(cache=2, pool=8, land_cache_share=1.0)
    bench.store(1, 2)
    bench.write_all()
    bench.store(3, 4)  # 1 and 2 are only in the pool now
    for command in bench.writes():
        bench.done(command.op, (0, DEADLINE))
    bench.core.prepare_load(keys_of(1))  # lands, and evicts chunks that are in no other tier
    evicted = set(keys_of(3, 4)) - {k for k in keys_of(3, 4) if bench.core.lookup(k)}
    assert len(evicted) == 1
    assert evicted <= set(bench.core.prepare_store(keys_of(9)).evicted)


def test_a_load_comes_from_the_cache_or_streams_or_lands() -> None:
    bench = Bench(cache=4, pool=8, land_cache_share=0.25)
    bench.store(1, 2, 3)
    bench.write_all()
    bench.store(4, 5, 6)
    chunks = bench.core.prepare_load(keys_of(1, 2, 3)).chunks
    places = [(c.cache_slot is not None, c.pool_slot is not None) for c in chunks]
    assert places == [(True, False), (True, True), (False, True)]


def test_a_failed_chunk_misses_at_the_first_ranks_report() -> None:
    bench = Bench(ranks=2, pool=0)
    bench.store(1, 2)
    load = bench.core.prepare_load(keys_of(1, 2))
    bench.core.report([OpReport(load.op, ((0, CHECKSUM_MISMATCH),))])
    assert bench.hits([1, 2]) == [2]
    bench.core.report([OpReport(load.op)])
    assert bench.core.gauges()["cache_slots_used"] == 1


def test_a_cancelled_load_dooms_nothing() -> None:
    bench = Bench(pool=0)
    bench.store(1)
    bench.done(bench.core.prepare_load(keys_of(1)).op, (0, CANCELLED))
    assert bench.hits([1]) == [1]


def test_slots_come_back_at_the_last_ranks_release() -> None:
    bench = Bench(cache=1, pool=0, ranks=2)
    bench.store(1)
    load = bench.core.prepare_load(keys_of(1))
    bench.core.report([OpReport(load.op, ((0, DEADLINE),), released=False), OpReport(load.op)])
    assert bench.hits([1]) == []
    assert bench.core.prepare_store(keys_of(2)).refused == 1
    bench.core.report([ReleaseReport(load.op)])
    assert bench.core.prepare_store(keys_of(2)).stored == (b"2",)


def test_a_late_failure_spares_the_keys_new_entry() -> None:
    bench = Bench(pool=0)
    bench.store(1)
    load = bench.core.prepare_load(keys_of(1))
    bench.core.reset()
    bench.store(1)
    bench.done(load.op, (0, CHECKSUM_MISMATCH))
    assert bench.hits([1]) == [1]
