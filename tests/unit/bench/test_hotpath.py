# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath`: its arithmetic on made-up samples, and one small run of the real code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.report import Table
from vllm_nvmeof_bench.reports.hotpath import (
    CASES,
    MODEL,
    ONE,
    OURS,
    PIPELINE,
    REPORTS,
    VLLM,
    Sample,
    goals,
    parts_of,
    total_us,
)
from vllm_nvmeof_bench.results import Goal, missed, rows_in

from vllm_nvmeof_offload.cli import app

SIZES = (ONE, 512, 8192, 65_536)
ROUNDS = 3
PLANS = ("look_up", "find", "prepare")  # the step that plans a load has more stages than the others
CONDITIONS = {"settings": {"entries": 1_000_000, "repeats": ROUNDS}, "cache_slots": 131_072}


def one(case: str, stage: str, side: str, chunks: int, us: float | None) -> list[Sample]:
    """Three rounds around `us`, which is their median."""
    size = {"pickle": 57.0, "memory": 114.0}.get(stage)
    thread = CASES[case][stage].thread
    figures = [us and us * share for share in (0.9, 1.0, 1.3)]
    return [
        Sample(
            stage, case, side, thread, chunks, number, found, size,
            found if stage == "pipeline" else None,
        )
        for number, found in enumerate(figures)
    ]  # fmt: skip


def everything() -> list[Sample]:
    """Every stage, made up so that all goals are reached."""
    found = one("start", "memory", OURS, 1_000_000, None)
    for stage in ("adopt_rank", "adopt_manager"):
        found += one("start", stage, OURS, 1_000_000, 0.1)
    for case in ("cpu", "pool", "store", "write", "hold"):
        for stage, (thread, _) in CASES[case].items():
            us = {MODEL: 0.005, PIPELINE: 0.4}.get(thread, 0.04)
            if stage == "look_up_again":
                us = 0.01
            for chunks in SIZES:
                us = us / 4 if chunks == SIZES[-1] and stage in PLANS else us
                found += one(case, stage, OURS, chunks, us)
                ours_alone = stage in ("find", "submit", "pipeline", "finished")
                if not ours_alone and case not in ("pool", "hold"):
                    found += one(case, stage, VLLM, chunks, 10 * us)
    for stage in CASES["blocks"]:
        found += one("blocks", stage, VLLM, SIZES[-1], 0.2)
    return found


def slower(samples: Sequence[Sample], factor: float, **wanted: object) -> list[Sample]:
    """The samples with these fields take `factor` times as long."""
    return [
        replace(
            each,
            us_per_chunk=each.us_per_chunk * factor,
            locked_us_per_chunk=each.locked_us_per_chunk and each.locked_us_per_chunk * factor,
        )
        if each.us_per_chunk and all(getattr(each, name) == of for name, of in wanted.items())
        else each
        for each in samples
    ]


def row(samples: Sequence[Sample], start: str) -> Goal:
    (found,) = (goal for goal in goals(samples, CONDITIONS) if goal.name.startswith(start))
    return found


def test_every_goal_is_reached_by_samples_made_up_for_it() -> None:
    found = goals(everything(), CONDITIONS)
    assert len(found) == 20
    assert [goal.name for goal in found if goal.reached is not True] == []


