# SPDX-License-Identifier: Apache-2.0
"""The `bench replay` report: each arm's completed requests, TTFT and hits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_nvmeof_bench import results
from vllm_nvmeof_bench.report import Column, Conditions, Report, Table, compared
from vllm_nvmeof_bench.results import distinct, median, percentile, select, values_of

_PLACES = {"gpu": "GPU", "cpu": "CPU tier", "pool": "pool", "other": "elsewhere"}


@dataclass(frozen=True)
class Sample:
    """One request. at_s: seconds from the first user's arrival to sending. ttft_s, end_s: seconds
    since sending; ttft_s is None if no token arrived. ended: `whole`, `failed`, or `cut` at the end
    of the run. why: the reason for a failure."""

    arm: str
    session: str
    at_s: float
    ttft_s: float | None
    end_s: float
    tokens_in: int
    tokens_out: int
    ended: str
    why: str = ""
    round: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Seconds per generated token after the first; None if the request is incomplete."""
        if self.ttft_s is None or self.ended != "whole" or self.tokens_out < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.tokens_out - 1)


def summary_of(samples: Sequence[Sample], arm: str) -> dict[str, float]:
    """Return an arm's figures by name; empty if it generated no token. TTFT includes all requests
    that received a token; tokens/s count whole requests, over the duration of all rounds."""
    mine = select(samples, arm=arm)
    firsts = values_of(mine, "ttft_s")
    if not firsts:
        return {}
    whole = select(mine, ended="whole")
    rounds = [select(mine, round=number) for number in distinct(mine, "round")]
    seconds = sum(max(one.at_s + one.end_s for one in part) for part in rounds)
    return {
        "completed": len(whole),
        "failed": len(select(mine, ended="failed")),
        "cut": len(select(mine, ended="cut")),
        "ttft_mean_s": statistics.fmean(firsts),
        "ttft_median_s": statistics.median(firsts),
        "ttft_p95_s": percentile(firsts, 0.95),
        "ttft_p99_s": percentile(firsts, 0.99),
        "tpot_ms": 1000 * (median(values_of(mine, "tpot_s")) or 0.0),
        "tokens_in_per_s": sum(one.tokens_in for one in whole) / seconds,
        "tokens_out_per_s": sum(one.tokens_out for one in whole) / seconds,
    }


def ratio(samples: Sequence[Sample], name: str, arm: str, other: str) -> list[float]:
    """Return the per-round ratios of `arm` to `other` for one of the figures in `summary_of`."""
    found = results.ratios_by_round(
        samples, lambda some, one: summary_of(some, one).get(name), arm, other
    )
    return [one for one in found if one]


def _lines(conditions: Conditions) -> Iterator[str]:
    settings = conditions["settings"]
    pace = settings["pace"]
    yield (
        f"{settings['trace']}: {conditions['sessions']} sessions, {conditions['requests']} "
        f"requests, {conditions['block_tokens']} tokens per block, context up to "
        f"{settings['context_tokens_max']:,}; seed {pace['seed']}"
    )
    yield (
        f"{pace['users']} users, one every {pace['ramp_s']:g} s, think times × "
        f"{pace['time_scale']:g}, at most {pace['think_s_max']:g} s; "
        f"{settings['duration_s']:g} s per run, {settings.get('rounds', 1)} runs of each arm"
    )
    if settings.get("third_tokens"):
        yield f"a CPU tier that holds a third has room for {settings['third_tokens']:,} tokens"


def _tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table | str]:
    there = distinct(samples, "arm")
    arms = [arm for arm in conditions.get("arms", {}) if arm in there] or there
    found = {arm: summary_of(samples, arm) or {"completed": 0} for arm in arms}

    def shown(title: str, name: str, form: str) -> Column:
        return Column(title, lambda arm: found[arm].get(name), form)

    seconds = (("TTFT avg", "mean"), ("median", "median"), ("P95", "p95"), ("P99", "p99"))
    columns = [
        Column("arm", str),
        *(shown(name, name, "{:,}") for name in ("completed", "failed", "cut")),
        *(shown(title, f"ttft_{name}_s", "{:.3f}") for title, name in seconds),
        shown("TPOT, ms", "tpot_ms", "{:.0f}"),
        shown("input/s", "tokens_in_per_s", "{:,.0f}"),
        shown("output/s", "tokens_out_per_s", "{:,.1f}"),
    ]
    title = "Requests, time to first token (s), tokens per second of whole requests"
    yield Table(title, columns, arms)
    rows = [
        (title, *pair, values, lower)
        for title, name, lower in _COMPARED
        for pair in _PAIRS
        if (values := ratio(samples, name, *pair))
    ]
    yield compared("Paired by run", rows)

    def rate(arm: str, place: str) -> float | None:
        hits = conditions["hits"][arm]
        return 100 * hits[place] / hits["prompt"] if hits["prompt"] else None

    columns = [
        Column("arm", str),
        Column("prompt tokens", lambda arm: conditions["hits"][arm]["prompt"] or None, "{:,}"),
        *(Column(name, partial(rate, place=place), "{:.1f} %") for place, name in _PLACES.items()),
        Column("working set", lambda arm: conditions["working_set_tokens"][arm], "{:,}"),
    ]
    title = "Where prompt tokens were found, as the server counts; unique tokens asked for"
    yield Table(title, columns, arms)
    for arm in arms:
        if failed := select(samples, arm=arm, ended="failed"):
            yield f"{arm}: {len(failed)} requests failed; the first failed with: {failed[0].why}"


#: Compared arms: with and without a pool, and ours and vLLM's tiering with equal memory.
_PAIRS = (("pool", "third"), ("pool", "peer"))
#: Title, name of a figure in `summary_of`, and whether less is better.
_COMPARED = (
    ("completed", "completed", False),
    ("TTFT average", "ttft_mean_s", True),
    ("TTFT P95", "ttft_p95_s", True),
    ("TPOT", "tpot_ms", True),
)
REPORTS = (
    Report(
        "replay",
        "Agentic traces, replayed",
        Sample,
        _tables,
        lines=_lines,
        columns=180,
    ),
)
