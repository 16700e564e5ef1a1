# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench latency`: the second target beside the first, and ours beside fio."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_nvmeof_bench import plots
from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.results import distinct, median_of, select, size_name
from vllm_nvmeof_bench.tables import Column, Table, load_in, machine_in, versions_in
from vllm_nvmeof_offload.units import KIB, slot_stride_bytes

ARMS = ("fio", "ours")
#: The name of a throttled directory, wherever its figures are.
STAND_IN = "throttled-stand-in"
PAYLOAD_MIN = 4 * KIB
_MEASURES = {"p50": "p50_us", "mean": "mean_us", "P99": "p99_us"}
_Side = dict[str, object]  # target and arm


@dataclass(frozen=True, order=True)
class Point:
    """Where one measurement is taken; payload_bytes is what a slot holds."""

    case: str
    payload_bytes: int
    jobs: int
    depth: int

    @property
    def io_bytes(self) -> int:
        """The bytes of one I/O of fio: 4 KiB as it is, else a whole slot as ours."""
        if self.payload_bytes <= PAYLOAD_MIN:
            return self.payload_bytes
        return slot_stride_bytes(self.payload_bytes)


@dataclass(frozen=True)
class Sample:
    """One target, arm, point and round. Latencies in µs, of the `operations` that ended.

    p99_us: of fewer than 100 operations it is the slowest. cpu_s_per_gib: of payload, all
    processes of the arm.
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
    """The difference of the second median from the first: µs, and per cent of the first."""

    us: float
    per_cent: float


def added(
    samples: Sequence[Sample], first: _Side, second: _Side, point: Point, measure: str
) -> Added | None:
    """None unless both were measured there. The first target of a file is compared with."""
    before, after = (median_of(samples, measure, point=point, **side) for side in (first, second))
    if before is None or after is None:
        return None
    return Added(after - before, 100 * (after - before) / before)


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Every point, by case, size, jobs and depth."""
    return sorted({one.point for one in samples})


def tables(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    """One table per arm, case and size; then one per target, case and size."""
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
        f"medians over {rounds} rounds of each round's p50, mean and P99; a P99 of fewer than 100 "
        "operations is the slowest. At 4 KiB ours reads 8 KiB: a slot's header page and payload."
    )


def _compared(
    title: str, samples: Sequence[Sample], sides: Mapping[str, _Side], with_cpu: bool = False
) -> Table:
    """One row per point. sides: two, by the names for their columns."""

    def middle(side: _Side, measure: str) -> Any:
        return lambda point: median_of(samples, measure, point=point, **side)

    def more(measure: str, field: str) -> Any:
        return lambda point: getattr(added(samples, *sides.values(), point, measure), field, None)

    columns = [Column("jobs × depth", lambda point: f"{point.jobs} × {point.depth}")]
    for name, side in sides.items():
        for what, measure in _MEASURES.items():
            columns.append(Column(f"{name} {what}", middle(side, measure), "{:,.0f}"))
    for what, measure in _MEASURES.items():
        columns.append(Column(f"added {what}", more(measure, "us"), "{:+,.0f}"))
        columns.append(Column("%", more(measure, "per_cent"), "{:+.0f}"))
    if with_cpu:
        for name, side in sides.items():
            columns.append(Column(f"CPU s/GiB {name}", middle(side, "cpu_s_per_gib"), "{:.3g}"))
    return Table(title, columns, points_of(samples))


def _short(name: str) -> str:
    return "stand-in" if STAND_IN in name else name


def lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    """Targets and engine, and how busy the machine was."""
    for name, target in conditions.get("targets", {}).items():
        limit = target.get("throttled_mb_per_s")
        how = "as it is"
        if limit:
            how = (
                f"throttled to {limit} MB/s by {conditions.get('throttle', '?')}: it stands in for "
                "the bandwidth of an NVMe-oF target, not for a network's latency; what a slice of "
                "0.1 s allows passes at once, the rest waits"
            )
        yield f"{name}: {target.get('file_system', '?')} on {target.get('device', '?')}, {how}"
    settings = conditions.get("settings", {})
    yield (
        f"ours: {', '.join(conditions.get('engines', ()))}; "
        f"{versions_in(conditions).get('fio') or 'fio ?'}; "
        f"{settings.get('run_s', '?')} s per measurement; {load_in(conditions)}"
    )


