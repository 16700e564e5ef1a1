# SPDX-License-Identifier: Apache-2.0
"""Every declared report prints, judges and draws the file in bench/results/ that it is of."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

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


def test_a_report_of_no_samples_judges_and_draws_nothing(file: Path, tmp_path: Path) -> None:
    report = report_of(name_in(file))
    _, conditions, _ = report.read(file)
    assert not [one for one in report.tables([], conditions) if isinstance(one, Table) and one.rows]
    assert {goal.reached for goal in report.goals([], {})} <= {None} if report.goals else True
    with pytest.raises(BenchError, match="nothing to draw"):
        report.draw(tmp_path / "none.png", [], conditions)


def test_whole_and_incomplete_files_have_what_a_picture_draws(file: Path) -> None:
    report = report_of(name_in(file))
    samples, conditions, _ = report.read(file)
    assert list(report.parts(samples[:1], conditions, []))
    drawn = [
        column.spread(row)
        for table in report.tables(samples, conditions)
        if isinstance(table, Table)
        for column in table.columns
        if column.drawn
        for row in table.rows
    ]
    assert any(drawn)
    assert all(one.low <= one.median <= one.high for one in drawn if one is not None)


@pytest.mark.parametrize("name", ["ttft", "turns", "stall", "latency", "replay", "pool"])
def test_a_picture_shows_where_and_what_and_no_more_than_was_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from matplotlib.colors import to_hex
    from matplotlib.container import BarContainer, ErrorbarContainer

    drawn: list[Any] = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    path, report = file_of(name), report_of(name)
    assert path is not None
    samples, conditions, _ = report.read(path)
    conditions |= {"gpus": ["GPU X"], "disk": {"file_system": "xfs", "device": "nvme9n1"}}
    conditions["gpu_cache_emptied"] = {"some server": False}
    report.draw(tmp_path / "one.png", samples, conditions)
    (figure,) = drawn
    title = figure.get_suptitle()
    assert "GPU X" in title
    assert "files on xfs on nvme9n1" in title
    below = " ".join(figure.get_supxlabel().split())
    assert "was not emptied on some server" in below
    codes = set(conditions.get("arms", {}))
    colours: dict[str, str] = {}
    for panel in filter(lambda one: one.has_data(), figure.axes):
        bars = [one for one in panel.containers if isinstance(one, BarContainer)]
        assert not (bars and panel.get_yscale() == "log"), "a bar's length means nothing there"
        whiskers = [one for one in panel.containers if isinstance(one, ErrorbarContainer)]
        for one in whiskers:
            ((low, high),) = one.lines[2][0].get_segments()
            assert low[1] < high[1], "a cap without a spread"
        handles, labels = panel.get_legend_handles_labels()
        assert not codes & {one.get_text() for one in panel.get_xticklabels()}
        for handle, label in zip(handles, labels, strict=True):
            is_bar = isinstance(handle, BarContainer)
            colour = to_hex(handle[0].get_facecolor() if is_bar else handle.get_color())
            assert colours.setdefault(label, colour) == colour
        assert not labels or not set(labels) <= codes, "an arm is described, not named"


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
        (Paired(0.9, (0.8, 1.1), 9), False, "0.90 (0.80 to 1.10)"),
        (Paired(0.9, None, 2), False, "0.90"),
    ],
)
def test_a_cell_is_the_text_of_a_value(value: object, ranged: bool, text: str) -> None:
    assert Column("", lambda row: row, "{:.2f}", ranged=ranged).cell(value) == text


def test_a_picture_has_the_medians_of_the_table() -> None:
    column = Column("ms", lambda row: row, scale=0.001)
    assert column.spread(Spread(2.0, 1.0, 4.0, 3)) == Spread(2000.0, 1000.0, 4000.0, 3)
    assert column.spread(Paired(0.9, (0.8, 1.1), 9)) == Spread(900.0, 800.0, 1100.0, 9)
    assert column.spread(0.5) == Spread(500.0, 500.0, 500.0, 1)
    assert column.spread("text") is None and column.spread(None) is None


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
