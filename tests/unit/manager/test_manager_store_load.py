# SPDX-License-Identifier: Apache-2.0
"""The core's stores, loads and evictions. Races are the simulator's (tests/sim)."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, io_error
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.protocol import OpReport, OpReports, ResetCommand, unpacked

from .bench import Bench, keys_of, numbers_of, release, report


def test_prepare_store_gives_the_subset_that_fits_in_order() -> None:
    bench = Bench(cache=3, pool=0)
    plan = bench.core.prepare_store(keys_of(1, 2, 2, 3, 4, 5))
    assert plan.refused == keys_of(4, 5)
    assert plan.command is not None
    assert plan.command.batch.key_list() == keys_of(1, 2, 3)
    full = bench.core.prepare_store(keys_of(6))
    assert (full.command, full.refused) == (None, keys_of(6))
    again = bench.core.prepare_store(keys_of(1, 2))
    assert (again.command, again.refused) == (None, []), (
        "a present chunk is neither new nor refused"
    )


def test_a_store_in_flight_is_a_hit_and_its_failure_a_miss() -> None:
    bench = Bench()
    plan = bench.core.prepare_store(keys_of(1, 2))
    assert bench.source(1) is Source.CPU
    assert plan.command is not None
    bench.done(plan.command.op, (1, io_error(errno.EFAULT)))
    assert bench.hits([1, 2]) == [1]


def test_the_head_of_a_prefix_outlives_its_tail() -> None:
    bench = Bench(cache=4, pool=0)
    bench.store(1, 2, 3, 4)
    left = []
    for number in (5, 6, 7):
        bench.core.prepare_store(keys_of(number))
        left.append(bench.hits([1, 2, 3, 4]))
    assert left == [[1, 2, 3], [1, 2], [1]]
    assert bench.hits(range(5, 8)) == [5, 6, 7]


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
    bench.core.prepare_store(keys_of(5, 6))
    assert bench.hits([1, 2, 3, 4]) == [1, 2]


def test_pinned_entries_stay() -> None:
    bench = Bench(cache=2, pool=0)
    bench.store(1, 2)
    load = bench.load(1)
    plan = bench.core.prepare_store(keys_of(3, 4))
    assert plan.refused == keys_of(4)
    assert bench.hits([1, 2, 3, 4]) == [1, 3]
    bench.done(load.op)
    bench.core.prepare_store(keys_of(4))
    assert bench.hits([1, 3, 4]) == [3, 4]


def test_a_load_comes_from_the_cache_or_streams_or_lands() -> None:
    bench = Bench(cache=4, pool=8, land_cache_share=0.25)
    bench.store(1, 2, 3)
    bench.write_all()
    bench.store(4, 5, 6)
    bench.write_all()
    batch = bench.load(1, 2, 3).batch
    assert (batch.cache >= 0).tolist() == [True, True, False]
    assert (batch.places >= 0).tolist() == [False, True, True]


def test_a_failed_chunk_misses_at_the_first_ranks_report() -> None:
    bench = Bench(ranks=2, pool=0)
    bench.store(1, 2)
    load = bench.load(1, 2)
    bench.report(load.op, (0, CHECKSUM_MISMATCH))
    assert bench.hits([1, 2]) == [2]
    bench.core.report([OpReport(load.op)])
    assert bench.core.gauges()["slots_used", "cache"] == 1


def test_a_cancelled_load_dooms_nothing() -> None:
    bench = Bench(pool=0)
    bench.store(1)
    bench.done(bench.load(1).op, (0, CANCELLED))
    assert bench.hits([1]) == [1]


def test_slots_come_back_at_the_last_ranks_release() -> None:
    bench = Bench(cache=1, pool=0, ranks=2)
    bench.store(1)
    load = bench.load(1)
    bench.report(load.op, (0, DEADLINE), released=False)
    bench.core.report([OpReport(load.op)])
    assert bench.hits([1]) == []
    assert bench.core.prepare_store(keys_of(2)).refused == keys_of(2)
    bench.core.report([release(load.op, 0)])
    assert bench.stored(2) == [2]


def test_a_row_without_its_release_keeps_only_its_own_slot() -> None:
    bench = Bench(cache=3, pool=0, ranks=2)
    bench.store(1, 2, 3)
    load = bench.load(1, 2, 3)
    bench.report(load.op, (1, DEADLINE), released=False)
    bench.core.report([OpReport(load.op)])
    assert bench.core.gauges()["cache_slots_in_use"] == 1
    assert bench.core.gauges()["ops"] == 1
    assert bench.stored(4, 5, 6) == [4, 5]
    bench.core.report([release(load.op, 1)])
    assert bench.core.gauges()["ops"] == 1, "of the store"
    assert bench.stored(6) == [6]


def test_rows_are_decided_one_by_one() -> None:
    bench = Bench(cache=4, pool=8, ranks=2, writes_pending_share=1.0)
    command = bench.core.prepare_store(keys_of(1, 2, 3)).command
    assert command is not None
    first = report(command.op, rows=[0, 1])
    bench.core.report([first, first])
    assert numbers_of(bench.write().batch.keys) == [1, 2], "the third is being copied"
    last = OpReport(command.op, np.array([2], np.uint32))
    bench.core.report([last])
    assert bench.writes() == [], "one rank has not copied it"
    bench.core.report([last])
    assert numbers_of(bench.write().batch.keys) == [3]


def test_one_report_too_many_is_an_assertion() -> None:
    bench = Bench(pool=0, ranks=2)
    bench.store(1)
    load = bench.load(1)
    with pytest.raises(AssertionError, match="before its outcome"):
        bench.core.report([release(load.op, 0)])
    bench.core.report([OpReport(load.op), OpReport(load.op)])
    with pytest.raises(AssertionError, match="which is over"):
        bench.core.report([OpReport(load.op)])
    load = bench.load(1)
    bench.report(load.op, (0, DEADLINE), released=False, rank_count=2)
    with pytest.raises(AssertionError, match="twice"):
        bench.core.report([OpReport(load.op)])


def test_a_late_failure_spares_the_keys_new_entry() -> None:
    bench = Bench(pool=0)
    bench.store(1)
    load = bench.load(1)
    bench.core.reset()
    bench.store(1)
    bench.done(load.op, (0, CHECKSUM_MISMATCH))
    assert bench.hits([1]) == [1]


def _several(*ops: int) -> OpReports:
    return OpReports(
        np.array(ops, np.uint64).tobytes(), np.full(len(ops), 0.25, np.float32).tobytes()
    )


def _two_ranks(*, joined: bool) -> tuple[object, ...]:
    """What is known after two ranks have reported on two stores, of which one failed on the first
    rank, on two loads, and on a reset. joined: the ops that went well in one report."""
    bench = Bench(cache=4, pool=8, ranks=2)
    bench.store(1, 2, 3, 4)
    bench.write_all()
    plans = [bench.core.prepare_store(keys_of(number)) for number in (5, 6)]
    good, bad = (plan.command.op for plan in plans if plan.command is not None)
    loads = [bench.load(number).op for number in (1, 4)]
    bench.report(bad, (0, io_error(errno.EFAULT)))
    for ops in ([good, *loads], [good, bad, *loads]):
        report = _several(*ops)
        bench.core.report([report] if joined else unpacked([report]))
        seen = bench.core.gauges()["ops"]
        assert seen == (4 if ops[1] != bad else 0), "an op is over when every rank has reported"
    held = bench.hits(range(1, 7))
    assert 6 not in held
    assert 5 in held
    bench.core.reset()
    (reset,) = bench.core.take_commands()
    assert isinstance(reset, ResetCommand)
    for _ in range(2):
        bench.core.report([_several(reset.op)] if joined else [OpReport(reset.op, seconds=0.25)])
    return held, bench.core.gauges(), dict(bench.core.counters), bench.core.last_failures


def test_one_report_on_several_ops_is_a_report_on_each() -> None:
    assert _two_ranks(joined=True) == _two_ranks(joined=False)


def test_a_report_on_several_ops_names_none_that_is_over() -> None:
    bench = Bench()
    plans = [bench.core.prepare_store(keys_of(number)) for number in (1, 2)]
    ops = [plan.command.op for plan in plans if plan.command is not None]
    bench.core.report([_several(*ops)])
    assert bench.hits([1, 2]) == [1, 2]
    with pytest.raises(AssertionError, match=f"op {ops[0]}, which is over"):
        bench.core.report([_several(*ops)])


CHUNK_TOKENS = 256


def test_tokens_of_a_load_are_those_that_vllm_loads() -> None:
    """vLLM has 240 tokens in GPU memory, a part of the first chunk. The third chunk is gone."""
    bench = Bench(cache=8, tokens_per_chunk=CHUNK_TOKENS)
    bench.store(0, 1)
    bench.core.prepare_load(keys_of(0, 1, 2), tokens=range(240, 3 * CHUNK_TOKENS))
    counters = bench.core.counters
    assert counters["loaded_tokens", "cpu"] == 2 * CHUNK_TOKENS - 240
    assert counters["loaded_tokens", "pool"] == 0


def test_tokens_are_lost_from_the_first_failed_chunk_on() -> None:
    """vLLM computes on from there."""
    bench = Bench(cache=8, tokens_per_chunk=CHUNK_TOKENS)
    bench.store(0, 1, 2, 3)
    tokens = range(240, 4 * CHUNK_TOKENS)
    op = bench.core.prepare_load(keys_of(0, 1, 2, 3), tokens=tokens).op
    lost = []
    for row in (2, 3, 0, 1):
        bench.report(op, (row, CHECKSUM_MISMATCH), rows=[row])
        lost.append(bench.core.counters["recomputed_tokens", "load_failed"])
    assert lost == [2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS, len(tokens), len(tokens)]
