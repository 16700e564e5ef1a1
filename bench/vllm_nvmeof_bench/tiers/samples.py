# SPDX-License-Identifier: Apache-2.0
"""One simulated run as a row of numbers, and the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import files

__all__ = ["Sample", "dump", "load"]

_BENCH = "tiers"


@dataclass(frozen=True)
class Sample:
    """sweep: `pool`, `cpu`, `writes`, or `alone` (one tier without a manager, of `pool_tokens`).
    Everything else in tokens: sizes; prompts, and where they were found; copied to the CPU
    tier, written to the pool. stranded: share of the chunks in the tiers at the end whose
    predecessor is in none: nothing finds them."""

    sweep: str
    policy: str
    write_policy: str
    store_threshold: int
    gpu_tokens: int
    cpu_tokens: int
    pool_tokens: int
    prompt_tokens: int
    hit_gpu: int
    hit_cpu: int
    hit_pool: int
    stored: int
    written: int
    stranded: float

    @property
    def hit(self) -> float:
        """Share of the prompts' tokens that were found anywhere."""
        return (self.hit_gpu + self.hit_cpu + self.hit_pool) / self.prompt_tokens


def dump(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """As `files.dump`."""
    files.dump(path, _BENCH, samples, conditions)


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """As `files.load`."""
    return files.load(path, _BENCH, Sample)
