# SPDX-License-Identifier: Apache-2.0
"""When a load's time begins, and when it is over."""

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
from vllm_nvmeof_offload.manager.load_or_recompute import LoadLimits
from vllm_nvmeof_offload.protocol import CancelCommand, OpReport

from .bench import Bench, keys_of
from .test_shelf import ShelfBench


class Watch:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.limits = LoadLimits(lambda: self.now_s)

    def at(self, now_s: float) -> LoadLimits:
        self.now_s = now_s
        return self.limits


def test_time_runs_from_the_end_of_the_step_that_brings_the_load() -> None:
    watch = Watch()
    watch.limits.planned(7, 1.0)
    watch.at(1.0).scheduled()
    assert watch.at(50.0).take_overdue() == [], "the step is still at work"
    watch.at(50.0).ended()
    assert watch.at(51.0).take_overdue() == []
    assert watch.at(51.1).take_overdue() == [7]
    assert watch.at(99.0).take_overdue() == [], "named once"


def test_with_a_step_scheduled_ahead_each_load_waits_for_its_own() -> None:
    watch = Watch()
    watch.limits.planned(1, 1.0)
    watch.at(0.0).scheduled()
    watch.limits.planned(2, 1.0)
    watch.at(0.1).scheduled()  # ahead of the first one's output
    watch.at(2.0).ended()
    assert watch.at(3.5).take_overdue() == [1]
    watch.limits.scheduled()
    watch.at(4.0).ended()
    assert watch.at(4.5).take_overdue() == []
    assert watch.at(5.1).take_overdue() == [2]


def test_each_load_has_its_own_limit() -> None:
    watch = Watch()
    for op, limit_s in ((1, 3.0), (2, 1.0), (3, 2.0)):
        watch.limits.planned(op, limit_s)
    watch.limits.scheduled()
    watch.limits.ended()
    assert watch.at(2.5).take_overdue() == [2, 3]
    assert watch.at(3.5).take_overdue() == [1]


def test_a_load_that_is_over_is_not_overdue_wherever_it_stood() -> None:
    watch = Watch()
    watch.limits.planned(1, 1.0)
    watch.limits.over(1)
    watch.limits.planned(2, 1.0)
    watch.limits.scheduled()
    watch.limits.over(2)
    watch.limits.planned(3, 1.0)
    watch.limits.scheduled()
    watch.limits.ended()
    watch.limits.ended()
    watch.limits.over(3)
    watch.limits.over(3)
    assert watch.at(99.0).take_overdue() == []


def test_outputs_without_a_step_change_nothing() -> None:
    watch = Watch()
    watch.limits.ended()
    watch.limits.planned(1, 1.0)
    watch.limits.ended()
    watch.limits.scheduled()
    assert watch.at(99.0).take_overdue() == []


def test_missed_outputs_are_forgotten_and_the_books_stay_small() -> None:
    watch = Watch()
    watch.limits.planned(1, 1.0)
    for _ in range(1000):
        watch.limits.scheduled()
    watch.limits.planned(2, 1.0)
    watch.limits.scheduled()
    for _ in range(8):
        watch.limits.ended()
    assert watch.at(5.0).take_overdue() == [2]
    for _ in range(1000):
        watch.limits.ended()
    assert watch.at(99.0).take_overdue() == [], "the first one has no limit any more"


def test_a_load_that_takes_longer_than_its_limit_is_cut_off_and_teaches() -> None:
    bench = ShelfBench()
    core = bench.core
    core.admission.prefill_rate = 100.0
    bench.in_the_pool(0, 1)
    core.take_commands()
    command = core.prepare_load(keys_of(0, 1), 0.5)
    core.turn()
    bench.now_s = 10.0
    core.step_ended()
    bench.now_s = 10.4
    core.turn()
    assert core.take_commands() == []
    bench.now_s = 10.6
    core.turn()
    assert core.take_commands() == [CancelCommand(command.op)]
    assert core.counters["loads_cut"] == 1
    core.report([OpReport(command.op, ((0, CANCELLED), (1, CANCELLED)), seconds=0.6)])
    assert core.learned()["load_overhead_seconds"] == pytest.approx(0.6)
    assert bench.hits([0, 1]) == [0, 1]
    assert core.lookup(b"0") is Source.POOL


