# SPDX-License-Identifier: Apache-2.0
"""One replayed request as a row of numbers, what follows for an arm, and the JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench import files

__all__ = ["Sample", "Summary", "arms_of", "dump", "load", "summary_of"]

_BENCH = "replay"


@dataclass(frozen=True)
class Sample:
    """at_s: sent, since the first user came. ttft_s, end_s: since it was sent; ttft_s None: no
    token came. ended: `whole`, `failed`, or `cut` (under way when the time was up)."""

    arm: str
    session: str
    at_s: float
    ttft_s: float | None
    end_s: float
    tokens_in: int
    tokens_out: int
    ended: str
    why: str = ""


@dataclass(frozen=True)
class Summary:
    """Of one arm. TTFT of all requests that got a first token, seconds. tokens a second: of
    whole requests, over the time from the first user's arrival to the end."""

    completed: int
    failed: int
    cut: int
    ttft_mean_s: float
    ttft_median_s: float
    ttft_p95_s: float
    ttft_max_s: float
    tokens_in_per_s: float
    tokens_out_per_s: float
    seconds: float


def arms_of(samples: Iterable[Sample]) -> list[str]:
    return list(dict.fromkeys(one.arm for one in samples))


def summary_of(samples: Sequence[Sample], arm: str) -> Summary | None:
    """None: no first token came."""
    mine = [one for one in samples if one.arm == arm]
    firsts = [one.ttft_s for one in mine if one.ttft_s is not None]
    if not firsts:
        return None
    whole = [one for one in mine if one.ended == "whole"]
    seconds = max(one.at_s + one.end_s for one in mine)
    return Summary(
        completed=len(whole),
        failed=sum(one.ended == "failed" for one in mine),
        cut=sum(one.ended == "cut" for one in mine),
        ttft_mean_s=statistics.fmean(firsts),
        ttft_median_s=statistics.median(firsts),
        ttft_p95_s=float(np.percentile(firsts, 95)),
        ttft_max_s=max(firsts),
        tokens_in_per_s=sum(one.tokens_in for one in whole) / seconds,
        tokens_out_per_s=sum(one.tokens_out for one in whole) / seconds,
        seconds=seconds,
    )


def dump(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """As `files.dump`."""
    files.dump(path, _BENCH, samples, conditions)


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """As `files.load`."""
    return files.load(path, _BENCH, Sample)
