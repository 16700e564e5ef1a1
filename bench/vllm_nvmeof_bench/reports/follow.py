# SPDX-License-Identifier: Apache-2.0
"""The report of `bench hotpath follow`: goals and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table, by, counts, medians, tails
from vllm_nvmeof_bench.results import Figure, Goal, bound, distinct, percentile, select, values_of

FIRST, SAME, CHANGED, PUT, IDLE = "first", "same", "changed", "put", "idle"
SCAN, LOG = "scan", "log"
_LOOKS = {FIRST: "first look", SAME: "nothing changed", CHANGED: "some entries changed"}
_MILLION = 1_000_000
#: The default numbers of regions in the directory of an idle follower.
_REGIONS = (1, 10, 100)


@dataclass(frozen=True)
class Sample:
    """One scan of another server's table or log, one write, or one period of idling.

    entries: entries in the table; for `CHANGED`, entries that changed; for `IDLE`, entries per
    region. wall_s: elapsed time; for `PUT`, from the write's completion until another process finds
    the chunk. cpu_s: CPU time of the thread, or of the whole follower for `IDLE`; None: not
    measured. by: how changes are found, `SCAN` or `LOG`. regions: only for `IDLE`.
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
        """The CPU time as a percentage of one core's."""
        return None if self.cpu_s is None else 100 * self.cpu_s / self.wall_s


Samples = Sequence[Sample]


def us_per_change(samples: Samples, by: str, entries: int) -> list[float]:
    """Return, per round, the CPU µs per changed entry, less the cost of a scan without changes."""
    above = {"stage": CHANGED, "by": by, "entries": entries}
    pairs = results.paired(samples, "cpu_s", above, {"stage": SAME, "by": by})
    return [1e6 * (changed - same) / entries for changed, same in pairs]


def _figure(values: Sequence[float], share: float = 0.5) -> Figure | None:
    return Figure(percentile(values, share), len(values)) if values else None


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals; they apply to medians, except that those for delays apply to P99."""

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


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    rows = [
        {"by": by, "stage": stage, "entries": entries}
        for by in (SCAN, LOG)
        for stage in _LOOKS
        for entries in distinct(select(samples, stage=stage, by=by), "entries")
    ]

    def change(row: dict[str, Any]) -> float | None:
        changed = row["stage"] == CHANGED
        return (
            results.median(us_per_change(samples, row["by"], row["entries"])) if changed else None
        )

    columns = [
        by("by"),
        by("stage", "", lambda stage: _LOOKS[stage]),
        by("entries", show="{:,}".format),
        medians(samples, "CPU, ms", "cpu_ms", "{:,.2f}", drawn=True),
        medians(samples, "wall, ms", "wall_ms", "{:,.2f}", drawn=True),
        Column("CPU, µs per changed entry", change, "{:.3f}"),
        counts(samples),
    ]
    yield Table("One look, medians", columns, rows, unit="ms")
    puts = [{"by": by, "stage": PUT} for by in (SCAN, LOG) if select(samples, stage=PUT, by=by)]
    columns = [
        by("by"),
        tails(samples, "p50, ms", "wall_ms", 0.5),
        tails(samples, "P99, ms", "wall_ms", 0.99),
        counts(samples),
    ]
    yield Table("A write is seen", columns, puts)
    idle = [
        {"stage": IDLE, "regions": one.regions, "entries": one.entries}
        for one in select(samples, stage=IDLE)
    ]
    columns = [
        by("regions"),
        by("entries", show="{:,}".format),
        medians(samples, "follower, % of a core", "share_percent", "{:.2f}"),
    ]
    yield Table("Idle regions of so many entries each", columns, idle)


REPORTS = (
    Report(
        "follow",
        "The cost and the delay of following another server's index",
        Sample,
        _tables,
        about=(
            "scans of a table and a log with {entries:,} entries, in the page cache, on one "
            "thread; delays and idle cost of a follower that scans every {follow_ms} ms; delays, "
            "from the write's completion, of two servers that each store {puts_per_s} chunks per "
            "second"
        ),
        goals=goals,
    ),
)
