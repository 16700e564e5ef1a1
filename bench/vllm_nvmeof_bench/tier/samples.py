# SPDX-License-Identifier: Apache-2.0
"""One measured time as a row; medians, spreads, ratios within a round; the JSON file.

A file is `{"schema": 1, "bench": "tier", "samples": […], "conditions": {…}}`. It holds no
verdict: `targets` computes one from the samples, in this process or in a reader's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import files
from vllm_nvmeof_bench.results import Spread, spread_of
from vllm_nvmeof_offload.units import GIB

__all__ = [
    "Sample",
    "Spread",
    "cpu_s_per_gib",
    "dump",
    "load",
    "places",
    "round_ratios",
    "seconds",
    "select",
    "spread_of",
]

_BENCH = "tier"


@dataclass(frozen=True)
class Sample:
    """One load, resume or request. `settings` says what parts, cases and arms are.

    at: load: multiple of the CPU tier; admission: the read limit in MB/s, 0: none; else null.
    number: which one within its round. cpu_s: of the whole process, load alone.
    loaded_tokens: a request's mean over its batch, by the server's own counters.
    """

    part: str
    case: str
    arm: str
    at: float | None
    round: int
    number: int
    seconds: float
    payload_bytes: int | None = None
    cpu_s: float | None = None
    loaded_tokens: int | None = None


def select(
    samples: Iterable[Sample],
    part: str,
    arm: str | None = None,
    case: str | None = None,
    at: float | None = None,
) -> list[Sample]:
    """The samples of a part; None: whatever it is."""
    return [
        one
        for one in samples
        if one.part == part
        and arm in (None, one.arm)
        and case in (None, one.case)
        and at in (None, one.at)
    ]


def seconds(samples: Iterable[Sample]) -> list[float]:
    return [one.seconds for one in samples]


def cpu_s_per_gib(samples: Iterable[Sample]) -> list[float]:
    """CPU seconds per GiB of payload, of the samples that know both."""
    return [
        one.cpu_s * GIB / one.payload_bytes
        for one in samples
        if one.cpu_s is not None and one.payload_bytes
    ]


def places(samples: Iterable[Sample], part: str, case: str | None = None) -> list[float]:
    """Every `at` of a part, ascending; a throttle of 0, which is none, comes last."""
    found = {one.at for one in select(samples, part, case=case) if one.at is not None}
    return sorted(found, key=lambda at: at or float("inf"))


def round_ratios(
    samples: Iterable[Sample],
    part: str,
    above: str,
    below: Sequence[str],
    case: str | None = None,
    at: float | None = None,
    worst: Callable[[Sequence[float]], float] = max,
) -> list[float]:
    """Per round: the median of arm `above` over the `worst` of the medians of `below`.

    A round in which one of them was not measured is left out.
    """
    chosen = select(samples, part, case=case, at=at)
    found = []
    for number in sorted({one.round for one in chosen}):
        medians = [
            statistics.median(times)
            for arm in (above, *below)
            if (times := [one.seconds for one in chosen if (one.arm, one.round) == (arm, number)])
        ]
        if len(medians) == 1 + len(below):
            found.append(medians[0] / worst(medians[1:]))
    return found


def dump(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """Write the file; as `files.dump`."""
    files.dump(path, _BENCH, samples, conditions)


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Read (samples, conditions) back; as `files.load`."""
    return files.load(path, _BENCH, Sample)
