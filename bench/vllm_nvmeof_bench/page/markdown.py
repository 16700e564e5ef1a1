# SPDX-License-Identifier: Apache-2.0
"""What benchmarks print for a terminal, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Recorder", "table_of"]

_WIDTH = 160
_BULLET = "• "


class Recorder:
    """In place of a rich Console: keeps what is printed as blocks of Markdown."""

    def __init__(self) -> None:
        self.blocks: list[str] = []

    def print(self, *objects: Any, markup: bool = True, **_: Any) -> None:
        """Tables become tables, strings lines; anything else what a terminal would show."""
        for one in objects:
            if isinstance(one, Table):
                self.blocks.append(_table(one))
            elif isinstance(one, str):
                self.blocks.append(_line(_plain(one) if markup else one))
            else:
                self.blocks.append(f"```\n{_shown(one)}\n```")

    @property
    def text(self) -> str:
        return "\n\n".join(block for block in self.blocks if block)


def table_of(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool] = ()
) -> str:
    """A Markdown table of plain cells. right: which columns are set to the right."""
    aligned = [*right, *[False] * (len(columns) - len(right))]
    rule = ["---:" if one else "---" for one in aligned]
    return "\n".join(
        "| " + " | ".join(cells) + " |"
        for cells in ([_cell(one) for one in columns], rule, *([_cell(one) for one in row]
                                                               for row in rows))
    )  # fmt: skip


def _table(table: Table) -> str:
    """An empty first cell is the one above it, which a terminal leaves out."""
    columns = [[_words(cell) for cell in column.cells] for column in table.columns]
    if columns:
        for number, name in enumerate(columns[0]):
            if not name and number:
                columns[0][number] = columns[0][number - 1]
    rows = list(zip(*columns, strict=True))
    headers = [_words(column.header) for column in table.columns]
    right = [column.justify == "right" for column in table.columns]
    parts = [table_of(headers, rows, right)]
    if table.title is not None:
        parts.insert(0, f"**{_words(table.title)}**")
    if table.caption is not None:
        parts.append(_words(table.caption))
    return "\n\n".join(parts)


def _line(text: str) -> str:
    text = text.strip()
    return f"- {text.removeprefix(_BULLET)}" if text.startswith(_BULLET) else text


def _words(one: Any) -> str:
    if isinstance(one, str):
        return _plain(one)
    return one.plain if isinstance(one, Text) else _shown(one)


def _plain(text: str) -> str:
    return Text.from_markup(text).plain


def _shown(one: Any) -> str:
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(one)
    return captured.get().strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip() or " "
