# SPDX-License-Identifier: Apache-2.0
"""Every declared report prints and judges the file in bench/results/ that it is of."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import BENCHMARKS, report_of
from vllm_nvmeof_bench.report import Column, Report, Table, common_lines, markdown, show
from vllm_nvmeof_bench.results import BenchError, Paired, Spread, dump, name_in

from tests.unit.bench import made_up
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.units import KIB, MIB

RESULTS = Path(__file__).parents[3] / "bench" / "results"


@cache
def file_of(name: str) -> Path | None:
    return next((path for path in sorted(RESULTS.glob("*.json")) if name_in(path) == name), None)


@pytest.fixture(params=BENCHMARKS)
def file(request: pytest.FixtureRequest) -> Path:
    """A file of each benchmark."""
    found = file_of(request.param)
    assert found is not None
    return found


def printed(report: Report, path: Path) -> str:
    out = io.StringIO()
    show(Console(file=out, width=300), report.parts(*report.read(path)))
    return " ".join(out.getvalue().split())


def test_a_file_is_printed_with_its_tables_and_goals(file: Path) -> None:
    report = report_of(name_in(file))
    text, (samples, conditions, goals) = printed(report, file), report.read(file)
    tables = [one for one in report.tables(samples, conditions) if isinstance(one, Table)]
    for needed in [one.title for one in tables if one.rows] + [goal.name for goal in goals]:
        assert needed.strip() in text, needed
    assert any(one.rows for one in tables)
    assert not {"nan", "None", "[/]"} & set(text.split())
    assert len(markdown(report.parts(samples, conditions, goals))) > 2


def test_a_file_reads_back_as_it_was_written(file: Path, tmp_path: Path) -> None:
    report = report_of(name_in(file))
    samples, conditions, goals = report.read(file)
    dump(tmp_path / "again.json", report.name, samples, conditions)
    assert report.read(tmp_path / "again.json") == (samples, conditions, goals)


def test_a_report_of_no_samples_judges_nothing(file: Path) -> None:
    report = report_of(name_in(file))
    _, conditions, _ = report.read(file)
    assert not [one for one in report.tables([], conditions) if isinstance(one, Table) and one.rows]
    assert {goal.reached for goal in report.goals([], {})} <= {None} if report.goals else True


def test_an_incomplete_file_is_printed_too(file: Path) -> None:
    report = report_of(name_in(file))
    samples, conditions, _ = report.read(file)
    assert list(report.parts(samples[:1], conditions, []))


def test_one_command_prints_any_file_and_judges_it(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    sizes = (64 * KIB, 512 * KIB, 2 * MIB)
    dump(path, "pool", made_up.everything(sizes), {})
    done = CliRunner().invoke(app, ["bench", "report", str(path), "--check"])
    assert done.exit_code == 0, done.output
    assert "samples in" in done.output
    dump(path, "pool", made_up.everything(sizes, ours=1000.0), {})
    assert CliRunner().invoke(app, ["bench", "report", str(path)]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "report", str(path), "--check"]).exit_code == 1
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "none.json")])
    assert done.exit_code == 2
    assert "none.json: not a benchmark's results file" in done.stderr


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"samples": [{}], "conditions": {}}'])
def test_a_file_of_another_form_is_refused(file: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(BenchError, match=r"other\.json: not a results file of"):
        report_of(name_in(file)).read(path)


@pytest.mark.parametrize(
    ("value", "ranged", "text"),
    [
        (None, False, "–"),
        ("as it is", False, "as it is"),
        (1.234, False, "1.23"),
        (Spread(2.0, 1.0, 4.0, 3), False, "2.00"),
        (Spread(2.0, 1.0, 4.0, 3), True, "2.00 [dim]1.00–4.00[/]"),
        (Paired(0.9, (0.8, 1.1), 9), False, "0.90 (0.80–1.10)"),
        (Paired(0.9, None, 2), False, "0.90"),
    ],
)
def test_a_cell_is_the_text_of_a_value(value: object, ranged: bool, text: str) -> None:
    assert Column("", lambda row: row, "{:.2f}", ranged=ranged).cell(value) == text


def test_lines_name_what_is_known_and_what_is_not() -> None:
    conditions = {
        "settings": {"tokens": 1000},
        "arms": {"fio": {"available": False, "reason": "not installed"}, "a": {"says": "it"}},
        "gpu_cache_emptied": {"a": True, "b": False},
        "cut_off": True,
    }
    lines = list(common_lines(conditions, "{tokens:,} tokens of {pace[users]:,} users"))
    assert lines[1] == "1,000 tokens of ? users"
    assert lines[2:4] == ["• fio: not measured: not installed", "• a: it"]
    assert "was not emptied on b" in lines[4]
    assert lines[5].startswith("this run was cut off")
    json.dumps(lines)
