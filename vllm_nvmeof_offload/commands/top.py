# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-nvmeof top`, which reads only servers' metrics.

A *reading* is a server's work between two scrapes of its metrics, in the JSON form that `top`
prints. A counter is `{"total": …, "per_s": …}`, with `per_s` None after the first scrape; a gauge
is a number. Metrics with labels are keyed by the labels' values, separated by spaces.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vllm_nvmeof_offload.commands import FAILED, print_json
from vllm_nvmeof_offload.commands.scrape import Metrics, ScrapeError, scrape_ours
from vllm_nvmeof_offload.metrics import METRICS, PREFIX, Metric
from vllm_nvmeof_offload.protocol import Verdict
from vllm_nvmeof_offload.units import format_bytes, human_seconds, printable

Reading: TypeAlias = dict[str, Any]

#: The sources of prompt tokens, by name.
PLACES = {
    "gpu": "GPU cache",
    "cpu": "CPU tier",
    "pool": "pool",
    "shared": "other engines' pools",
    "computed": "computed",
}
#: The number of tokens for which the times to read and to compute are compared.
COMPARED_TOKENS = 1000
_TIERS = {"cpu": "cache", "pool": "pool"}
#: Gauges in these units are summed over a server's engines; for others, the largest counts.
_ADDED_UNITS = ("chunks", "slots", "tokens", "operations", "requests", "parts")
#: Counters that should stay 0, and what a nonzero count means.
_HOLES = (
    ("unwritten_chunks", "evicted", "chunks evicted unwritten: later chunks are not found"),
    ("unstored_chunks", "no_room", "chunks not stored: the CPU tier was full"),
    ("failed_chunks", "", "failed operations on chunks"),
    ("peer_events", "rest", "pauses of peers"),
)


def growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def read(url: str, before: Metrics | None, now: Metrics, seconds: float) -> Reading:
    """Return a reading of the `seconds` since `before` or, if that is None, one without rates."""
    amounts = {
        name: _measured(metric, before, now, seconds)
        for name, metric in METRICS.items()
        if not name.endswith("_info")
    }
    config = next((labels for labels, _ in now.samples(f"{PREFIX}config_info")), {})
    found: Reading = {
        "url": url,
        "interval_s": seconds if before else None,
        "config": config,
        "requests": {
            state: now.value(f"vllm:num_requests_{state}") for state in ("running", "waiting")
        },
        "tiers": {
            tier: {
                "slots": amounts["slots"].get(kind, 0),
                "used": amounts["slots_used"].get(kind, 0),
                "tokens": amounts["capacity_tokens"].get(tier, 0),
            }
            for tier, kind in _TIERS.items()
        },
        "prompt_tokens": _prompt_tokens(before, now, seconds),
        "targets": list(_targets(now, amounts)),
        "estimate": _estimate(amounts),
        "metrics": amounts,
    }
    return {**found, "attention": list(_attention(found))}


def _amounts(metric: Metric, found: Metrics) -> dict[str, float]:
    counted = metric.kind == "counter"
    by_key: dict[str, list[float]] = defaultdict(list)
    for labels, value in found.samples(metric.name + "_total" * counted):
        by_key[" ".join(labels.get(label.name, "") for label in metric.labels)].append(value)
    joined = sum if counted or metric.unit in _ADDED_UNITS else max
    return {key: joined(values) for key, values in by_key.items()}


def _measured(metric: Metric, before: Metrics | None, now: Metrics, seconds: float) -> Any:
    amounts: dict[str, Any] = dict(_amounts(metric, now))
    if metric.kind == "counter":
        first = _amounts(metric, before) if before else {}
        for key, total in amounts.items():
            per_s = growth(first.get(key, 0), total) / seconds if before else None
            amounts[key] = {"total": total, "per_s": per_s}
    return amounts if metric.labels else amounts.get("")


