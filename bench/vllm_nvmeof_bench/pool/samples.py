# SPDX-License-Identifier: Apache-2.0
"""One measurement as a row of numbers; percentiles, medians; the JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import files
from vllm_nvmeof_bench.results import percentile, size_name
from vllm_nvmeof_offload.units import GIB, MIB

__all__ = ["Figures", "Sample", "dump", "load", "median_of", "percentile", "select", "size_name"]

_BENCH = "pool"


@dataclass(frozen=True)
class Figures:
    """What one arm measured. payload_bytes: header pages and table entries do not count.

    cpu_s: user and system time of all threads of the process, io_uring's workers included;
    None where it cannot be told apart. Latencies are None where an arm cannot say them.
    """

    payload_bytes: int
    seconds: float
    cpu_s: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None


@dataclass(frozen=True)
class Sample:
    """One arm, case, block size and round. MiB and GiB of payload."""

    arm: str
    case: str
    block_bytes: int
    round: int
    mib_per_s: float
    cpu_s_per_gib: float | None
    p50_us: float | None
    p99_us: float | None

    @staticmethod
    def of(arm: str, case: str, block_bytes: int, number: int, figures: Figures) -> Sample:
        per_gib = GIB / figures.payload_bytes
        return Sample(
            arm=arm,
            case=case,
            block_bytes=block_bytes,
            round=number,
            mib_per_s=round(figures.payload_bytes / MIB / figures.seconds, 2),
            cpu_s_per_gib=None if figures.cpu_s is None else round(figures.cpu_s * per_gib, 5),
            p50_us=_rounded(figures.p50_us),
            p99_us=_rounded(figures.p99_us),
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def select(
    samples: Iterable[Sample], arm: str, case: str, block_bytes: int | None = None
) -> list[Sample]:
    return [
        one
        for one in samples
        if one.arm == arm and one.case == case and block_bytes in (None, one.block_bytes)
    ]


def median_of(
    samples: Iterable[Sample], arm: str, case: str, block_bytes: int, field: str = "mib_per_s"
) -> float | None:
    """The median over rounds; None if nothing was measured."""
    values = [getattr(one, field) for one in select(samples, arm, case, block_bytes)]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def dump(
    path: Path,
    samples: Sequence[Sample],
    conditions: dict[str, Any],
    manager: dict[str, Any] | None,
) -> None:
    """Write the file; as `files.dump`. The manager's figures lie among the conditions."""
    files.dump(path, _BENCH, samples, {**conditions, "manager": manager})


def load(path: Path) -> tuple[list[Sample], dict[str, Any], dict[str, Any] | None]:
    """Read (samples, conditions, manager) back; as `files.load`."""
    samples, conditions = files.load(path, _BENCH, Sample)
    return samples, conditions, conditions.pop("manager", None)
