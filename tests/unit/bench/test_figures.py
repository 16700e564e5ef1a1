# SPDX-License-Identifier: Apache-2.0
"""Every figure in README.md and docs/benchmarks.md is printed from a file in bench/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.figures import BLOCK, render
from vllm_nvmeof_bench.report import compared
from vllm_nvmeof_bench.reports.serve import TtftSample
from vllm_nvmeof_bench.results import BenchError, dump

from vllm_nvmeof_offload.cli import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
CODE = re.compile(r"^(?: {4}|```).*?$|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
#: A number with a unit, or a ratio.
FIGURE = re.compile(
    r"(?<![\w.-])[\d.,]*\d\s?"
    r"(?:[×%]|(?:m|µ|n)?s\b|[kKMGT]i?B(?:/s|\b)|tokens?\b|times\b|hours?\b|minutes?\b)"
)
#: Defaults and settings, which no sample can show, by page.
EXCEPTED = {"README.md": {"8 GiB", "100 GiB"}, "benchmarks.md": {"95 %", "64 MiB"}}
CONDITIONS = {"date": "2026-01-02", "revision": "abc", "machine": {"cpus": 2, "cpu": "made up"}}


def unmarked(text: str) -> set[str]:
    """The figures of a page outside of blocks, code and links."""
    return set(FIGURE.findall(CODE.sub(" ", BLOCK.sub(" ", text))))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_has_only_figures_of_recorded_samples(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert render(page) == text, f"run vllm-nvmeof bench report {page.relative_to(ROOT)}"
    assert unmarked(text) == EXCEPTED[page.name]
    assert BLOCK.search(text)


@pytest.mark.parametrize(
    "figure",
    ["73 ×", "0.5×", "8.4 %", "12 ms", "35 µs", "3.5 s", "55.2 GB/s", "2,590 MiB/s", "45 KiB",
     "832 tokens", "2 times", "110 MB/s"],
)  # fmt: skip
def test_a_figure_outside_of_a_block_is_found(figure: str) -> None:
    assert unmarked(f"It takes {figure}, about.") == {figure}
    block = f"<!-- figures: a.json | T -->\n\n| {figure} |\n\n<!-- end -->"
    assert unmarked(f"{block}\n\n`{figure}` [a](b-{figure})\n\n    --size {figure}\n") == set()


def test_versions_dates_and_names_are_no_figures() -> None:
    words = "vLLM 0.32.0 on 30 November 2026, SmolLM2-135M, PCIe 5, H200, 16 cores, CRC-32C"
    assert unmarked(words) == set()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page, and MADE-UP samples of first tokens: ours twice as slow as vLLM's tiering."""
    samples = [
        TtftSample(arm, phase, 100, number, ttft_s, 9.0, 0, 0, 0, 0, True, None)
        for number in range(5)
        for arm, times in (("full", (4.0, 1.0)), ("peer_full", (4.0, 0.5)))
        for phase, ttft_s in zip(("cold", "back"), times, strict=True)
    ]
    dump(tmp_path / "bench" / "results" / "t.json", "ttft", samples, CONDITIONS)
    found = tmp_path / "docs" / "page.md"
    found.parent.mkdir()
    found.write_text("<!-- figures: t.json | Ours -->\nold\n<!-- end -->\n")
    return found


def test_a_block_is_filled_with_its_source_and_a_row_behind_is_bold(page: Path) -> None:
    shown = render(page)
    row = ["TTFT of 100 tokens", "full/peer_full", "2.00 (2.00–2.00)", "behind", "5"]
    assert f"|{'|'.join(f'**{cell}**' for cell in row)}|" in shown
    assert "`t.json`: 2 CPUs made up; 2026-01-02, abc; 5 rounds." in shown
    assert "old" not in shown
    page.write_text(page.read_text().replace("Ours", "TTFT in ms | prompt, tokens; full | return"))
    assert "|100|1,000|" in render(page)
    assert "4,000" not in render(page)


def test_the_command_prints_a_page_anew_and_only_checks_with_check(page: Path) -> None:
    old = page.read_text()
    call = ["bench", "report", str(page)]
    assert CliRunner().invoke(app, [*call, "--check"]).exit_code == 1
    assert page.read_text() == old
    assert CliRunner().invoke(app, call).exit_code == 0
    assert CliRunner().invoke(app, [*call, "--check"]).exit_code == 0
    page.write_text(page.read_text().replace("2.00 (", "1.00 ("))
    assert CliRunner().invoke(app, [*call, "--check"]).exit_code == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [("t.json | Nothing", "no table"), ("t.json | Ours | speed", "no column"),
     ("t.json | Ours | | never", "no row"), ("none.json | Ours", "not a benchmark's results")],
)  # fmt: skip
def test_a_block_that_names_nothing_is_refused(page: Path, words: str, why: str) -> None:
    page.write_text(f"<!-- figures: {words} -->\n<!-- end -->\n")
    with pytest.raises(BenchError, match=why):
        render(page)


@pytest.mark.parametrize(
    ("values", "lower", "verdict"),
    [([0.9] * 5, True, "ahead"), ([0.9] * 5, False, "behind"), ([1.1] * 5, True, "behind"),
     ([0.5, 0.9, 1.0, 1.1, 2.0], True, "level"), ([0.9, 1.0, 1.1], True, "level"),
     ([0.8, 0.9, 0.9], True, "ahead"), ([0.5, 0.5], True, "–")],
)  # fmt: skip
def test_an_interval_that_contains_one_is_level(
    values: list[float], lower: bool, verdict: str
) -> None:
    assert compared("", [("TTFT", "a", "b", values, lower)]).cells[0][3] == verdict
