# SPDX-License-Identifier: Apache-2.0
"""Two arms compared round by round: what disturbs a round disturbs both.

The estimate is the median over rounds of the ratio (or difference) within a round. Its 95 %
interval is the bootstrap's percentile interval of that median: rounds are drawn anew with
replacement, 10,000 times, from a fixed seed; of ratios, their logarithms. Below five rounds it
says nothing, and there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_bench.cost.samples import MEASURES, Sample, select

__all__ = ["Paired", "differences", "differences_of", "ratios", "ratios_of"]

_RESAMPLES = 10_000
_SEED = 20261121
_ROUNDS_MIN = 5
METHOD = "median of paired ratios, 95 % percentile bootstrap of it (10,000 draws of rounds)"


@dataclass(frozen=True)
class Paired:
    """An estimate with its 95 % interval over `n` rounds; `values` are the rounds' own."""

    middle: float
    low: float | None
    high: float | None
    n: int
    values: tuple[float, ...] = ()

    def contains(self, value: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= value <= self.high

    @property
    def width(self) -> float | None:
        """From one end of the interval to the other."""
        return None if self.low is None or self.high is None else self.high - self.low


def ratios(above: Sequence[float], below: Sequence[float]) -> Paired:
    """above / below, pair by pair. All values are above 0; there is at least one pair."""
    logs = np.log(np.asarray(above, float)) - np.log(np.asarray(below, float))
    middle, low, high = _interval(logs)
    return Paired(
        math.exp(middle),
        None if low is None else math.exp(low),
        None if high is None else math.exp(high),
        len(logs),
        tuple(float(value) for value in np.exp(logs)),
    )


def differences(above: Sequence[float], below: Sequence[float]) -> Paired:
    """above - below, pair by pair. There is at least one pair."""
    values = np.asarray(above, float) - np.asarray(below, float)
    return Paired(*_interval(values), len(values), tuple(float(value) for value in values))


def ratios_of(
    samples: Sequence[Sample], arm: str, base: str, case: str, measure: str
) -> Paired | None:
    """`arm` over `base`; None if they share no round, or a value is 0 or not known."""
    above, below = _pairs(samples, arm, base, case, measure)
    return ratios(above, below) if above and min(*above, *below) > 0 else None


def differences_of(
    samples: Sequence[Sample], arm: str, base: str, case: str, measure: str
) -> Paired | None:
    """`arm` less `base`; None if they share no round with known values."""
    above, below = _pairs(samples, arm, base, case, measure)
    return differences(above, below) if above else None


def _pairs(
    samples: Sequence[Sample], arm: str, base: str, case: str, measure: str
) -> tuple[list[float], list[float]]:
    found = [
        {one.round: MEASURES[measure](one) for one in select(samples, name, case)}
        for name in (arm, base)
    ]
    both = [(found[0][number], found[1][number]) for number in sorted(found[0].keys() & found[1])]
    known = [(above, below) for above, below in both if above is not None and below is not None]
    return [above for above, _ in known], [below for _, below in known]


def _interval(values: npt.NDArray[np.float64]) -> tuple[float, float | None, float | None]:
    middle = float(np.median(values))
    if len(values) < _ROUNDS_MIN:
        return middle, None, None
    generator = np.random.default_rng(_SEED)
    drawn = generator.integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5))
    return middle, float(low), float(high)
