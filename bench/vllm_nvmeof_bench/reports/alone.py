# SPDX-License-Identifier: Apache-2.0
"""The report of `bench hotpath alone`: CPU time with sharing / without, by block.

A block measures the same chunks on every side and gives one ratio. The reported figure is the
median over all blocks, with its 95 % interval. The ratio of the two sides without sharing is noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table
from vllm_nvmeof_bench.reports.hotpath import CASES, ONE, SCHEDULER
from vllm_nvmeof_bench.results import METHOD, Figure, Goal, Paired, bound, distinct, select

OFF, AGAIN, ON = "off", "off again", "on"
SIDES = (OFF, AGAIN, ON)
#: Cases and stages that `bench hotpath chunks` does not have.
MISS, STEP = "miss", "step"
_RATIO_MAX = 1.01
_Parts = tuple[tuple[str, str], ...]  # (case, stage)


def _of(case: str, *without: str) -> _Parts:
    """Return those stages of a case, except `without`, that run on the scheduler's thread."""
    stages = CASES[case].items()
    return tuple(
        (case, name) for name, one in stages if one.thread == SCHEDULER and name not in without
    )


#: Name of a comparison → its parts, whose sum is compared per block.
FIGURES: dict[str, _Parts] = {
    "look-ups that hit the CPU tier": (("cpu", "look_up"),),
    "look-ups that hit the pool": (("pool", "look_up"),),
    "look-ups that miss": ((MISS, "look_up"),),
    "load from the CPU tier, look-ups included": _of("cpu"),
    "the same without its look-ups": _of("cpu", "look_up"),
    "load from the pool, look-ups included": _of("pool"),
    "the same without its look-ups ": _of("pool", "look_up"),
    "store and write": (*_of("store"), *_of("write")),
    "step without work": ((STEP, STEP),),
}
#: The scheduler thread's work for a request.
_REQUESTS = (*_of("cpu"), *_of("pool"), *_of("store"), *_of("write"), (MISS, "look_up"))
_EVERYTHING = "everything that requests make it do"
FIGURES[_EVERYTHING] = _REQUESTS


@dataclass(frozen=True)
class Sample:
    """One stage of one case in one block, on one side.

    chunks: chunks per op; if 1, times are per op. us: CPU time of the scheduler's thread per chunk,
    or, for `STEP`, per step without work.
    """

    side: str
    case: str
    stage: str
    chunks: int
    round: int
    block: int
    us: float


Samples = Sequence[Sample]


def sums(samples: Samples, side: str, chunks: int, parts: _Parts) -> dict[tuple[int, int], float]:
    """Return (round, block) → the sum of `parts`, for blocks that measured all parts."""
    wanted, found = set(parts), dict[tuple[int, int], dict[tuple[str, str], float]]()
    for one in select(samples, side=side, chunks=chunks):
        if (one.case, one.stage) in wanted:
            found.setdefault((one.round, one.block), {})[one.case, one.stage] = one.us
    return {at: sum(us.values()) for at, us in found.items() if len(us) == len(wanted)}


def ratio(samples: Samples, side: str, chunks: int, parts: _Parts) -> Paired | None:
    """Return the ratio `side` / `OFF`, block by block; None if nothing was measured."""
    above, below = (sums(samples, one, chunks, parts) for one in (side, OFF))
    both = [at for at in above if at in below]
    if not both:
        return None
    return results.ratios([above[at] for at in both], [below[at] for at in both])


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Return a goal for each op size, on the scheduler thread's whole work for requests."""
    return [
        bound(
            f"with sharing / without, ops of {chunks:,} {'chunk' if chunks == ONE else 'chunks'}",
            "≤",
            _RATIO_MAX,
            _figure(ratio(samples, ON, chunks, _REQUESTS)),
        )
        for chunks in sorted(set(distinct(samples, "chunks"))) or (ONE,)
    ]


def _figure(found: Paired | None) -> Figure | None:
    return Figure(found.middle, found.n) if found else None


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    rows = [
        (chunks, name)
        for chunks in sorted(set(distinct(samples, "chunks")))
        for name, parts in FIGURES.items()
        if sums(samples, OFF, chunks, parts)
    ]

    def us(row: tuple[int, str]) -> float | None:
        return results.median(sums(samples, OFF, row[0], FIGURES[row[1]]).values())

    def over_off(side: str) -> Column:
        def get(row: tuple[int, str]) -> Paired | None:
            return ratio(samples, side, row[0], FIGURES[row[1]])

        return Column(f"{side} / off", get, "{:.3f}", drawn=True)

    columns = [
        Column("op of", lambda row: f"{row[0]:,}"),
        Column("scheduler's thread", lambda row: row[1].strip(), left=True),
        Column("off, µs", us, "{:,.3f}"),
        over_off(AGAIN),
        over_off(ON),
    ]
    title = "CPU time per chunk (op of 1: per op; a step: per step), and paired ratios"
    yield Table(title, columns, rows, grouped=True, caption=METHOD, unit="ratio of CPU time")


REPORTS = (
    Report(
        "alone",
        "The cost of sharing without other servers",
        Sample,
        _tables,
        about=(
            "{entries:,} chunks in each index; managers made {rounds} times, {blocks} blocks each"
        ),
        goals=goals,
    ),
)
