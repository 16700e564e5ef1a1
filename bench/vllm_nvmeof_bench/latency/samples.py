# SPDX-License-Identifier: Apache-2.0
"""One measurement as a row of numbers; medians over rounds, and what one adds to another."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import files
from vllm_nvmeof_bench.latency.settings import Point

__all__ = ["Added", "Sample", "added", "dump", "load", "median_of", "points_of", "targets_of"]

_BENCH = "latency"


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


@dataclass(frozen=True)
class Added:
    """What the second has more than the first, of medians: µs, and per cent of the first."""

    first_us: float
    second_us: float

    @property
    def us(self) -> float:
        return self.second_us - self.first_us

    @property
    def per_cent(self) -> float:
        return 100 * self.us / self.first_us


def targets_of(samples: Iterable[Sample]) -> list[str]:
    """Names in the order of the file: the first is what the second is compared with."""
    return list(dict.fromkeys(one.target for one in samples))


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Every point, by case, size, jobs and depth."""
    found = {one.point for one in samples}
    return sorted(found, key=lambda one: (one.case, one.payload_bytes, one.jobs, one.depth))


def median_of(
    samples: Iterable[Sample], target: str, arm: str, point: Point, field: str
) -> float | None:
    """The median over rounds; None if nothing was measured."""
    values = [
        getattr(one, field)
        for one in samples
        if one.target == target and one.arm == arm and one.point == point
    ]
    return statistics.median(values) if values else None


def added(
    samples: Sequence[Sample],
    first: tuple[str, str],
    second: tuple[str, str],
    point: Point,
    field: str,
) -> Added | None:
    """Each a (target, arm); None unless both were measured there."""
    values = [median_of(samples, *one, point, field) for one in (first, second)]
    if values[0] is None or values[1] is None:
        return None
    return Added(values[0], values[1])


def dump(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """Write the file, making its directory; as `files.dump`."""
    files.dump(path, _BENCH, samples, conditions)


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Read (samples, conditions) back; as `files.load`."""
    return files.load(path, _BENCH, Sample)
