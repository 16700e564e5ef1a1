# SPDX-License-Identifier: Apache-2.0
"""The `bench serve stall` report: a sample's longest gap between two tokens of a request, as
seen by the client. Figures are medians over rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table, by, compared, counts, medians, ratios_of
from vllm_nvmeof_bench.results import Figure, Goal, bound, distinct, median_of, select

ALONE, IN_GPU, BACK = "alone", "in_gpu", "back"
#: Phase → its name. Requests only decode in the first phase; in the others, a prompt is sent again.
PHASES = {ALONE: "alone", IN_GPU: "prompt in GPU memory", BACK: "prompt lost there"}
#: Our arm, and vLLM's tiering with equal CPU memory; both CPU tiers hold the prompt.
_OURS, _THEIRS = "full", "peer_full"
_CHUNKS_MIN = 3000
#: Our arms to which `_STEPS_MAX` applies → the source of the prompt's KV.
_LOADED = {"full": "the CPU tier", "pool": "the pool"}
_STEPS_MAX = 2
#: Title, measure, and whether less is better.
_COMPARED = (
    ("longest gap during a load", "gap_ms", True),
    ("TTFT of the prompt", "ttft_s", True),
    ("tokens/s of the others", "tokens_per_s", False),
)


@dataclass(frozen=True)
class Sample:
    """One phase of one round of one arm.

    gaps_ms: each decoding request's longest gap. tokens: number received by all these requests in
    `seconds`. ttft_s: TTFT of the prompt that is sent again. gpu to other: its tokens by where they
    were found, as in `Hits`; gpu includes restarted requests' prompts. same: whether its answer
    equals the first one; None: no prompt was sent. restarts: finished requests sent again.
    """

    arm: str
    phase: str
    round: int
    gaps_ms: Sequence[float]
    tokens: int
    seconds: float
    ttft_s: float | None = None
    gpu: int = 0
    cpu: int = 0
    pool: int = 0
    other: int = 0
    same: bool | None = None
    restarts: int = 0

    @property
    def gap_ms(self) -> float:
        """The longest gap of all requests."""
        return max(self.gaps_ms)

    @property
    def step_ms(self) -> float:
        """The time of a step, in which every decoding request receives one token."""
        return 1000 * self.seconds * len(self.gaps_ms) / max(1, self.tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


Samples = Sequence[Sample]


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals, which are for the phase in which the prompt is loaded."""
    above, below = ({"arm": arm, "phase": BACK} for arm in (_OURS, _THEIRS))
    ratio = results.ratio_of_medians(samples, "gap_ms", above, below)
    compared = [one.same for one in samples if one.same is not None]
    different = Figure(float(compared.count(False)), len(compared)) if compared else None
    chunks = conditions.get("prompt_chunks")
    size = Figure(float(chunks), len(distinct(samples, "round"))) if chunks else None
    return [
        *(
            bound(
                f"steps that a load from {place} adds to the longest gap",
                "≤",
                _STEPS_MAX,
                _added_steps(samples, arm),
            )
            for arm, place in _LOADED.items()
        ),
        bound("longest gap beside a load, ours / vLLM's tiering", "≤", 1, ratio),
        bound("chunks of the returning prompt", "≥", _CHUNKS_MIN, size),
        bound("answers that differ between arms", "≤", 0, different),
    ]


def _added_ms(samples: Samples, arm: str) -> float | None:
    """Return the ms that a load adds to the longest gap, relative to a prompt without a load."""
    with_load, without = (
        median_of(samples, "gap_ms", arm=arm, phase=phase) for phase in (BACK, IN_GPU)
    )
    return None if with_load is None or without is None else with_load - without


def _added_steps(samples: Samples, arm: str) -> Figure | None:
    """Return `_added_ms` as a number of decoding steps."""
    added_ms = _added_ms(samples, arm)
    step_ms = median_of(samples, "step_ms", arm=arm, phase=ALONE)
    if added_ms is None or not step_ms:
        return None
    return Figure(added_ms / step_ms, len(select(samples, arm=arm, phase=BACK)))


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    rows = [{"arm": arm} for arm in distinct(samples, "arm")]
    of_phase = {phase: select(samples, phase=phase) for phase in PHASES}

    def steps(row: dict[str, str]) -> float | None:
        found = _added_steps(samples, row["arm"])
        return None if found is None else found.value

    columns = [
        by("arm", "longest gap, ms"),
        *(
            medians(of_phase[phase], words, "gap_ms", "{:,.1f}", ranged=True)
            for phase, words in PHASES.items()
        ),
        Column("the load adds", lambda row: _added_ms(samples, row["arm"]), "{:,.1f}"),
        Column("in steps", steps, "{:,.1f}"),
        counts(of_phase[BACK]),
    ]
    title = "Gaps between two tokens of the requests that decode"
    yield Table(title, columns, rows)
    if again := [one for one in samples if one.restarts]:
        yield (
            f"In {len(again)} of {len(samples)} samples, requests finished decoding and were sent "
            f"again ({sum(one.restarts for one in again)} times in all), which is not a gap"
        )
    yield compared(
        "Paired by round",
        [
            row
            for title, measure, lower in _COMPARED
            for ours in _LOADED
            for row in ratios_of(of_phase[BACK], measure, ours, _THEIRS, lower, title)
        ],
    )
    back, places = of_phase[BACK], ("gpu", "cpu", "pool", "other")
    columns = [
        by("arm", "the prompt, lost there"),
        medians(back, "first token, s", "ttft_s", "{:.2f}"),
        *(medians(back, f"tokens, {name}", name) for name in places),
        medians(back, "tokens/s beside it", "tokens_per_s"),
        medians(of_phase[ALONE], "alone", "tokens_per_s"),
    ]
    yield Table("The returning prompt", columns, rows)


REPORTS = (
    Report(
        "stall",
        "Gaps in decoding while a prompt of thousands of chunks returns",
        Sample,
        _tables,
        about=(
            "{decoding} requests decode; a prompt of {prompt_tokens:,} tokens, {prompt_chunks:,} "
            "chunks, returns"
        ),
        goals=goals,
    ),
)
