# SPDX-License-Identifier: Apache-2.0
"""What must be reached, computed from samples alone.

Arms that were measured within seconds of each other are compared within a round, and the
median of the rounds' ratios counts; servers that ran one after the other by their medians. The
worst size or throttle decides and is named. What was not measured is neither reached nor missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench.pool.targets import Row
from vllm_nvmeof_bench.tier.samples import Sample, places, round_ratios, seconds, select
from vllm_nvmeof_bench.tier.settings import PARTS

__all__ = ["Ratio", "admission_ratio", "evaluate", "load_ratio", "median_ratio", "throttle_name"]

_LOAD_MAX = 1.15
_ADMISSION_MAX = 1.1


@dataclass(frozen=True)
class Ratio:
    """n: rounds, or samples of the arm with the fewest."""

    value: float
    n: int
    where: str = ""


def throttle_name(at: float | None) -> str:
    """A throttle for people; 0 and None are none."""
    return f"{at:g} MB/s" if at else "unthrottled"


def load_ratio(samples: Sequence[Sample], case: str, size: float) -> Ratio | None:
    """Ours over the larger of read and copy alone."""
    ratios = round_ratios(samples, "load", "ours", ("read", "copy"), case, size)
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), len(ratios), f"{size:g}× the CPU tier")


def median_ratio(
    samples: Sequence[Sample], part: str, above: str, below: str, case: str | None = None
) -> Ratio | None:
    """The median of one arm over that of another."""
    times = [seconds(select(samples, part, arm, case)) for arm in (above, below)]
    if not all(times):
        return None
    value = statistics.median(times[0]) / statistics.median(times[1])
    return Ratio(value, min(map(len, times)))


def admission_ratio(samples: Sequence[Sample], at: float) -> Ratio | None:
    """auto over the better of always and never, at one throttle (which never does not feel)."""
    times = [
        seconds(select(samples, "admission", "auto", at=at)),
        seconds(select(samples, "admission", "always", at=at)),
        seconds(select(samples, "admission", "never")),
    ]
    if not all(times):
        return None
    auto, always, never = map(statistics.median, times)
    better = "loading" if always < never else "recomputing"
    where = f"{throttle_name(at)}, {better} is better"
    return Ratio(auto / min(always, never), min(map(len, times)), where)


def evaluate(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> list[Row]:
    """The table, of the parts that this run was asked for."""
    wanted = conditions.get("settings", {}).get("parts", PARTS)
    rows = []
    if "load" in wanted:
        for case, what in (("memory", "load"), ("paced", "load, slow copies")):
            sizes = places(samples, "load", case)
            row = Row(f"{what} / larger of read and copy alone", False, _LOAD_MAX)
            rows.append(_worst(row, [load_ratio(samples, case, size) for size in sizes]))
    if "resume" in wanted:
        row = Row("resume after preemption / recomputed", False, 1.0)
        rows.append(_worst(row, [median_ratio(samples, "resume", "reload", "recompute")]))
    if "prefetch" in wanted:
        row = Row("turn of a waiting request, prefetch on / off", False, 1.0)
        rows.append(_worst(row, [median_ratio(samples, "prefetch", "on", "off", "turn")]))
    if "admission" in wanted:
        throttles = places(samples, "admission")
        row = Row("admission / better of load and recompute", False, _ADMISSION_MAX)
        rows.append(_worst(row, [admission_ratio(samples, at) for at in throttles]))
    rows += _answers(conditions)
    return rows


def _worst(row: Row, ratios: Sequence[Ratio | None]) -> Row:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        return row
    worst = max(known, key=lambda ratio: ratio.value)
    return Row(row.target, row.at_least, row.limit, "", worst.value, worst.n, worst.where)


def _answers(conditions: Mapping[str, Any]) -> list[Row]:
    """Loaded KV gives the same tokens as computed KV, in every part with servers."""
    parts = conditions.get("parts", {})
    counted = [part["answers"] for part in parts.values() if "answers" in part]
    if not counted:
        return []
    compared = sum(answers["compared"] for answers in counted)
    different = sum(answers["different"] for answers in counted)
    row = Row("answers that differ between arms", False, 0)
    return [Row(row.target, False, 0, "", float(different), compared)]
