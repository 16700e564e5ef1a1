# SPDX-License-Identifier: Apache-2.0
"""What the demo of two paths calls good, and what it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from vllm_nvmeof_bench.demo import dual


def outcome(both_s: float = 0.5, failed: int = 0, different: int = 0) -> dual.Outcome:
    """One path takes a second; the last phase, D's starts, has failures or other tokens."""
    phases = [
        dual.Phase("computed", [2.0], [2.0]),
        dual.Phase("one path", [1.0, 1.0, 9.0], [1.0], read_bytes=100.0),
        dual.Phase("both paths", [both_s] * 3, [both_s], pulled_bytes=40.0, read_bytes=60.0),
        dual.Phase("D is killed", [], [], failed=0),
        dual.Phase("D starts", [1.0], [1.0], failed, different),
    ]
    return dual.Outcome(phases, kills=2, kills_serving=1, kill_gaps_s=[5.04])


@pytest.mark.parametrize(
    ("one", "status"),
    [
        (outcome(), 0),
        (outcome(both_s=0.6), 0),
        (outcome(both_s=0.61), 1),
        (outcome(failed=1), 1),
        (outcome(different=1), 1),
    ],
)
def test_the_status_says_whether_all_was_right_and_fast(
    one: dual.Outcome, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dual, "measure", lambda *_: one)
    assert dual.main([]) == status


def test_the_table_has_all_that_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    dual.show(Console(width=120), replace(outcome(failed=2), kills=0, kill_gaps_s=[]))
    shown = capsys.readouterr().out
    assert "40%" in shown
    assert "both/one: 0.50" in shown
    assert "2 failed requests" in shown
