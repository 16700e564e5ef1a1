# SPDX-License-Identifier: Apache-2.0
"""Figures in a Markdown page: marked blocks that are filled from results files.

A block begins with a comment that names a results file and the first words of a table's title in
its report. Columns and a regular expression for rows can follow:

    <!-- figures: turns.json | Conversations | at once; arm; tokens/s | none|pool -->
    <!-- end -->

`<!-- figures: summary -->` is a table of ratios from several files. Rows in which ours is behind or
misses a goal are bold. The line below a table gives machine, date, revision and rounds. A test
checks that README.md and docs/benchmarks.md contain none of our figures outside blocks.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.benchmark import report_of
from vllm_nvmeof_bench.report import (
    BEHIND,
    Table,
    compared,
    markdown_table,
    plain,
    setting_in,
)
from vllm_nvmeof_bench.reports.replay import ratio as ratio_of_replay
from vllm_nvmeof_bench.reports.serve import ratio_of_hits, ratio_of_ttft, ratio_of_turns
from vllm_nvmeof_bench.results import BenchError, distinct, name_in

BLOCK = re.compile(r"(<!-- figures: (.*?)\s*-->\n).*?(<!-- end -->)", re.DOTALL)
_RESULTS = Path("bench") / "results"
_COLUMNS = 100


def render(page: Path) -> str:
    """Return the page's text with every block filled; raise BenchError if a block names no table
    or its file cannot be read."""
    above = (up / _RESULTS for up in page.resolve().parents)
    results = next((one for one in above if one.is_dir()), None)
    if results is None:
        raise BenchError(f"{page}: no {_RESULTS} in a directory above")
    text = page.read_text(encoding="utf-8")
    files = [_parts(found[2])[0] for found in BLOCK.finditer(text)]
    following = iter([*files[1:], ""])

    def filled(found: re.Match[str]) -> str:
        file, *more = _parts(found[2])
        shown = _summary(results) if file == "summary" else _selected(results / file, more)
        # Of successive blocks filled from one file, only the last names the source.
        source = "" if next(following) == file or file == "summary" else _source(results / file)
        return "\n\n".join(filter(None, [f"{found[1]}\n{shown}", source, found[3]]))

    return BLOCK.sub(filled, text)


def update(page: Path, check: bool) -> bool:
    """Render the page in place, unless `check`; return whether the page was up to date."""
    text = render(page)
    same = text == page.read_text(encoding="utf-8")
    if not same and not check:
        page.write_text(text, encoding="utf-8")
    return same


def _parts(words: str) -> list[str]:
    return re.split(r" ?\| ?", " ".join(words.split()), maxsplit=3)


def _selected(path: Path, more: Sequence[str]) -> str:
    title, wanted, pattern = [*more, "", "", ""][:3]
    tables = _read(path)[2]
    table = next((one for one in tables if one.title.startswith(title)), None)
    if table is None:
        known = [one.title for one in tables]
        raise BenchError(f"{path.name}: no table {title!r}; choose from {known}")
    return _table(table, [one.strip() for one in wanted.split(";") if one.strip()], pattern)


@cache
def _read(path: Path) -> tuple[Sequence[Any], dict[str, Any], Sequence[Table]]:
    report = report_of(name_in(path))
    samples, conditions, goals = report.read(path)
    parts = report.parts(samples, conditions, goals)
    return samples, conditions, [one for one in parts if isinstance(one, Table)]


def _table(table: Table, wanted: Sequence[str] = (), pattern: str = "") -> str:
    names = [column.name for column in table.columns]
    if missing := set(wanted) - set(names):
        raise BenchError(f"{table.title}: no column {missing}; choose from {names}")
    at = [names.index(one) for one in wanted] or list(range(len(names)))
    rows = []
    for row in table.cells:
        every = [plain(cell) for cell in row]
        behind = BEHIND in every or (names[-1] == "reached" and every[-1] == "no")
        if re.search(pattern, " | ".join(every)):
            cells = [every[index] for index in at]
            rows.append([f"**{one}**" if one else "" for one in cells] if behind else cells)
    if not rows:
        raise BenchError(f"{table.title}: no row matches {pattern!r}")
    right = [place for place, index in enumerate(at) if place and not table.columns[index].left]
    return markdown_table([names[index] for index in at], rows, right)


def _source(path: Path) -> str:
    samples, conditions, _ = _read(path)
    rounds = len(distinct(samples, "round")) if hasattr(samples[0], "round") else 0
    words = [
        *setting_in(conditions),
        f"{conditions['date']}, {conditions['revision']}",
        f"{rounds} round{'s' * (rounds > 1)}" if rounds else "",
        "the last one cut off" if conditions.get("cut_off") else "",
    ]
    return textwrap.fill(f"`{path.name}`: {'; '.join(filter(None, words))}.", _COLUMNS)


def _summary(results: Path) -> str:
    """Return the README's table of ratios, and the lines that describe its files."""
    found = [
        (what, ours, other, values(_read(results / file)[0]), lower)
        for file, what, ours, other, values, lower in _SUMMARY
    ]
    names = dict.fromkeys(row[0] for row in _SUMMARY)
    return "\n\n".join([_table(compared("", found)), *(_source(results / one) for one in names)])


