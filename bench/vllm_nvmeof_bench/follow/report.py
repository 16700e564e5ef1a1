# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench follow`: goals, tables, picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import plots, results
from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.plots import Style, finish
from vllm_nvmeof_bench.results import Figure, Goal, bound, distinct, percentile, select, values_of
from vllm_nvmeof_bench.tables import Column, Table, disk_in, load_in, machine_in

FIRST, SAME, CHANGED, PUT, IDLE = "first", "same", "changed", "put", "idle"
SCAN, LOG = "scan", "log"
_WAYS = {SCAN: "scan", LOG: "log"}
_LOOKS = {FIRST: "first look", SAME: "nothing changed", CHANGED: "some entries changed"}
_MILLION = 1_000_000
#: How many regions an idle follower has by default.
_REGIONS = (1, 10, 100)


@dataclass(frozen=True)
class Sample:
    """One look into another server's table or log, one write, or one stretch of idleness.

    entries: entries of the table; of `CHANGED`, those that changed. wall_s: of `PUT`, from the
    write's completion until another process finds the chunk. cpu_s: of the thread, of `IDLE` of
    the whole follower; None: not measured. by: scan of the table, or log. regions: of `IDLE`, with
    so many entries each.
    """

    stage: str
    round: int
    entries: int
    wall_s: float
    cpu_s: float | None = None
    by: str = SCAN
    regions: int = 1

    @property
    def cpu_ms(self) -> float | None:
        return None if self.cpu_s is None else 1000 * self.cpu_s

    @property
    def wall_ms(self) -> float:
        return 1000 * self.wall_s

    @property
    def share_percent(self) -> float | None:
        """Of a core."""
        return None if self.cpu_s is None else 100 * self.cpu_s / self.wall_s


Samples = Sequence[Sample]


def us_per_change(samples: Samples, by: str, entries: int) -> list[float]:
    """By round: CPU µs per changed entry, beyond those of the look that found no change."""
    above = {"stage": CHANGED, "by": by, "entries": entries}
    pairs = results.paired(samples, "cpu_s", above, {"stage": SAME, "by": by})
    return [1e6 * (changed - same) / entries for changed, same in pairs]


def _figure(values: Sequence[float], share: float = 0.5) -> Figure | None:
    return Figure(percentile(values, share), len(values)) if values else None


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Medians, but of delays their P99."""

    def per_million(stage: str, by: str, scale: float = 1.0) -> Figure | None:
        chosen = select(samples, stage=stage, by=by)
        return _figure([scale * one.cpu_s * _MILLION / one.entries for one in chosen if one.cpu_s])

    def delay(by: str) -> Figure | None:
        return _figure(values_of(samples, "wall_ms", stage=PUT, by=by), 0.99)

    most = max((one.entries for one in select(samples, stage=CHANGED, by=LOG)), default=0)
    pace = conditions.get("settings", {}).get("follow_ms", 100.0)
    idle = {
        regions: _figure(values_of(samples, "share_percent", stage=IDLE, regions=regions))
        for regions in distinct(select(samples, stage=IDLE), "regions") or _REGIONS
    }
    return [
        bound("a million entries scanned, none changed, CPU", "≤", 20,
              per_million(SAME, SCAN, 1e3), " ms"),
        bound("a record of the log, CPU", "≤", 0.6,
              _figure(us_per_change(samples, LOG, most)), " µs"),
        bound("first look at a million entries, CPU", "≤", 0.5, per_million(FIRST, LOG), " s"),
        bound("a write seen by log, P99", "≤", 250, delay(LOG), " ms"),
        bound("a write seen by scans, P99", "≤", 100 + pace, delay(SCAN), " ms"),
        *(bound(f"idle, regions: {regions}, of a core", "≤", 0.5, found, " %")
          for regions, found in idle.items()),
    ]  # fmt: skip


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    settings = conditions.get("settings", {})
    yield f"{machine_in(conditions)}; {disk_in(conditions)}; {load_in(conditions)}"
    yield (
        f"looks into a table and a log of {settings.get('entries', 0):,} entries, in the page "
        f"cache, on one thread; delays and idleness of a follower that looks every "
        f"{settings.get('follow_ms', '?')} ms; delays of two servers that store "
        f"{settings.get('puts_per_s', '?')} chunks per second each, from the write's completion on"
    )


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    rows = [
        (by, stage, entries)
        for by in _WAYS
        for stage in _LOOKS
        for entries in distinct(select(samples, stage=stage, by=by), "entries")
    ]

    def middle(row: tuple[str, str, int], measure: str) -> float | None:
        by, stage, entries = row
        return results.median_of(samples, measure, stage=stage, by=by, entries=entries)

    def change(row: tuple[str, str, int]) -> float | None:
        by, stage, entries = row
        return results.median(us_per_change(samples, by, entries)) if stage == CHANGED else None

    columns = [
        Column("by", lambda row: _WAYS[row[0]]),
        Column("", lambda row: _LOOKS[row[1]]),
        Column("entries", lambda row: row[2], "{:,}"),
        Column("CPU, ms", lambda row: middle(row, "cpu_ms"), "{:,.2f}"),
        Column("wall, ms", lambda row: middle(row, "wall_ms"), "{:,.2f}"),
        Column("CPU, µs per changed entry", change, "{:.3f}"),
        Column("n", lambda row: len(select(samples, by=row[0], stage=row[1], entries=row[2]))),
    ]
    if rows:
        yield Table("One look, medians", columns, rows)
    for by, words in _WAYS.items():
        if delays := values_of(samples, "wall_ms", stage=PUT, by=by):
            p50, p99 = (percentile(delays, share) for share in (0.5, 0.99))
            shown = f"{p50:.0f} ms (p50), {p99:.0f} ms (P99), n = {len(delays)}"
            yield f"a write is seen by {words} after {shown}"
    for one in select(samples, stage=IDLE):
        yield (
            f"idle, with {one.regions} × {one.entries:,} entries, the follower takes "
            f"{one.share_percent:.2f} % of a core"
        )


_STYLES = {SCAN: Style(plots.BLUE, label="by scan"), LOG: Style(plots.SKY, label="by log")}


def _plot(path: Path, samples: Samples, conditions: Mapping[str, Any]) -> None:
    """Left: the CPU time of a look. Right: the delays of writes, in their order."""

    def spread(by: str, stage: str) -> results.Spread | None:
        return results.spread_of(values_of(samples, "cpu_ms", stage=stage, by=by))

    title = f"Following another server's index: {plots.where_measured(conditions)}"
    with plots.picture(path, title, "AB") as (_, (looks, delays)):
        plots.bars(looks, _STYLES, {words: stage for stage, words in _LOOKS.items()}, spread)
        finish(looks, "CPU time of one look", True, ylabel="ms")
        for by, style in _STYLES.items():
            found = sorted(values_of(samples, "wall_ms", stage=PUT, by=by))
            shares = [100 * (at + 1) / len(found) for at in range(len(found))]
            delays.plot(found, shares, color=style.color, label=style.label)
        finish(delays, "a write is seen", True, xlabel="ms", ylabel="% of writes", ylim=(0, 100))


BENCHES = (Benchmark("follow", Sample, _lines, _tables, _plot, goals, columns=150),)
