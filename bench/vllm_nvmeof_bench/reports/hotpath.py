# SPDX-License-Identifier: Apache-2.0
"""The `bench hotpath` report: stages, goals and tables. A total is the sum over stages within a
round that measured all of them; figures are medians over rounds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table
from vllm_nvmeof_bench.results import (
    METHOD,
    Figure,
    Goal,
    Paired,
    Spread,
    bound,
    median_ratio,
    select,
    spread_of,
    values_of,
)

OURS, VLLM = "ours", "vllm"
SIDES = (OURS, VLLM)
SCHEDULER, MODEL, PIPELINE = "scheduler", "model", "pipeline"
#: The number of chunks in an op that measures the cost per op.
ONE = 1


class Stage(NamedTuple):
    """A step of a case, and the thread that runs it."""

    thread: str
    words: str


_PICKLE = Stage(SCHEDULER, "pickle the command")
_UNPICKLE = Stage(MODEL, "unpickle the command")
_SUBMIT = Stage(MODEL, "submit the job")
_PIPELINE = Stage(PIPELINE, "transfer, with instant engines")
_FINISHED = Stage(MODEL, "take finished jobs")
_LOAD = {
    "look_up": Stage(SCHEDULER, "look-up, key by key"),
    "look_up_again": Stage(SCHEDULER, "look-up in the next step"),
    "find": Stage(SCHEDULER, "find the chunks again, for admission"),
    "prepare": Stage(SCHEDULER, "prepare the load"),
    "pickle": _PICKLE,
    "unpickle": _UNPICKLE,
    "submit": _SUBMIT,
    "pipeline": _PIPELINE,
    "finished": _FINISHED,
    "report": Stage(SCHEDULER, "report of the load"),
    "end": Stage(SCHEDULER, "end of the request"),
}
#: Case → its stages in order.
CASES: dict[str, dict[str, Stage]] = {
    "cpu": _LOAD,
    "pool": _LOAD,
    "store": {
        "prepare": Stage(SCHEDULER, "prepare the store, and evict"),
        "pickle": _PICKLE,
        "unpickle": _UNPICKLE,
        "submit": _SUBMIT,
        "pipeline": _PIPELINE,
        "finished": _FINISHED,
        "report": Stage(SCHEDULER, "report of the store"),
    },
    "write": {
        "take": Stage(SCHEDULER, "take the write command"),
        "pickle": _PICKLE,
        "unpickle": _UNPICKLE,
        "submit": _SUBMIT,
        "pipeline": _PIPELINE,
        "report": Stage(SCHEDULER, "report of the write"),
    },
    "hold": {
        "hold": Stage(SCHEDULER, "hold a chunk for a preempted request"),
        "fetch": Stage(SCHEDULER, "fetch a chunk for a preempted request"),
        "release": Stage(SCHEDULER, "release a held chunk"),
    },
    "blocks": {
        "allocate": Stage(SCHEDULER, "allocate the load's GPU blocks"),
        "name": Stage(SCHEDULER, "enter the blocks in the prefix cache"),
        "free": Stage(SCHEDULER, "free the blocks"),
    },
    "start": {
        "adopt_rank": Stage(MODEL, "adopt the pool's table"),
        "adopt_manager": Stage(SCHEDULER, "build the index"),
        "memory": Stage(SCHEDULER, "memory of the index"),
    },
}
_TITLES = {
    "cpu": "load from the CPU tier",
    "pool": "load from the pool",
    "store": "store into a full CPU tier",
    "write": "write to the pool",
    "hold": "requests that wait",
    "blocks": "vLLM's own work for a load",
    "start": "start with a full pool",
}
#: A load's stages on the scheduler's thread, except look-ups; vLLM's manager has no `find`.
_PLANNED = ("find", "prepare", "pickle", "report")
_STORED = tuple((case, stage) for case in ("store", "write") for stage in CASES[case])
_MODEL_STAGES = tuple(name for name, stage in _LOAD.items() if stage.thread == MODEL)

#: Step of a load → our stages in it, and vLLM's own stage.
_STEPS = {
    "plans the load": (("look_up", "find", "prepare", "pickle"), "allocate"),
    "applies its report": (("report",), "name"),
    "ends the request": (("end",), "free"),
}

_CHUNKS, _MORE_CHUNKS = 8192, 65_536


@dataclass(frozen=True)
class Sample:
    """One stage of one case in one round.

    chunks: chunks per op; if `ONE`, us_per_chunk is the cost per op. us_per_chunk: CPU time of the
    thread. bytes_per_chunk: size of a pickled command, or resident memory of the index.
    locked_us_per_chunk: CPU time for which the pipeline's thread holds the interpreter lock.
    """

    stage: str
    case: str
    side: str
    thread: str
    chunks: int
    round: int
    us_per_chunk: float | None
    bytes_per_chunk: float | None = None
    locked_us_per_chunk: float | None = None


Samples = Sequence[Sample]
Parts = Iterable[tuple[str, str]]  # (case, stage)


def parts_of(case: str, stages: Iterable[str]) -> list[tuple[str, str]]:
    return [(case, stage) for stage in stages]


def total_us(samples: Samples, side: str, chunks: int, parts: Parts) -> list[float]:
    """Return the sum of the parts, in µs per chunk, for each round that measured all parts."""
    by_round: dict[int, dict[tuple[str, str], float]] = {}
    for one in select(samples, side=side, chunks=chunks):
        if one.us_per_chunk is not None:
            by_round.setdefault(one.round, {})[one.case, one.stage] = one.us_per_chunk
    wanted = list(parts)
    whole = [found for found in by_round.values() if found.keys() >= set(wanted)]
    return [sum(found[part] for part in wanted) for found in whole]


def _figure(values: Sequence[float], where: str = "", scale: float = 1.0) -> Figure | None:
    return Figure(statistics.median(values) * scale, len(values), where) if values else None


def _total(
    samples: Samples, case: str, stages: Iterable[str], chunks: int = _CHUNKS, scale: float = 1.0
) -> Figure | None:
    """Return our total of a case's `stages`, in µs per chunk times `scale`."""
    values = total_us(samples, OURS, chunks, parts_of(case, stages))
    return _figure(values, _TITLES[case], scale)


