# SPDX-License-Identifier: Apache-2.0
"""One measurement as a row of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import files

__all__ = ["Sample", "dump", "load", "median_of"]

_BENCH = "copy"


@dataclass(frozen=True)
class Sample:
    """One arm, case and round.

    direction: store, load, or both. value: GB/s (1e9 bytes) unless the case says otherwise:
    `submit` has µs, `loop` has steps/s.
    """

    case: str
    arm: str
    direction: str
    block_bytes: int
    count: int
    round: int
    value: float


def median_of(samples: Sequence[Sample], **wanted: object) -> float | None:
    """Over rounds, of what has these fields; None if nothing was measured."""
    values = [
        one.value
        for one in samples
        if all(getattr(one, name) == value for name, value in wanted.items())
    ]
    return statistics.median(values) if values else None


def dump(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """Write the file; as `files.dump`."""
    files.dump(path, _BENCH, samples, conditions)


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Read (samples, conditions) back; as `files.load`."""
    return files.load(path, _BENCH, Sample)
