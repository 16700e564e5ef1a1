# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench borrow`: a borrowed prompt beside one in the server's own pool.

Ratios are of the two prompts of one pair, which have the same length and were asked at the same
server one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import plots, results
from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.plots import Style, finish
from vllm_nvmeof_bench.results import METHOD, Figure, Goal, Paired, bound, median_of, select
from vllm_nvmeof_bench.tables import Column, Table, load_in, machine_in, number, vllm_in

OWN, BORROWED = "own", "borrowed"
KINDS = {OWN: "in its own pool", BORROWED: "in the other server's pool"}
RATIO_MAX = 1.3
#: Of what is found in the own pool.
HITS_MIN = 0.95
#: Of a prompt's tokens, at least so many are found where they were stored, or it is no such load.
FOUND_MIN = 0.9


@dataclass(frozen=True)
class Sample:
    """One request at the server that borrows. gpu to other: tokens of the prompt by where they were
    found, as in `Hits`; `shared` is not in `other`. same: whether the answer is that of the server
    that stored the prompt.
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
        """Share of the prompt that was found where the kind says."""
        return (self.pool if self.kind == OWN else self.shared) / self.prompt_tokens


Samples = Sequence[Sample]


def found_there(samples: Samples) -> list[Sample]:
    """The samples whose prompt came from where it was stored."""
    return [one for one in samples if one.found_there >= FOUND_MIN]


def ratio(samples: Samples) -> Paired | None:
    """Borrowed over own, pair by pair; None: there is no whole pair."""
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


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    settings = conditions.get("settings", {})
    yield f"{machine_in(conditions)}; vLLM {vllm_in(conditions)}; {load_in(conditions)}"
    idle_s = settings.get("idle_s") or 0
    before = "right after another request"
    if idle_s:
        before = (
            f"after {idle_s:g} s in which the server had no request and a made-up server wrote "
            f"{settings.get('puts', 0):,} chunks' entries"
        )
    yield (
        f"prompts of {settings.get('tokens', '?')} tokens, GPU memory emptied before each; each is "
        f"asked {before}"
    )
    if conditions.get("cut_off"):
        yield "this run was cut off: some pairs are missing"


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    def ttft(kind: str, share: float) -> str:
        values = results.values_of(found_there(samples), "ttft_s", kind=kind)
        return number(results.percentile(values, share) if values else None, scale=0.001)

    columns = [
        Column("", lambda kind: KINDS[kind]),
        Column("TTFT, ms", lambda kind: ttft(kind, 0.5)),
        Column("P95", lambda kind: ttft(kind, 0.95)),
        Column("found there", lambda kind: median_of(samples, "found_there", kind=kind), "{:.0%}"),
        Column("n", lambda kind: len(select(samples, kind=kind))),
    ]
    if samples:
        yield Table("A prompt that is found, by where it is", columns, list(KINDS))
    if found := ratio(samples):
        between = found.text(".3f", ", 95 % interval {} to {}")
        yield f"• TTFT, borrowed / own pool: {between} ({found.n} pairs; {METHOD})"
    for reason in sorted({one.failure for one in samples if one.failure}):
        yield f"failed: {reason}"


_STYLES = {"ttft_s": Style(plots.BLUE, label="TTFT")}


def _plot(path: Path, samples: Samples, conditions: Mapping[str, Any]) -> None:
    """The times of both kinds, and the ratios of the pairs in their order."""

    def spread(measure: str, kind: str) -> results.Spread | None:
        values = results.values_of(found_there(samples), measure, kind=kind)
        return results.spread_of([1000 * value for value in values])

    title = f"A borrowed prompt: {plots.where_measured(conditions)}"
    with plots.picture(path, title, "AB") as (_, (times, pairs)):
        plots.bars(times, _STYLES, {words: kind for kind, words in KINDS.items()}, spread)
        finish(times, "time to first token", ylabel="ms")
        found = ratio(samples)
        pairs.plot(sorted(found.values) if found else [], "o", color=plots.BLUE)
        pairs.axhline(RATIO_MAX, color=plots.GREY, linewidth=1)
        finish(pairs, "borrowed / own pool", xlabel="pair, by its ratio", ylabel="ratio of TTFT")


BENCHES = (Benchmark("borrow", Sample, _lines, _tables, _plot, goals),)
