# SPDX-License-Identifier: Apache-2.0
"""`bench peers`: its arithmetic on made-up samples, and one small run of two real processes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.reports.peers import (
    ABSENT,
    BOTH,
    IDLE,
    LANDING,
    LOAD,
    MB,
    MESSAGES,
    NO_LINKS,
    WITHOUT,
    Sample,
    goals,
)
from vllm_nvmeof_bench.results import rows_in

from vllm_nvmeof_offload.cli import app

GOALS = 5


def everything(
    both: float = 780.0,
    landing: float = 770.0,
    unequal: float = 760.0,
    absent: float = 397.0,
    idle: float = 0.1,
) -> list[Sample]:
    """Three rounds of 400 MB; rates in MB/s, idleness in % of a core."""
    found = []
    for number in range(3):
        rates = {
            "400:400": {WITHOUT: 400.0, ABSENT: absent, BOTH: both, LANDING: landing},
            "200:600": {WITHOUT: 200.0, ABSENT: 199.0, BOTH: unequal},
        }
        for links, arms in rates.items():
            for arm, rate in arms.items():
                pulled = 200 * MB if arm in (BOTH, LANDING) else 0
                where = LOAD, links, MESSAGES, arm, number
                found.append(Sample(*where, 400 / rate, 400 * MB, pulled, 0.4, 0.1))
    cpu_s = 0.1 * idle
    found.append(Sample(IDLE, NO_LINKS, MESSAGES, BOTH, 0, 10.0, 0, 0, cpu_s / 2, cpu_s))
    return found


def test_goals_are_ratios_of_rates() -> None:
    found = goals(everything(), {})
    assert [goal.reached for goal in found] == [True] * GOALS
    measured = [goal.measured for goal in found]
    assert measured == pytest.approx([1.95, 1.925, 0.95, 397 / 400, 0.1], abs=0.01)


@pytest.mark.parametrize(
    ("number", "slow"),
    [
        (0, {"both": 750.0}),
        (1, {"landing": 750.0}),
        (2, {"unequal": 730.0}),
        (3, {"absent": 390.0}),
        (4, {"idle": 0.6}),
    ],
)
def test_each_goal_can_be_missed(number: int, slow: dict[str, float]) -> None:
    missed = [goal.reached for goal in goals(everything(**slow), {})]
    assert missed == [at != number for at in range(GOALS)]


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    assert [goal.reached for goal in goals([], {})] == [None] * GOALS


def test_a_small_run_loads_over_both_links(tmp_path: Path) -> None:
    """The rates are ones that this machine has beside all its tests; how much each link carries is
    not looked at, because it follows from what else runs."""
    sizes = ["--chunks", "24", "--chunk", "512KiB", "--rates", "40:40", "--rounds", "2"]
    arms = f"{WITHOUT},{ABSENT},{BOTH},{LANDING}"
    rest = ["--idle-s", "0.2", "--arms", arms]
    files = ["--dir", str(tmp_path / "disk"), "--json", str(tmp_path / "p.json")]
    done = CliRunner().invoke(app, ["bench", "peers", *sizes, *rest, *files])
    assert done.exit_code in (0, 1), done.output
    assert not (tmp_path / "disk").exists(), "the run cleans up"
    rows = rows_in(json.loads((tmp_path / "p.json").read_text()))
    counts = Counter((one["stage"], one["arm"]) for one in rows)
    loads = dict.fromkeys([(LOAD, arm) for arm in (WITHOUT, ABSENT, BOTH, LANDING)], 2)
    assert counts == loads | {(IDLE, ABSENT): 1, (IDLE, BOTH): 1}
    for arm in (WITHOUT, ABSENT, BOTH, LANDING):
        of_arm = [one for one in rows if one["stage"] == LOAD and one["arm"] == arm]
        pulled, size = (sum(one[key] for one in of_arm) for key in ("pulled_bytes", "size_bytes"))
        assert 0 < pulled < size if arm in (BOTH, LANDING) else pulled == 0