def load_ratio(samples: Samples) -> Figure | None:
    """Return our cost of a load from the CPU tier relative to vLLM's, on the scheduler's thread."""

    def cost(some: Samples, side: str) -> float | None:
        stages = _PLANNED if side == OURS else _PLANNED[1:]
        return next(iter(total_us(some, side, _CHUNKS, parts_of("cpu", stages))), None)

    return _figure(results.ratios_by_round(samples, cost, OURS, VLLM))


def _step_ms(samples: Samples, step: str, case: str) -> list[float]:
    """Return our ms (or vLLM's own, if `case` is "blocks") in a step of a load of 65,536 chunks, by
    round."""
    ours, own = _STEPS[step]
    side, stages = (VLLM, (own,)) if case == "blocks" else (OURS, ours)
    return [
        us * _MORE_CHUNKS / 1000
        for us in total_us(samples, side, _MORE_CHUNKS, parts_of(case, stages))
    ]


def _longest_step(samples: Samples) -> Figure | None:
    pairs = [(step, case) for step in _STEPS for case in ("cpu", "pool")]
    found = (_figure(_step_ms(samples, *pair), _TITLES[pair[1]]) for pair in pairs)
    return results.worst(found, max)


def _step_ratio(samples: Samples, step: str, case: str) -> Paired | None:
    ours, own = _step_ms(samples, step, case), _step_ms(samples, step, "blocks")
    if not ours or len(ours) != len(own):
        return None
    return median_ratio([mine / theirs for mine, theirs in zip(ours, own, strict=True)])


def _steps(samples: Samples) -> Table:
    columns = [Column("the step that", lambda step: step)]
    for case in ("cpu", "pool", "blocks"):
        name = _TITLES[case].removeprefix("load ")
        get = partial(_step_ms, samples, case=case)
        columns.append(Column(name, lambda step, get=get: spread_of(get(step)), "{:.1f}"))  # type: ignore[misc]
    for case, name in (("cpu", "CPU tier / own"), ("pool", "pool / own")):
        columns.append(Column(name, partial(_step_ratio, samples, case=case), "{:.2f}"))
    return Table("a load of 65,536 chunks: ms per step", columns, list(_STEPS), caption=METHOD)


