# SPDX-License-Identifier: Apache-2.0
"""When a load is overdue, and how its time changes the estimates."""

from __future__ import annotations

import errno

import pytest

from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.protocol import CancelCommand, OpReport, target_of

from .bench import Bench, keys_of
from .test_holds import HoldsBench

#: How slow a load or a probe counts of which nothing came, and for which no time was predicted.
HANGS = 16.0


def slowness(bench: Bench) -> float:
    return bench.core.gauges()["load_slowness"]


class Watch:
    """A core with loads that have limits, and a model that computes prompts."""

    def __init__(self, chunks: int = 4) -> None:
        self.bench = HoldsBench()
        self.core = self.bench.core
        self.bench.in_the_pool(*range(chunks))
        self.core.take_commands()

    def load(self, number: int, limit_s: float | None) -> int:
        return self.core.prepare_load(keys_of(number), limit_s).op

    def cut(self, now_s: float, prompts_s: float = 0.0) -> list[int]:
        """The loads that a step cuts off at this time."""
        self.bench.now_s, self.bench.prompts_s = now_s, prompts_s
        self.core.turn()
        commands = self.core.take_commands()
        return [command.target_op for command in commands if isinstance(command, CancelCommand)]


def test_the_time_in_which_prompts_are_computed_does_not_count() -> None:
    """This includes the step that brings the load: nothing is read before it ends."""
    watch = Watch()
    op = watch.load(0, 1.0)
    assert watch.cut(50.0, prompts_s=50.0) == []
    assert watch.cut(51.0, prompts_s=50.0) == []
    assert watch.cut(51.1, prompts_s=50.0) == [op]
    assert watch.cut(99.0, prompts_s=50.0) == [], "named once"


def test_each_load_has_its_own_beginning_and_limit() -> None:
    watch = Watch()
    ops = [watch.load(number, limit_s) for number, limit_s in enumerate((3.0, 1.0, 2.0))]
    assert watch.cut(0.9) == []
    late = watch.load(3, 1.0)
    assert watch.cut(1.5) == [ops[1]]
    assert watch.cut(1.95) == [late]
    assert watch.cut(2.5) == [ops[2]]
    assert watch.cut(3.5) == [ops[0]]


def test_a_load_without_a_limit_is_never_cut_off() -> None:
    watch = Watch()
    watch.load(0, None)
    assert watch.cut(1e6) == []


def test_a_finished_load_is_not_overdue() -> None:
    watch = Watch()
    op = watch.load(0, 1.0)
    watch.bench.done(op)
    assert watch.cut(99.0) == []


def test_a_load_that_takes_longer_than_its_limit_is_cut_off_and_teaches() -> None:
    bench = HoldsBench()
    core = bench.core
    core.admission.prefill_rate = 100.0
    bench.in_the_pool(0, 1)
    core.take_commands()
    command = core.prepare_load(keys_of(0, 1), limit_s=0.5, predicted_s=0.1)
    core.turn()
    bench.now_s = 0.4
    core.turn()
    assert core.take_commands() == []
    bench.now_s = 0.6
    core.turn()
    (cancel,) = core.take_commands()
    assert isinstance(cancel, CancelCommand)
    assert (cancel.target_op, cancel.indexes) == (command.op, None), "all of it"
    assert core.counters["loads_cut"] == 1
    bench.report(command.op, (0, CANCELLED), (1, CANCELLED))
    assert slowness(bench) == pytest.approx(6), "at once, because it is at least so slow"
    assert bench.hits([0, 1]) == [0, 1]
    assert bench.source(0) is Source.POOL


def test_queued_reads_are_counted_in_bytes_per_lane() -> None:
    bench = HoldsBench(targets=2, tokens_per_chunk=10)
    bench.in_the_pool(0, 1, 2)
    slot_bytes = bench.core.capacity.slot_bytes
    lanes = [sum(target_of(bench.slots(n)[1]) == lane for n in (0, 1)) for lane in (0, 1)]
    in_both = next(n for n in range(100, 200) if bench.source(n) is Source.CPU)
    found = bench.core.find(keys_of(in_both, 0, 1))
    assert (found.leading_cpu, found.tokens) == (1, 20)
    assert found.read_bytes == [count * slot_bytes for count in lanes]
    assert found.queued_bytes == [0, 0]
    command = bench.load(0, 1)
    assert bench.core.find(keys_of(2)).queued_bytes == found.read_bytes
    bench.done(command.op)
    assert bench.core.find(keys_of(2)).queued_bytes == [0, 0]


@pytest.mark.parametrize(
    ("computed_s", "expected"), [(0.0, (1 + 6) / 2), (0.25, (1 + 3.5) / 2), (0.55, (1 + 0.5) / 2)]
)
def test_prefill_time_of_other_requests_does_not_count_against_a_load(
    computed_s: float, expected: float
) -> None:
    bench = HoldsBench()
    bench.prompts_s = 100.0
    bench.in_the_pool(0)
    bench.prompts_s = 200.0
    op = bench.core.prepare_load(keys_of(0), 0.3, predicted_s=0.1).op
    bench.prompts_s += computed_s
    bench.now_s += 0.6
    bench.core.report([OpReport(op)])
    assert slowness(bench) == pytest.approx(expected)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.0])
