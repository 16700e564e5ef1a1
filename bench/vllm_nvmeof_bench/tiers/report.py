# SPDX-License-Identifier: Apache-2.0
"""Tables: hit rates by tier and bytes over the sizes of both tiers, for every policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_nvmeof_bench.tiers.samples import Sample
from vllm_nvmeof_offload.units import GIB

__all__ = ["of_sweep", "print_conditions", "print_samples", "share_of"]

_TITLES = {
    "pool": "Over the size of the pool",
    "cpu": "Over the size of the CPU tier",
    "writes": "Over what is written, and when",
}
_COLUMNS = ("GPU", "CPU tier", "pool", "policy", "hits", "in GPU", "in CPU tier", "in pool")


def of_sweep(samples: Sequence[Sample], sweep: str) -> list[Sample]:
    return [one for one in samples if one.sweep == sweep]


def share_of(tokens: int, conditions: Mapping[str, Any]) -> float:
    """A size as a share of the working set."""
    return tokens / max(1, int(conditions["working_set_tokens"]))


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """What was asked, and what is not simulated."""
    settings = conditions["settings"]
    pace = settings["pace"]
    working = conditions["working_set_tokens"]
    asked = (
        f"{conditions['trace']}: {conditions['sessions']:,} sessions, "
        f"{conditions['requests']:,} requests, {conditions['prompt_tokens'] / 1e6:,.1f} M prompt "
        f"tokens, of which {100 * conditions['reusable']:.1f} % come again; context up to "
        f"{settings['context_tokens_max']:,}; seed {pace['seed']}"
    )
    how = (
        f"{pace['users']} users (a trace with a clock has its own), think times × "
        f"{pace['time_scale']:g}, at most {pace['think_s_max']:g} s; chunks of "
        f"{conditions['chunk_tokens']} tokens"
    )
    kv_bytes = settings["kv_bytes_per_token"]
    sizes = (
        f"working set {working / 1e6:,.2f} M tokens, {working * kv_bytes / GIB:,.0f} GiB at "
        f"{kv_bytes // 1024} KiB a token; sizes below are shares of it"
    )
    lines = (asked, how, sizes, str(conditions["simulated"]))
    for line in lines:
        console.print(line, highlight=False)


def print_samples(
    console: Console, samples: Sequence[Sample], conditions: Mapping[str, Any]
) -> None:
    """One table a sweep, and one of the orders of eviction alone."""
    gib = int(conditions["settings"]["kv_bytes_per_token"]) / GIB
    for sweep, title in _TITLES.items():
        table = _table(title, *_COLUMNS, "read, GiB", "stored, GiB", "written, GiB", "stranded")
        for one in of_sweep(samples, sweep):
            rate = [f"{100 * n / one.prompt_tokens:.1f} %" for n in _found(one)]
            policy = one.policy
            if sweep == "writes":
                policy += f", {one.write_policy}, threshold {one.store_threshold}"
            sizes = (one.gpu_tokens, one.cpu_tokens, one.pool_tokens)
            moved = (one.hit_pool, one.stored, one.written)
            table.add_row(
                *(f"{share_of(size, conditions):.3g}" for size in sizes),
                policy,
                f"{100 * one.hit:.1f} %",
                *rate,
                *(f"{tokens * gib:,.0f}" for tokens in moved),
                f"{100 * one.stranded:.1f} %",
            )
        if table.row_count:
            console.print(table)
    _print_alone(console, of_sweep(samples, "alone"), conditions)


def _found(one: Sample) -> tuple[int, int, int]:
    return one.hit_gpu, one.hit_cpu, one.hit_pool


def _print_alone(
    console: Console, samples: Sequence[Sample], conditions: Mapping[str, Any]
) -> None:
    names = list(dict.fromkeys(one.policy for one in samples))
    if not names:
        return
    table = _table("One tier alone: hits by order of eviction", "size", *names)
    for size in dict.fromkeys(one.pool_tokens for one in samples):
        by_name = {one.policy: one.hit for one in samples if one.pool_tokens == size}
        cells = (f"{100 * by_name[name]:.1f} %" for name in names)
        table.add_row(f"{share_of(size, conditions):.3g}", *cells)
    console.print(table)
    console.print(
        "best: Belady's, which knows the future; s3_fifo: Yang et al., SOSP '23", highlight=False
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header == "policy" else "right"
    return table
