# SPDX-License-Identifier: Apache-2.0
"""The `bench peers` report: loads over both links, relative to one link and to their sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table, by, medians
from vllm_nvmeof_bench.results import (
    MB,
    METHOD,
    BenchError,
    Figure,
    Goal,
    Paired,
    bound,
    distinct,
    select,
    values_of,
    worst,
)

#: The rates in measurements of idle servers, whose links are unlimited.
NO_LINKS = "0:0"
LOAD, IDLE = "load", "idle"
WITHOUT, ABSENT, BOTH, LANDING = "without", "absent", "both", "landing"
ARMS = {
    WITHOUT: "own link, no peer",
    ABSENT: "own link, peer absent",
    BOTH: "both links",
    LANDING: "both links, every other chunk cached",
}
MESSAGES = "messages"
BOTH_MIN, SUM_MIN, ABSENT_MIN, IDLE_MAX = 1.9, 0.93, 0.98, 0.5


def link_rates(rates: str) -> tuple[float, float]:
    """Parse rates such as `400:400`: MB/s of the server's own link and of the peer's. Raise
    BenchError if the text is malformed."""
    try:
        own, peer = map(float, rates.split(":"))
    except ValueError:
        raise BenchError(f"{rates!r} is not a pair of rates such as 400:400") from None
    return own, peer


@dataclass(frozen=True)
class Sample:
    """One load of one arm, or one idle period. rates: see `link_rates`. size_bytes: payload of the
    load. pulled_bytes: payload received from the peer. cpu_s, helper_cpu_s: CPU time of the loading
    process, and of the peer."""

    stage: str
    rates: str
    transport: str
    arm: str
    round: int
    seconds: float
    size_bytes: int
    pulled_bytes: int
    cpu_s: float
    helper_cpu_s: float

    @property
    def mb_per_s(self) -> float:
        return self.size_bytes / MB / self.seconds

    @property
    def of_sum(self) -> float:
        """The load's rate as a share of both links' total rate."""
        return self.mb_per_s / sum(link_rates(self.rates))

    @property
    def pulled_share(self) -> float:
        return self.pulled_bytes / self.size_bytes

    @property
    def cpu_ms_per_gb(self) -> float:
        return 1e12 * self.cpu_s / self.size_bytes

    @property
    def helper_ms_per_gb(self) -> float | None:
        """The peer's CPU time in ms per GB that it read for the loading server."""
        return 1e12 * self.helper_cpu_s / self.pulled_bytes if self.pulled_bytes else None

    @property
    def idle_percent(self) -> float:
        """The CPU time of the busier process as a percentage of one core."""
        return 100 * max(self.cpu_s, self.helper_cpu_s) / self.seconds


Samples = Sequence[Sample]
Place = tuple[str, str]  # rates and transport


def places_of(samples: Samples) -> list[Place]:
    loads = select(samples, stage=LOAD)
    return list(dict.fromkeys((one.rates, one.transport) for one in loads))


def ratio(samples: Samples, place: Place, arm: str) -> Paired | None:
    """Return the ratio of the rate of `arm` to that without a peer, paired by round."""
    where = {"stage": LOAD, "rates": place[0], "transport": place[1]}
    above, below = {**where, "arm": arm}, {**where, "arm": WITHOUT}
    pairs = results.paired(samples, "mb_per_s", above, below)
    return results.median_ratio([a / b for a, b in pairs]) if pairs else None


def _is_equal(rates: str) -> bool:
    own, peer = link_rates(rates)
    return own == peer


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals, each for the worst combination of rates and transport."""
    places = places_of(samples)

    def worst_ratio(arm: str, chosen: Sequence[Place]) -> Figure | None:
        found = {place: ratio(samples, place, arm) for place in chosen}
        return worst(
            Figure(one.middle, one.n, " ".join(place)) if one else None
            for place, one in found.items()
        )

    def of_sum(place: Place) -> Figure | None:
        where = {"stage": LOAD, "rates": place[0], "transport": place[1], "arm": BOTH}
        values = values_of(samples, "of_sum", **where)
        middle = results.median(values)
        return None if middle is None else Figure(middle, len(values), " ".join(place))

    equal = [place for place in places if _is_equal(place[0])]
    unequal = [place for place in places if not _is_equal(place[0])]
    idle = values_of(samples, "idle_percent", stage=IDLE)
    return [
        bound("equal links: both / one", "≥", BOTH_MIN, worst_ratio(BOTH, equal)),
        bound("equal links: both, every other chunk cached / one", "≥", BOTH_MIN,
              worst_ratio(LANDING, [one for one in equal if ratio(samples, one, LANDING)])),
        bound("unequal links: both / the sum of their rates", "≥", SUM_MIN,
              worst(map(of_sum, unequal))),
        bound("an absent peer / no peer", "≥", ABSENT_MIN, worst_ratio(ABSENT, places)),
        bound("idle, of a core", "≤", IDLE_MAX,
              Figure(max(idle), len(idle)) if idle else None, " %"),
    ]  # fmt: skip


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    settings = conditions.get("settings", {})
    size = results.size_name(settings.get("chunk_bytes", 0))
    yield (
        f"loads of {settings.get('chunks', '?')} chunks of {size} by two processes on one machine; "
        "the reads of each process share a link of the given rate, which simulates the bandwidth "
        "of an NVMe-oF target, not a network's latency; the peer sends chunks in messages over TCP"
    )


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    loads = select(samples, stage=LOAD)
    rows = [
        {"rates": rates, "transport": transport, "arm": arm}
        for rates, transport in places_of(samples)
        for arm in ARMS
        if select(loads, rates=rates, transport=transport, arm=arm)
    ]

    def over_alone(row: dict[str, str]) -> Paired | None:
        """Return the ratio of the row's arm to a load without a peer."""
        place = row["rates"], row["transport"]
        return None if row["arm"] == WITHOUT else ratio(samples, place, row["arm"])

    columns = [
        by("rates", "links, MB/s"),
        by("transport", "chunks come by"),
        by("arm", "", lambda arm: ARMS[arm]),
        medians(loads, "MB/s", "mb_per_s"),
        Column("/ no peer", over_alone, "{:.3f}"),
        medians(loads, "/ sum", "of_sum", "{:.3f}"),
        medians(loads, "by the peer", "pulled_share", "{:.0%}"),
        medians(loads, "CPU ms/GB", "cpu_ms_per_gb"),
        medians(loads, "peer's", "helper_ms_per_gb"),
    ]
    title = f"One load, medians over {len(distinct(loads, 'round'))} rounds"
    yield Table(title, columns, rows, caption=METHOD)
    for one in select(samples, stage=IDLE):
        own, helper = (100 * cpu / one.seconds for cpu in (one.cpu_s, one.helper_cpu_s))
        state = "connected" if one.arm == BOTH else "not connected"
        yield (
            f"idle, {state} ({one.transport}), over {one.seconds:.0f} s: {own:.2f} % of a core "
            f"where chunks are loaded, {helper:.2f} % at the peer"
        )


REPORTS = (
    Report(
        "peers",
        "A load over two servers' storage links",
        Sample,
        _tables,
        lines=_lines,
        goals=goals,
    ),
)
