# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench moving`: what a user sees who gets another server at each turn.

TTFT, and what was found, are of turns from the second on: nobody has the first one's prompt. Their
ratios are of the same turn of the same conversation in the same round. Throughput is of a whole
round, its first turns included, over the time in which requests were under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import plots, results
from vllm_nvmeof_bench.benchmark import Benchmark
from vllm_nvmeof_bench.plots import Style, finish
from vllm_nvmeof_bench.results import (
    METHOD,
    Figure,
    Goal,
    Paired,
    bound,
    distinct,
    median_of,
    select,
    values_of,
)
from vllm_nvmeof_bench.tables import Column, Table, load_in, machine_in, number, vllm_in

OURS, STICKY, PEER = "ours", "sticky", "peer"
#: What is compared with ours, and which share of it is required.
_RIVALS = {PEER: 1.0, STICKY: 0.9}
_PLACES = {"gpu": "GPU", "cpu": "CPU", "pool": "own pool", "shared": "others'", "other": "other"}


@dataclass(frozen=True)
class Sample:
    """One turn of one conversation. server: its name. Seconds; digest: of the answer. gpu to other:
    tokens of the prompt by where they were found: `shared` in the pool of the other server. With
    vLLM's tiering `pool` is the directory that both servers share.
    """

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
        """Share of the prompt's tokens that were not computed."""
        return sum(getattr(self, at) for at in _PLACES) / max(1, self.prompt_tokens)


Samples = Sequence[Sample]


def later(samples: Samples) -> list[Sample]:
    """Turns from the second on."""
    return [one for one in samples if one.turn > 0]


def tokens_per_s(samples: Samples) -> float | None:
    """Prompt and answer tokens of whole answers per second of requests; None: there are none."""
    seconds = sum(one.end_s for one in samples)
    whole = [one for one in samples if one.failure is None]
    return sum(one.prompt_tokens + one.answer_tokens for one in whole) / seconds if whole else None


def _paired(samples: Samples, arm: str, other: str, measure: str) -> list[tuple[float, float]]:
    """By turn of a conversation, from the second on."""
    above, below = ({"arm": one} for one in (arm, other))
    pairs = results.paired(
        later(samples), measure, above, below, lambda one: (one.round, one.conversation, one.turn)
    )
    return [pair for pair in pairs if min(pair) > 0]


def ratio_of_ttft(samples: Samples, arm: str, other: str) -> Paired | None:
    """`arm` over `other`, turn by turn."""
    pairs = _paired(samples, arm, other, "ttft_s")
    return results.median_ratio([a / b for a, b in pairs]) if pairs else None


def ratio_of_found(samples: Samples, arm: str, other: str) -> Paired | None:
    """The shares of the prompts' tokens that were not computed, `arm` over `other`, by round."""
    return _by_round(samples, arm, other, lambda some: _found(some, *_PLACES))


def ratio_of_tokens(samples: Samples, arm: str, other: str) -> Paired | None:
    """Tokens per second, `arm` over `other`, round by round."""
    return _by_round(samples, arm, other, tokens_per_s)


def _by_round(
    samples: Samples, arm: str, other: str, measure: Callable[[Samples], float | None]
) -> Paired | None:
    found = []
    for one in sorted(set(distinct(samples, "round"))):
        ours, theirs = (measure(select(samples, arm=name, round=one)) for name in (arm, other))
        if ours and theirs:
            found.append(ours / theirs)
    return results.median_ratio(found) if found else None


def _found(samples: Samples, *places: str) -> float | None:
    """Share of the prompts' tokens, from the second turn on, that were found in these places."""
    chosen = later(samples)
    prompts = sum(one.prompt_tokens for one in chosen)
    return sum(getattr(one, at) for one in chosen for at in places) / prompts if prompts else None


def different(samples: Samples) -> tuple[int, int]:
    """(answers that differ from the first one to the same turn, compared ones)."""
    first: dict[tuple[int, int, int], str] = {}
    unequal = compared = 0
    for one in samples:
        if one.failure is None:
            key = (one.round, one.conversation, one.turn)
            compared += key in first
            unequal += first.setdefault(key, one.digest) != one.digest
    return unequal, compared


def goals(samples: Samples, conditions: Mapping[str, Any]) -> list[Goal]:
    """Ours, whose conversations move, beside vLLM's tiering and beside conversations that stay."""

    def figure(found: Paired | None, inverse: bool = False) -> Figure | None:
        return Figure(1 / found.middle if inverse else found.middle, found.n) if found else None

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


