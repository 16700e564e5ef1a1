# SPDX-License-Identifier: Apache-2.0
"""The report of `bench serve borrow`: prompts in another server's pool and in the server's own.

A ratio compares the two prompts of a pair: they have the same length and were sent to the same
server, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Report, Table, by, counts, medians, tails
from vllm_nvmeof_bench.results import METHOD, Figure, Goal, Paired, bound

OWN, BORROWED = "own", "borrowed"
KINDS = {OWN: "in its own pool", BORROWED: "in the other server's pool"}
RATIO_MAX = 1.3
#: The goal for tokens found in the other server's pool / in the server's own pool.
HITS_MIN = 0.95
#: A prompt counts only if at least this share of its tokens was found where it was stored.
FOUND_MIN = 0.9


@dataclass(frozen=True)
class Sample:
    """One request to the borrowing server. gpu to other: the prompt's tokens by where they were
    found, as in `Hits`; `other` excludes `shared`. same: whether the answer equals that of the
    server that stored the prompt.
    """

    kind: str
    round: int
    ttft_s: float | None
    prompt_tokens: int
    gpu: int
    cpu: int
    pool: int
    shared: int
    other: int
    same: bool
    failure: str | None

    @property
    def found_there(self) -> float:
        """The share of the prompt's tokens that were found where the prompt was stored."""
        return (self.pool if self.kind == OWN else self.shared) / self.prompt_tokens


Samples = Sequence[Sample]


def found_there(samples: Samples) -> list[Sample]:
    """Return the samples whose prompts were found where they were stored."""
    return [one for one in samples if one.found_there >= FOUND_MIN]


def ratio(samples: Samples) -> Paired | None:
    """Return the TTFT of borrowed / own prompts, pair by pair; None if no pair is complete."""
    pairs = results.paired(
        found_there(samples), "ttft_s", {"kind": BORROWED}, {"kind": OWN}, lambda one: one.round
    )
    return results.median_ratio([above / below for above, below in pairs]) if pairs else None


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    found = ratio(samples)
    wrong = sum(not one.same for one in samples)
    elsewhere = len(samples) - len(found_there(samples))
    count = len(samples)
    own = sum(one.pool for one in samples if one.kind == OWN)
    borrowed = sum(one.shared for one in samples if one.kind == BORROWED)
    return [
        bound("TTFT, borrowed / own pool", "≤", RATIO_MAX,
              Figure(found.middle, found.n) if found else None),
        bound("tokens found, borrowed / own pool", "≥", HITS_MIN,
              Figure(borrowed / own, count) if own else None),
        bound("prompts found elsewhere, or not whole", "≤", 0,
              Figure(float(elsewhere), count) if count else None),
        bound("answers that fail or differ", "≤", 0,
              Figure(float(wrong), count) if count else None),
    ]  # fmt: skip


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    there = found_there(samples)
    columns = [
        by("kind", "", lambda kind: KINDS[kind]),
        tails(there, "TTFT, ms", "ttft_s", 0.5, scale=0.001, drawn=True),
        tails(there, "P95", "ttft_s", 0.95, scale=0.001),
        medians(samples, "found there", "found_there", "{:.0%}"),
        counts(samples),
    ]
    rows = [{"kind": kind} for kind in KINDS if samples]
    yield Table("A prompt that is found, by where it is", columns, rows, unit="TTFT, ms")
    yield Table(
        "TTFT, borrowed / own pool",
        [Column("ratio", lambda found: found, "{:.3f}"), Column("pairs", lambda found: found.n)],
        filter(None, [ratio(samples)]),
        caption=METHOD,
    )


REPORTS = (
    Report(
        "borrow",
        "A prompt that another server has stored",
        Sample,
        _tables,
        about=(
            "prompts of {tokens} tokens, GPU memory emptied before each; each is sent after "
            "{idle_s:g} s without requests, during which a simulated server wrote the entries of "
            "{puts:,} chunks"
        ),
        goals=goals,
    ),
)
