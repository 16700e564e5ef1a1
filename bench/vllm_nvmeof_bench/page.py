# SPDX-License-Identifier: Apache-2.0
"""`bench report`: one Markdown page with a section per results file in a directory, in the order of
`BENCHMARKS`. For an unreadable file, the page gives the reason in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from vllm_nvmeof_bench.benchmark import BENCHMARKS, report_of, words_of
from vllm_nvmeof_bench.report import Report, markdown
from vllm_nvmeof_bench.results import BenchError, name_in

#: Exceptions that damaged samples or conditions can raise in a report.
_DAMAGE = (BenchError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError,
           ValueError)  # fmt: skip


@dataclass
class Page:
    """A page to write. text: Markdown. left_out: name of an omitted file → the reason."""

    text: str = ""
    sections: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def write(directory: Path, page_path: Path | None) -> bool:
    """Write a directory's page, by default inside it; return False if a file was left out. Raise
    BenchError if there is no such directory or the page cannot be written."""
    path = page_path or directory / "REPORT.md"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    page = build(directory, console.print)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None
    for name, why in sorted(page.left_out.items()):
        console.print(f"left out: {name}: {why}")
    console.print(f"{page.sections} sections: {path}")
    return not page.left_out


def build(directory: Path, on_progress: Callable[[str], None] = lambda what: None) -> Page:
    """Build the page of a directory's `*.json` files; raise BenchError if it is not a directory."""
    if not directory.is_dir():
        raise BenchError(f"{directory}: not a directory")
    page = Page()
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            name = name_in(path)
            report = report_of(name)
            found.append((list(BENCHMARKS).index(name), path, report))
        except BenchError as error:
            page.left_out[path.name] = _without_path(error, path)
    sections = []
    for _, path, report in sorted(found, key=lambda one: one[:2]):
        on_progress(f"{path.name}: {report.title}")
        try:
            sections.append("\n\n".join(_section(path, report)))
        except _DAMAGE as error:
            page.left_out[path.name] = f"damaged: {_without_path(error, path)}"
    page.sections = len(sections)
    head = (
        "# Benchmarks\n\n"
        f"Written by `vllm-nvmeof bench report` from {page.sections} results files; each section "
        "names its file and gives the conditions. No figure is extrapolated."
    )
    if page.left_out:
        lines = "\n".join(f"- `{name}`: {why}" for name, why in sorted(page.left_out.items()))
        sections += ["## Files that were left out", lines]
    page.text = "\n\n".join([head, *sections]) + "\n"
    return page


def _without_path(error: Exception, path: Path) -> str:
    """Return the error's text without the file's directory, because pages are published."""
    text = str(error) if isinstance(error, BenchError) else repr(error)
    return text.removeprefix(f"{path}: ").replace(str(path), path.name)


def _section(path: Path, report: Report) -> list[str]:
    command = "demo" if report.name == "demo" else f"bench {words_of(report.name)}"
    blocks = [f"## {report.title}", f"`{command}`, samples in `{path.name}`."]
    return blocks + markdown(report.parts(*report.read(path)))
