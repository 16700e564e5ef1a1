# SPDX-License-Identifier: Apache-2.0
"""One measurement as a row of numbers, and the JSON file of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Sample", "dump", "median_of"]

SCHEMA = 1


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
    """Write `{"schema": 1, "samples": […], "conditions": {…}}`, making the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(one) for one in samples]
    content = {"schema": SCHEMA, "samples": rows, "conditions": conditions}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
