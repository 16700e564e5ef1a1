# SPDX-License-Identifier: Apache-2.0
"""Benchmark samples: results files, medians and goals.

A file is `{"schema", "bench", "fields", "samples", "conditions"}`. A row in `samples` has the
fields' values; in older files, without fields, it is a dict. Readers compute results from the
samples: a file has no verdict. A sample is a frozen dataclass of numbers and strings; a *measure*
is the name of a field or property. Percentiles are nearest-rank, so that each is a measured value.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import format_bytes

SCHEMA = 1
MB = 1_000_000
_DIGITS = 6
#: With at least this many values, a spread is p5 to p95; with fewer, it is the range.
PERCENTILES_FROM = 20
Sample = TypeVar("Sample")


class BenchError(OffloadError):
    """A one-line error that ends a benchmark: it cannot run here, or an arm failed."""


def dump(path: Path, bench: str, samples: Sequence[Any], conditions: dict[str, Any]) -> None:
    """Write samples, one per line, and conditions; create the file's directory. Raise BenchError if
    the file cannot be written."""
    names = list(asdict(samples[0])) if samples else []
    rows = [list(map(_short, asdict(one).values())) for one in samples]
    lines = ",\n".join(map(json.dumps, rows))
    rest = json.dumps({"conditions": conditions}, indent=1).removeprefix("{")
    known = f'"bench": {json.dumps(bench)}, "fields": {json.dumps(names)}'
    head = f'{{"schema": {SCHEMA}, {known}, "samples": ['
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{head}\n{lines}],{rest}\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None


def load(path: Path, bench: str, kind: type[Sample]) -> tuple[list[Sample], dict[str, Any]]:
    """Read a file's samples and conditions; raise BenchError if it cannot be read or is not a
    results file from `bench`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["bench"] != bench or content["schema"] != SCHEMA:
            raise ValueError(f"it is from {content['bench']!r}, schema {content['schema']}")
        known = fields(kind)  # type: ignore[arg-type]
        # Older files lack the fields that were added later, which have defaults.
        needed = [one.name for one in known if one.default is MISSING]
        added = [one.name for one in known if one.default is not MISSING]
        samples = [
            kind(**{name: row[name] for name in (*needed, *(set(added) & row.keys()))})
            for row in rows_in(content)
        ]
        return samples, dict(content["conditions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a results file of {bench}: {error!r}") from None


def rows_in(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the samples of a file's content as dicts."""
    if (names := content.get("fields")) is None:
        return list(content["samples"])
    return [dict(zip(names, row, strict=True)) for row in content["samples"]]


def name_in(path: Path) -> str:
    """Return the name of the benchmark that wrote the file; raise BenchError if it cannot be read
    or names none."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["bench"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: not a benchmark's results file: {error!r}") from None


def _short(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value


def select(samples: Iterable[Sample], **wanted: object) -> list[Sample]:
    """Return the samples whose fields have these values; None matches any value."""
    wanted = {name: value for name, value in wanted.items() if value is not None}
    return [
        one for one in samples if all(getattr(one, name) == value for name, value in wanted.items())
    ]


def distinct(samples: Iterable[Any], field: str) -> list[Any]:
    """Return a field's distinct values in the samples' order."""
    return list(dict.fromkeys(getattr(one, field) for one in samples))


def levels(samples: Iterable[Any], field: str) -> list[Any]:
    """Return a field's distinct values in ascending order."""
    return sorted(set(distinct(samples, field)))


def ratios_by_round(
    samples: Sequence[Sample],
    measure: Callable[[Sequence[Sample], str], float | None],
    arm: str,
    other: str,
) -> list[float]:
    """Return the ratio of `arm` to `other` for each round that measured both. measure: a function
    of a round's samples and an arm."""
    rounds = (select(samples, round=one) for one in levels(samples, "round"))
    pairs = [(measure(some, arm), measure(some, other)) for some in rounds]
    return [a / b for a, b in pairs if a is not None and b]


def same_answers(samples: Iterable[Any], *fields: str) -> tuple[int, int]:
    """Return (answers that equal the first complete answer with the same fields, answers
    compared)."""
    first: dict[tuple[Any, ...], str] = {}
    same = compared = 0
    for one in samples:
        if one.failure is None:
            key = tuple(getattr(one, field) for field in fields)
            compared += key in first
            same += key in first and first[key] == one.digest
            first.setdefault(key, one.digest)
    return same, compared


def values_of(samples: Iterable[Any], measure: str, **wanted: object) -> list[float]:
    """Return a measure's values in the selected samples, without None."""
    values = [getattr(one, measure) for one in select(samples, **wanted)]
    return [value for value in values if value is not None]


def median_of(samples: Iterable[Any], measure: str, **wanted: object) -> float | None:
    """Return the median of `values_of`; None if it is empty."""
    return median(values_of(samples, measure, **wanted))


def paired(
    samples: Sequence[Any],
    measure: str,
    above: dict[str, object],
    below: dict[str, object],
    key: Callable[[Any], Any] = lambda one: one.round,
) -> list[tuple[float, float]]:
    """Return a pair of medians for each key (such as a round) that both selections measured."""
    sides = []
    for wanted in (above, below):
        groups: dict[Any, list[float]] = {}
        for one in select(samples, **wanted):
            if (value := getattr(one, measure)) is not None:
                groups.setdefault(key(one), []).append(value)
        sides.append({name: statistics.median(values) for name, values in groups.items()})
    return [(sides[0][name], sides[1][name]) for name in sorted(sides[0]) if name in sides[1]]


#: A description of `Paired` for reports.
METHOD = "median of paired ratios, with its 95 % bootstrap interval (10,000 draws of rounds)"
_RESAMPLES = 10_000
_SEED = 20261121
_PAIRS_MIN = 5


@dataclass(frozen=True)
class Paired:
    """A median over `n` pairs with its 95 % interval.

    The interval is the median's percentile bootstrap: the pairs' logarithms are resampled with
    replacement 10,000 times from a fixed seed. Fewer than five pairs have no interval.
    """

    middle: float
    interval: tuple[float, float] | None
    n: int

    def contains(self, value: float) -> bool:
        return self.interval is not None and self.interval[0] <= value <= self.interval[1]


def median_ratio(of_pairs: Sequence[float]) -> Paired:
    """Return the median of the pairs' ratios, with its interval. There must be a pair; all ratios
    must be above 0."""
    values = np.log(np.asarray(of_pairs, float))
    middle = float(np.exp(np.median(values)))
    if len(values) < _PAIRS_MIN:
        return Paired(middle, None, len(values))
    generator = np.random.default_rng(_SEED)
    drawn = generator.integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.exp(np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5)))
    return Paired(middle, (float(low), float(high)), len(values))


