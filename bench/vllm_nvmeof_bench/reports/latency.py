# SPDX-License-Identifier: Apache-2.0
"""The `bench latency` report: the second target relative to the first, and our engine to fio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from vllm_nvmeof_bench.report import Column, Report, Table, versions_in
from vllm_nvmeof_bench.results import (
    METHOD,
    Paired,
    Spread,
    distinct,
    median_of,
    median_ratio,
    select,
    size_name,
    spread_of,
    values_of,
)
from vllm_nvmeof_offload.units import KIB, slot_stride_bytes

ARMS = ("fio", "ours")
#: The name of a throttled target in results files.
STAND_IN = "throttled-stand-in"
PAYLOAD_MIN = 4 * KIB
#: The stages of a read by our engine, and the whole.
STAGES = (
    "handed to the ring's thread",
    "given to the disk",
    "read by the disk",
    "completion seen",
    "checked and reported",
    "caller woken",
    "taken by the caller",
    "whole",
)
SLOT_BY_FIO = "fio, whole slots"
_MEASURES = {"p50": "p50_us", "mean": "mean_us", "P99": "p99_us"}
_Side = dict[str, object]  # target and arm


@dataclass(frozen=True, order=True)
class Point:
    """The parameters of one measurement. payload_bytes: the payload of a pool slot."""

    case: str
    payload_bytes: int
    jobs: int
    depth: int

    @property
    def io_bytes(self) -> int:
        """The size of fio's I/O: the payload for 4 KiB, otherwise a whole slot, as in our arm."""
        if self.payload_bytes <= PAYLOAD_MIN:
            return self.payload_bytes
        return slot_stride_bytes(self.payload_bytes)


@dataclass(frozen=True)
class Sample:
    """A target, arm, point and round, with latencies of its completed `operations`. p99_us: the
    slowest if fewer than 100 operations. cpu_s_per_gib: of all the arm's processes, per GiB of
    payload."""

    target: str
    arm: str
    case: str
    payload_bytes: int
    jobs: int
    depth: int
    round: int
    operations: int
    mean_us: float
    p50_us: float
    p99_us: float
    mib_per_s: float
    cpu_s_per_gib: float

    @property
    def point(self) -> Point:
        return Point(self.case, self.payload_bytes, self.jobs, self.depth)


class Added(NamedTuple):
    """The difference between two medians, in µs and as a percentage of the first."""

    us: float
    per_cent: float


def added(
    samples: Sequence[Sample], first: _Side, second: _Side, point: Point, measure: str
) -> Added | None:
    """Return the second side's median minus the first's; None unless both were measured."""
    before, after = (median_of(samples, measure, point=point, **side) for side in (first, second))
    if before is None or after is None:
        return None
    return Added(after - before, 100 * (after - before) / before)


