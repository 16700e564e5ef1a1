# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal, one a part: medians with their spread, ratios, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.pool.targets import Row
from vllm_nvmeof_bench.results import PERCENTILES_FROM
from vllm_nvmeof_bench.tier.samples import (
    Sample,
    Spread,
    cpu_s_per_gib,
    places,
    round_ratios,
    seconds,
    select,
    spread_of,
)
from vllm_nvmeof_bench.tier.settings import ARMS
from vllm_nvmeof_bench.tier.targets import admission_ratio, median_ratio, throttle_name

__all__ = ["number_table", "print_conditions", "print_samples", "print_targets"]

_MS_BELOW_S = 1.0
_SMALL_MS = 100.0
_LOAD_TITLES = {
    "memory": "Load from a throttled pool",
    "paced": "The same, copies as slow as the target",
}
_PAIR_TITLES = (
    ("resume", "crowd", "Preempted request: from room to its next token"),
    ("prefetch", "turn", "Waiting request: from its turn to its first token"),
    ("prefetch", "total", "All of them, from sending to the last token"),
)


def print_samples(console: Console, samples: Sequence[Sample]) -> None:
    """One table a part that has samples."""
    for case in _LOAD_TITLES:
        if select(samples, "load", case=case):
            console.print(_load_table(samples, case))
    for part, case, title in _PAIR_TITLES:
        if select(samples, part, case=case):
            console.print(_pair_table(samples, part, case, title))
    if select(samples, "admission"):
        console.print(_admission_table(samples))
    if samples:
        console.print(
            f"median, smallest to largest (p5 to p95 from {PERCENTILES_FROM} values on)",
            style="dim",
            highlight=False,
        )


def number_table(title: str, *columns: str) -> Table:
    """The first column as it is, numbers to the right in the others."""
    made = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    made.columns[0].no_wrap = True
    for column in made.columns[1:]:
        column.justify = "right"
    return made


def _time(spread: Spread | None, alone: bool = False) -> str:
    """`1.23 s 1.10–1.50`, or in ms; alone: the median without its spread."""
    if spread is None:
        return "–"
    values, form, unit = [spread.median, spread.low, spread.high], "{:.2f}", "s"
    if spread.median < _MS_BELOW_S:
        values = [1000 * value for value in values]
        form, unit = "{:.1f}" if values[0] < _SMALL_MS else "{:.0f}", "ms"
    middle, low, high = (form.format(value) for value in values)
    return f"{middle} {unit}" if alone else f"{middle} {unit} [dim]{low}–{high}[/]"


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{spread.median:.3f} [dim]{spread.low:.3f}–{spread.high:.3f}[/]"


def _load_table(samples: Sequence[Sample], case: str) -> Table:
    """One row a size; ratios are of arms of one round, the others show their median alone."""
    table = number_table(
        _LOAD_TITLES[case],
        "× tier",
        "ours",
        "read",
        "copy",
        "two phase",
        "ours / larger alone",
        "ours / two phase",
        "CPU s/GiB",
        "read + copy",
    )
    for size in places(samples, "load", case):
        spreads = [
            spread_of(seconds(select(samples, "load", arm, case, size))) for arm in ARMS["load"]
        ]
        cells = [_time(spreads[0]), *(_time(spread, alone=True) for spread in spreads[1:])]
        for below in (("read", "copy"), ("two_phase",)):
            ratios = round_ratios(samples, "load", "ours", below, case, size)
            cells.append(_ratio(spread_of(ratios)))
        cpu = [
            spread_of(cpu_s_per_gib(select(samples, "load", arm, case, size)))
            for arm in ("ours", "read", "copy")
        ]
        known = [spread.median for spread in cpu if spread is not None]
        sums = (known[0], known[1] + known[2]) if len(known) == len(cpu) else ()
        cells += [f"{value:.2f}" for value in sums] or ["–", "–"]
        table.add_row(f"{size:g}", *cells)
    table.caption_justify = "left"
    if case == "memory":
        table.caption = (
            "two phase: all into the CPU tier, then from there; beyond it in rounds of one tier, "
            "where vLLM's own tiering would find a miss and recompute"
        )
    return table


def _pair_table(samples: Sequence[Sample], part: str, case: str, title: str) -> Table:
    """Ours above what it is compared with, and the ratio of their medians."""
    arms = ARMS[part]
    table = number_table(title, part, "time", "n", "ratio", "loaded tokens")
    ratio = median_ratio(samples, part, arms[0], arms[1], case)
    for number, arm in enumerate(arms):
        chosen = select(samples, part, arm, case)
        spread = spread_of(seconds(chosen))
        share = "–" if ratio is None or number else f"{ratio.value:.3f}"
        table.add_row(arm, _time(spread), str(len(chosen)), share, _loaded(chosen))
    return table


def _admission_table(samples: Sequence[Sample]) -> Table:
    arms = ARMS["admission"]
    table = number_table(
        "A prompt returns: time to first token",
        "pool reads",
        *({"never": "never (recompute)", "always": "always (load)"}.get(arm, arm) for arm in arms),
        "auto / better",
        "tokens auto loads",
        "n",
    )
    never = _time(spread_of(seconds(select(samples, "admission", "never"))))
    for at in places(samples, "admission"):
        auto = select(samples, "admission", "auto", at=at)
        ratio = admission_ratio(samples, at)
        table.add_row(
            throttle_name(at),
            _time(spread_of(seconds(auto))),
            _time(spread_of(seconds(select(samples, "admission", "always", at=at)))),
            never,
            "–" if ratio is None else f"{ratio.value:.3f}",
            _loaded(auto),
            str(len(auto)),
        )
    return table


def _loaded(samples: Sequence[Sample]) -> str:
    """Mean of the tokens loaded a request."""
    known = [one.loaded_tokens for one in samples if one.loaded_tokens is not None]
    return f"{sum(known) / len(known):.0f}" if known else "–"


def print_targets(console: Console, rows: Sequence[Row]) -> None:
    """target | required | measured | n | reached."""
    table = Table("target", "required", "measured", "n", "reached", box=SIMPLE_HEAD)
    table.title, table.title_justify = "Targets: the worst size or throttle decides", "left"
    for row in rows:
        answer = {True: "[green]yes[/]", False: "[red]no[/]", None: "not measured"}[row.reached]
        measured = "–" if row.measured is None else f"{row.measured:.3f}{row.unit}"
        if row.where:
            measured += f" [dim]({row.where})[/]"
        table.add_row(row.target, row.required, measured, str(row.n or "–"), answer)
    console.print(table)


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """What ran, what throttled, and how busy the machine was: a few lines."""
    for name, part in conditions.get("parts", {}).items():
        words = [f"{key.replace('_', ' ')} {part[key]}" for key in _SHOWN if key in part]
        if words:
            console.print(f"{name}: {', '.join(words)}", highlight=False, soft_wrap=True)
    disk = conditions.get("disk", {})
    before = conditions.get("load_average_at_start", ["?"])[0]
    after = conditions.get("load_average_at_end", ["?"])[0]
    console.print(
        f"{disk.get('file_system', '?')} on {disk.get('device', '?')}; load average {before} "
        f"before, {after} after",
        highlight=False,
    )


_SHOWN = ("engine", "throttle", "read_mb_per_s", "prompts", "prompt_tokens", "preemptions")
