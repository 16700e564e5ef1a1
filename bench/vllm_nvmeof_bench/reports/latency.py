# SPDX-License-Identifier: Apache-2.0
"""The report of `bench latency`: the second target against the first, our engine against fio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_nvmeof_bench.report import Column, Report, Table, versions_in
from vllm_nvmeof_bench.results import (
    Spread,
    distinct,
    median_of,
    select,
    size_name,
    spread_of,
    values_of,
)
from vllm_nvmeof_offload.units import KIB, slot_stride_bytes

ARMS = ("fio", "ours")
#: The name of a throttled target in every results file.
STAND_IN = "throttled-stand-in"
PAYLOAD_MIN = 4 * KIB
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
        """The size of fio's I/O: for 4 KiB the payload, otherwise a whole slot, as for ours."""
        if self.payload_bytes <= PAYLOAD_MIN:
            return self.payload_bytes
        return slot_stride_bytes(self.payload_bytes)


@dataclass(frozen=True)
class Sample:
    """A target, arm, point and round, with the latencies in µs of its completed `operations`.

    p99_us: the slowest operation, if there are fewer than 100. cpu_s_per_gib: CPU seconds of all
    processes of the arm per GiB of payload.
    """

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
    """The difference between two medians, in µs and in per cent of the first."""

    us: float
    per_cent: float


def added(
    samples: Sequence[Sample], first: _Side, second: _Side, point: Point, measure: str
) -> Added | None:
    """Return the second side's median minus the first's; None unless both sides were measured."""
    before, after = (median_of(samples, measure, point=point, **side) for side in (first, second))
    if before is None or after is None:
        return None
    return Added(after - before, 100 * (after - before) / before)


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Return all points, sorted by case, size, jobs and depth."""
    return sorted({one.point for one in samples})


def _tables(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield, for each case and payload, first a table per arm, then a table per target."""
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
    rounds = len(distinct(samples, "round"))
    yield (
        f"medians over {rounds} rounds of each round's p50, mean and P99; with fewer than 100 "
        "operations, P99 is the slowest. At 4 KiB ours reads 8 KiB: a header page and the payload."
    )


def _compared(
    title: str, samples: Sequence[Sample], sides: Mapping[str, _Side], with_cpu: bool = False
) -> Table:
    """Return a table with a row per point. sides: column name → side, for two sides."""

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
    """Yield lines about the targets and the engine."""
    for name, target in conditions.get("targets", {}).items():
        limit = target.get("throttled_mb_per_s")
        how = "not throttled"
        if limit:
            how = (
                f"throttled to {limit} MB/s by {conditions.get('throttle', '?')}: it stands in for "
                "the bandwidth of an NVMe-oF target, not for a network's latency; the bytes of "
                "each 0.1 s slice pass at once, and the rest waits"
            )
        yield f"{name}: {target.get('file_system', '?')} on {target.get('device', '?')}, {how}"
    settings = conditions.get("settings", {})
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