def as_expected(samples: Sequence[Sample], point: Point) -> Paired | None:
    """Return the median over rounds of the ratio of our mean latency on the second target to the
    expected one: fio's there plus what our engine adds to fio's on the first target."""
    before, after = distinct(samples, "target")[:2]
    rounds: dict[int, dict[tuple[str, str], float]] = {}
    for one in select(samples, point=point):
        rounds.setdefault(one.round, {})[one.target, one.arm] = one.mean_us
    shares = [
        mean[after, "ours"] / (mean[after, "fio"] + mean[before, "ours"] - mean[before, "fio"])
        for mean in rounds.values()
        if len(mean) == 2 * len(ARMS)
    ]
    return median_ratio(shares) if min(shares, default=0) > 0 else None


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Return all points in the samples, sorted."""
    return sorted({one.point for one in samples})


def _tables(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    targets = distinct(samples, "target")
    for case, payload in sorted({(one.case, one.payload_bytes) for one in samples}):
        chosen = select(samples, case=case, payload_bytes=payload)
        what = f"{case}s of {size_name(payload)}"
        for arm in ARMS if len(targets) > 1 else ():
            title = f"{what}, {arm}: what {targets[1]} adds to {targets[0]}, µs"
            sides = {_short(name): {"target": name, "arm": arm} for name in targets[:2]}
            yield _compared(title, chosen, sides)
        for target in targets:
            title = f"{what} on {target}: what our engine adds to fio, µs"
            sides = {arm: {"target": target, "arm": arm} for arm in ARMS}
            yield _compared(title, chosen, sides, with_cpu=True)
    if len(targets) > 1:
        yield _alike(samples, targets)
    stages: Sequence[Mapping[str, Any]] = conditions.get("stages", ())
    for payload in dict.fromkeys(one["payload_bytes"] for one in stages):
        yield _split([one for one in stages if one["payload_bytes"] == payload], payload)
    rounds = len(distinct(samples, "round"))
    yield (
        f"medians over {rounds} rounds of each round's p50, mean and P99; with fewer than 100 "
        "operations, P99 is the slowest. At 4 KiB ours reads 8 KiB: a header page and the payload."
    )


def _split(stages: Sequence[Mapping[str, Any]], payload: int) -> Table:
    def us(stage: str, depth: int) -> Spread | None:
        wanted = {"stage": stage, "depth": depth}
        return spread_of([one["us"] for one in stages if wanted.items() <= one.items()])

    columns = [Column("stage", str)] + [
        Column(f"depth {depth}", partial(us, depth=depth), "{:,.1f}")
        for depth in dict.fromkeys(one["depth"] for one in stages)
    ]
    title = f"stages of a read of {size_name(payload)} by our engine, µs"
    caption = "medians over rounds of each round's median; medians of stages do not add up"
    return Table(title, columns, [*STAGES, SLOT_BY_FIO], caption=caption)


def _alike(samples: Sequence[Sample], targets: Sequence[str]) -> Table:
    """Return a table of the latency that our engine adds to fio's on each target, by point."""
    columns = [
        Column("case", lambda point: f"{point.case}s of {size_name(point.payload_bytes)}"),
        Column("jobs × depth", lambda point: f"{point.jobs} × {point.depth}"),
    ]
    for name in targets[:2]:
        fio, ours = ({"target": name, "arm": arm} for arm in ARMS)

        def fio_mean(point: Point, fio: _Side = fio) -> float | None:
            return median_of(samples, "mean_us", point=point, **fio)

        def more(point: Point, fio: _Side = fio, ours: _Side = ours) -> float | None:
            return getattr(added(samples, fio, ours, point, "mean_us"), "us", None)

        columns.append(Column(f"fio {_short(name)}", fio_mean, "{:,.0f}"))
        columns.append(Column("ours adds", more, "{:+,.0f}"))
    columns.append(Column("ours / expected", lambda one: as_expected(samples, one), "{:.3f}"))
    title = f"what our engine adds on {' and '.join(map(_short, targets[:2]))}, mean µs"
    expected = (
        f"expected on {_short(targets[1])}: fio's latency there, plus what our engine adds on "
        f"{_short(targets[0])}"
    )
    return Table(title, columns, points_of(samples), caption=f"{expected}; {METHOD}")


def _compared(
    title: str, samples: Sequence[Sample], sides: Mapping[str, _Side], with_cpu: bool = False
) -> Table:
    """Return a table with a row per point. sides: column name → side, for both sides."""

    def middle(side: _Side, measure: str) -> Any:
        def get(point: Point) -> Spread | None:
            return spread_of(values_of(samples, measure, point=point, **side))

        return get

    def more(measure: str, field: str) -> Any:
        return lambda point: getattr(added(samples, *sides.values(), point, measure), field, None)

    columns = [Column("jobs × depth", lambda point: f"{point.jobs} × {point.depth}")]
    for name, side in sides.items():
        for what, measure in _MEASURES.items():
            get = middle(side, measure)
            columns.append(Column(f"{name} {what}", get, "{:,.0f}"))
    for what, measure in _MEASURES.items():
        columns.append(Column(f"added {what}", more(measure, "us"), "{:+,.0f}"))
        columns.append(Column("%", more(measure, "per_cent"), "{:+.0f}"))
    if with_cpu:
        for name, side in sides.items():
            columns.append(Column(f"CPU s/GiB {name}", middle(side, "cpu_s_per_gib"), "{:.3g}"))
    return Table(title, columns, points_of(samples))


def _short(name: str) -> str:
    return "stand-in" if STAND_IN in name else name


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    for name, target in conditions.get("targets", {}).items():
        limit = target.get("throttled_mb_per_s")
        how = "not throttled"
        if limit:
            how = (
                f"throttled to {limit} MB/s by {conditions.get('throttle', '?')}: it simulates the "
                "bandwidth of an NVMe-oF target, not a network's latency; the bytes of each 0.1 s "
                "slice can pass at once"
            )
        yield f"{name}: {target.get('file_system', '?')} on {target.get('device', '?')}, {how}"
    settings = conditions.get("settings", {})
    if guest := conditions.get("guest"):
        yield f"machine: {guest}"
    yield (
        f"ours: {', '.join(conditions.get('engines', ()))}; "
        f"{versions_in(conditions).get('fio') or 'fio ?'}; "
        f"{settings.get('run_s', '?')} s per measurement"
    )


REPORTS = (
    Report(
        "latency",
        "Latency of two targets, and of our engine",
        Sample,
        _tables,
        lines=_lines,
        columns=170,
    ),
)
