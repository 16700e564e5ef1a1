# SPDX-License-Identifier: Apache-2.0
"""The report of `bench cost`: medians, ratios paired by round, and goals.

Two arms are compared round by round, because a disturbance in a round affects both. Estimates and
their intervals are computed by `results.Paired`.

A cost meets its goal if the median ratio is within 2 %, or if the interval contains 1, so that the
difference may be noise. Goals apply to the default settings, the arm `ours`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table, by_arm
from vllm_nvmeof_bench.reports import published
from vllm_nvmeof_bench.results import (
    Figure,
    Goal,
    Paired,
    distinct,
    paired,
    ratios,
    select,
    spread_of,
    values_of,
)
from vllm_nvmeof_offload.units import MIB

BASE, OURS, PROMPT_ONLY = "none", "ours", "ours_prompt_only"
ARMS = (BASE, OURS, PROMPT_ONLY)
CASES = ("single", "batch")
COST_MAX = 0.02
_SCHEDULER_SHARE_MAX = 0.05
#: vLLM's own processes wake up occasionally; a server that keeps stepping uses a whole core.
_IDLE_CORES_MAX = 0.05


@dataclass(frozen=True)
class Sample:
    """One arm, case and round.

    ttft_s: time to the first token, the median if there are several requests. seconds: time to the
    last token. tokens: in prompts and answers. cpu_s: user and system time of the server's
    processes until they were idle again. others_cpu_s: CPU time of the other, idle servers in that
    period. quiet_after_s: how long the server kept working. stored_bytes, loaded_bytes: copied
    between GPU memory and staging. hits: tokens found in any cache. scheduler_s, scheduler_steps:
    time and steps of our scheduler side; step_s, step_tokens: the engine's; None if not counted.
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
        """Generated tokens per second."""
        return self.answer_tokens / self.seconds

    @property
    def cpu_s_per_1k_tokens(self) -> float:
        return 1000 * self.cpu_s / self.tokens

    @property
    def stored_bytes_per_1k_tokens(self) -> float:
        return 1000 * self.stored_bytes / self.tokens

    @property
    def written_bytes_per_1k_tokens(self) -> float:
        return 1000 * self.written_bytes / self.tokens

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


def arms_of(samples: Sequence[Sample]) -> list[str]:
    return [arm for arm in ARMS if select(samples, arm=arm)]


def ratios_of(
    samples: Sequence[Sample], arm: str, base: str, case: str, measure: str
) -> Paired | None:
    """Return the ratio `arm` / `base`; None if no round has both, or a value is 0 or unknown."""
    pairs = _pairs(samples, arm, base, case, measure)
    positive = bool(pairs) and min(map(min, pairs)) > 0
    return ratios(*zip(*pairs, strict=True)) if positive else None


def _pairs(
    samples: Sequence[Sample], arm: str, base: str, case: str, measure: str
) -> list[tuple[float, float]]:
    return paired(samples, measure, {"arm": arm, "case": case}, {"arm": base, "case": case})


