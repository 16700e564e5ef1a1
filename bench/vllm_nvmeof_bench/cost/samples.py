# SPDX-License-Identifier: Apache-2.0
"""One measurement as a row of numbers, what follows from it, and the JSON file.

A file is `{"schema": 1, "samples": […], "conditions": {…}}`. It holds no verdict: `targets`
computes one from the samples, in this process or in a reader's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import files

__all__ = ["MEASURES", "Sample", "dump", "load", "median_of", "select"]

_BENCH = "cost"


@dataclass(frozen=True)
class Sample:
    """One arm, case and round. Seconds, bytes, counts.

    ttft_s: to the first token, of several requests their median. seconds: to the last token.
    tokens: of prompts and answers. cpu_s: all processes of the server, user and system, until
    they were quiet again. others_cpu_s: of the other, idle servers meanwhile. quiet_after_s:
    how long the server worked on behind the last token. stored, loaded: copied between GPU
    memory and staging; written: to the pool. hits: tokens found in any cache.
    scheduler_s, scheduler_steps: in our scheduler side; step_s, step_tokens: the engine's
    steps; all four None where the server does not say them.
    """

    arm: str
    case: str
    round: int
    ttft_s: float
    seconds: float
    answer_tokens: int
    tokens: int
    cpu_s: float
    others_cpu_s: float
    quiet_after_s: float
    stored_bytes: int
    loaded_bytes: int
    written_bytes: int
    hits: int
    preemptions: int
    scheduler_s: float | None = None
    scheduler_steps: int | None = None
    step_s: float | None = None
    step_tokens: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.answer_tokens / self.seconds

    def per_1k_tokens(self, amount: float) -> float:
        return 1000 * amount / self.tokens

    @property
    def scheduler_us_per_step(self) -> float | None:
        if self.scheduler_s is None or not self.scheduler_steps:
            return None
        return 1e6 * self.scheduler_s / self.scheduler_steps

    @property
    def scheduler_us_per_1k_tokens(self) -> float | None:
        if self.scheduler_s is None or not self.step_tokens:
            return None
        return 1e9 * self.scheduler_s / self.step_tokens


#: What is compared and printed, by name.
MEASURES: dict[str, Callable[[Sample], float | None]] = {
    "ttft_ms": lambda one: 1000 * one.ttft_s,
    "seconds": lambda one: one.seconds,
    "tokens_per_s": lambda one: one.tokens_per_s,
    "cpu_s_per_1k_tokens": lambda one: one.per_1k_tokens(one.cpu_s),
    "stored_bytes_per_1k_tokens": lambda one: one.per_1k_tokens(one.stored_bytes),
    "loaded_bytes_per_1k_tokens": lambda one: one.per_1k_tokens(one.loaded_bytes),
    "written_bytes_per_1k_tokens": lambda one: one.per_1k_tokens(one.written_bytes),
    "scheduler_us_per_step": lambda one: one.scheduler_us_per_step,
    "scheduler_us_per_1k_tokens": lambda one: one.scheduler_us_per_1k_tokens,
    "quiet_after_s": lambda one: one.quiet_after_s,
}


def select(samples: Iterable[Sample], arm: str, case: str | None = None) -> list[Sample]:
    return [one for one in samples if one.arm == arm and case in (None, one.case)]


def median_of(samples: Iterable[Sample], arm: str, case: str, measure: str) -> float | None:
    """The median over rounds; None if nothing was measured."""
    values = [MEASURES[measure](one) for one in select(samples, arm, case)]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def dump(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """Write the file; as `files.dump`."""
    files.dump(path, _BENCH, samples, conditions)


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Read (samples, conditions) back; as `files.load`."""
    return files.load(path, _BENCH, Sample)
