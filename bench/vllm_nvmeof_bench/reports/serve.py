# SPDX-License-Identifier: Apache-2.0
"""The report of `bench serve ttft`, `hits` and `turns`: tables, and ratios that are paired by
prompt or round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import (
    Column,
    Report,
    Table,
    arm_columns,
    by,
    by_arm,
    compared,
    ratios_of,
)
from vllm_nvmeof_bench.results import distinct, levels, mean, paired, select, spread_of

#: Pairs of our arm and its rival: vLLM's tiering with the same CPU memory and storage, or our arm
#: on faster storage. On a GPU, our arm's name can include a copy backend.
_RIVALS = (
    *((ours, "peer_full") for ours in ("full", "full:dma", "full:kernel")),
    *((ours, "peer") for ours in ("pool", "pool:dma")),
    ("target", "peer_target"),
    ("target", "pool"),
    ("pool", "lifeboat"),
    ("pool", "kvcr"),
)
#: Pairs of our arm and the arm that measures bare reads from the same storage.
_LIMITS = (("pool", "drive"), ("target", "stand_in"))
_PLACES = ("gpu", "cpu", "pool", "other")
Conditions = Mapping[str, Any]


@dataclass(frozen=True)
class TtftSample:
    """One request. gpu to other: prompt tokens by where they were found, as in `Hits`. same:
    whether the answer equals the first arm's to the same prompt; None if the request failed."""

    arm: str
    phase: str
    length: int
    round: int
    ttft_s: float | None
    end_s: float
    gpu: int
    cpu: int
    pool: int
    other: int
    same: bool | None
    failure: str | None

    @property
    def prompt_tokens(self) -> int:
        return self.length


@dataclass(frozen=True)
class HitSample:
    """One batch. seconds: from the first request to the last token. Token counts are sums over the
    batch; gpu to other: prompt tokens by where they were found. ttft_s: median. same: number of
    answers equal to the first arm's, among those compared. cpu_s: CPU seconds of the server; None
    if it was not started here."""

    arm: str
    rate: int
    round: int
    requests: int
    failures: int
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float | None
    gpu: int
    cpu: int
    pool: int
    other: int
    same: int
    compared: int
    cpu_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens, computed or loaded, and answer tokens per second."""
        return (self.prompt_tokens + self.answer_tokens) / self.seconds


@dataclass(frozen=True)
class TurnSample:
    """One turn of one conversation. start_s: seconds from the measurement's start to sending.
    digest: a hash of the answer, to compare arms. gpu to other: the whole measurement's hits,
    stored in the first turn of its first conversation; 0 in all other turns."""

    arm: str
    concurrency: int
    round: int
    conversation: int
    turn: int
    start_s: float
    ttft_s: float | None
    end_s: float
    prompt_tokens: int
    answer_tokens: int
    digest: str
    failure: str | None
    gpu: int = 0
    cpu: int = 0
    pool: int = 0
    other: int = 0


def rivals(arms: Iterable[str]) -> list[tuple[str, str]]:
    """Return the (ours, rival) pairs among the measured arms."""
    known = set(arms)
    return [pair for pair in _RIVALS if known.issuperset(pair)]


def found_in(samples: Sequence[Any]) -> tuple[float, ...]:
    """Return the shares of prompt tokens found in GPU memory, CPU tier, pool and, if not 0,
    elsewhere."""
    prompt = sum(one.prompt_tokens for one in samples)
    shares = [sum(getattr(one, at) for one in samples) / max(1, prompt) for at in _PLACES]
    return tuple(shares) if shares[3] else tuple(shares[:3])


def ratio_of_ttft(
    samples: Sequence[Any], arm: str, length: int | None = None, other: str | None = None
) -> list[float]:
    """Return ratios of TTFT, paired by prompt: "cold" on `arm` to "back" on `arm` or, with `other`,
    "back" on `arm` to "back" on `other`. length: the prompts' length; None: all."""
    below: dict[str, object] = {"arm": other or arm, "phase": "back", "length": length}
    above = {**below, "arm": arm, "phase": "back" if other else "cold"}
    pairs = paired(samples, "ttft_s", above, below, lambda one: (one.length, one.round))
    return [a / b for a, b in pairs if b]


def ratio_of_hits(
    samples: Sequence[Any], arm: str, other: str, rate: int, measure: str = "tokens_per_s"
) -> list[float]:
    """Return the per-round ratios of a measure on `arm` to that on `other`."""
    above, below = ({"arm": name, "rate": rate} for name in (arm, other))
    return [a / b for a, b in paired(samples, measure, above, below) if b]


