# SPDX-License-Identifier: Apache-2.0
"""The report of simulated clusters: tables, and a comparison with DualPath's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench.report import Column, Conditions, Report, Table, by_arm
from vllm_nvmeof_bench.results import distinct, median, select

from research.cluster.paper import Row, balance_rows, capacity, gains, goals, rows

PARTS = ("offline", "agents", "online", "recorded", "open", "enclosure")


@dataclass(frozen=True)
class Sample:
    """The conditions and results of one run."""

    part: str
    cluster: str
    arm: str  # choice of links for reads
    agents: int
    rate: float = 0.0  # agents that arrive per second during `window_s`; 0: `agents` start together
    window_s: float = 0.0
    knob: str = ""  # other differences
    seed: int = 0  # of agents and arrivals; 0: the first seed
    turns: int = 0
    end_s: float = 0.0  # end of the last answer
    ttft_mean_s: float = 0.0
    ttft_p50_s: float = 0.0
    ttft_p95_s: float = 0.0
    ttft_p99_s: float = 0.0
    ttft_max_s: float = 0.0
    tpot_s: float = 0.0
    drift: float = 0.0  # mean TTFT of the second half of the counted period / of the first half
    balance: float = 0.0  # maximum / mean of the links' bytes, by window
    read_bytes: float = 0.0
    hit: float = 0.0  # share of prompt tokens found
    recomputed: int = 0  # tokens found but recomputed
    kept: bool = False  # whether mean TTFT and mean time per token met the objectives


def _lines(conditions: Conditions) -> Iterator[str]:
    agents, settings = conditions["agents"], conditions["settings"]
    drawn = "drawn from " if settings["added_tokens"] and settings["answer_tokens"] else ""
    yield (
        f"agents {drawn}{conditions['trace']}: {agents['turns']:.0f} turns, context "
        f"{agents['context_tokens']:,.0f} tokens, of which {100 * agents['hit']:.1f} % are found, "
        f"{agents['new_tokens']:,.0f} new, {agents['answer_tokens']:,.0f} answered; seeds "
        f"{', '.join(map(str, settings['seeds']))}"
    )
    yield str(conditions["simulated"])


def _tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table | str]:
    offline = select(samples, part="offline")
    if offline:
        yield Table("All agents at once", _gains(offline), distinct(offline, "cluster"))
    if offline or select(samples, part="online"):
        yield _published("Compared with DualPath", rows(samples))
    if offline:
        yield _published("Maximum / mean of the links' bytes", balance_rows(samples))
    if many := select(samples, part="agents"):
        columns = [
            Column("cluster", lambda row: row[0]),
            Column("agents", lambda row: str(row[1])),
            *_jct_columns(many, lambda one: (one.cluster, one.agents)),
        ]
        pairs = list(dict.fromkeys((one.cluster, one.agents) for one in many))
        yield Table("JCT in seconds by number of agents", columns, pairs)
    yield from _online_tables(samples, conditions)
    for part, title in _PARTS.items():
        if found := select(samples, part=part):
            yield Table(title, _columns(part), _groups(found))


def _gains(offline: Sequence[Sample]) -> list[Column]:
    def ratio(arm: str) -> Column:
        return Column(f"{arm}, ×", lambda cluster: median(gains(offline, cluster, arm)), "{:.2f}")

    jct = _jct_columns(offline, lambda one: one.cluster)
    return [Column("cluster", str), *jct, *map(ratio, ("alternate", "request", "chunk", "none"))]


def _jct_columns(samples: Sequence[Sample], key: Any) -> list[Column]:
    """Return a column of JCT per arm; values are medians over seeds."""
    found: dict[Any, list[float]] = {}
    for one in samples:
        found.setdefault((key(one), one.arm), []).append(one.end_s)
    return [
        Column(
            f"{arm}, s",
            lambda row, arm=arm: median(found.get((row, arm), ())),
            "{:,.1f}",
        )
        for arm in distinct(samples, "arm")
    ]


def _published(title: str, found: Sequence[Row]) -> Table:
    columns = [
        Column("row", lambda row: row.name),
        Column("published", lambda row: row.form.format(row.published)),
        Column("simulated", lambda row: row.ours and row.form.format(row.ours)),
        Column("from", lambda row: row.form.format(min(row.values)) if row.values else None),
        Column("to", lambda row: row.form.format(max(row.values)) if row.values else None),
        Column("seeds", lambda row: len(row.values) or None),
        Column("off", lambda row: None if row.off is None else 100 * row.off, "{:+.1f} %"),
    ]
    return Table(title, columns, found)


def _online_tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table]:
    runs = select(samples, part="online")
    if not runs:
        return
    keys = list(dict.fromkeys((one.cluster, one.arm, one.window_s) for one in runs))
    best = [(key, capacity(samples, *key)) for key in keys]
    own = {(key[0], key[2]): one for key, one in best if key[1] == "own"}

    def ratio(row: Any) -> float | None:
        (cluster, _, window_s), one = row
        base = own.get((cluster, window_s))
        return one.rate / base.rate if one and base else None

    columns = [
        Column("cluster", lambda row: row[0][0]),
        Column("arm", lambda row: row[0][1], left=True),
        Column("window, s", lambda row: row[0][2], "{:,.0f}"),
        Column("agents/s", lambda row: row[1] and row[1].rate, "{:.3f}"),
        Column("× own", ratio, "{:.2f}"),
        Column("TTFT, s", lambda row: row[1] and row[1].ttft_mean_s, "{:.3f}"),
        Column("second half / first", lambda row: row[1] and row[1].drift, "{:.2f}"),
    ]
    settings = conditions["settings"]
    title = (
        f"Most agents per second with mean TTFT ≤ {settings['ttft_s']:g} s and "
        f"{1000 * settings['tpot_s']:g} ms per token"
    )
    yield Table(title, columns, best)
    yield from _over_rates(runs)


def _over_rates(runs: Sequence[Sample]) -> Iterator[Table]:
    """Yield a table of mean TTFT by agents per second for each cluster, in the longest window."""
    longest = max(one.window_s for one in runs)
    for cluster in distinct(runs, "cluster"):
        here = select(runs, cluster=cluster, window_s=longest)

        def ttft(arm: str, rate: float, here: Sequence[Sample] = here) -> float | None:
            return median(one.ttft_mean_s for one in select(here, arm=arm, rate=rate))

        columns = [
            Column("agents/s", "{:.3g}".format),
            *by_arm(distinct(here, "arm"), ttft, "{:.3f}"),
        ]
        rates = sorted(set(distinct(here, "rate")))
        yield Table(f"{cluster}: mean TTFT in seconds", columns, rates)


_PARTS = {
    "recorded": "The sessions as recorded",
    "split": "TTFT with links busy for a third to a half of the time",
    "routers": "Routers at 85 % of the rate that links and compute can sustain",
    "admission": "Load or compute",
    "sharing": "Shared and separate pools, by size",
    "lost": "A link lost for a minute",
    "herd": "Eight prefill engines see the same four helpers",
    "enclosure": "24 drives for 96 GPUs and 384 sessions: in an enclosure, and in the nodes",
}
_ONLINE = ("split", "routers", "lost")


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each row of a table; within a row only the seed differs."""
    rows: dict[tuple[str, str, str], list[Sample]] = {}
    for one in samples:
        rows.setdefault((one.cluster, one.arm, one.knob), []).append(one)
    return list(rows.values())