@pytest.mark.parametrize(("computed_s", "overhead_s"), [(0.0, 0.6), (0.25, 0.35), (9.0, 0.0)])
def test_the_time_in_which_others_were_computed_is_not_held_against_a_load(
    computed_s: float, overhead_s: float
) -> None:
    """Neither a load's time nor a probe's."""
    for probe in (False, True):
        bench = ShelfBench()
        core, bench.prompts_s = bench.core, 100.0
        core.admission.read_rates = [1e15]
        bench.in_the_pool(0)
        bench.prompts_s = 200.0
        if probe:
            core.reload.probe(keys_of(0))
            op = bench.fetches()[0].op
        else:
            op = core.prepare_load(keys_of(0), 10.0).op
        bench.prompts_s += computed_s
        core.report([OpReport(op, seconds=0.6)])
        assert core.learned()["load_overhead_seconds"] == pytest.approx(overhead_s)


@pytest.mark.parametrize("first", [0, 1])
def test_cutting_a_load_does_not_doom_what_another_waits_for(first: int) -> None:
    """In whichever order the two reports come: the pool's copy was read by neither."""
    bench = Bench(cache=8, pool=16, land_cache_share=1.0)
    bench.store(1, 2, 3)
    bench.write_all()
    bench.store(4, 5, 6, 7, 8, 9, 10, 11)
    bench.write_all()
    assert bench.core.lookup(b"1") is Source.POOL
    lands, waits = (bench.core.prepare_load(keys_of(1)) for _ in range(2))
    assert lands.chunks[0].pool_slot is not None
    assert waits.chunks[0].pool_slot is None
    reports = [(lands.op, CANCELLED), (waits.op, STALE)]
    for op, outcome in (reports[first], reports[1 - first]):
        bench.done(op, (0, outcome))
    assert bench.core.lookup(b"1") is Source.POOL
    assert bench.core.gauges()["cache_slots_in_use"] == 0


def test_a_cache_slot_that_is_not_what_it_should_be_dooms_its_chunk() -> None:
    bench = Bench(cache=4, pool=4)
    bench.store(1)
    bench.write_all()
    bench.done(bench.core.prepare_load(keys_of(1)).op, (0, STALE))
    assert bench.core.lookup(b"1") is None


@pytest.mark.parametrize(
    ("outcome", "seconds", "overhead_s"),
    [
        (io_error(errno.EIO), 0.7, 0.0),  # at once or not: it says nothing of reading
        (CANCELLED, 0.7, 0.0),  # by a reset, not by its limit
        (DEADLINE, 5.0, 5.0),
        (CHECKSUM_MISMATCH, 0.7, 0.7),  # it was read to its end
    ],
)
def test_what_a_failed_load_teaches(outcome: Outcome, seconds: float, overhead_s: float) -> None:
    bench = ShelfBench()
    bench.core.admission.read_rates = [1e15]
    bench.in_the_pool(0)
    command = bench.core.prepare_load(keys_of(0), 10.0)
    bench.core.report([OpReport(command.op, ((0, outcome),), seconds=seconds)])
    assert bench.core.learned()["load_overhead_seconds"] == pytest.approx(overhead_s)


def test_a_probe_that_met_its_deadline_teaches_that_the_pool_is_slow() -> None:
    bench = ShelfBench()
    bench.core.admission.read_rates = [1e15]
    bench.in_the_pool(0)
    bench.core.reload.probe(keys_of(0))
    (fetch,) = bench.fetches()
    bench.core.report([OpReport(fetch.op, ((0, DEADLINE),), released=False, seconds=5.0)])
    assert bench.core.learned()["load_overhead_seconds"] == pytest.approx(5.0)


def test_a_probe_is_not_charged_with_those_that_were_read_before_it() -> None:
    """Three read one after the other: the last one takes three times as long as the first."""
    bench = ShelfBench()
    bench.in_the_pool(0, 1, 2, 3)
    bench.core.reload.probe(keys_of(0, 1, 2))
    fetches = bench.fetches()
    slot_bytes = bench.core.capacity.slot_bytes
    bench.core.admission.read_rates = [slot_bytes / 0.5]
    for count, fetch in enumerate(fetches, 1):
        bench.core.report([OpReport(fetch.op, seconds=0.5 * count + 0.01)])
    assert bench.core.learned()["load_overhead_seconds"] == pytest.approx(0.01)
    bench.core.reload.probe(keys_of(3))
    (fetch,) = bench.fetches()
    bench.core.report([OpReport(fetch.op, seconds=0.51)])
    assert bench.core.learned()["load_overhead_seconds"] == pytest.approx(0.01), (
        "none was before it"
    )