@dataclass(frozen=True)
class Turns:
    """An arm's figures at one concurrency over all rounds. found: see `found_in`."""

    tokens_per_s: float | None
    ttft_mean_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    failures: int
    found: tuple[float, ...]


def turns_of(samples: Sequence[Any], arm: str, concurrency: int) -> Turns:
    mine = select(samples, arm=arm, concurrency=concurrency)
    whole = [one for one in mine if one.failure is None]
    seconds = sum(
        max(one.start_s + one.end_s for one in mine if one.round == index)
        for index in distinct(mine, "round")
    )
    tokens = sum(one.prompt_tokens + one.answer_tokens for one in whole)
    ttfts = results.values_of(whole, "ttft_s")
    return Turns(
        tokens_per_s=tokens / seconds if seconds else None,
        ttft_mean_s=mean(ttfts),
        ttft_p95_s=results.percentile(ttfts, 0.95) if ttfts else None,
        ttft_p99_s=results.percentile(ttfts, 0.99) if ttfts else None,
        failures=len(mine) - len(whole),
        found=found_in(mine),
    )


def ratio_of_turns(
    samples: Sequence[Any], arm: str, other: str, concurrency: int, name: str = "tokens_per_s"
) -> list[float]:
    """Return the per-round ratios of `arm` to `other` for one of the figures in `Turns`."""

    def measure(some: Sequence[Any], one: str) -> float | None:
        found: float | None = getattr(turns_of(some, one, concurrency), name)
        return found

    return results.ratios_by_round(samples, measure, arm, other)


_RATIOS = {"tokens/s": "tokens_per_s", "TTFT avg": "ttft_mean_s", "TTFT P95": "ttft_p95_s"}


def _ordered(samples: Iterable[Any], conditions: Conditions) -> list[Any]:
    """Return the samples in order of arms; comparisons are relative to the first arm."""
    order = list(conditions.get("arms", {}))
    return sorted(samples, key=lambda one: order.index(one.arm) if order else 0)


def _found_table(samples: Sequence[Any], field: str, form: str) -> Table:
    def cell(arm: str, row: Any) -> str:
        shares = found_in(select(samples, **{"arm": arm, field: row}))
        return " / ".join(f"{share:.0%}" for share in shares)

    title = "Found, share of the prompts' tokens: GPU / CPU tier / pool"
    columns = [Column("", form.format), *by_arm(distinct(samples, "arm"), cell)]
    return Table(title, columns, distinct(samples, field))


def _rivals_table(
    samples: Sequence[Any],
    ratios: Mapping[str, Callable[[str, str], list[float]]],
) -> Table:
    """Return a table with a row per figure and pair of rivals. Less is better for figures whose
    title begins with TTFT or CPU."""
    rows = [
        (what, *pair, found, what.startswith(("TTFT", "CPU")))
        for what, of in ratios.items()
        for pair in rivals(distinct(samples, "arm"))
        if (found := of(*pair))
    ]
    return compared("Ours / the other", rows)


def _ttft_tables(samples: Sequence[Any], conditions: Conditions) -> Iterator[Table | str]:
    samples = _ordered(samples, conditions)
    arms, lengths = distinct(samples, "arm"), levels(samples, "length")
    phases = {"cold": "first time", "back": "returning"}
    rows = [{"length": length, "phase": phase} for length in lengths for phase in phases]
    counts = {len(select(samples, arm=arm, **row)) for arm in arms for row in rows}
    of = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "0"
    columns = [
        by("length", "prompt, tokens"),
        by("phase", "", lambda phase: phases[phase]),
        *arm_columns(samples, arms, "ttft_s", scale=0.001),
    ]
    yield Table(f"TTFT in ms, medians of {of} rounds", columns, rows, grouped=True)

    def times(arm: str, length: int) -> results.Spread | None:
        return spread_of(ratio_of_ttft(samples, arm, length))

    columns = [Column("tokens", str), *by_arm(arms, times, "{:.2f}×")]
    yield Table("First time / returning, paired by prompt: times as fast", columns, lengths)
    yield _found_table(select(samples, phase="back"), "length", "{}")
    ratios = {
        f"TTFT of {length:,} tokens": lambda a, b, at=length: ratio_of_ttft(samples, a, at, b)
        for length in lengths
    }
    yield _rivals_table(samples, ratios)
    written = {arm: count for arm, count in conditions.get("written_bytes", {}).items() if count}
    if written and arms:
        tokens = sum(one.prompt_tokens for one in select(samples, arm=arms[0], phase="cold"))
        columns = [
            Column("arm", str),
            Column("KiB per token", lambda arm: written[arm] / tokens, "{:.1f}", 1024),
        ]
        yield Table("Written for the prompts", columns, written)
    known = results.values_of(samples, "same")
    yield f"answers that equal the first arm's: {int(sum(known))} of {len(known)}"


