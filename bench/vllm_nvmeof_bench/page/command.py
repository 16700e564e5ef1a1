# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench report` behind its options: build, write, say what was left out."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vllm_nvmeof_bench.page.page import build
from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["write"]


def write(directory: Path, page_path: Path | None, plots: bool) -> bool:
    """Make the page of a directory, inside it unless told; False if a file was left out.

    Raises:
        BenchError: no such directory, or the page cannot be written.
    """
    path = page_path or directory / "REPORT.md"
    console = Console(soft_wrap=True)
    page = build(directory, path, lambda what: console.print(what, highlight=False), plots)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None
    for name, why in sorted(page.left_out.items()):
        console.print(f"left out: {name}: {why}", highlight=False, markup=False)
    console.print(
        f"{page.sections} sections and {len(page.pictures)} pictures: {path}", highlight=False
    )
    return not page.left_out