@pytest.mark.parametrize(
    ("goal", "factor", "wanted"),
    [
        ("scheduler: a load from the CPU tier", 9, {"case": "cpu", "stage": "prepare"}),
        ("scheduler: a load from the pool", 20, {"case": "pool", "stage": "report"}),
        ("the first / vLLM's own manager", 9, {"case": "cpu", "stage": "find", "side": OURS}),
        ("pickle and unpickle a load", 9, {"case": "pool", "stage": "pickle"}),
        ("store, from plan to written", 5, {"case": "write", "stage": "pipeline"}),
        ("65,536 chunks / 8,192", 50, {"case": "store", "chunks": 65_536}),
        ("the longest step of a load of 65,536", 5, {"stage": "end", "chunks": 65_536}),
        ("a step with a blocked head", 2, {"stage": "look_up_again", "case": "cpu"}),
        ("look-up of a key", 9, {"stage": "look_up", "case": "pool"}),
        ("an op beside its chunks", 50, {"stage": "pipeline", "case": "store", "chunks": ONE}),
        ("model: per load", 99, {"thread": MODEL, "case": "cpu"}),
        ("pipeline: interpreter lock", 2, {"stage": "pipeline", "case": "cpu"}),
        ("pipeline: from the CPU tier", 5, {"stage": "pipeline", "case": "cpu"}),
        ("pipeline: through stream slots", 9, {"stage": "pipeline", "case": "pool"}),
        ("a million chunks adopted", 4, {"stage": "adopt_rank"}),
    ],
)
def test_one_slow_stage_misses_its_goal(
    goal: str, factor: float, wanted: dict[str, object]
) -> None:
    assert row(slower(everything(), factor, **wanted), goal).reached is False


def test_memory_and_bytes_are_judged_too() -> None:
    samples = [replace(each, bytes_per_chunk=131.0) for each in everything()]
    assert row(samples, "memory of the index").reached is False
    assert row(samples, "bytes of a pickled load").reached is False


def test_a_total_is_the_sum_of_its_stages_within_a_round() -> None:
    samples = one("cpu", "find", OURS, 512, 1.0) + one("cpu", "report", OURS, 512, 2.0)
    found = total_us(samples, OURS, 512, parts_of("cpu", ("find", "report")))
    assert found == pytest.approx([2.7, 3.0, 3.9])
    assert total_us(samples, OURS, 512, parts_of("cpu", ("find", "prepare"))) == []
    assert total_us(samples, OURS, 8192, parts_of("cpu", ("find",))) == []


def test_a_step_is_compared_with_the_work_of_vllm_in_it() -> None:
    samples = slower(everything(), 3, case="cpu", stage="end")
    (table,) = (
        each
        for each in REPORTS[0].parts(samples, CONDITIONS, [])
        if isinstance(each, Table) and each.title.startswith("a load of 65,536")
    )
    cells = {row[0]: row[1:] for row in table.cells}
    per_us = 65_536 / 1000
    assert cells["ends the request"] == [f"{us * per_us:.1f}" for us in (0.12, 0.04, 0.2)] + [
        "0.60",
        "0.20",
    ]
    planned = 3 * 0.01 + 0.04
    assert cells["plans the load"][0] == f"{planned * per_us:.1f}"
    assert cells["plans the load"][3] == f"{planned / 0.2:.2f}"


def test_a_stage_that_was_not_measured_leaves_its_goals_open() -> None:
    samples = [each for each in everything() if each.stage != "report"]
    found = goals(samples, CONDITIONS)
    assert row(samples, "scheduler: a load from the CPU tier").reached is None
    assert row(samples, "store, from plan to written").reached is None
    assert missed(found) == []
    assert all(goal.reached is None for goal in goals([], {}))


def test_a_small_run_measures_every_stage_of_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="its manager is measured beside ours")
    command = [
        "bench",
        "hotpath",
        "--chunks",
        "512",
        "--entries",
        "10000",
        "--repeats",
        "1",
    ]
    files = ["--dir", str(tmp_path / "disk"), "--json", str(tmp_path / "h.json")]
    done = CliRunner().invoke(app, [*command, *files])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "disk").exists(), "the run cleans up"
    rows = rows_in(json.loads((tmp_path / "h.json").read_text()))
    assert all(
        isinstance(each["us_per_chunk"], float) for each in rows if each["stage"] != "memory"
    )
    stages = {(each["case"], each["stage"]) for each in rows if each["side"] == OURS}
    own = {("blocks", stage) for stage in CASES["blocks"]}  # vLLM's own, which has no other side
    assert stages == {(case, stage) for case, some in CASES.items() for stage in some} - own
    theirs = {(each["case"], each["stage"]) for each in rows if each["side"] == VLLM}
    assert own | {("cpu", "look_up"), ("cpu", "report"), ("store", "prepare")} < theirs
    assert {each["chunks"] for each in rows if each["case"] == "pool"} == {ONE, 512}
