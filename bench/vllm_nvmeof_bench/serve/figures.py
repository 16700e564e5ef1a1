# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on measured values. Percentiles are nearest-rank: each is a value that was seen."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from vllm_nvmeof_bench.pool.samples import percentile as nearest_rank

__all__ = ["changed", "mean", "median", "paired", "percentile"]


def percentile(values: Sequence[float], share: float) -> float | None:
    """As `pool.samples.percentile`; None without values."""
    return nearest_rank(values, share) if values else None


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def changed(value: float | None, base: float | None) -> str:
    """`value` against `base` in per cent, as tables print it; – where one is missing."""
    if value is None or not base:
        return "–"
    return f"{100 * (value / base - 1):+.0f} %"


def paired(
    mine: dict[tuple[object, ...], float], theirs: dict[tuple[object, ...], float]
) -> list[float]:
    """mine / theirs for every key (a round, a length …) that both have, in order of the keys."""
    return [mine[key] / theirs[key] for key in sorted(mine, key=repr) if theirs.get(key)]