def _prompt_tokens(before: Metrics | None, now: Metrics, seconds: float) -> dict[str, Any]:
    loaded = f"{PREFIX}loaded_tokens_total"
    counters: dict[str, tuple[str, dict[str, str]]] = {
        "gpu": ("vllm:prefix_cache_hits_total", {}),
        **{source: (loaded, {"source": source}) for source in ("cpu", "pool", "shared")},
        "computed": ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    }
    found: dict[str, Any] = {}
    for source, (name, labels) in counters.items():
        total = now.value(name, **labels) if now.has(name) else None
        recent = None
        if before and total is not None:
            recent = growth(before.value(name, **labels), total)
        per_s = None if recent is None else recent / seconds
        found[source] = {"total": total, "per_s": per_s, "share": recent, "share_total": total}
    for share in ("share", "share_total"):
        amounts = [one[share] for one in found.values()]
        whole = 0 if None in amounts else sum(amounts)
        for one in found.values():
            one[share] = one[share] / whole if whole else None
    return found


def _targets(now: Metrics, amounts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    paths = {labels["target"]: labels["path"] for labels, _ in now.samples(f"{PREFIX}target_info")}
    for target, verdict in amounts["target_verdict"].items():
        failed = (v["total"] for k, v in amounts["failed_chunks"].items() if k.split()[2] == target)
        yield {
            "target": target,
            "path": paths.get(target, ""),
            "verdict": str(Verdict(int(verdict))),
            "written_bytes": amounts["target_written_bytes"].get(target),
            "read_bytes_per_s": amounts["target_bytes_per_second"].get(f"{target} load"),
            "write_bytes_per_s": amounts["target_bytes_per_second"].get(f"{target} store"),
            "failed_chunks": sum(failed),
        }


def _estimate(amounts: dict[str, Any]) -> dict[str, float | None]:
    """Return the seconds needed to compute and to read `COMPARED_TOKENS`; None if unknown. The time
    to read includes the learned slowness, but no queueing."""
    slots, tokens = amounts["slots"].get("pool"), amounts["capacity_tokens"].get("pool")
    prefill, rate = amounts["prefill_tokens_per_second"], amounts["pool_read_bytes_per_second"]
    read_s = None
    if slots and tokens and rate:
        token_bytes = amounts["slot_bytes"] * amounts["slot_fill"] * slots / tokens
        read_s = COMPARED_TOKENS * token_bytes / rate * (amounts["load_slowness"] or 1)
    return {"compute_s": COMPARED_TOKENS / prefill if prefill else None, "read_s": read_s}


def _attention(found: Reading) -> Iterator[str]:
    for one in found["targets"]:
        if one["verdict"] != str(Verdict.OK):
            yield f"target {one['target']} ({one['path']}) is {one['verdict']}"
    amounts = found["metrics"]
    for name, key, says in _HOLES:
        counts = amounts[name].items()
        if total := sum(one["total"] for have, one in counts if key in ("", have)):
            yield f"{total:,.0f} {says}"
    if suspended := amounts["stores_suspended"]:
        yield f"KV of {suspended:,.0f} running requests is not stored: weights may have changed"
    if slower := [part for part, count in amounts["fallbacks"].items() if count]:
        yield f"slower alternatives are in use for {', '.join(slower)}"


# -- views: pure functions from readings to tables of any width ----------------------------

_Part: TypeAlias = Callable[[Reading], RenderableType]

_STEPS = {
    "store gpu": "GPU to CPU tier",
    "store pool": "CPU tier to pool",
    "load pool": "pool to CPU memory",
    "load gpu": "CPU memory to GPU",
}
_VERDICT_STYLES = dict(zip(map(str, Verdict), ("green", "yellow", "red", "red"), strict=True))
_UNKNOWN = "-"
_BAR_COLUMNS = 16
_TABLE_COLUMNS = 76


def _number(value: float | None, unit: str = "") -> str:
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
    """Return a table with numbers in all columns but the first. Texts are printed verbatim."""
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


def _attention_part(reading: Reading) -> Text:
    lines = reading["attention"]
    if not lines:
        return Text("Nothing needs attention.", "green")
    return Text("\n".join(["Needs attention (counts since the start):", *lines]), "yellow")


def _targets_part(reading: Reading) -> Table:
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


def _estimate_part(reading: Reading) -> Text:
    policy, times = reading["config"].get("admission", "unknown"), reading["estimate"]
    compute, read = (_number(times[f"{way}_s"], "seconds") for way in ("compute", "read"))
    return Text(
        f"Admission: {policy}. {COMPARED_TOKENS:,} tokens at the learned rates: computed in "
        f"{compute}, read in {read}."
    )


def _counts(reading: Reading) -> Table:
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
    "summary": (_attention_part, _tiers, _tokens, _transfers),
    "targets": (_targets_part,),
    "metrics": (_estimate_part, _counts),
}


