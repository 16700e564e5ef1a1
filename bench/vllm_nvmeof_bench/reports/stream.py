# SPDX-License-Identifier: Apache-2.0
"""The report of `bench stream`: ratios, goals, tables.

Arms measured within seconds of each other are compared within a round, and the median of the
rounds' ratios counts. Servers that ran one after another are compared by their medians. A goal is
decided by the worst size or throttle, which is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table
from vllm_nvmeof_bench.reports import published
from vllm_nvmeof_bench.results import (
    Figure,
    Goal,
    Spread,
    bound,
    median_of,
    select,
    spread_of,
    values_of,
)
from vllm_nvmeof_offload.units import GIB

PARTS = ("load", "prefetch", "admission")
ARMS = {
    "load": ("ours", "read", "copy", "two_phase"),
    "resume": ("reload", "recompute"),  # only in older files: the demo measures it now
    "prefetch": ("on", "off"),
    "admission": ("auto", "always", "never"),
}
_LOAD_MAX = 1.15
_ADMISSION_MAX = 1.1
_TWO_PHASE = (
    "two phase: all into the CPU tier, then from there; beyond it in rounds of one tier, where "
    "vLLM's own tiering would find a miss and recompute"
)
_SHOWN = ("engine", "throttle", "read_mb_per_s", "prompts", "prompt_tokens", "preemptions")


@dataclass(frozen=True)
class Sample:
    """One load, resume or request. `vllm_nvmeof_bench.stream` describes parts, cases and arms.

    at: for load, the multiple of the CPU tier; for admission, the read limit in MB/s, 0: none;
    otherwise null. number: index within the round. cpu_s: CPU time of the whole process, only for
    loads. loaded_tokens: mean per request of the batch, from the server's counters.
    """

    part: str
    case: str
    arm: str
    at: float | None
    round: int
    number: int
    seconds: float
    payload_bytes: int | None = None
    cpu_s: float | None = None
    loaded_tokens: int | None = None

    @property
    def cpu_s_per_gib(self) -> float | None:
        """CPU seconds per GiB of payload."""
        if self.cpu_s is None or not self.payload_bytes:
            return None
        return self.cpu_s * GIB / self.payload_bytes


Samples = Sequence[Sample]


def throttle_name(at: float | None) -> str:
    """Return a throttle as text; 0 and None mean unthrottled."""
    return f"{at:g} MB/s" if at else "unthrottled"


def places(samples: Samples, part: str, case: str | None = None) -> list[float]:
    """Return every `at` of a part in ascending order, except that 0 (unthrottled) is last."""
    found = {one.at for one in select(samples, part=part, case=case) if one.at is not None}
    return sorted(found, key=lambda at: at or float("inf"))


def round_ratios(
    samples: Samples, above: str, below: Sequence[str], case: str, at: float
) -> list[float]:
    """Return, per round of loads, the ratio of `above`'s median to the largest one of `below`.

    Rounds that lack one of these arms are left out.
    """
    chosen = select(samples, part="load", case=case, at=at)
    found = []
    for index in sorted({one.round for one in chosen}):
        medians = [median_of(chosen, "seconds", arm=arm, round=index) for arm in (above, *below)]
        if None not in medians:
            found.append(medians[0] / max(medians[1:]))
    return found


def load_ratio(samples: Samples, case: str, size: float) -> Figure | None:
    """Return the time of our load / the larger of the times of only reading and only copying."""
    ratios = round_ratios(samples, "ours", ("read", "copy"), case, size)
    if not ratios:
        return None
    return Figure(statistics.median(ratios), len(ratios), f"{size:g}× the CPU tier")


def _ratio(samples: Samples, part: str, case: str) -> Figure | None:
    """Return the ratio of the median of the part's first arm to that of its second arm."""
    above, below = ({"part": part, "case": case, "arm": arm} for arm in ARMS[part])
    return results.ratio_of_medians(samples, "seconds", above, below)


def _first_token_s(samples: Samples, arm: str, at: float) -> list[float]:
    """Return the TTFTs of part "admission" at one throttle; arm "never" does not depend on it."""
    throttle = None if arm == "never" else at
    return values_of(samples, "seconds", part="admission", arm=arm, at=throttle)


