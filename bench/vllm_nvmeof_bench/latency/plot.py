# SPDX-License-Identifier: Apache-2.0
"""The samples as one picture (PNG): latencies at every point, and what is added at each.

Upper row: medians of p50 (filled) and P99 (hollow), a column a size. Lower row: what the second
target adds to the first, and what ours adds to fio, of the means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.latency.samples import Sample, added, median_of, points_of, targets_of
from vllm_nvmeof_bench.latency.settings import ARMS, Point
from vllm_nvmeof_bench.picture import pyplot, save
from vllm_nvmeof_bench.pool.samples import size_name
from vllm_nvmeof_bench.pool.settings import BenchError

__all__ = ["plot"]

#: Okabe and Ito's colours, which colour-blind readers can tell apart: an arm on a target.
_COLOURS = ("#999999", "#0072B2", "#000000", "#D55E00")
_PAIRS = ("#56B4E9", "#009E73", "#CC79A7", "#E69F00")
_MARKERS = ("^", "o", "D", "v")


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Draw the picture, of the first case alone.

    Raises:
        BenchError: nothing to draw, no matplotlib, or the file cannot be written.
    """
    plt = pyplot()
    if not samples:
        raise BenchError("there is nothing to draw: the file has no samples")
    case = samples[0].case
    of = [one for one in samples if one.case == case]
    payloads = sorted({one.payload_bytes for one in of})
    figure = plt.figure(figsize=(8 * len(payloads), 11), layout="constrained")
    for half, draw in zip(figure.subfigures(2, 1), (_latencies, _additions), strict=True):
        axes = half.subplots(1, len(payloads), squeeze=False)[0]
        for place, payload_bytes in zip(axes, payloads, strict=True):
            points = [one for one in points_of(of) if one.payload_bytes == payload_bytes]
            draw(place, of, points)
            place.set_title(f"random {case}s of {size_name(payload_bytes)}", fontsize=12)
            place.set_xticks(range(len(points)), [f"{one.jobs}×{one.depth}" for one in points])
            place.set_xlabel("jobs × depth")
            place.grid(alpha=0.3)
        handles, labels = axes[0].get_legend_handles_labels()
        half.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(_title(of, conditions), fontsize=11)
    save(figure, path)


def _title(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> str:
    machine, versions = conditions.get("machine", {}), conditions.get("versions", {})
    rounds = len({one.round for one in samples})
    return (
        f"{' beside '.join(targets_of(samples))}: medians over rounds ({rounds}), interleaved\n"
        f"{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}, "
        f"Linux {versions.get('kernel', '?')}, {versions.get('fio') or 'fio ?'}"
    )


def _latencies(place: Any, samples: Sequence[Sample], points: Sequence[Point]) -> None:
    sides = [(target, arm) for target in targets_of(samples) for arm in ARMS]
    for number, (target, arm) in enumerate(sides):
        colour, marker = _COLOURS[number % 4], _MARKERS[number % 4]
        for field, line, fill in (("p50_us", "-", colour), ("p99_us", ":", "white")):
            found = [median_of(samples, target, arm, point, field) for point in points]
            place.plot(
                range(len(points)),
                [float("nan") if value is None else value for value in found],
                linestyle=line,
                marker=marker,
                color=colour,
                markerfacecolor=fill,
                label=f"{arm}, {target}: {field[:3].replace('p99', 'P99')}",
            )
    place.set_yscale("log")
    place.set_ylabel("µs")


def _additions(place: Any, samples: Sequence[Sample], points: Sequence[Point]) -> None:
    targets = targets_of(samples)
    pairs = [
        (f"ours adds to fio, {target}", (target, "fio"), (target, "ours")) for target in targets
    ]
    if len(targets) > 1:
        pairs += [
            (f"{targets[1]} adds, {arm}", (targets[0], arm), (targets[1], arm)) for arm in ARMS
        ]
    width = 0.8 / len(pairs)
    for number, (label, first, second) in enumerate(pairs):
        found = [added(samples, first, second, point, "mean_us") for point in points]
        at = [index + (number - (len(pairs) - 1) / 2) * width for index in range(len(points))]
        high = [float("nan") if one is None else one.us for one in found]
        place.bar(at, high, width * 0.9, color=_PAIRS[number % 4], label=label)
    place.axhline(0, color="black", linewidth=1)
    place.set_yscale("symlog", linthresh=100)
    place.set_ylabel("added to the mean, µs")
