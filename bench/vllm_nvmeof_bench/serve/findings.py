# SPDX-License-Identifier: Apache-2.0
"""What follows from the samples: medians, percentiles, ratios paired by round. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench.serve.figures import mean, median, paired, percentile

__all__ = [
    "RIVALS",
    "Turns",
    "batch_of",
    "beside_hits",
    "beside_ttft",
    "hit_share",
    "levels_of",
    "rates_of",
    "ratio_of_hits",
    "ratio_of_ttft",
    "ratio_of_turns",
    "rivals",
    "same_answers",
    "ttft_of",
    "turns_of",
]

#: Ours and the peer with the same bytes of CPU memory on the same storage.
RIVALS = (("full", "peer_full"), ("pool", "peer"), ("target", "peer_target"))
#: Our arms whose CPU tier holds everything, as what is published did.
_HOLD_ALL = ("cpu", "full")


def rivals(arms: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of which both were measured."""
    known = set(arms)
    return [pair for pair in RIVALS if known.issuperset(pair)]


def hit_share(samples: Sequence[Any]) -> tuple[float, ...]:
    """(GPU, CPU tier, pool) of the prompts' tokens; a fourth, elsewhere, only if there is any."""
    prompt = sum(
        getattr(one, "prompt_tokens", None) or getattr(one, "length", 0) for one in samples
    )
    found = [sum(getattr(one, name) for one in samples) for name in ("gpu", "cpu", "pool", "other")]
    shares = tuple(one / prompt if prompt else 0.0 for one in found)
    return shares if shares[3] else shares[:3]


# -- time to first token ------------------------------------------------------------------


def _ttfts(samples: Sequence[Any], arm: str, phase: str) -> dict[tuple[object, ...], float]:
    return {
        (one.length, one.round): one.ttft_s
        for one in samples
        if (one.arm, one.phase) == (arm, phase) and one.ttft_s is not None
    }


def ttft_of(samples: Sequence[Any], arm: str, phase: str, length: int) -> float | None:
    """Seconds, the median over rounds."""
    found = _ttfts(samples, arm, phase)
    return median(value for key, value in found.items() if key[0] == length)


def ratio_of_ttft(
    samples: Sequence[Any], arm: str, length: int | None = None, other: str | None = None
) -> list[float]:
    """Of each prompt: its first time over its return on `arm`; with `other`, returns of the two.

    length: of the prompts; None: all.
    """
    back = _ttfts(samples, arm, "back")
    if other is None:
        ratios = {key: (_ttfts(samples, arm, "cold"), back) for key in back}
    else:
        ratios = {key: (back, _ttfts(samples, other, "back")) for key in back}
    return [
        above[key] / below[key]
        for key, (above, below) in ratios.items()
        if length in (None, key[0]) and above.get(key) and below.get(key)
    ]


# -- throughput against hit rate ----------------------------------------------------------


def rates_of(samples: Iterable[Any]) -> list[int]:
    return sorted({one.rate for one in samples})


def batch_of(samples: Sequence[Any], arm: str, rate: int, measure: str) -> float | None:
    """tokens_per_s or requests_per_s, the median over rounds."""
    return median(getattr(one, measure) for one in samples if (one.arm, one.rate) == (arm, rate))


def ratio_of_hits(samples: Sequence[Any], arm: str, other: str, rate: int) -> list[float]:
    """Throughput of `arm` over that of `other`, paired by round."""
    mine, theirs = (
        {(one.round,): one.tokens_per_s for one in samples if (one.arm, one.rate) == (name, rate)}
        for name in (arm, other)
    )
    return paired(mine, theirs)


# -- turns --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """One arm at one concurrency, all rounds together. gpu to other: share of prompts' tokens."""

    tokens_per_s: float | None
    answer_tokens_per_s: float | None
    ttft_mean_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    failures: int
    gpu: float
    cpu: float
    pool: float
    other: float


def levels_of(samples: Iterable[Any]) -> list[int]:
    return sorted({one.concurrency for one in samples})


