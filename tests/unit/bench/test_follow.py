# SPDX-License-Identifier: Apache-2.0
"""`bench hotpath follow`: its arithmetic on made-up samples, and one small run of the real code."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import report_of
from vllm_nvmeof_bench.reports.follow import (
    CHANGED,
    FIRST,
    IDLE,
    LOG,
    PUT,
    SAME,
    SCAN,
    Sample,
    goals,
    us_per_change,
)

from vllm_nvmeof_offload.cli import app

ENTRIES = 500_000
GOALS = 8


def everything(
    first_s: float = 0.1,
    same_s: float = 0.005,
    change_us: float = 0.3,
    by_log_s: float = 0.1,
    by_scan_s: float = 0.1,
    idle: float = 0.004,
    idle_of_ten: float = 0.0045,
    idle_of_hundred: float = 0.0048,
) -> list[Sample]:
    """Three rounds; the CPU times are half of the elapsed ones, and the log takes a tenth."""
    found = []
    for number in range(3):
        for by, part in ((SCAN, 1.0), (LOG, 0.1)):
            changed_s = part * same_s + 1e-6 * change_us * 50_000
            for stage, entries, cpu_s in (
                (FIRST, ENTRIES, first_s),
                (SAME, ENTRIES, part * same_s),
                (CHANGED, 1000, part * same_s + 0.001),
                (CHANGED, 50_000, changed_s),
            ):
                found.append(Sample(stage, number, entries, 2 * cpu_s, cpu_s, by))
    for by, delay_s in ((SCAN, by_scan_s), (LOG, by_log_s)):
        delays = [delay_s * (number + 1) / 100 for number in range(100)]
        found += [Sample(PUT, at, 1, one, None, by) for at, one in enumerate(delays)]
    shares = {1: idle, 10: idle_of_ten, 100: idle_of_hundred}
    idles = [Sample(IDLE, 0, 100, 10.0, 10 * part, LOG, n) for n, part in shares.items()]
    return [*found, *idles]


def test_goals_are_per_million_entries_and_per_changed_entry() -> None:
    found = goals(everything(), {})
    assert [goal.reached for goal in found] == [True] * GOALS
    measured = [goal.measured for goal in found]
    assert measured == pytest.approx([10, 0.3, 0.2, 99, 99, 0.4, 0.45, 0.48])
    assert us_per_change(everything(), SCAN, 1000) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("number", "slow"),
    [
        (0, {"same_s": 0.011}),
        (1, {"change_us": 0.7}),
        (2, {"first_s": 0.3}),
        (3, {"by_log_s": 0.26}),
        (4, {"by_scan_s": 0.21}),
        (5, {"idle": 0.006}),
        (6, {"idle_of_ten": 0.006}),
        (7, {"idle_of_hundred": 0.006}),
    ],
)
def test_each_goal_can_be_missed(number: int, slow: dict[str, float]) -> None:
    missed = [goal.reached for goal in goals(everything(**slow), {})]
    assert missed == [at != number for at in range(GOALS)]


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    assert [goal.reached for goal in goals([], {})] == [None] * GOALS


def test_a_file_of_before_there_were_logs_is_of_scans(tmp_path: Path) -> None:
    row = {"stage": SAME, "round": 0, "entries": 1000, "wall_s": 0.1, "cpu_s": 0.01}
    path = tmp_path / "old.json"
    path.write_text(
        json.dumps({"schema": 1, "bench": "follow", "samples": [row], "conditions": {}})
    )
    (sample,), _, _ = report_of("follow").read(path)
    assert sample.by == SCAN


def test_a_small_run_measures_every_stage(tmp_path: Path) -> None:
    sizes = ["--entries", "5000", "--changed", "10,200", "--repeats", "2", "--regions", "1,2"]
    rest = ["--puts", "3", "--puts-per-s", "100", "--idle-s", "0.2", "--follow-ms", "20"]
    files = ["--dir", str(tmp_path / "disk"), "--json", str(tmp_path / "f.json")]
    done = CliRunner().invoke(app, ["bench", "hotpath", "follow", *sizes, *rest, *files])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "disk").exists(), "the run cleans up"
    rows = json.loads((tmp_path / "f.json").read_text())["samples"]
    counts: Counter[tuple[str, str, int]] = Counter()
    for one in rows:
        counts[one["by"], one["stage"], one["entries"]] += 1
        assert one["wall_s"] >= 0
        assert (one["cpu_s"] is None) == (one["stage"] == PUT)
    looks = ((FIRST, 5000, 2), (SAME, 5000, 2), (CHANGED, 10, 2), (CHANGED, 200, 2), (PUT, 1, 3))
    wanted = {(by, stage, n): times for by in (SCAN, LOG) for stage, n, times in looks}
    assert counts == {**wanted, (LOG, IDLE, 5000): 2}
    assert [one["regions"] for one in rows if one["stage"] == IDLE] == [1, 2]
