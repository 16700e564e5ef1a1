# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal: medians of every case, latencies beside writes, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.pool.samples import Sample, median_of, size_name
from vllm_nvmeof_bench.pool.settings import ARMS, CASES
from vllm_nvmeof_bench.pool.targets import Row

__all__ = ["print_conditions", "print_samples", "print_targets", "table_of"]

_LATENCY_CASE = "read_beside_writes"


def print_samples(console: Console, samples: Sequence[Sample]) -> None:
    """Throughput, CPU time, and the demand read's latency."""
    rounds = max((one.round for one in samples), default=0) + 1
    of = f"median of {rounds} rounds"
    throughput = [one for one in samples if one.case != _LATENCY_CASE]
    console.print(table_of(f"MiB/s, {of}", throughput, "mib_per_s", "{:,.0f}"))
    console.print(table_of(f"CPU seconds per GiB, {of}", throughput, "cpu_s_per_gib", "{:.3f}"))
    beside = [one for one in samples if one.case == _LATENCY_CASE]
    if beside:
        console.print(table_of(f"demand read beside writes, p50 in µs, {of}", beside, "p50_us"))
        console.print(table_of(f"demand read beside writes, p99 in µs, {of}", beside, "p99_us"))


def table_of(title: str, samples: Sequence[Sample], field: str, form: str = "{:,.0f}") -> Table:
    """One row a case and block size, one column an arm; "–" where nothing was measured."""
    arms = [arm for arm in ARMS if any(one.arm == arm for one in samples)]
    table = Table("case", "block", *arms, title=title, title_justify="left", box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for case in CASES:
        blocks = sorted({one.block_bytes for one in samples if one.case == case})
        for number, block_bytes in enumerate(blocks):
            cells = []
            for arm in arms:
                value = median_of(samples, arm, case, block_bytes, field)
                cells.append("–" if value is None else form.format(value))
            table.add_row(
                case if number == 0 else "",
                size_name(block_bytes),
                *cells,
                end_section=number == len(blocks) - 1 and len(blocks) > 1,
            )
    return table


def print_targets(console: Console, rows: Sequence[Row]) -> None:
    """target | required | measured | n | reached."""
    table = Table(
        "target", "required", "measured", "n", "reached", title_justify="left", box=SIMPLE_HEAD
    )
    table.title = "Targets: ratios of medians, and the manager"
    for row in rows:
        answer = {True: "[green]yes[/]", False: "[red]no[/]", None: "not measured"}[row.reached]
        measured = "–" if row.measured is None else f"{row.measured:.2f}{row.unit}"
        if row.where:
            measured += f" [dim]({row.where})[/]"
        table.add_row(row.target, row.required, measured, str(row.n or "–"), answer)
    console.print(table)


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """What ran and what did not, and how busy the machine was: a few lines."""
    for name, arm in conditions.get("arms", {}).items():
        if not arm.get("available"):
            console.print(f"{name}: not measured: {arm.get('reason')}", highlight=False)
        elif "runs" in arm:
            extra = "" if arm.get("c_extension") is None else f", C extension {arm['c_extension']}"
            console.print(f"{name}: {arm['runs']}{extra}", highlight=False)
    disk = conditions.get("disk", {})
    before = conditions.get("load_average_at_start", ["?"])[0]
    after = conditions.get("load_average_at_end", ["?"])[0]
    console.print(
        f"{disk.get('file_system', '?')} on {disk.get('device', '?')}; load average {before} "
        f"before, {after} after",
        highlight=False,
    )
