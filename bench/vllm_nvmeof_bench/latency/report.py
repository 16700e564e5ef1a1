# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal: the second target beside the first, and ours beside fio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.latency.samples import (
    Added,
    Sample,
    added,
    median_of,
    points_of,
    targets_of,
)
from vllm_nvmeof_bench.latency.settings import ARMS, STAND_IN, Point
from vllm_nvmeof_bench.pool.samples import size_name

__all__ = ["print_conditions", "print_samples"]

_FIELDS = ("p50_us", "mean_us", "p99_us")
_NAMES = ("p50", "mean", "P99")
_Side = tuple[str, str]  # target, arm


def print_samples(console: Console, samples: Sequence[Sample]) -> None:
    """A table an arm, case and size; then one a target, case and size."""
    targets = targets_of(samples)
    for case, payload_bytes in sorted({(one.case, one.payload_bytes) for one in samples}):
        of = [one for one in samples if (one.case, one.payload_bytes) == (case, payload_bytes)]
        what = f"{case}s of {size_name(payload_bytes)}"
        if len(targets) > 1:
            for arm in ARMS:
                title = f"{what}, {arm}: what {targets[1]} adds to {targets[0]}, µs"
                sides = (targets[0], arm), (targets[1], arm)
                console.print(_compared(title, of, *sides, targets[:2]))
        for target in targets:
            title = f"{what} on {target}: what our engine adds to fio, µs"
            sides = (target, "fio"), (target, "ours")
            console.print(_compared(title, of, *sides, ARMS, with_cpu=True))
    rounds = len({one.round for one in samples})
    console.print(
        f"medians over {rounds} rounds of each round's p50, mean and P99; a P99 of fewer than 100 "
        "operations is the slowest. At 4 KiB ours reads 8 KiB: a slot's header page and payload.",
        style="dim",
        highlight=False,
    )


def _compared(
    title: str,
    samples: Sequence[Sample],
    first: _Side,
    second: _Side,
    names: Sequence[str],
    with_cpu: bool = False,
) -> Table:
    """One row a point. names: of the two sides, for the columns."""
    columns = ["jobs × depth"]
    columns += [f"{_short(name)} {what}" for name in names for what in _NAMES]
    columns += ["added p50", "%", "added mean", "%", "added P99", "%"]
    if with_cpu:
        columns += [f"CPU s/GiB {name}" for name in names]
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for point in points_of(samples):
        cells = [f"{point.jobs} × {point.depth}"]
        cells += [_us(median_of(samples, *side, point, field)) for side in (first, second)
                  for field in _FIELDS]  # fmt: skip
        for field in _FIELDS:
            cells += _added(added(samples, first, second, point, field))
        if with_cpu:
            cells += [_cpu(samples, side, point) for side in (first, second)]
        table.add_row(*cells)
    return table


def _short(name: str) -> str:
    return "stand-in" if STAND_IN in name else name


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _added(found: Added | None) -> tuple[str, str]:
    if found is None:
        return "–", "–"
    return f"{found.us:+,.0f}", f"{found.per_cent:+.0f}"


def _cpu(samples: Sequence[Sample], side: _Side, point: Point) -> str:
    value = median_of(samples, *side, point, "cpu_s_per_gib")
    return "–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.1f}"


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """Which targets and engine, and how busy the machine was: a few lines."""
    for name, target in conditions.get("targets", {}).items():
        limit = target.get("throttled_mb_per_s")
        how = "as it is"
        if limit:
            how = (
                f"throttled to {limit} MB/s by {conditions.get('throttle', '?')}: it stands in for "
                "the bandwidth of an NVMe-oF target, not for a network's latency; what a slice of "
                "0.1 s allows passes at once, the rest waits"
            )
        console.print(
            f"{name}: {target.get('file_system', '?')} on {target.get('device', '?')}, {how}",
            highlight=False,
            soft_wrap=True,
        )
    settings, versions = conditions.get("settings", {}), conditions.get("versions", {})
    before = conditions.get("load_average_at_start", ["?"])[0]
    after = conditions.get("load_average_at_end", ["?"])[0]
    console.print(
        f"ours: {', '.join(conditions.get('engines', ()))}; {versions.get('fio') or 'fio ?'}; "
        f"{settings.get('run_s', '?')} s a measurement; "
        f"load average {before} before, {after} after",
        highlight=False,
        soft_wrap=True,
    )
