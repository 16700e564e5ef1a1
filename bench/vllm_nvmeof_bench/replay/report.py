# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench replay`: completed requests, first tokens and hits of each arm."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench import plots
from vllm_nvmeof_bench.benchmark import Benchmark, Conditions
from vllm_nvmeof_bench.plots import finish
from vllm_nvmeof_bench.results import distinct, select, values_of
from vllm_nvmeof_bench.tables import Column, Table, vllm_in

_PLACES = {"gpu": "GPU", "cpu": "CPU tier", "pool": "pool", "other": "elsewhere"}
#: The columns of the published study: GPU memory only, + CPU tier, + CPU tier + NVMe.
_STUDIED = ("none", "cpu", "pool")


@dataclass(frozen=True)
class Sample:
    """One request. at_s: sent, since the first user came. ttft_s, end_s: since it was sent; ttft_s
    None: no token came. ended: `whole`, `failed`, or `cut` (under way when the time was up)."""

    arm: str
    session: str
    at_s: float
    ttft_s: float | None
    end_s: float
    tokens_in: int
    tokens_out: int
    ended: str
    why: str = ""


def summary_of(samples: Sequence[Sample], arm: str) -> dict[str, float]:
    """One arm's figures by name; empty if no first token came.

    TTFT in seconds, of all requests that got a first token. Tokens per second of whole requests,
    over the time from the first user's arrival to the end.
    """
    mine = select(samples, arm=arm)
    firsts = values_of(mine, "ttft_s")
    if not firsts:
        return {}
    whole = select(mine, ended="whole")
    seconds = max(one.at_s + one.end_s for one in mine)
    return {
        "completed": len(whole),
        "failed": len(select(mine, ended="failed")),
        "cut": len(select(mine, ended="cut")),
        "ttft_mean_s": statistics.fmean(firsts),
        "ttft_median_s": statistics.median(firsts),
        "ttft_p95_s": float(np.percentile(firsts, 95)),
        "ttft_max_s": max(firsts),
        "tokens_in_per_s": sum(one.tokens_in for one in whole) / seconds,
        "tokens_out_per_s": sum(one.tokens_out for one in whole) / seconds,
    }


#: Rows of the study: name, figure of a summary, format.
_STUDY_ROWS = (
    ("requests completed", "completed", "{:,}"),
    ("TTFT average", "ttft_mean_s", "{:.2f} s"),
    ("TTFT median", "ttft_median_s", "{:.2f} s"),
    ("TTFT P95", "ttft_p95_s", "{:.2f} s"),
    ("input tokens/s", "tokens_in_per_s", "{:,.0f}"),
    ("output tokens/s", "tokens_out_per_s", "{:,.1f}"),
)


def published(samples: Sequence[Sample]) -> dict[str, str]:
    """Ours for the study's rows, one figure per column; empty unless all three arms ran."""
    known = [summary_of(samples, arm) for arm in _STUDIED]
    if not all(known):
        return {}
    return {
        row: " / ".join(form.format(one[name]) for one in known) for row, name, form in _STUDY_ROWS
    }


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
        f"{settings['duration_s']:g} s per arm, one arm after the other"
    )
    if model := conditions.get("model"):
        cpus = conditions["machine"].get("cpus", "?")
        yield (
            f"{model['name']}, {model['parameters'] / 1e6:.0f} M parameters, "
            f"{model['kv_bytes_per_token'] // 1024} KiB of KV per token, GPU cache "
            f"{conditions['gpu_tokens']:,} tokens; vLLM {vllm_in(conditions)} on {cpus} cores"
        )
    if settings.get("third_tokens"):
        yield f"a CPU tier that holds a third holds {settings['third_tokens']:,} tokens"
    yield from (conditions[name] for name in ("stand_in", "peer_note") if name in conditions)
    if conditions.get("cut_off"):
        yield "this run was cut off: not every arm has every sample"


