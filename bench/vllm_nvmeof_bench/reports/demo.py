# SPDX-License-Identifier: Apache-2.0
"""The demo's cases and their report, without the verdict of `vllm_nvmeof_bench.demo.report`.

cold_without        first turns on the server without offloading
cold                first turns on the offloading server, which has nothing to load
cpu_tier            later turns whose prompt was loaded mostly from pinned CPU memory
pool                later turns whose prompt was loaded mostly from the pool's files
restart             each conversation's first turn after the server restarts
preempted           resumes of preempted requests with offloading (`workload.resume_times_s`)
preempted_recompute the same crowd's resumes without offloading
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_nvmeof_bench.report import Column, Conditions, Report, Table, by, counts, medians
from vllm_nvmeof_bench.results import distinct, median_of

COLD, RETURNING = ("cold_without", "cold"), ("cpu_tier", "pool", "restart")
#: Case → the base cases for its speed-up. Prompts of cold first turns are slightly shorter.
_BASES = {**dict.fromkeys(RETURNING, COLD), "preempted": ("preempted_recompute",)}


@dataclass(frozen=True)
class Sample:
    """The time to a first token, or of a preempted request's resume."""

    case: str
    seconds: float


def speedup(samples: Sequence[Sample], case: str) -> float | None:
    """Return the smallest median of the case's base cases divided by the case's median; None if
    either was not measured."""
    own = median_of(samples, "seconds", case=case)
    bases = [median_of(samples, "seconds", case=base) for base in _BASES.get(case, ())]
    least = min(filter(None, bases), default=None)
    return least / own if least and own else None


def tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table | str]:
    rows = [{"case": case} for case in distinct(samples, "case")]
    columns = [
        by("case"),
        medians(samples, "seconds", "seconds", "{:.3f}", ranged=True),
        Column("times as fast", lambda row: speedup(samples, row["case"]), "{:.1f}"),
        counts(samples),
    ]
    yield Table("Time to first token; of preempted requests, to the next token", columns, rows)


REPORTS = (Report("demo", "The demo", Sample, tables),)