def _hits_tables(samples: Sequence[Any], conditions: Conditions) -> Iterator[Table | str]:
    samples = _ordered(samples, conditions)
    arms, rates = distinct(samples, "arm"), levels(samples, "rate")
    rows = [{"rate": rate} for rate in rates]
    at = by("rate", "hit rate", "{} %".format)
    requests = samples[0].requests if samples else 0
    title = f"of {requests} prompts at once, medians of rounds"
    for name, measure, form in (
        ("Tokens/s", "tokens_per_s", "{:,.0f}"),
        ("Seconds", "seconds", "{:,.3f}"),
        ("The server's CPU seconds", "cpu_s", "{:.2f}"),
    ):
        if results.values_of(samples, measure):
            columns = [at, *arm_columns(samples, arms, measure, form)]
            yield Table(f"{name} {title}", columns, rows)

    def over_first(arm: str, rate: int) -> results.Spread | None:
        return spread_of(ratio_of_hits(samples, arm, arms[0], rate))

    columns = [Column("hit rate", "{} %".format), *by_arm(arms, over_first, "{:.2f}×")]
    yield Table(f"Throughput / {arms[0] if arms else '?'}, paired by round", columns, rates)
    yield _found_table(samples, "rate", "{} %")
    ratios: dict[str, Callable[[str, str], list[float]]] = {}
    for rate in rates:
        ratios[f"throughput at {rate} % hits"] = partial(ratio_of_hits, samples, rate=rate)
        ratios[f"CPU seconds at {rate} % hits"] = partial(
            ratio_of_hits, samples, rate=rate, measure="cpu_s"
        )
    yield _rivals_table(samples, ratios)
    costs = [
        ("throughput", ours, "none", found, False)
        for ours in ("full", "pool")
        if (found := ratio_of_hits(samples, ours, "none", 0))
    ]
    yield compared("Nothing returns", costs)
    limits = [
        row
        for ours, other in _LIMITS
        for row in ratios_of(samples, "seconds", ours, other, True, "seconds", rate=100)
    ]
    columns = [
        Column("seconds of", lambda row: f"{row[1]}/{row[2]}"),
        Column("ratio", lambda row: results.median_ratio(row[3]), "{:.2f}"),
    ]
    yield Table("Time / minimum time of the storage", columns, limits)
    same, count = (sum(getattr(one, name) for one in samples) for name in ("same", "compared"))
    yield f"answers that equal the first arm's: {same} of {count}"


def _turns_tables(samples: Sequence[Any], conditions: Conditions) -> Iterator[Table | str]:
    """Yield tables, the first with the columns of the OpenFlex Data24 table."""
    samples = _ordered(samples, conditions)
    arms, at_once = distinct(samples, "arm"), levels(samples, "concurrency")
    found = {(level, arm): turns_of(samples, arm, level) for level in at_once for arm in arms}

    def places(row: tuple[int, str]) -> str:
        shares = zip(found[row].found, ("GPU", "CPU", "pool", "other"), strict=False)
        return ", ".join(f"{share:.0%} {name}" for share, name in shares)

    columns = [
        Column("at once", lambda row: str(row[0])),
        Column("arm", lambda row: row[1], left=True),
    ]
    for name, title, scale in (
        ("tokens_per_s", "tokens/s", 1.0),
        ("ttft_mean_s", "TTFT avg, ms", 0.001),
        ("ttft_p95_s", "P95", 0.001),
        ("ttft_p99_s", "P99", 0.001),
    ):
        get = partial(lambda row, name: getattr(found[row], name), name=name)
        columns.append(Column(title, get, "{:,.0f}", scale))
    columns += [Column("failures", lambda row: found[row].failures), Column("found", places)]
    rounds = len(distinct(samples, "round"))
    title = f"Conversations; rounds, taken together: {rounds}"
    yield Table(title, columns, found, grouped=True)
    yield "tokens/s: of all prompts and answers; found: share of the prompts' tokens"
    ratios = {
        f"{title} at {level}": partial(ratio_of_turns, samples, concurrency=level, name=name)
        for title, name in _RATIOS.items()
        for level in at_once
    }
    yield _rivals_table(samples, ratios)
    turn = ("concurrency", "round", "conversation", "turn")
    same, compared = results.same_answers(samples, *turn)
    yield f"answers that equal the first arm's: {same} of {compared}"


REPORTS = (
    Report("ttft", "TTFT of one request", TtftSample, _ttft_tables),
    Report("hits", "Throughput against the hit rate", HitSample, _hits_tables),
    Report("turns", "Conversations of four turns", TurnSample, _turns_tables),
)