def goals(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals for both costs, our scheduler's share, and the run's fairness."""
    ttft = ratios_of(samples, OURS, BASE, "single", "ttft_s")
    throughput = ratios_of(samples, OURS, BASE, "batch", "tokens_per_s")
    idle = conditions.get("idle_cores") or {}
    used = results.worst((Figure(cores, len(idle), arm) for arm, cores in idle.items()), max)
    return [
        _cost_goal("TTFT, ours / none", ttft, more_is_worse=True),
        _cost_goal("throughput, ours / none", throughput, more_is_worse=False),
        *(_share_goal(samples, case) for case in CASES),
        _fair_goal(samples),
        results.bound("cores that an idle server uses", "≤", _IDLE_CORES_MAX, used),
    ]


def within(ratio: Paired, more_is_worse: bool) -> bool:
    """Return whether the cost is within 2 %, or could be noise because the interval contains 1."""
    return _cost(ratio, more_is_worse) <= COST_MAX or ratio.contains(1.0)


def scheduler_share(samples: Sequence[Sample], arm: str, case: str) -> float | None:
    """Return our scheduler side's share of the steps' time over all rounds; None if unknown."""
    pairs = [(one.scheduler_s, one.step_s) for one in select(samples, arm=arm, case=case)]
    if not pairs or not all(ours is not None and steps for ours, steps in pairs):
        return None
    return sum(ours for ours, _ in pairs) / sum(steps for _, steps in pairs)


def _cost(ratio: Paired, more_is_worse: bool) -> float:
    return ratio.middle - 1 if more_is_worse else 1 - ratio.middle


def _cost_goal(name: str, ratio: Paired | None, more_is_worse: bool) -> Goal:
    required = f"≤ {1 + COST_MAX}" if more_is_worse else f"≥ {1 - COST_MAX}"
    required += ", or inside the noise"
    if ratio is None:
        return Goal(name, required)
    shown = ratio.text()
    if _cost(ratio, more_is_worse) > COST_MAX and ratio.contains(1.0):
        shown += ", inside the noise"
    return Goal(name, required, within(ratio, more_is_worse), ratio.middle, shown, ratio.n)


def _share_goal(samples: Sequence[Sample], case: str) -> Goal:
    name, required = f"our scheduler / steps, {case}", f"≤ {_SCHEDULER_SHARE_MAX:.0%}"
    share = scheduler_share(samples, OURS, case)
    if share is None:
        return Goal(name, required)
    n = len(select(samples, arm=OURS, case=case))
    return Goal(name, required, share <= _SCHEDULER_SHARE_MAX, share, f"{share:.2%}", n)


def _fair_goal(samples: Sequence[Sample]) -> Goal:
    name, required = "cache hits, preemptions, loads", "0, 0, 0"
    if not samples:
        return Goal(name, required)
    sums = [sum(values_of(samples, one)) for one in ("hits", "preemptions", "loaded_bytes")]
    shown = ", ".join(map(str, sums))
    return Goal(name, required, not any(sums), shown=shown, n=len(samples))


#: Field, name with unit, divisor, number format.
_MEDIANS = (
    ("ttft_s", "TTFT, ms", 0.001, "{:,.1f}"),
    ("seconds", "to the last token, s", 1.0, "{:.3f}"),
    ("tokens_per_s", "generated tokens/s", 1.0, "{:,.1f}"),
    ("cpu_s_per_1k_tokens", "CPU s / 1,000 tokens", 1.0, "{:.3f}"),
    ("stored_bytes_per_1k_tokens", "MiB copied / 1,000 tokens", MIB, "{:,.1f}"),
    ("written_bytes_per_1k_tokens", "MiB written / 1,000 tokens", MIB, "{:,.1f}"),
    ("scheduler_us_per_step", "our scheduler, µs / step", 1.0, "{:,.0f}"),
    ("scheduler_us_per_1k_tokens", "our scheduler, µs / 1,000 tokens", 1.0, "{:,.0f}"),
    ("quiet_after_s", "works on after the last token, s", 1.0, "{:.2f}"),
)
#: Comparisons with the arm without offloading: (case, field, name).
_COMPARED = (
    ("single", "ttft_s", "single: TTFT"),
    ("single", "seconds", "single: to the last token"),
    ("single", "cpu_s_per_1k_tokens", "single: CPU time"),
    ("batch", "tokens_per_s", "batch: throughput"),
    ("batch", "cpu_s_per_1k_tokens", "batch: CPU time"),
)


def _tables(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield medians and paired ratios."""
    arms = arms_of(samples)
    rounds = len(distinct(samples, "round"))

    def middle(arm: str, row: Any) -> str | None:
        case, (measure, _, scale, form) = row
        spread = spread_of(values_of(samples, measure, arm=arm, case=case))
        return spread and form.format(spread.median / scale)

    known = [
        (case, one) for case in CASES for one in _MEDIANS if values_of(samples, one[0], case=case)
    ]
    names = (Column("case", lambda row: row[0]), Column("", lambda row: row[1][1], left=True))
    yield Table(f"Medians of {rounds} rounds", [*names, *by_arm(arms, middle)], known, grouped=True)
    others = [arm for arm in arms if arm != BASE]
    yield Table(
        f"Against {BASE}, paired by round: ratio and 95 % interval",
        [
            Column("", lambda row: row[2]),
            *by_arm(others, lambda arm, row: ratios_of(samples, arm, BASE, *row[:2]), "{:.3f}"),
        ],
        [row for row in _COMPARED if any(ratios_of(samples, a, BASE, *row[:2]) for a in others)],
        unit=f"ratio to {BASE}",
    )
    yield results.METHOD


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    idle = conditions.get("idle_cores", {})
    cores = ", ".join(f"{arm} {used:.3f}" for arm, used in idle.items()) or "not measured"
    yield f"cores used by idle servers: {cores}"


REPORTS = (
    Report(
        "cost",
        "What offloading costs where it cannot help",
        Sample,
        _tables,
        about=(
            "single: {single_prompt_tokens} + {single_answer_tokens} tokens; batch: "
            "{batch_requests} × ({batch_prompt_tokens} + {batch_answer_tokens}); every prompt new"
        ),
        lines=_lines,
        goals=goals,
        goals_title="Goals: default settings against no offloading, and a fair run",
        theirs=published.COST,
    ),
)
