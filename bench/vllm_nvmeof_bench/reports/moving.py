# SPDX-License-Identifier: Apache-2.0
"""The `bench serve moving` report: conversations that move to another server at each turn.

TTFT and the share found exclude first turns, whose prompts are new. TTFT ratios compare the same
turn of the same conversation in the same round. Throughput is the tokens of a whole round divided
by the total time of its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import (
    Column,
    Report,
    Table,
    arm_columns,
    by,
    compared,
    medians,
    tails,
)
from vllm_nvmeof_bench.results import Figure, Goal, bound, distinct, levels, select

OURS, STICKY, PEER = "ours", "sticky", "peer"
#: The arms compared with ours → the required ratios.
_RIVALS = {PEER: 1.0, STICKY: 0.9}
_PLACES = {"gpu": "GPU", "cpu": "CPU", "pool": "own pool", "shared": "others'", "other": "other"}


@dataclass(frozen=True)
class Sample:
    """One turn of one conversation. digest: a hash of the answer. gpu to other: prompt tokens by
    where they were found; `shared` is the other server's pool. With vLLM's tiering, `pool` is the
    directory that both servers share."""

    arm: str
    round: int
    conversation: int
    turn: int
    server: str
    ttft_s: float | None
    end_s: float
    prompt_tokens: int
    answer_tokens: int
    gpu: int
    cpu: int
    pool: int
    shared: int
    other: int
    digest: str
    failure: str | None

    @property
    def found(self) -> float:
        """The share of the prompt's tokens that were not computed."""
        return sum(getattr(self, at) for at in _PLACES) / max(1, self.prompt_tokens)


Samples = Sequence[Sample]


def later(samples: Samples) -> list[Sample]:
    """Return all turns except the first of each conversation."""
    return [one for one in samples if one.turn > 0]


def tokens_per_s(samples: Samples) -> float | None:
    """Return the tokens of complete requests per second of all requests' time."""
    seconds = sum(one.end_s for one in samples)
    whole = [one for one in samples if one.failure is None]
    return sum(one.prompt_tokens + one.answer_tokens for one in whole) / seconds if whole else None


def _paired(samples: Samples, arm: str, other: str, measure: str) -> list[tuple[float, float]]:
    """Return a measure's (`arm`, `other`) pairs, one per later turn of a conversation."""
    above, below = ({"arm": one} for one in (arm, other))
    pairs = results.paired(
        later(samples), measure, above, below, lambda one: (one.round, one.conversation, one.turn)
    )
    return [pair for pair in pairs if min(pair) > 0]


def ratio_of_ttft(samples: Samples, arm: str, other: str) -> list[float]:
    """Return the per-turn ratios of the TTFT on `arm` to that on `other`."""
    return [a / b for a, b in _paired(samples, arm, other, "ttft_s")]


def ratio_of_found(samples: Samples, arm: str, other: str) -> list[float]:
    """Return the per-round ratios of the shares of prompt tokens that were not computed."""
    return _by_round(samples, arm, other, lambda some: _found(some, *_PLACES))


def ratio_of_tokens(samples: Samples, arm: str, other: str) -> list[float]:
    """Return the per-round ratios of tokens per second on `arm` to those on `other`."""
    return _by_round(samples, arm, other, tokens_per_s)


def _by_round(
    samples: Samples, arm: str, other: str, measure: Callable[[Samples], float | None]
) -> list[float]:
    found = results.ratios_by_round(
        samples, lambda some, name: measure(select(some, arm=name)), arm, other
    )
    return [one for one in found if one]


def _found(samples: Samples, *places: str) -> float | None:
    """Return the share of later turns' prompt tokens that were found in `places`."""
    chosen = later(samples)
    prompts = sum(one.prompt_tokens for one in chosen)
    return sum(getattr(one, at) for one in chosen for at in places) / prompts if prompts else None


def different(samples: Samples) -> tuple[int, int]:
    """Return (answers that differ from the first answer of the same turn, answers compared)."""
    same, compared = results.same_answers(samples, "round", "conversation", "turn")
    return compared - same, compared


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Return the goals for our arm relative to vLLM's tiering, and to sticky conversations."""

    def figure(values: list[float], inverse: bool = False) -> Figure | None:
        if not values:
            return None
        found = results.median_ratio(values)
        return Figure(1 / found.middle if inverse else found.middle, found.n)

    made = []
    for rival, least in _RIVALS.items():
        made += [
            bound(f"tokens/s, ours / {rival}", "≥", least,
                  figure(ratio_of_tokens(samples, OURS, rival))),
            bound(f"TTFT from the second turn on, {rival} / ours", "≥", least,
                  figure(ratio_of_ttft(samples, OURS, rival), inverse=True)),
            bound(f"share of prompts found, ours / {rival}", "≥", least,
                  figure(ratio_of_found(samples, OURS, rival))),
        ]  # fmt: skip
    unequal, compared = different(samples)
    failed = sum(one.failure is not None for one in samples)
    return [
        *made,
        bound("answers that differ between arms", "≤", 0,
              Figure(float(unequal), compared) if compared else None),
        bound("failed requests", "≤", 0, Figure(float(failed), len(samples)) if samples else None),
    ]  # fmt: skip


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    arms = [arm for arm in (OURS, STICKY, PEER) if arm in distinct(samples, "arm")]
    back = later(samples)

    def of_arm(name: str, value: Callable[[Samples], object], form: str = "{}") -> Column:
        return Column(name, lambda row: value(select(samples, **row)), form)

    def places(mine: Samples) -> str:
        shares = {name: _found(mine, at) for at, name in _PLACES.items()}
        return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)

    columns = [
        by("arm", ""),
        of_arm("tokens/s", tokens_per_s, "{:,.0f}"),
        medians(back, "TTFT, ms", "ttft_s", scale=0.001),
        tails(back, "P95", "ttft_s", 0.95, scale=0.001),
        of_arm("found", lambda mine: _found(mine, *_PLACES), "{:.0%}"),
        of_arm("where", places),
        of_arm("failures", lambda mine: sum(one.failure is not None for one in mine)),
    ]
    rounds = len(distinct(samples, "round"))
    title = f"TTFT and found: from the second turn on; rounds: {rounds}"
    yield Table(title, columns, [{"arm": arm} for arm in arms])
    turns = [{"turn": turn} for turn in levels(samples, "turn")]
    columns = [
        by("turn", show=lambda turn: str(turn + 1)),
        *arm_columns(samples, arms, "ttft_s", scale=0.001),
    ]
    yield Table("TTFT in ms by turn, medians", columns, turns)
    ratios = [
        (what, OURS, rival, found, what == "TTFT")
        for rival in _RIVALS
        for what, of in _RATIOS.items()
        if (found := of(samples, OURS, rival))
    ]
    yield compared("Ours beside others", ratios)
    unequal, count = different(samples)
    yield f"answers that differ between arms: {unequal} of {count}"


_RATIOS = {"tokens/s": ratio_of_tokens, "TTFT": ratio_of_ttft, "share found": ratio_of_found}
REPORTS = (
    Report(
        "moving",
        "Conversations whose turns alternate between two servers",
        Sample,
        _tables,
        about=(
            "{conversations} conversations of {turns} turns, {first_tokens} tokens and "
            "{grow_tokens} more per turn; one request at a time, each after a pause of "
            "{think_s:g} s and with empty GPU memory"
        ),
        goals=goals,
    ),
)