def _tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table | str]:
    arms = distinct(samples, "arm")
    found = {arm: summary_of(samples, arm) or {"completed": 0} for arm in arms}

    def shown(title: str, name: str, form: str) -> Column:
        return Column(title, lambda arm: found[arm].get(name), form)

    seconds = (("TTFT avg", "mean"), ("median", "median"), ("P95", "p95"), ("max", "max"))
    columns = (
        Column("arm", str),
        *(shown(name, name, "{:,}") for name in ("completed", "failed", "cut")),
        *(shown(title, f"ttft_{name}_s", "{:.3f}") for title, name in seconds),
        shown("input/s", "tokens_in_per_s", "{:,.0f}"),
        shown("output/s", "tokens_out_per_s", "{:,.1f}"),
    )
    title = "Requests, time to first token (s), tokens per second of whole requests"
    yield Table(title, columns, arms)

    def rate(arm: str, place: str) -> float | None:
        hits = conditions["hits"][arm]
        return 100 * hits[place] / hits["prompt"] if hits["prompt"] else None

    columns = (
        Column("arm", str),
        Column("prompt tokens", lambda arm: conditions["hits"][arm]["prompt"] or None, "{:,}"),
        *(Column(name, partial(rate, place=place), "{:.1f} %") for place, name in _PLACES.items()),
        Column("working set", lambda arm: conditions["working_set_tokens"][arm], "{:,}"),
        Column("server", lambda arm: conditions["arms"][arm]["says"], left=True),
    )
    title = "Where prompt tokens were found, as the server counts; unique tokens asked for"
    yield Table(title, columns, arms)
    for arm in arms:
        if failed := select(samples, arm=arm, ended="failed"):
            yield f"{arm}: {len(failed)} failed, the first with: {failed[0].why}"


_COLOURS = (
    *(plots.GREY, plots.ORANGE, plots.BLUE, plots.GREEN),
    *(plots.RED, plots.PINK, plots.SKY, plots.BLACK),
)
_PLACE_COLOURS = {"gpu": plots.GREY, "cpu": plots.ORANGE, "pool": plots.BLUE, "other": plots.PINK}
_WINDOWS = 12


def _plot(path: Path, samples: Sequence[Sample], conditions: Conditions) -> None:
    """Left: the time to first token of each request over the time at which it was sent, and a
    moving median: where the median climbs while the users stay the same, the server is in the
    spiral. Top right: requests completed over time. Bottom right: where prompts were found."""
    settings = conditions["settings"]
    title = (
        f"{settings['trace']}, {settings['pace']['users']} users, seed "
        f"{settings['pace']['seed']}: the same sessions against each server"
    )
    with plots.picture(path, title, "AB;AC", (8, 4), width_ratios=(1.5, 1)) as (_, panels):
        firsts, completed, found = panels
        _first_tokens(firsts, samples)
        for arm, colour in _coloured(samples):
            ends = sorted(one.at_s + one.end_s for one in select(samples, arm=arm, ended="whole"))
            counts = range(len(ends) + 1)
            completed.step([0.0, *ends], counts, where="post", color=colour, linewidth=2.5)
        finish(completed, "requests completed", xlabel="seconds")
        _found(found, distinct(samples, "arm"), conditions)


def _coloured(samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    return zip(distinct(samples, "arm"), itertools.cycle(_COLOURS), strict=False)


def _first_tokens(panel: Any, samples: Sequence[Sample]) -> None:
    edges = np.linspace(0, max(one.at_s for one in samples) or 1.0, _WINDOWS + 1)
    for arm, colour in _coloured(samples):
        mine = [one for one in select(samples, arm=arm) if one.ttft_s is not None]
        sent = np.array([one.at_s for one in mine])
        first = np.array([one.ttft_s for one in mine], float)
        panel.plot(sent, first, ".", color=colour, alpha=0.35, markersize=6)
        middles, medians = [], []
        for low, high in itertools.pairwise(edges):
            inside = (sent >= low) & (sent <= high)
            if inside.any():
                middles.append((low + high) / 2)
                medians.append(float(np.median(first[inside])))
        panel.plot(middles, medians, "-", color=colour, linewidth=2.5, label=arm)
    panel.set_yscale("log")
    xlabel, ylabel = "sent, seconds after the first user came", "time to first token, s"
    finish(panel, "each request, and a moving median", True, xlabel=xlabel, ylabel=ylabel)


def _found(panel: Any, arms: Sequence[str], conditions: Conditions) -> None:
    left = np.zeros(len(arms))
    for place, name in _PLACES.items():
        hits = [conditions["hits"][arm] for arm in arms]
        share = np.array([100 * one[place] / max(1, one["prompt"]) for one in hits])
        if place != "other" or share.any():
            panel.barh(arms, share, left=left, color=_PLACE_COLOURS[place], label=name)
            left += share
    panel.invert_yaxis()
    title = "where prompts were found; the rest was computed"
    finish(panel, title, xlim=(0, 100), xlabel="% of prompt tokens")
    # Below the panel: over the bars it would hide them.
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(_PLACES))


BENCHES = (Benchmark("replay", Sample, _lines, _tables, _plot, published=published, columns=180),)