#: An arm on a target.
_COLOURS = (plots.GREY, plots.BLUE, plots.BLACK, plots.RED)
_PAIRS = (plots.SKY, plots.GREEN, plots.PINK, plots.ORANGE)
_MARKERS = ("^", "o", "D", "v")


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """The first case: latencies at every point, and what is added at each; one column per size.

    Upper row: medians of p50 (filled) and P99 (hollow). Lower row: what the second target adds
    to the first, and what ours adds to fio, of the means.
    """
    case = samples[0].case
    chosen = select(samples, case=case)
    payloads = sorted({one.payload_bytes for one in chosen})
    title = (
        f"{' beside '.join(distinct(chosen, 'target'))}: medians over rounds "
        f"({len(distinct(chosen, 'round'))}), interleaved\n{machine_in(conditions)}, "
        f"Linux {versions_in(conditions).get('kernel', '?')}, "
        f"{versions_in(conditions).get('fio') or 'fio ?'}"
    )
    mosaic = [[f"{row}{payload}" for payload in payloads] for row in ("latency", "added")]
    with plots.picture(path, title, mosaic, (8, 5.5)) as (figure, panels):
        for index, panel in enumerate(panels):
            payload = payloads[index % len(payloads)]
            points = points_of(select(chosen, payload_bytes=payload))
            (_latencies if index < len(payloads) else _additions)(panel, chosen, points)
            panel.set_xticks(range(len(points)), [f"{one.jobs}×{one.depth}" for one in points])
            plots.finish(panel, f"random {case}s of {size_name(payload)}", xlabel="jobs × depth")
        plots.legend_below(figure, panels, 4)


def _latencies(panel: Any, samples: Sequence[Sample], points: Sequence[Point]) -> None:
    sides = itertools.product(distinct(samples, "target"), ARMS)
    for (target, arm), colour, marker in zip(sides, _COLOURS, _MARKERS, strict=False):
        mine = select(samples, target=target, arm=arm)
        for name, dashes, fill in (("p50", "-", colour), ("P99", ":", "white")):
            panel.plot(
                [_known(median_of(mine, _MEASURES[name], point=point)) for point in points],
                linestyle=dashes,
                marker=marker,
                color=colour,
                markerfacecolor=fill,
                label=f"{arm}, {target}: {name}",
            )
    panel.set_yscale("log")
    panel.set_ylabel("µs")


def _additions(panel: Any, samples: Sequence[Sample], points: Sequence[Point]) -> None:
    targets = distinct(samples, "target")
    pairs = [(f"ours adds to fio, {name}", (name, "fio"), (name, "ours")) for name in targets]
    if len(targets) > 1:
        pairs += [
            (f"{targets[1]} adds, {arm}", (targets[0], arm), (targets[1], arm)) for arm in ARMS
        ]
    width = 0.8 / len(pairs)
    for index, (label, *both) in enumerate(pairs):
        first, second = ({"target": target, "arm": arm} for target, arm in both)
        found = [added(samples, first, second, point, "mean_us") for point in points]
        at = [place + (index - (len(pairs) - 1) / 2) * width for place in range(len(points))]
        high = [_known(one and one.us) for one in found]
        panel.bar(at, high, width * 0.9, color=_PAIRS[index % 4], label=label)
    panel.axhline(0, color="black", linewidth=1)
    panel.set_yscale("symlog", linthresh=100)
    panel.set_ylabel("added to the mean, µs")


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def published(samples: Sequence[Sample]) -> dict[str, str]:
    """fio's reads of 4 KiB on the first target, one in flight."""
    target = next(iter(distinct(samples, "target")), "")
    point = Point("read", 4 * KIB, 1, 1)
    value = median_of(samples, "p50_us", target=target, arm="fio", point=point)
    shown = None if value is None else f"{value:.0f} µs on {target} (fio, 4 KiB, p50)"
    return {"one read in flight, attached directly": shown} if shown else {}


BENCHES = (Benchmark("latency", Sample, lines, tables, plot, published=published, columns=170),)