def server(reading: Reading, views: Iterable[str] = VIEWS) -> RenderableType:
    """Return views of one server, with tables side by side if the terminal is wide enough."""
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


# -- the loop: read several servers, draw, and apply keys -----------------------------------

_REDRAW_S = 0.5


class Watched:
    """A server that is read repeatedly. While the server does not answer, `reading` keeps the last
    values and has an `error`. Each update replaces `reading` as a whole."""

    def __init__(self, url: str) -> None:
        self.reading: Reading = {"url": url}
        self._before: tuple[float, Metrics] | None = None

    def update(self) -> Reading:
        url = str(self.reading["url"])
        try:
            now, at_s = scrape_ours(url), time.monotonic()
            then_s, before = self._before or (at_s, None)
            self.reading = read(url, before, now, at_s - then_s)
            self._before = at_s, now
        except ScrapeError as error:
            self.reading = {**self.reading, "error": printable(str(error))}
        except (LookupError, TypeError, ValueError) as error:  # another version's metrics
            why = printable(f"{url}: metrics of another version of this package ({error!r})")
            self.reading = {**self.reading, "error": why}
        return self.reading

    def follow(self, interval_s: float) -> None:
        while True:
            time.sleep(interval_s)
            self.update()


def run(urls: Sequence[str], interval_s: float, once: bool, as_json: bool) -> int:
    """Show servers until q is pressed, or print one reading of each; return the exit code. Raises
    ScrapeError if no server answers with this package's metrics."""
    watched = [Watched(url) for url in urls]
    first = [one.update() for one in watched]
    if all("error" in reading for reading in first):
        raise ScrapeError("\n".join(reading["error"] for reading in first))
    console = Console()
    if not (once or as_json) and console.is_terminal:
        for one in watched:
            threading.Thread(target=one.follow, args=(interval_s,), daemon=True).start()
        _live(console, watched)
        return 0
    time.sleep(interval_s)
    readings = [one.update() for one in watched]
    if as_json:
        print_json(readings)
    else:
        overview = [servers(readings)] if len(readings) > 1 else []
        console.print(*overview, *map(server, readings), sep="\n")
    return FAILED if any("error" in reading for reading in readings) else 0


def _live(console: Console, watched: Sequence[Watched]) -> None:
    views = {str(number): name for number, name in enumerate(VIEWS, 1)}
    if len(watched) > 1:
        views = {"0": "servers", **views, "n": "next"}
    help_line = Text(
        "  ".join(f"{key} {does}" for key, does in {**views, "q": "quit"}.items()), "dim"
    )
    view, number = next(iter(views)), 0
    with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            readings = [one.reading for one in watched]
            shown: RenderableType = servers(readings)
            if view != "0":
                shown = server(readings[number], [views[view]])
            live.update(Group(help_line, shown), refresh=True)
            key = wait(_REDRAW_S)
            if key == "q":
                return
            if key == "n":
                number = (number + 1) % len(watched)
            elif key in views:
                view = key


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key; it returns "" after a timeout, "q" at end of input."""
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor) if sys.stdin.isatty() else None

    def wait(seconds: float) -> str:
        # Do not read a file or pipe: the end of the file would end the loop.
        if not select.select([descriptor] if saved else [], [], [], seconds)[0]:
            return ""
        return os.read(descriptor, 1).decode(errors="replace") or "q"

    try:
        if saved:
            tty.setcbreak(descriptor)
        yield wait
    finally:
        if saved:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