def admission_ratio(samples: Samples, at: float) -> Figure | None:
    """Return the median of auto / the smaller one of always and never, at one throttle."""
    times = [_first_token_s(samples, arm, at) for arm in ARMS["admission"]]
    if not all(times):
        return None
    auto, always, never = map(statistics.median, times)
    better = "loading" if always < never else "recomputing"
    where = f"{throttle_name(at)}, {better} is better"
    return Figure(auto / min(always, never), min(map(len, times)), where)


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals of the requested parts; wherever servers ran, their answers must agree."""
    wanted = conditions.get("settings", {}).get("parts", PARTS)
    rows = []
    if "load" in wanted:
        for case, what in (("memory", "load"), ("paced", "load, slow copies")):
            sizes = places(samples, "load", case)
            found = results.worst((load_ratio(samples, case, size) for size in sizes), max)
            rows.append(bound(f"{what} / larger of read and copy alone", "≤", _LOAD_MAX, found))
    for part, case, name in (
        ("resume", "crowd", "resume after preemption / recomputed"),
        ("prefetch", "turn", "turn of a waiting request, prefetch on / off"),
    ):
        if part in wanted:
            rows.append(bound(name, "≤", 1, _ratio(samples, part, case)))
    if "admission" in wanted:
        ratios = (admission_ratio(samples, at) for at in places(samples, "admission"))
        name = "admission / better of load and recompute"
        rows.append(bound(name, "≤", _ADMISSION_MAX, results.worst(ratios, max)))
    parts = conditions.get("parts", {}).values()
    answers = [part["answers"] for part in parts if "answers" in part]
    if answers:
        different, compared = (sum(one[n] for one in answers) for n in ("different", "compared"))
        found = Figure(float(different), compared)
        rows.append(bound("answers that differ between arms", "≤", 0, found))
    return rows


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    for name, part in conditions.get("parts", {}).items():
        words = [f"{key.replace('_', ' ')} {part[key]}" for key in _SHOWN if key in part]
        if words:
            yield f"{name}: {', '.join(words)}"


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    for case, title in (
        ("memory", "Load from a throttled pool"),
        ("paced", "The same, copies as slow as the target"),
    ):
        if select(samples, part="load", case=case):
            yield _load_table(samples, case, title)
    for part, case, title in (
        ("resume", "crowd", "Preempted request: from room to its next token"),
        ("prefetch", "turn", "Waiting request: from its turn to its first token"),
        ("prefetch", "total", "All of them, from sending to the last token"),
    ):
        if select(samples, part=part, case=case):
            yield _pair_table(samples, part, case, title)
    if select(samples, part="admission"):
        yield _admission_table(samples)
    yield f"median, smallest to largest (p5 to p95 from {results.PERCENTILES_FROM} values on)"


def _times(arms: Sequence[str], time: Any, ranged: Sequence[str] = ()) -> list[Column]:
    """Return columns of milliseconds by arm. time: a function of arm and row, in seconds."""
    return [
        Column(
            arm.replace("_", " "), partial(time, arm), "{:,.1f}", 0.001, ranged=arm in ranged,
            drawn=True,
        )
        for arm in arms
    ]  # fmt: skip


def _load_table(samples: Samples, case: str, title: str) -> Table:
    """Return a table with a row per size; its ratios compare arms of the same round."""
    chosen = select(samples, part="load", case=case)

    def time(arm: str, size: float) -> Spread | None:
        return spread_of(values_of(chosen, "seconds", arm=arm, at=size))

    def ratio(size: float, *below: str) -> Spread | None:
        return spread_of(round_ratios(samples, "ours", below, case, size))

    def cpu(size: float, *arms: str) -> float | None:
        found = [median_of(chosen, "cpu_s_per_gib", arm=arm, at=size) for arm in arms]
        return None if None in found else sum(found)

    columns = (
        Column("× tier", "{:g}".format),
        *_times(ARMS["load"], time, ranged=("ours",)),
        Column("ours / larger alone", lambda at: ratio(at, "read", "copy"), "{:.3f}", ranged=True),
        Column("ours / two phase", lambda at: ratio(at, "two_phase"), "{:.3f}", ranged=True),
        Column("CPU s/GiB", lambda size: cpu(size, "ours"), "{:.2f}"),
        Column("read + copy", lambda size: cpu(size, "read", "copy"), "{:.2f}"),
    )
    caption = _TWO_PHASE if case == "memory" else None
    rows = places(samples, "load", case)
    return Table(f"{title}, ms", columns, rows, caption=caption, unit="ms")


def _loaded(samples: Samples, **wanted: object) -> float | None:
    return results.mean(values_of(samples, "loaded_tokens", **wanted))


def _pair_table(samples: Samples, part: str, case: str, title: str) -> Table:
    ratio = _ratio(samples, part, case)
    ratios = {ARMS[part][0]: ratio.value} if ratio else {}
    chosen = select(samples, part=part, case=case)

    def time(arm: str) -> Spread | None:
        return spread_of(values_of(chosen, "seconds", arm=arm))

    columns = (
        Column(part, str),
        Column("time, ms", time, "{:,.1f}", 0.001, ranged=True, drawn=True),
        Column("n", lambda arm: len(select(chosen, arm=arm))),
        Column("ratio", ratios.get, "{:.3f}"),
        Column("loaded tokens", lambda arm: _loaded(chosen, arm=arm), "{:.0f}"),
    )
    return Table(title, columns, ARMS[part], unit="ms")


def _admission_table(samples: Samples) -> Table:
    chosen = select(samples, part="admission")

    def time(arm: str, at: float) -> Spread | None:
        return spread_of(_first_token_s(samples, arm, at))

    def ratio(at: float) -> float | None:
        found = admission_ratio(samples, at)
        return found and found.value

    columns = (
        Column("pool reads", throttle_name),
        *_times(ARMS["admission"], time, ranged=ARMS["admission"]),
        Column("auto / better", ratio, "{:.3f}"),
        Column("tokens auto loads", lambda at: _loaded(chosen, arm="auto", at=at), "{:.0f}"),
        Column("n", lambda at: len(select(chosen, arm="auto", at=at))),
    )
    title = "A prompt returns: time to first token in ms, deciding, loading, recomputing"
    return Table(title, columns, places(samples, "admission"), unit="ms")


REPORTS = (
    Report(
        "stream",
        "Loads, resumes, prefetch, admission",
        Sample,
        _tables,
        lines=_lines,
        goals=goals,
        goals_title="Goals: the worst size or throttle decides",
        theirs=published.TIER,
    ),
)