def _growth(samples: Samples) -> Figure | None:
    """Return the worst ratio of µs per chunk, 65,536 chunks to 8,192, for loads and stores."""

    def ratio(case: str, parts: Parts) -> Figure | None:
        wanted = list(parts)
        few, more = (total_us(samples, OURS, n, wanted) for n in (_CHUNKS, _MORE_CHUNKS))
        if not few or not more:
            return None
        value = statistics.median(more) / statistics.median(few)
        return Figure(value, min(len(few), len(more)), _TITLES[case])

    loads = [ratio(case, parts_of(case, _PLANNED)) for case in ("cpu", "pool")]
    return results.worst([*loads, ratio("store", _STORED)], max)


def _op(samples: Samples) -> Figure | None:
    """Return the µs of the slowest kind of one-chunk op, summed over all threads."""
    without = ("look_up", "look_up_again")  # run per chunk, not per op
    loads = [name for name in _LOAD if name not in without]
    found = [_total(samples, case, loads, ONE) for case in ("cpu", "pool")]
    return results.worst([*found, _total(samples, "store", CASES["store"], ONE)], max)


def _rate(samples: Samples, case: str) -> Figure | None:
    """Return the thousands of chunks per second that the pipeline's thread can move."""
    chosen = select(samples, side=OURS, case=case, stage="pipeline", chunks=_CHUNKS)
    values = [one.us_per_chunk for one in chosen if one.us_per_chunk]
    return _figure([1000 / value for value in values])


def _worst_of(samples: Samples, stage: str, measure: str, scale: float = 1.0) -> Figure | None:
    """Return the larger of both loads' values for a measure of a stage, multiplied by `scale`."""
    wanted = {"side": OURS, "stage": stage, "chunks": _CHUNKS}
    found = (
        _figure(values_of(samples, measure, case=case, **wanted), _TITLES[case], scale)
        for case in ("cpu", "pool")
    )
    return results.worst(found, max)


def _adoption(samples: Samples) -> Figure | None:
    """Return adoption's µs per entry, which equals seconds per million entries."""
    chosen = select(samples, case="start", side=OURS)
    sizes = {one.chunks for one in chosen if one.stage == "adopt_rank"}
    stages = parts_of("start", ("adopt_rank", "adopt_manager"))
    return results.worst([_figure(total_us(chosen, OURS, one, stages)) for one in sizes], max)