def _lines(conditions: Mapping[str, Any]) -> Iterator[str]:
    settings = conditions.get("settings", {})
    yield f"{machine_in(conditions)}; vLLM {vllm_in(conditions)}; {load_in(conditions)}"
    if model := conditions.get("model"):
        yield (
            f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, "
            f"{model['kv_bytes_per_token'] // 1024} KiB of KV per token"
        )
    yield (
        f"{settings.get('conversations', '?')} conversations of {settings.get('turns', '?')} "
        f"turns, {settings.get('first_tokens', '?')} tokens and {settings.get('grow_tokens', '?')} "
        f"more each turn; {settings.get('think_s', '?')} s of thinking; GPU memory emptied before "
        "each request, one request at a time"
    )
    for name, arm in conditions.get("arms", {}).items():
        staging = arm.get("staging_bytes")
        yield f"• {name}: {arm['says']}" + (
            f" ({staging / (1 << 20):.0f} MiB of CPU memory)" if staging else ""
        )
    if note := conditions.get("peer_note"):
        yield str(note)
    if conditions.get("cut_off"):
        yield "this run was cut off: not every arm has every sample"


def _tables(samples: Samples, conditions: Mapping[str, Any]) -> Iterator[Table | str]:
    arms = [arm for arm in (OURS, STICKY, PEER) if arm in distinct(samples, "arm")]

    def ttft(arm: str, share: float) -> str:
        values = values_of(later(samples), "ttft_s", arm=arm)
        return number(results.percentile(values, share) if values else None, scale=0.001)

    def places(arm: str) -> str:
        mine = select(samples, arm=arm)
        shares = {name: _found(mine, at) for at, name in _PLACES.items()}
        return ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share)

    columns = [
        Column("", str),
        Column("tokens/s", lambda arm: tokens_per_s(select(samples, arm=arm)), "{:,.0f}"),
        Column("TTFT, ms", lambda arm: number(
            median_of(later(samples), "ttft_s", arm=arm), scale=0.001)),
        Column("P95", partial(ttft, share=0.95)),
        Column("found", lambda arm: _found(select(samples, arm=arm), *_PLACES), "{:.0%}"),
        Column("where", places, left=True),
        Column("failures", lambda arm: sum(
            one.failure is not None for one in select(samples, arm=arm))),
    ]  # fmt: skip
    rounds = len(set(distinct(samples, "round")))
    if samples:
        yield Table(f"TTFT and found: from the second turn on; rounds: {rounds}", columns, arms)
    turns = sorted(set(distinct(samples, "turn")))

    def of_turn(arm: str, turn: int) -> str:
        return number(median_of(samples, "ttft_s", arm=arm, turn=turn), scale=0.001)

    columns = [Column("turn", lambda turn: str(turn + 1))]
    columns += [Column(arm, partial(of_turn, arm)) for arm in arms]
    if turns:
        yield Table("TTFT in ms by turn, medians", columns, turns)
    for rival in _RIVALS:
        for what, found in (
            ("tokens/s", ratio_of_tokens(samples, OURS, rival)),
            ("TTFT", ratio_of_ttft(samples, OURS, rival)),
            ("share found", ratio_of_found(samples, OURS, rival)),
        ):
            if found:
                between = found.text(".3f", ", 95 % interval {} to {}")
                yield f"• {what}, ours / {rival}: {between} ({found.n} pairs)"
    for reason in sorted({one.failure for one in samples if one.failure}):
        yield f"failed: {reason}"
    unequal, compared = different(samples)
    yield f"answers that differ between arms: {unequal} of {compared}; ratios: {METHOD}"


_STYLES = {
    OURS: Style(plots.BLUE, "o", "ours, another server at each turn"),
    STICKY: Style(plots.GREEN, "s", "ours, the same server"),
    PEER: Style(plots.RED, "v", "vLLM's tiering, another server at each turn", "--"),
}


def _plot(path: Path, samples: Samples, conditions: Mapping[str, Any]) -> None:
    """TTFT by turn, and the share of the prompts' tokens that was found."""
    turns = sorted(set(distinct(samples, "turn")))

    def spread(measure: str) -> Callable[[str, int], results.Spread | None]:
        return lambda arm, turn: results.spread_of(values_of(samples, measure, arm=arm, turn=turn))

    title = f"Conversations that change servers: {plots.where_measured(conditions)}"
    with plots.picture(path, title, "AB") as (_, (times, shares)):
        plots.lines(times, _STYLES, turns, spread("ttft_s"), 0.001)
        plots.lines(shares, _STYLES, turns, spread("found"))
        labels = ("time to first token, ms", "share of the prompt found")
        for panel, label in zip((times, shares), labels, strict=True):
            panel.set_xticks(turns, [str(turn + 1) for turn in turns])
            finish(panel, "", True, xlabel="turn", ylabel=label, ylim=(0, None))


BENCHES = (Benchmark("moving", Sample, _lines, _tables, _plot, goals, columns=150),)