def _columns(part: str) -> list[Column]:
    """Return the columns of a part; values are medians over seeds."""

    def column(title: str, form: str, value: Callable[[Sample], float]) -> Column:
        return Column(title, lambda group: median(map(value, group)), form)

    columns = [
        Column("cluster", lambda group: group[0].cluster),
        Column("arm", lambda group: group[0].arm, left=True),
    ]
    if part not in ("recorded", "split"):
        columns.append(Column("", lambda group: group[0].knob, left=True))
    columns.append(Column("seeds", len))
    if part not in _ONLINE:
        columns.append(column("JCT, s", "{:,.1f}", lambda one: one.end_s))
    columns += [
        column("TTFT mean, ms", "{:,.0f}", lambda one: 1000 * one.ttft_mean_s),
        column("p50", "{:,.0f}", lambda one: 1000 * one.ttft_p50_s),
        column("p95", "{:,.0f}", lambda one: 1000 * one.ttft_p95_s),
        column("p99", "{:,.0f}", lambda one: 1000 * one.ttft_p99_s),
        column("longest", "{:,.0f}", lambda one: 1000 * one.ttft_max_s),
        column("found", "{:.1f} %", lambda one: 100 * one.hit),
        column("read, GB", "{:,.0f}", lambda one: one.read_bytes / 1e9),
    ]
    if part in ("admission", "lost", "enclosure"):
        columns.append(column("recomputed, k", "{:,.0f}", lambda one: one.recomputed / 1000))
    return [*columns, column("balance", "{:.2f}", lambda one: one.balance)]


REPORT = Report(
    "cluster",
    "A simulated cluster",
    Sample,
    _tables,
    lines=_lines,
    goals=goals,
    goals_title="Findings of the prototype and of DualPath",
    columns=190,
)
