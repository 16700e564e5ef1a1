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

#: Share of the distance by which a sample moves the overhead.
SHARE = 0.5


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
    command = core.prepare_load(keys_of(0, 1), limit_s=0.5)
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
    assert core.gauges()["load_overhead_seconds"] == pytest.approx(0.6)
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


@pytest.mark.parametrize(("computed_s", "sample_s"), [(0.0, 0.6), (0.25, 0.35), (0.6, 0.0)])
def test_prefill_time_of_other_requests_does_not_count_against_a_load(
    computed_s: float, sample_s: float
) -> None:
    """Prefill time counts neither in a load's time nor in a probe's."""
    for probe in (False, True):
        bench = HoldsBench()
        core, bench.prompts_s = bench.core, 100.0
        core.admission.read_rates = [1e15]
        bench.in_the_pool(0)
        bench.prompts_s = 200.0
        if probe:
            core.reload.probe(keys_of(0))
            op = bench.fetch().op
        else:
            op = core.prepare_load(keys_of(0), 10.0).op
        bench.prompts_s += computed_s
        bench.now_s += 0.6
        core.report([OpReport(op)])
        assert core.gauges()["load_overhead_seconds"] == pytest.approx(SHARE * sample_s)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.0])
def test_prompts_computed_after_a_load_has_ended_do_not_make_it_look_fast(after_s: float) -> None:
    """Its report waits for the step that computes them. The load takes 1 s, and computing 0.4 s."""
    bench = HoldsBench(tokens_per_chunk=100)
    core, bench.prompts_s = bench.core, 100.0
    bench.in_the_pool(*range(4))
    core.admission.read_rates, core.admission.prefill_rate = [1e15], 1000.0
    load = core.prepare_load(keys_of(*range(4)), token_s=1e-3)
    bench.now_s += 1.0
    bench.now_s += after_s
    bench.prompts_s += after_s
    bench.report(load.op, seconds=1.0)
    assert core.gauges()["load_overhead_seconds"] == pytest.approx(1.0)
    assert not core.admission.reading


def test_a_load_takes_until_the_step_in_which_its_request_can_run() -> None:
    """The copy takes 20 ms. The step before it and the one that reports it take 30 ms each, so that
    the load takes 25 ms longer than computing."""
    bench = HoldsBench(tokens_per_chunk=100, land_cache_share=0.0)
    core = bench.core
    bench.in_the_pool(*range(4))
    find, admission = core.find(keys_of(*range(4))), core.admission
    admission.read_rates, admission.prefill_rate = [1e15], 400 / 0.055

    def is_loaded() -> bool:
        return admission.decide(find.read_bytes, find.queued_bytes, find.tokens).load

    loads = 0
    while is_loaded() and loads < 9:
        load = core.prepare_load(keys_of(*range(4)))
        bench.now_s += 0.03 + 0.02 + 0.03
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
    assert (gauges["cache_slots_used"], gauges["pool_slots_used"]) == (0, 1)


def test_a_cache_slot_with_the_wrong_content_dooms_a_chunk_that_is_nowhere_else() -> None:
    bench = Bench(cache=4, pool=0)
    bench.store(1)
    bench.done(bench.load(1).op, (0, STALE))
    assert bench.source(1) is None


@pytest.mark.parametrize(
    ("outcome", "seconds", "overhead_s"),
    [
        (io_error(errno.EIO), 0.7, 0.0),  # at once or not, it is no measurement of reading
        (CANCELLED, 0.7, 0.0),  # by a reset, not by its limit
        (DEADLINE, 5.0, 5.0),
        (CHECKSUM_MISMATCH, 0.7, SHARE * 0.7),  # it was read to its end
    ],
)
def test_a_failed_load_changes_the_overhead_by_its_outcome(
    outcome: Outcome, seconds: float, overhead_s: float
) -> None:
    bench = HoldsBench()
    bench.core.admission.read_rates = [1e15]
    bench.in_the_pool(0)
    command = bench.core.prepare_load(keys_of(0), limit_s=10.0)
    bench.now_s += seconds
    bench.report(command.op, (0, outcome))
    assert bench.core.gauges()["load_overhead_seconds"] == pytest.approx(overhead_s)


def test_a_probe_that_met_its_deadline_teaches_that_the_pool_is_slow() -> None:
    bench = HoldsBench()
    bench.core.admission.read_rates = [1e15]
    bench.in_the_pool(0)
    bench.core.reload.probe(keys_of(0))
    fetch = bench.fetch()
    bench.now_s += 5.0
    bench.report(fetch.op, (0, DEADLINE), released=False)
    assert bench.core.gauges()["load_overhead_seconds"] == pytest.approx(5.0)


def test_a_probe_of_several_chunks_is_timed_as_one_read_of_their_bytes() -> None:
    """They are read in turn: the last takes three times as long as the first."""
    bench = HoldsBench()
    bench.in_the_pool(0, 1, 2, 3)
    bench.core.reload.probe(keys_of(0, 1, 2))
    fetch = bench.fetch()
    slot_bytes = bench.core.capacity.slot_bytes
    bench.core.admission.read_rates = [slot_bytes / 0.5]
    bench.now_s += 0.01
    for row in range(3):
        assert bench.core.gauges()["load_overhead_seconds"] == 0
        bench.now_s += 0.5
        bench.report(fetch.op, rows=[row])
    overhead_s = SHARE * 0.01
    assert bench.core.gauges()["load_overhead_seconds"] == pytest.approx(overhead_s)
    bench.core.reload.probe(keys_of(3))
    fetch = bench.fetch()
    bench.now_s += 0.51
    bench.report(fetch.op)
    overhead_s += SHARE * (0.01 - overhead_s)
    assert bench.core.gauges()["load_overhead_seconds"] == pytest.approx(overhead_s)
