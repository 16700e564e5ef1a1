# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench alone`: ratios of CPU time, with sharing over without, block by block.

A block measures the same chunks on every side. A ratio is of one block; its figure is the median
over all blocks, with its 95 % interval. The ratio of two sides that are equal shows the noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import plots, results
from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.hotpath.report import CASES, ONE, SCHEDULER
from vllm_nvmeof_bench.plots import Style, finish
from vllm_nvmeof_bench.results import METHOD, Figure, Goal, Paired, bound, distinct, select
from vllm_nvmeof_bench.tables import NOTHING, Column, Table, load_in, machine_in, number, vllm_in

OFF, AGAIN, ON = "off", "off again", "on"
SIDES = (OFF, AGAIN, ON)
#: Cases and stages that `bench hotpath` has not.
MISS, STEP = "miss", "step"
_RATIO_MAX = 1.01
_Parts = tuple[tuple[str, str], ...]  # (case, stage)


def _of(case: str, *without: str) -> _Parts:
    """The stages of the scheduler's thread."""
    stages = CASES[case].items()
    return tuple(
        (case, name) for name, one in stages if one.thread == SCHEDULER and name not in without
    )


#: What is compared → its parts, whose sum is one figure of a block.
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
#: What a request makes the scheduler's thread do.
_REQUESTS = (*_of("cpu"), *_of("pool"), *_of("store"), *_of("write"), (MISS, "look_up"))
_EVERYTHING = "everything that requests make it do"
FIGURES[_EVERYTHING] = _REQUESTS


@dataclass(frozen=True)
class Sample:
    """One stage of one case in one block, on one side.

    chunks: of an op; of 1: the figures are of one op. us: CPU time of the scheduler's thread, per
    chunk; of a step without work, per step.
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
    """(round, block) → the sum of the parts, where all were measured."""
    wanted, found = set(parts), dict[tuple[int, int], dict[tuple[str, str], float]]()
    for one in select(samples, side=side, chunks=chunks):
        if (one.case, one.stage) in wanted:
            found.setdefault((one.round, one.block), {})[one.case, one.stage] = one.us
    return {at: sum(us.values()) for at, us in found.items() if len(us) == len(wanted)}


def ratio(samples: Samples, side: str, chunks: int, parts: _Parts) -> Paired | None:
    """`side` over `OFF`, block by block; None if nothing was measured."""
    above, below = (sums(samples, one, chunks, parts) for one in (side, OFF))
    both = [at for at in above if at in below]
    if not both:
        return None
    return results.ratios([above[at] for at in both], [below[at] for at in both])


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Of every size of op: everything that requests make the scheduler's thread do."""
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


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    settings = conditions.get("settings", {})
    yield f"{machine_in(conditions)}; vLLM {vllm_in(conditions)}; {load_in(conditions)}"
    yield (
        f"{settings.get('entries', 0):,} chunks in each index; managers made "
        f"{settings.get('rounds', '?')} times, {settings.get('blocks', '?')} blocks each; {METHOD}"
    )


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    rows = [
        (chunks, name)
        for chunks in sorted(set(distinct(samples, "chunks")))
        for name, parts in FIGURES.items()
        if sums(samples, OFF, chunks, parts)
    ]

    def shown(row: tuple[int, str], side: str) -> str:
        found = ratio(samples, side, row[0], FIGURES[row[1]])
        return found.text() if found else NOTHING

    def us(row: tuple[int, str]) -> str:
        values = sums(samples, OFF, row[0], FIGURES[row[1]]).values()
        return number(results.median(values), "{:,.3f}")

    columns = [
        Column("op of", lambda row: f"{row[0]:,}"),
        Column("scheduler's thread", lambda row: row[1].strip(), left=True),
        Column("off, µs", us),
        Column("off again / off", partial(shown, side=AGAIN)),
        Column("on / off", partial(shown, side=ON)),
    ]
    if rows:
        title = "CPU time per chunk (op of 1: per op; a step: per step), and paired ratios"
        yield Table(title, columns, rows, grouped=True)


_STYLES = {
    AGAIN: Style(plots.GREY, label="off again / off"),
    ON: Style(plots.BLUE, label="on / off"),
}


def _plot(path: Path, samples: Samples, conditions: Mapping[str, Any]) -> None:
    """The ratios with their intervals, by what is compared, for the largest op."""
    chunks = max(distinct(samples, "chunks"))

    def spread(side: str, name: str) -> results.Spread | None:
        found = ratio(samples, side, chunks, FIGURES[name])
        if found is None:
            return None
        return results.Spread(found.middle, *(found.interval or (found.middle,) * 2), found.n)

    names = {name.strip().replace(", ", ",\n"): name for name in FIGURES}
    title = f"Sharing with nobody there: {plots.where_measured(conditions)}"
    with plots.picture(path, title, "A", (20, 6)) as (_, (panel,)):
        plots.bars(panel, _STYLES, names, spread, form="{:.3f}")
        panel.axhline(_RATIO_MAX, color=plots.RED, linewidth=1)
        panel.set_ylim(0.9, 1.1)
        panel.tick_params(axis="x", rotation=20)
        finish(panel, f"CPU time of the scheduler's thread, ops of {chunks:,} chunks", True)


BENCHES = (Benchmark("alone", Sample, _lines, _tables, _plot, goals),)