@dataclass(frozen=True)
class Spread:
    """A median of n values. low, high: p5 and p95, or the range if there are few values."""

    median: float
    low: float
    high: float
    n: int


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return the spread of the values; None if there are none."""
    if not values:
        return None
    low, high = min(values), max(values)
    if len(values) >= PERCENTILES_FROM:
        low, high = percentile(values, 0.05), percentile(values, 0.95)
    return Spread(statistics.median(values), low, high, len(values))


def median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    assert values
    assert 0 < share <= 1
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def size_name(count: int) -> str:
    """Return a size as text, such as `64 KiB`."""
    return format_bytes(count).replace(".0 ", " ")


@dataclass(frozen=True)
class Figure:
    """A number that a goal bounds. n: number of rounds, or of samples from the arm that has the
    fewest. where: the size, throttle or rival that decided."""

    value: float
    n: int
    where: str = ""


@dataclass(frozen=True)
class Goal:
    """A benchmark's goal. reached: None if it was not measured. shown: the value as text."""

    name: str
    required: str
    reached: bool | None = None
    measured: float | None = None
    shown: str = ""
    n: int = 0
    where: str = ""


def bound(name: str, sign: str, limit: float, found: Figure | None, unit: str = "") -> Goal:
    """Return a goal with a lower (≥) or upper (≤) limit. found: None if not measured."""
    required = f"{sign} {limit:g}{unit}"
    if found is None:
        return Goal(name, required)
    reached = found.value >= limit if sign == "≥" else found.value <= limit
    shown = f"{found.value:.3f}{unit}"
    return Goal(name, required, reached, found.value, shown, found.n, found.where)


def missed(goals: Iterable[Goal]) -> list[Goal]:
    """Return the goals that were measured but not reached."""
    return [goal for goal in goals if goal.reached is False]


def ratio_of_medians(
    samples: Sequence[Any],
    measure: str,
    above: dict[str, object],
    below: dict[str, object],
    where: str = "",
) -> Figure | None:
    """Return the ratio of two selections' medians; None unless both were measured."""
    values = [values_of(samples, measure, **wanted) for wanted in (above, below)]
    if not all(values) or not (under := statistics.median(values[1])):
        return None
    return Figure(statistics.median(values[0]) / under, min(map(len, values)), where)


def worst(found: Iterable[Figure | None], by: Callable[..., Figure] = min) -> Figure | None:
    """Return the least figure, or the greatest with `by` max; None if any was not measured."""
    figures = list(found)
    whole = [one for one in figures if one is not None]
    if not whole or len(whole) < len(figures):
        return None
    return by(whole, key=lambda one: one.value)