def turns_of(samples: Sequence[Any], arm: str, concurrency: int) -> Turns:
    mine = [one for one in samples if (one.arm, one.concurrency) == (arm, concurrency)]
    rounds = sorted({one.round for one in mine})
    seconds = sum(_span_s(mine, number) for number in rounds)
    whole = [one for one in mine if one.failure is None]
    answers = sum(one.answer_tokens for one in whole)
    tokens = answers + sum(one.prompt_tokens for one in whole)
    ttfts = [one.ttft_s for one in whole if one.ttft_s is not None]
    shares = (*hit_share(mine), 0.0)[:4]
    return Turns(
        tokens_per_s=tokens / seconds if seconds else None,
        answer_tokens_per_s=answers / seconds if seconds else None,
        ttft_mean_s=mean(ttfts),
        ttft_p95_s=percentile(ttfts, 0.95),
        ttft_p99_s=percentile(ttfts, 0.99),
        failures=len(mine) - len(whole),
        gpu=shares[0],
        cpu=shares[1],
        pool=shares[2],
        other=shares[3],
    )


def _span_s(samples: Sequence[Any], number: int) -> float:
    """From the start of a measurement to its last answer."""
    return max(one.start_s + one.end_s for one in samples if one.round == number)


def ratio_of_turns(samples: Sequence[Any], arm: str, other: str, concurrency: int) -> list[float]:
    """Tokens per second of `arm` over those of `other`, paired by round."""
    found: list[dict[tuple[object, ...], float]] = []
    for name in (arm, other):
        mine = [one for one in samples if (one.arm, one.concurrency) == (name, concurrency)]
        found.append({})
        for number in {one.round for one in mine}:
            part = [one for one in mine if one.round == number]
            speed = turns_of(part, name, concurrency).tokens_per_s
            if speed is not None:
                found[-1][(number,)] = speed
    return paired(found[0], found[1])


# -- answers ------------------------------------------------------------------------------


def same_answers(samples: Sequence[Any]) -> tuple[int, int]:
    """(equal, compared): answers against the first arm's to the same request."""
    if samples and hasattr(samples[0], "same"):
        known = [one.same for one in samples if one.same is not None]
        return sum(known), len(known)
    first: dict[tuple[int, ...], str] = {}
    same = compared = 0
    for one in samples:
        if one.failure is not None:
            continue
        key = (one.concurrency, one.round, one.conversation, one.turn)
        if key not in first:
            first[key] = one.digest
            continue
        compared += 1
        same += first[key] == one.digest
    return same, compared


# -- beside what is published -------------------------------------------------------------


def _holds_all(samples: Iterable[Any]) -> str | None:
    arms = {one.arm for one in samples}
    return next((name for name in _HOLD_ALL if name in arms), None)


def beside_ttft(samples: Sequence[Any]) -> dict[str, str]:
    """Medians of the lengths' ratios, of an arm whose CPU tier holds everything."""
    arm = _holds_all(samples)
    if arm is None:
        return {}
    lengths = sorted({one.length for one in samples})
    middles = [median(ratio_of_ttft(samples, arm, length)) for length in lengths]
    known = [middle for middle in middles if middle is not None]
    if not known:
        return {}
    text = f"{min(known):.1f}×–{max(known):.1f}×, by prompt length ({arm})"
    return {"TTFT, computed / loaded from the CPU tier": text}


def beside_hits(samples: Sequence[Any]) -> dict[str, str]:
    """The most hits over the fewest, by medians, of an arm whose CPU tier holds everything."""
    arm, rates = _holds_all(samples), rates_of(samples)
    if arm is None or len(rates) < 2:
        return {}
    few, many = (batch_of(samples, arm, rate, "tokens_per_s") for rate in (rates[0], rates[-1]))
    if not few or many is None:
        return {}
    text = f"{many / few:.1f}× ({arm}, {rates[-1]} % hits / {rates[0]} %)"
    return {"throughput, many hits in the CPU tier / none": text}