_TIERING = "vLLM's tiering"
_GPU_TTFT = "ttft-memory-h200-580.159.04-2026-11-27.json"
#: The summary's rows: file, measure, both sides of the ratio, a function of samples that returns
#: the ratios, and whether less is better.
_SUMMARY: tuple[tuple[str, str, str, str, Callable[[Any], list[float]], bool], ...] = (
    (_GPU_TTFT, "H200: TTFT of 32,768 tokens", "computing", "CPU tier",
     partial(ratio_of_ttft, arm="full:dma", length=32768), False),
    (_GPU_TTFT, "H200: TTFT of 8,192 tokens", "computing", "pool",
     partial(ratio_of_ttft, arm="pool:dma", length=8192), False),
    *(
        (_GPU_TTFT, f"H200: TTFT of {length:,} tokens", "CPU tier", _TIERING,
         partial(ratio_of_ttft, arm="full:dma", length=length, other="peer_full"), True)
        for length in (8192, 32768)
    ),
    *(
        ("ttft.json", "TTFT of 4,096 tokens", "computing", tier,
         partial(ratio_of_ttft, arm=arm, length=4096), False)
        for tier, arm in (("CPU tier", "full"), ("pool", "pool"))
    ),
    *(
        ("ttft.json", "TTFT of 4,096 tokens", tier, _TIERING,
         partial(ratio_of_ttft, arm=arm, length=4096, other=other), True)
        for tier, arm, other in (("CPU tier", "full", "peer_full"), ("pool", "pool", "peer"))
    ),
    ("restart.json", "after a restart: TTFT of 4,096 tokens", "computing", "pool",
     partial(ratio_of_ttft, arm="pool", length=4096), False),
    ("restart.json", "after a restart: TTFT of 4,096 tokens", "pool", _TIERING,
     partial(ratio_of_ttft, arm="pool", length=4096, other="peer"), True),
    ("turns.json", "16 conversations: tokens/s", "pool", _TIERING,
     partial(ratio_of_turns, arm="pool", other="peer", concurrency=16), False),
    ("replay.json", "agentic sessions: TTFT P95", "pool", "no pool",
     partial(ratio_of_replay, name="ttft_p95_s", arm="pool", other="third"), True),
    ("replay.json", "agentic sessions: TTFT P95", "pool", _TIERING,
     partial(ratio_of_replay, name="ttft_p95_s", arm="pool", other="peer"), True),
    ("beyond.json", "four prompts beyond the CPU tier: tokens/s", "pool", _TIERING,
     partial(ratio_of_hits, arm="pool", other="peer", rate=100), False),
)  # fmt: skip