def test_prompts_computed_after_a_load_has_ended_do_not_make_it_look_fast(after_s: float) -> None:
    """Its report waits for the step that computes them. The load takes 1 s, and computing 0.4 s."""
    bench = HoldsBench(tokens_per_chunk=100)
    core, bench.prompts_s = bench.core, 100.0
    bench.in_the_pool(*range(4))
    load = core.prepare_load(keys_of(*range(4)), 0.8, predicted_s=0.2)
    bench.now_s += 1.0
    bench.now_s += after_s
    bench.prompts_s += after_s
    bench.report(load.op, seconds=1.0)
    assert slowness(bench) == pytest.approx((1 + 5) / 2)
    assert not core.admission.reading


def test_a_load_takes_until_the_step_in_which_its_request_can_run() -> None:
    """The copy takes 20 ms. The step before it and the one that reports it take 30 ms each, so that
    the load takes 20 ms longer than computing."""
    bench = HoldsBench(tokens_per_chunk=100, land_cache_share=0.0)
    core = bench.core
    bench.in_the_pool(*range(4))
    find, admission = core.find(keys_of(*range(4))), core.admission
    admission.read_rates, admission.prefill_rate = [find.read_bytes[0] / 0.02], 400 / 0.13

    loads = 0
    while loads < 9:
        decision = admission.decide(find.read_bytes, find.queued_bytes, find.tokens)
        if not decision.load:
            break
        assert decision.predicted_s == pytest.approx(0.02)
        load = core.prepare_load(
            keys_of(*range(4)), decision.limit_s, predicted_s=decision.predicted_s
        )
        bench.now_s += 0.03 + 0.02 + 0.1
        bench.report(load.op, seconds=0.02)
        loads += 1
    assert loads == 2, "the first one moved the estimate half of the way"


@pytest.mark.parametrize("first", [0, 1])
def test_cutting_off_a_load_does_not_doom_a_chunk_that_another_load_waits_for(first: int) -> None:
    """The order of the two reports does not matter: neither load read the pool's copy."""
    bench = Bench(cache=8, pool=16, land_cache_share=1.0)
    bench.store(1, 2, 3)
    bench.write_all()
    bench.store(4, 5, 6, 7, 8, 9, 10, 11)
    bench.write_all()
    assert bench.source(1) is Source.POOL
    lands, waits = bench.load(1), bench.load(1)
    assert (lands.batch.places[0] >= 0, waits.batch.places[0]) == (True, -1)
    reports = [(lands.op, CANCELLED), (waits.op, STALE)]
    for op, outcome in (reports[first], reports[1 - first]):
        bench.done(op, (0, outcome))
    assert bench.source(1) is Source.POOL
    assert bench.core.gauges()["cache_slots_in_use"] == 0


def test_a_cache_slot_with_the_wrong_content_says_nothing_of_the_pools_copy() -> None:
    bench = Bench(cache=4, pool=4)
    bench.store(1)
    bench.write_all()
    bench.done(bench.load(1).op, (0, STALE))
    assert bench.source(1) is Source.POOL
    gauges = bench.core.gauges()
    assert (gauges["slots_used", "cache"], gauges["slots_used", "pool"]) == (0, 1)


def test_a_cache_slot_with_the_wrong_content_dooms_a_chunk_that_is_nowhere_else() -> None:
    bench = Bench(cache=4, pool=0)
    bench.store(1)
    bench.done(bench.load(1).op, (0, STALE))
    assert bench.source(1) is None


@pytest.mark.parametrize(
    ("outcome", "seconds", "expected"),
    [
        (io_error(errno.EIO), 0.7, 1.0),  # at once or not, it is no measurement of reading
        (CANCELLED, 0.7, 1.0),  # by a reset, not by its limit
        (DEADLINE, 5.0, 10.0),  # at least so slow
        (CHECKSUM_MISMATCH, 0.3, (1 + 0.6) / 2),  # it was read to its end
    ],
)
def test_a_failed_load_changes_the_slowness_by_its_outcome(
    outcome: Outcome, seconds: float, expected: float
) -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    command = bench.core.prepare_load(keys_of(0), limit_s=10.0, predicted_s=0.5)
    bench.now_s += seconds
    bench.report(command.op, (0, outcome))
    assert slowness(bench) == pytest.approx(expected)


def test_a_probe_that_met_its_deadline_teaches_that_the_pool_is_slow() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.core.reload.probe(keys_of(0))
    fetch = bench.fetch()
    bench.now_s += 5.0
    bench.report(fetch.op, (0, DEADLINE), released=False)
    assert slowness(bench) == pytest.approx((1 + HANGS) / 2)


def test_a_probe_counts_once_when_all_of_its_chunks_have_come() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0, 1, 2, 3)
    bench.core.admission.slowness = 4.5
    bench.core.reload.probe(keys_of(0, 1, 2))
    fetch = bench.fetch()
    for row in range(3):
        assert slowness(bench) == 4.5
        bench.report(fetch.op, rows=[row])
    assert slowness(bench) == pytest.approx(2.5)
    bench.core.reload.probe(keys_of(3))
    fetch = bench.fetch()
    bench.report(fetch.op, (0, io_error(errno.EIO)))
    assert slowness(bench) == pytest.approx(2.5), "it is no measurement of reading"
