# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath alone`: its arithmetic on made-up samples, and one small run of the real code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.reports.alone import (
    AGAIN,
    FIGURES,
    OFF,
    ON,
    SIDES,
    Sample,
    goals,
    ratio,
    sums,
)

from vllm_nvmeof_offload.cli import app

STAGES = sorted({part for parts in FIGURES.values() for part in parts})
BLOCKS = [(number, block) for number in range(2) for block in range(4)]
CONDITIONS = {"settings": {"entries": 200_000, "rounds": 2, "blocks": 4}}
HIT = FIGURES["look-ups that hit the CPU tier"]
LOAD = FIGURES["load from the CPU tier, look-ups included"]


def everything(on: float = 1.005) -> list[Sample]:
    """Every stage of every side; with sharing it takes `on` times as long. Blocks differ."""
    scales = {OFF: 1.0, AGAIN: 0.99, ON: on}
    return [
        Sample(side, case, stage, chunks, number, block, scales[side] * (1 + block))
        for side in SIDES
        for case, stage in STAGES
        for chunks in (1, 512)
        for number, block in BLOCKS
    ]


def test_ratios_are_of_the_same_block() -> None:
    found = ratio(everything(), ON, 512, HIT)
    assert found is not None
    assert (found.middle, found.n) == (pytest.approx(1.005), len(BLOCKS))
    again = ratio(everything(), AGAIN, 1, LOAD)
    assert again is not None and again.middle == pytest.approx(0.99)
    assert ratio([], ON, 512, HIT) is None


def test_a_sum_is_of_blocks_that_have_all_parts() -> None:
    samples = everything()
    assert sums(samples, OFF, 1, LOAD)[0, 1] == pytest.approx(2.0 * len(LOAD))
    lost = [one for one in samples if (one.stage, one.block) != ("prepare", 1)]
    assert (0, 1) not in sums(lost, OFF, 1, LOAD)
    assert (0, 2) in sums(lost, OFF, 1, LOAD)


def test_the_goal_is_missed_above_one_per_cent() -> None:
    assert [goal.reached for goal in goals(everything(), CONDITIONS)] == [True, True]
    assert [goal.reached for goal in goals(everything(1.02), CONDITIONS)] == [False, False]
    slow = [
        replace(one, us=1.5 * one.us) if (one.side, one.chunks) == (ON, 1) else one
        for one in everything()
    ]
    assert [goal.reached for goal in goals(slow, CONDITIONS)] == [False, True]
    assert [goal.reached for goal in goals([], {})] == [None]


def test_too_few_entries_are_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "hotpath", "alone", "--entries", "40000"])
    assert done.exit_code == 2
    assert "40000 entries are too few for 40 blocks" in done.output


def test_a_small_run_measures_every_stage_of_every_side(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="its interface is what is measured")
    sizes = ["--chunks", "16", "--entries", "60000", "--blocks", "1", "--rounds", "1"]
    files = ["--dir", str(tmp_path / "disk"), "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["bench", "hotpath", "alone", *sizes, *files])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "disk").exists(), "the run cleans up"
    rows = json.loads((tmp_path / "a.json").read_text())["samples"]
    assert all(row["us"] > 0 for row in rows)
    found = {(row["side"], row["chunks"], row["case"], row["stage"]) for row in rows}
    wanted = {(side, chunks, *stage) for side in SIDES for chunks in (1, 16) for stage in STAGES}
    assert wanted <= found