def _worst_load(
    samples: Samples, stages: Iterable[str], scale: float, cases: Sequence[str] = ("cpu", "pool")
) -> Figure | None:
    wanted = list(stages)
    return results.worst((_total(samples, case, wanted, scale=scale) for case in cases), max)


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals, which are for a load of 8,192 chunks unless stated otherwise."""
    ms = _CHUNKS / 1000
    total, worst = partial(_total, samples), partial(_worst_load, samples)
    index = values_of(samples, "bytes_per_chunk", side=OURS, case="start", stage="memory")
    return [
        bound("scheduler: a load from the CPU tier", "≤", 2.5, total("cpu", _PLANNED, scale=ms),
              " ms"),
        bound("scheduler: a load from the pool", "≤", 4, total("pool", _PLANNED, scale=ms), " ms"),
        bound("the first / vLLM's own manager", "≤", 0.25, load_ratio(samples)),
        bound("pickle and unpickle a load", "≤", 1, worst(("pickle", "unpickle"), ms), " ms"),
        bound("bytes of a pickled load", "≤", 60, _worst_of(samples, "pickle", "bytes_per_chunk"),
              " per chunk"),
        bound("store, from plan to written, all threads", "≤", 2,
              _figure(total_us(samples, OURS, _CHUNKS, _STORED)), " µs per chunk"),
        bound("65,536 chunks / 8,192 chunks, per chunk", "≤", 2, _growth(samples)),
        bound("the longest step of a load of 65,536 chunks", "≤", 5, _longest_step(samples), " ms"),
        bound("a step with a blocked head", "≤", 0.1, worst(("look_up_again",), ms), " ms"),
        bound("look-up of a key", "≤", 0.2, worst(("look_up",), 1), " µs"),
        bound("hold a chunk for a preempted request", "≤", 0.3, total("hold", ("hold",)), " µs"),
        bound("fetch one for it", "≤", 0.3, total("hold", ("fetch",)), " µs"),
        bound("release 15,360 of them", "≤", 2, total("hold", ("release",), scale=15.36), " ms"),
        bound("an op beside its chunks, all threads", "≤", 20, _op(samples), " µs"),
        bound("model: per load", "≤", 1, worst(_MODEL_STAGES, ms), " ms"),
        bound("pipeline: interpreter lock held per load", "≤", 4,
              _worst_of(samples, "pipeline", "locked_us_per_chunk", ms), " ms"),
        bound("pipeline: from the CPU tier", "≥", 1000, _rate(samples, "cpu"),
              " thousand chunks/s"),
        bound("pipeline: through stream slots", "≥", 400, _rate(samples, "pool"),
              " thousand chunks/s"),
        bound("memory of the index", "≤", 130, _figure(index), " bytes per chunk"),
        bound("a million chunks adopted, rank and manager", "≤", 0.3, _adoption(samples), " s"),
    ]  # fmt: skip


def _by_size(sizes: Sequence[int], cell: Callable[..., Any]) -> Iterator[Column]:
    """Yield a column per size and side. cell: a function of a row, `side` and `chunks`."""
    for chunks, side in itertools.product(sizes, SIDES):
        name = "op of 1" if chunks == ONE else f"{chunks:,}"
        get = partial(cell, side=side, chunks=chunks)
        yield Column(f"{name} {side}", get, "{:,.3f}")


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table]:
    sizes = sorted({one.chunks for one in samples if one.case in ("cpu", "pool", "store", "write")})
    there = {(one.case, one.stage) for one in samples}
    rows = [(case, name) for case in CASES for name in CASES[case] if (case, name) in there]

    def us(row: tuple[str, str], side: str, chunks: int) -> Spread | None:
        fields = {"case": row[0], "stage": row[1], "chunks": chunks, "side": side}
        return spread_of(values_of(samples, "us_per_chunk", **fields))

    columns = [
        Column("", lambda row: _TITLES[row[0]]),
        Column("stage", lambda row: CASES[row[0]][row[1]].words, left=True),
        Column("thread", lambda row: CASES[row[0]][row[1]].thread, left=True),
        *_by_size(sizes, us),
    ]
    title = "µs per chunk (µs per op of one chunk), by chunks of the op"
    shown = [row for row in rows if row[0] != "start"]
    yield Table(title, columns, shown, grouped=True)
    yield _sums(samples, sizes)
    if any(one.case == "blocks" and one.chunks == _MORE_CHUNKS for one in samples):
        yield _steps(samples)


def _sums(samples: Samples, sizes: Sequence[int]) -> Table:

    def sum_of(row: tuple[str, str], side: str, chunks: int) -> Spread | None:
        case, thread = row
        there = select(samples, case=case, side=side, thread=thread, chunks=chunks)
        stages = {one.stage for one in there} - {"look_up_again"}
        totals = total_us(samples, side, chunks, parts_of(case, stages)) if stages else []
        return spread_of([us * chunks / 1000 for us in totals])

    rows = [
        (case, thread)
        for case in CASES
        for thread in (SCHEDULER, MODEL, PIPELINE)
        if case != "start" and select(samples, case=case, thread=thread)
    ]
    columns = [
        Column("", lambda row: _TITLES[row[0]]),
        Column("thread", lambda row: row[1], left=True),
        *_by_size(sizes, sum_of),
    ]
    return Table("ms per op, look-ups included", columns, rows, grouped=True)


REPORTS = (
    Report(
        "hotpath",
        "The cost per chunk on every thread that requests wait for",
        Sample,
        _tables,
        about=(
            "{entries:,} chunks in the index; {cache_slots:,} cache slots; CPU time of each "
            "thread, medians of {repeats} rounds, garbage collection as in production"
        ),
        goals=goals,
        columns=190,
    ),
)
