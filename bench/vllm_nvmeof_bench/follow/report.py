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
_SCANS = {
    FIRST: "first scan",
    SAME: "scan, nothing changed",
    CHANGED: "scan, some entries changed",
}
_MILLION = 1_000_000


@dataclass(frozen=True)
class Sample:
    """One scan, one write, or one stretch of idleness.

    entries: entries of the table; of `CHANGED`, those that changed. wall_s: of `PUT`, from the
    write of the entry until another process finds it. cpu_s: of the thread, of `IDLE` of the whole
    follower; None: not measured.
    """

    stage: str
    round: int
    entries: int
    wall_s: float
    cpu_s: float | None = None

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


def us_per_change(samples: Samples, entries: int) -> list[float]:
    """By round: CPU µs per changed entry, beyond those of the scan that found no change."""
    above, below = {"stage": CHANGED, "entries": entries}, {"stage": SAME}
    pairs = results.paired(samples, "cpu_s", above, below)
    return [1e6 * (changed - same) / entries for changed, same in pairs]


def _figure(values: Sequence[float], share: float = 0.5) -> Figure | None:
    return Figure(percentile(values, share), len(values)) if values else None


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Medians, but of the delay its P99."""

    def per_million(stage: str) -> Figure | None:
        chosen = [one for one in select(samples, stage=stage) if one.cpu_s is not None]
        return _figure([one.cpu_s * _MILLION / one.entries for one in chosen if one.cpu_s])

    def scaled(found: Figure | None, scale: float) -> Figure | None:
        return None if found is None else Figure(found.value * scale, found.n)

    most = max((one.entries for one in select(samples, stage=CHANGED)), default=0)
    idle = _figure(values_of(samples, "share_percent", stage=IDLE))
    delay = _figure(values_of(samples, "wall_ms", stage=PUT), 0.99)
    return [
        bound("a million entries, none changed, CPU", "≤", 20, scaled(per_million(SAME), 1e3),
              " ms"),
        bound("a changed entry, CPU", "≤", 0.6, _figure(us_per_change(samples, most)), " µs"),
        bound("first scan of a million entries, CPU", "≤", 0.5, per_million(FIRST), " s"),
        bound("a write seen by another server, P99", "≤", 250, delay, " ms"),
        bound("idle, of a core", "≤", 0.5, idle, " %"),
    ]  # fmt: skip


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    settings = conditions.get("settings", {})
    yield f"{machine_in(conditions)}; {disk_in(conditions)}; {load_in(conditions)}"
    yield (
        f"scans of {settings.get('entries', 0):,} entries, in the page cache, on one thread; "
        f"delays and idleness of a follower of {settings.get('engines', '?')} live servers with "
        f"{settings.get('small_entries', 0):,} entries each, which scans every "
        f"{settings.get('follow_ms', '?')} ms"
    )


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    rows = [
        (stage, entries)
        for stage in _SCANS
        for entries in distinct(select(samples, stage=stage), "entries")
    ]

    def middle(row: tuple[str, int], measure: str) -> float | None:
        return results.median_of(samples, measure, stage=row[0], entries=row[1])

    def change(row: tuple[str, int]) -> float | None:
        return results.median(us_per_change(samples, row[1])) if row[0] == CHANGED else None

    columns = [
        Column("", lambda row: _SCANS[row[0]]),
        Column("entries", lambda row: row[1], "{:,}"),
        Column("CPU, ms", lambda row: middle(row, "cpu_ms"), "{:,.1f}"),
        Column("wall, ms", lambda row: middle(row, "wall_ms"), "{:,.1f}"),
        Column("CPU, µs per changed entry", change, "{:.3f}"),
        Column("n", lambda row: len(select(samples, stage=row[0], entries=row[1]))),
    ]
    if rows:
        yield Table("One scan, medians", columns, rows)
    if delays := values_of(samples, "wall_ms", stage=PUT):
        p50, p99 = (percentile(delays, share) for share in (0.5, 0.99))
        yield f"a write is seen after {p50:.0f} ms (p50), {p99:.0f} ms (P99), n = {len(delays)}"
    if shares := values_of(samples, "share_percent", stage=IDLE):
        yield f"idle, the follower takes {percentile(shares, 0.5):.2f} % of a core"


_STYLES = {"cpu_ms": Style(plots.BLUE, label="CPU"), "wall_ms": Style(plots.SKY, label="wall")}


def _plot(path: Path, samples: Samples, conditions: Mapping[str, Any]) -> None:
    """Left: the time of a scan. Right: the delays of writes, in their order."""

    def spread(measure: str, stage: str) -> results.Spread | None:
        return results.spread_of(values_of(samples, measure, stage=stage))

    title = f"Following another server's index: {plots.where_measured(conditions)}"
    with plots.picture(path, title, "AB") as (_, (scans, delays)):
        plots.bars(scans, _STYLES, {words: stage for stage, words in _SCANS.items()}, spread)
        finish(scans, "one scan", True, ylabel="ms")
        found = sorted(values_of(samples, "wall_ms", stage=PUT))
        shares = [100 * (at + 1) / len(found) for at in range(len(found))]
        delays.plot(found, shares, color=plots.BLUE)
        finish(delays, "a write is seen", xlabel="ms", ylabel="% of writes", ylim=(0, 100))


BENCHES = (Benchmark("follow", Sample, _lines, _tables, _plot, goals, columns=150),)
