# SPDX-License-Identifier: Apache-2.0
"""The report on the demo's results, without the verdict of `vllm_nvmeof_bench.demo.report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_nvmeof_bench.report import Column, Conditions, Report, Table, by, medians
from vllm_nvmeof_bench.results import median_of, select

#: Case → the base case for its speed-up.
_BASES = {
    **dict.fromkeys(("cpu_tier", "pool", "restart"), "cold_without"),
    "preempted": "preempted_recompute",
}


@dataclass(frozen=True)
class Sample:
    """The time to a first token, or of a preempted request's resume."""

    case: str
    seconds: float


def _tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table | str]:
    rows = [{"case": case} for case in dict.fromkeys(one.case for one in samples)]

    def speedup(row: dict[str, str]) -> float | None:
        base = median_of(samples, "seconds", case=_BASES.get(row["case"], ""))
        own = median_of(samples, "seconds", **row)
        return base / own if base and own else None

    columns = [
        by("case"),
        medians(samples, "seconds", "seconds", "{:.3f}", ranged=True),
        Column("times as fast", speedup, "{:.1f}"),
        Column("n", lambda row: len(select(samples, **row))),
    ]
    yield Table("Time to first token; of preempted requests, to the next token", columns, rows)


REPORTS = (Report("demo", "The demo", Sample, _tables),)
