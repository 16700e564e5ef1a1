# SPDX-License-Identifier: Apache-2.0
"""DualPath's published figures (Wu et al., arXiv 2602.21548, 2026) and the simulated ones.

Two numbers are fitted, because the paper's machines were not measured: a node's compute rate, for
all rows, and the shortest decode step of the smaller model. The paper's offline ratios are maxima
over numbers of agents; ours are medians over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vllm_nvmeof_bench.results import Goal, median, median_of, paired, select, values_of

#: The number of concurrent agents by cluster.
OFFLINE = {"660b-2p4d": 512, "27b-1p1d": 256, "27b-1p2d": 256, "27b-2p1d": 256}
_SMALL = ("27b-1p1d", "27b-1p2d", "27b-2p1d")
_NEAR = 0.1
_ROWS_MIN = 6


@dataclass(frozen=True)
class Row:
    """A published figure, and ours by seed; `values` is empty if it was not simulated."""

    name: str
    published: float
    values: Sequence[float]
    form: str = "{:.2f}"

    @property
    def ours(self) -> float | None:
        return median(self.values)

    @property
    def off(self) -> float | None:
        return None if self.ours is None else self.ours / self.published - 1

    @property
    def near(self) -> bool | None:
        return None if self.off is None else abs(self.off) <= _NEAR


def gains(samples: Sequence[Any], cluster: str, arm: str) -> list[float]:
    """Return, by seed, the ratio of JCT with only a node's own link to the arm's JCT."""
    runs = select(samples, part="offline", cluster=cluster)
    pairs = paired(runs, "end_s", {"arm": "own"}, {"arm": arm}, key=lambda one: one.seed)
    return [own / other for own, other in pairs]


def capacity(samples: Sequence[Any], cluster: str, arm: str, window_s: float) -> Any | None:
    """Return the run with the highest rate that met the objectives, if any."""
    runs = select(samples, part="online", cluster=cluster, arm=arm, window_s=window_s)
    return max((one for one in runs if one.kept), key=lambda one: one.rate, default=None)


def _served(samples: Sequence[Any], cluster: str) -> list[float]:
    windows = {one.window_s for one in select(samples, part="online", cluster=cluster)}
    if not windows:
        return []
    own, dual = (capacity(samples, cluster, arm, max(windows)) for arm in ("own", "request"))
    return [dual.rate / own.rate] if own and dual else []


def rows(samples: Sequence[Any]) -> list[Row]:
    """Return the eight rows with which the simulation is compared."""
    small = [gains(samples, name, "request") for name in _SMALL]
    mean = [fmean(seed) for seed in zip(*small, strict=False)] if all(small) else []
    path, rule = (gains(samples, "660b-2p4d", arm) for arm in ("alternate", "request"))
    return [
        Row("offline, 660B 2P4D, ×", 1.87, rule),
        Row("offline, 27B 1P1D, ×", 1.78, small[0]),
        Row("offline, 27B 1P2D, ×", 2.46, small[1]),
        Row("offline, 27B, mean of 1P1D, 1P2D, 2P1D, ×", 1.64, mean),
        Row("JCT reduction by alternating paths, %", 38.2, _less(path), "{:.1f}"),
        Row("JCT reduction by paths and scheduling, %", 45.6, _less(rule), "{:.1f}"),
        Row("agents per second, 27B 1P1D, ×", 1.67, _served(samples, "27b-1p1d")),
        Row("agents per second, 660B 2P4D, ×", 2.25, _served(samples, "660b-2p4d")),
    ]


def _less(ratios: Sequence[float]) -> list[float]:
    return [100 * (1 - 1 / one) for one in ratios]


def balance_rows(samples: Sequence[Any]) -> list[Row]:
    """Return rows for the maximum / mean of the links' bytes in windows of two seconds."""
    return [
        Row(
            f"{cluster}, {words}",
            published,
            values_of(samples, "balance", part="offline", cluster=cluster, arm=arm),
        )
        for cluster in ("27b-1p2d", "27b-2p1d")
        for arm, words, published in (
            ("alternate", "alternating", 1.53),
            ("request", "by the rule", 1.18),
        )
    ]


def goals(samples: Sequence[Any], _: Any) -> list[Goal]:
    return [_rows_goal(samples), *_equivalences(samples), *_findings(samples)]


def _rows_goal(samples: Sequence[Any]) -> Goal:
    found = [one for one in rows(samples) if one.near is not None]
    name, required = "DualPath's rows within 10 %", f"≥ {_ROWS_MIN} of 8"
    if len(found) < len(rows(samples)):
        return Goal(name, required)
    count = sum(one.near is True for one in found)
    return Goal(name, required, count >= _ROWS_MIN, count, str(count), len(found))


def _equivalences(samples: Sequence[Any]) -> list[Goal]:
    """Return goals for JCT ratios of two clusters, by the seed that deviates most."""
    clusters = {
        "own link: 1P1D = 1P2D": (("27b-1p1d", "own"), ("27b-1p2d", "own")),
        "both paths 1P1D = own link 2P1D": (("27b-1p1d", "request"), ("27b-2p1d", "own")),
        "both paths: 2P1D = 1P2D": (("27b-2p1d", "request"), ("27b-1p2d", "request")),
    }
    runs, goals = select(samples, part="offline"), []
    for name, sides in clusters.items():
        above, below = (dict(zip(("cluster", "arm"), side, strict=True)) for side in sides)
        pairs = paired(runs, "end_s", {**above}, {**below}, key=lambda one: one.seed)
        ratios = [one / other for one, other in pairs]
        if not ratios:
            goals.append(Goal(name, "within 10 %"))
            continue
        ratio = max(ratios, key=lambda one: abs(one - 1))
        near = abs(ratio - 1) <= _NEAR
        goals.append(Goal(name, "within 10 %", near, ratio, f"{ratio:.3f}", len(ratios)))
    return goals


def _findings(samples: Sequence[Any]) -> list[Goal]:
    ratios = gains(samples, "27b-2p1d", "alternate")
    blind = median(ratios)
    found = [Goal("alternating at 2P1D gains nothing", "≤ 1 ×")]
    if blind is not None:
        found = [Goal(found[0].name, "≤ 1 ×", blind <= 1.0, blind, f"{blind:.3f} ×", len(ratios))]
    for cluster in ("27b-1p1d", "660b-2p4d"):
        by_chunk, by_request = (
            median_of(samples, "ttft_mean_s", part="split", cluster=cluster, arm=arm)
            for arm in ("chunk", "request")
        )
        name = f"{cluster}: TTFT by chunk / by request"
        if not by_chunk or not by_request:
            found.append(Goal(name, "< 1"))
            continue
        ratio = by_chunk / by_request
        found.append(Goal(name, "< 1", ratio < 1, ratio, f"{ratio:.3f}", 1))
    herd = [one for one in select(samples, part="herd", arm="chunk") if " 50 ms" in one.knob]
    name = "8 P on 4 D, reports every 50 ms: most / mean"
    if not herd:
        return [*found, Goal(name, "≤ 1.25")]
    worst = max(one.balance for one in herd)
    return [*found, Goal(name, "≤ 1.25", worst <= 1.25, worst, f"{worst:.3f}", len(herd))]
