# SPDX-License-Identifier: Apache-2.0
"""Ratios and goals of `bench stream`, on made-up samples."""

from __future__ import annotations

import pytest
from vllm_nvmeof_bench.reports.stream import (
    admission_ratio,
    goals,
    load_ratio,
    places,
    round_ratios,
)
from vllm_nvmeof_bench.results import Goal, select, spread_of

from tests.unit.bench.stream_made_up import CONDITIONS, everything, load, times


def row(rows: list[Goal], start: str) -> Goal:
    (found,) = (one for one in rows if one.name.startswith(start))
    return found


def test_every_goal_is_listed_and_reached_by_good_samples() -> None:
    rows = goals(everything(), CONDITIONS)
    assert len(rows) == 5
    assert all(one.reached is True for one in rows), rows


def test_a_load_is_compared_with_the_larger_of_its_own_round() -> None:
    samples = [
        *times("load", "memory", "ours", [[1.0], [3.0], [9.0]], 4),
        *times("load", "memory", "read", [[0.5], [2.0], [9.0]], 4),
        *times("load", "memory", "copy", [[0.8], [1.0], [10.0]], 4),
    ]
    assert round_ratios(samples, "ours", ("read", "copy"), "memory", 4) == pytest.approx(
        [1.25, 1.5, 0.9]
    )
    ratio = load_ratio(samples, "memory", 4)
    assert ratio is not None
    assert (ratio.value, ratio.n) == (pytest.approx(1.25), 3)


def test_a_round_that_lacks_an_arm_does_not_count() -> None:
    samples = load(1, [1.0, 1.0])
    gone = select(samples, part="load", arm="copy")[0]
    samples.remove(gone)
    assert len(round_ratios(samples, "ours", ("read", "copy"), "memory", 1)) == 1


def test_the_worst_size_decides_and_is_named() -> None:
    samples = [*load(0.5, [0.5] * 3), *load(8, [9.6, 8.0, 9.6])]
    found = row(goals(samples, {"settings": {"parts": ["load"]}}), "load / larger")
    assert (found.measured, found.where) == (pytest.approx(1.2), "8× the CPU tier")
    assert found.reached is False


def test_copies_as_slow_as_the_disk_have_a_separate_row() -> None:
    samples = [*load(2, [2.0] * 3), *load(2, [3.0] * 3, "paced")]
    rows = goals(samples, {"settings": {"parts": ["load"]}})
    assert [one.reached for one in rows] == [True, False]


@pytest.mark.parametrize(
    ("at", "auto", "better", "value"),
    [(10, 0.55, "recomputing", 1.1), (200, 0.3, "loading", 1.5)],
)
def test_admission_is_measured_against_the_better_of_both(
    at: float, auto: float, better: str, value: float
) -> None:
    samples = [
        *times("admission", "ttft", "never", [[0.5, 0.5]]),
        *times("admission", "ttft", "always", [[1.0]], 10),
        *times("admission", "ttft", "always", [[0.2]], 200),
        *times("admission", "ttft", "auto", [[auto]], at),
    ]
    ratio = admission_ratio(samples, at)
    assert ratio is not None
    assert ratio.value == pytest.approx(value)
    assert better in ratio.where


def test_each_side_of_the_crossover_is_judged_by_itself() -> None:
    samples = [one for one in everything() if (one.arm, one.at) != ("auto", 10)]
    found = row(goals(samples, {}), "admission")
    assert found.measured is None
    assert found.reached is None


def test_unrequested_parts_have_no_rows() -> None:
    rows = goals([], {"settings": {"parts": ["resume"]}})
    assert [(one.name, one.reached) for one in rows] == [
        ("resume after preemption / recomputed", None)
    ]


def test_a_different_answer_misses_a_goal() -> None:
    part = {"answers": {"compared": 10, "different": 1}}
    found = row(goals([], {"parts": {"resume": part, "prefetch": part}}), "answers")
    assert (found.measured, found.n, found.reached) == (2, 20, False)


def test_throttles_and_sizes_ascend_and_none_is_last() -> None:
    assert places(everything(), "admission") == [10, 200, 0]
    assert places(everything(), "load", "paced") == [0.5, 1, 8]


def test_few_values_show_their_extremes_many_their_percentiles() -> None:
    few, many = spread_of([3.0, 1.0, 2.0]), spread_of([float(i) for i in range(1, 101)])
    assert few is not None
    assert (few.low, few.median, few.high) == (1.0, 2.0, 3.0)
    assert many is not None
    assert (many.low, many.high, many.n) == (5.0, 95.0, 100)
    assert spread_of([]) is None
