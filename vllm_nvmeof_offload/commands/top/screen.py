# SPDX-License-Identifier: Apache-2.0
"""The views of `vllm-nvmeof top`: pure functions from readings to tables of any width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vllm_nvmeof_offload.commands.top.reading import COMPARED_TOKENS, PLACES, VERDICTS, Reading
from vllm_nvmeof_offload.metrics import METRICS
from vllm_nvmeof_offload.units import format_bytes, human_seconds

_Part: TypeAlias = Callable[[Reading], RenderableType]

_STEPS = {
    "store gpu": "GPU to CPU tier",
    "store pool": "CPU tier to pool",
    "load pool": "pool to CPU memory",
    "load gpu": "CPU memory to GPU",
}
_VERDICT_STYLES = dict(zip(VERDICTS, ("green", "yellow", "red", "red"), strict=True))
_UNKNOWN = "-"
_BAR_COLUMNS = 16
_TABLE_COLUMNS = 76


def _number(value: float | None, unit: str = "") -> str:
    """Format an amount in the unit of a metric; `-` if it is unknown."""
    if value is None:
        return _UNKNOWN
    if unit.startswith("bytes"):
        return format_bytes(value) + unit.removeprefix("bytes")
    return human_seconds(value) if unit == "seconds" else f"{value:,.{2 * (unit == 'ratio')}f}"


def _rate(amount: dict[str, Any] | None, unit: str = "") -> str:
    per_s = amount["per_s"] if amount else None
    if per_s is None or unit == "bytes":
        return _number(per_s, "bytes/s")
    return f"{per_s:,.1f}"


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


def _used(tier: dict[str, Any]) -> str:
    return _percent(tier["used"] / tier["slots"] if tier["slots"] else None)


def _table(*headings: str, rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Return a table whose columns after the first are numbers. Texts are printed verbatim."""
    made = Table(box=None, pad_edge=False, min_width=_TABLE_COLUMNS, header_style="bold")
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    made.add_row()
    return made


def _tiers(reading: Reading) -> Table:
    def row(name: str, tier: dict[str, Any]) -> Sequence[RenderableType]:
        bar = ProgressBar(tier["slots"] or 1, tier["used"], width=_BAR_COLUMNS)
        chunks = f"{tier['used']:,.0f} of {tier['slots']:,.0f}"
        return PLACES[name], bar, _used(tier), chunks, _number(tier["tokens"])

    rows = (row(*one) for one in reading["tiers"].items())
    return _table("tier", "", "used", "chunks", "room for tokens", rows=rows)


def _tokens(reading: Reading) -> Table:
    rows = (
        (
            *(PLACES[source], _percent(one["share"]), _rate(one)),
            *(_percent(one["share_total"]), _number(one["total"])),
        )
        for source, one in reading["prompt_tokens"].items()
    )
    headings = ("prompt tokens from", "share", "tokens/s", "since start", "tokens")
    return _table(*headings, rows=rows)


def _transfers(reading: Reading) -> Table:
    sizes, counts = (reading["metrics"][f"transfer_{of}"] for of in ("bytes", "operations"))
    rows = (
        (
            *(name, _rate(sizes[key], "bytes"), _rate(counts[key])),
            _number(sizes[key]["total"], "bytes"),
        )
        for key, name in _STEPS.items()
        if key in sizes
    )
    return _table("transfers", "rate", "operations/s", "since start", rows=rows)


def _attention(reading: Reading) -> Text:
    lines = reading["attention"]
    if not lines:
        return Text("Nothing needs attention.", "green")
    return Text("\n".join(["Needs attention (counts since the start):", *lines]), "yellow")


def _targets(reading: Reading) -> Table:
    rows = (
        (
            f"{one['target']} {one['path']}",
            Text(one["verdict"], _VERDICT_STYLES[one["verdict"]]),
            _rate(one["written_bytes"], "bytes"),
            _number(one["write_bytes_per_s"] or None, "bytes/s"),
            _number(one["read_bytes_per_s"] or None, "bytes/s"),
            _number(one["failed_chunks"]),
        )
        for one in reading["targets"]
    )
    headings = ("target", "verdict", "writing", "can write", "can read", "failed")
    return _table(*headings, rows=rows)


def _estimate(reading: Reading) -> Text:
    policy, times = reading["config"].get("admission", "unknown"), reading["estimate"]
    compute, read = (_number(times[f"{way}_s"], "seconds") for way in ("compute", "read"))
    return Text(
        f"Admission: {policy}. {COMPARED_TOKENS:,} tokens at the learned rates: computed in "
        f"{compute}, read in {read}."
    )


def _counts(reading: Reading) -> Table:
    """Return a table of all metrics by their labels' values, without what is 0."""

    def rows() -> Iterable[Sequence[str]]:
        zeros = 0
        for name, amounts in reading["metrics"].items():
            metric = METRICS[name]
            for key, amount in (amounts if metric.labels else {"": amounts}).items():
                counter = amount if isinstance(amount, dict) else None
                if now := counter["total"] if counter else amount:
                    rate = _rate(counter, metric.unit) if counter else ""
                    yield f"{name.replace('_', ' ')} {key}", _number(now, metric.unit), rate
                else:
                    zeros += 1
        yield f"{zeros} others", "0", ""

    return _table("metric", "now or total", "per second", rows=rows())


#: The parts of each view of one server, in the order of the views' keys, from 1.
VIEWS: dict[str, tuple[_Part, ...]] = {
    "summary": (_attention, _tiers, _tokens, _transfers),
    "targets": (_targets,),
    "metrics": (_estimate, _counts),
}


def server(reading: Reading, views: Iterable[str] = VIEWS) -> RenderableType:
    """Return views of one server, with tables side by side where the width allows."""
    lines = [Text(reading["error"], "red")] if "error" in reading else []
    if "metrics" not in reading:
        return Group(*lines)
    seconds, requests = reading["interval_s"], reading["requests"]
    about = (
        *(reading["url"], reading["config"].get("model_name", "")),
        f"{requests['running']:.0f} running, {requests['waiting']:.0f} waiting",
        "no rates yet" if seconds is None else f"rates over {seconds:.1f} s",
    )
    parts = [part(reading) for view in views for part in VIEWS[view]]
    texts = [part for part in parts if isinstance(part, Text)]
    tables = [part for part in parts if isinstance(part, Table)]
    top = Text("  ".join(filter(None, about)), "bold")
    return Group(top, *lines, *texts, "", Columns(tables, padding=(0, 4)))


def servers(readings: Iterable[Reading]) -> Table:
    """Return one row per server."""

    def row(reading: Reading) -> Sequence[RenderableType]:
        name, state = reading["url"].partition("://")[2], reading.get("error") and "no answer"
        if "metrics" not in reading:
            return name, *[_UNKNOWN] * 6, Text("no answer", "red")
        sources, sizes = reading["prompt_tokens"], reading["metrics"]["transfer_bytes"]
        found = [sources[source]["share"] for source in ("cpu", "pool", "shared")]
        state = state or str(len(reading["attention"]))
        return (
            *(name, *map(_used, reading["tiers"].values()), _percent(sources["gpu"]["share"])),
            _percent(None if None in found else sum(found)),
            *(_rate(sizes.get(f"{way} pool"), "bytes") for way in ("load", "store")),
            Text(state, "green" if state == "0" else "red"),
        )

    headings = ("server", "CPU", "pool", "GPU hits", "loaded", "reading", "writing", "attention")
    return _table(*headings, rows=map(row, readings))
