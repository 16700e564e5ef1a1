# SPDX-License-Identifier: Apache-2.0
"""The `bench simulate` report: hit rates by size and policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_nvmeof_bench.report import Column, Conditions, Report, Table, by_arm
from vllm_nvmeof_bench.results import distinct, median_of, select
from vllm_nvmeof_offload.units import GIB


@dataclass(frozen=True)
class Sample:
    """One simulated run. sweep: `pool`, `cpu` or `writes`. Integers count tokens, except for the
    threshold. stored: tokens stored in the CPU tier. written: tokens written to the pool. stranded:
    share of the chunks left in the tiers that cannot be found because their predecessor is in no
    tier."""

    sweep: str
    policy: str
    write_policy: str
    store_threshold: int
    gpu_tokens: int
    cpu_tokens: int
    pool_tokens: int
    prompt_tokens: int
    hit_gpu: int
    hit_cpu: int
    hit_pool: int
    stored: int
    written: int
    stranded: float

    @property
    def hit(self) -> float:
        """The share of prompt tokens found in GPU memory or in a tier."""
        return (self.hit_gpu + self.hit_cpu + self.hit_pool) / self.prompt_tokens

    @property
    def hit_per_cent(self) -> float:
        return 100 * self.hit

    @property
    def written_per_cent(self) -> float:
        return 100 * self.written / self.prompt_tokens


def _share(tokens: int, conditions: Conditions) -> float:
    return tokens / max(1, int(conditions["working_set_tokens"]))


def _lines(conditions: Conditions) -> Iterator[str]:
    settings = conditions["settings"]
    pace, working = settings["pace"], conditions["working_set_tokens"]
    yield (
        f"{conditions['trace']}: {conditions['sessions']:,} sessions, "
        f"{conditions['requests']:,} requests, {conditions['prompt_tokens'] / 1e6:,.1f} M prompt "
        f"tokens, of which {100 * conditions['reusable']:.1f} % return; context up to "
        f"{settings['context_tokens_max']:,}; seed {pace['seed']}"
    )
    yield (
        f"{pace['users']} users (unless the trace has timestamps), think times × "
        f"{pace['time_scale']:g}, at most {pace['think_s_max']:g} s; chunks of "
        f"{conditions['chunk_tokens']} tokens"
    )
    kv_bytes = settings["kv_bytes_per_token"]
    yield (
        f"working set {working / 1e6:,.2f} M tokens, {working * kv_bytes / GIB:,.0f} GiB at "
        f"{kv_bytes // 1024} KiB per token; sizes below are shares of it"
    )


def _tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table | str]:
    for sweep, title in (
        ("pool", "Over the size of the pool"),
        ("cpu", "Over the size of the CPU tier"),
        ("writes", "Over what is written, and when"),
    ):
        yield Table(title, _columns(conditions), select(samples, sweep=sweep))
    pools = select(samples, sweep="pool")
    yield _by_policy("Hits over the size of the pool", pools, "hit_per_cent", conditions)
    written = [one for one in pools if one.pool_tokens]
    yield _by_policy("Written of the prompts' tokens", written, "written_per_cent", conditions)


def _by_policy(
    title: str, samples: Sequence[Sample], measure: str, conditions: Conditions
) -> Table:
    def value(policy: str, size: int) -> float | None:
        return median_of(samples, measure, policy=policy, pool_tokens=size)

    columns = [
        Column("size", lambda size: f"{_share(size, conditions):.3g}"),
        *by_arm(distinct(samples, "policy"), value, "{:.1f} %"),
    ]
    return Table(title, columns, distinct(samples, "pool_tokens"))


def _columns(conditions: Conditions) -> list[Column]:
    gib = int(conditions["settings"]["kv_bytes_per_token"]) / GIB

    def policy(one: Sample) -> str:
        more = f", {one.write_policy}, threshold {one.store_threshold}"
        return one.policy + more * (one.sweep == "writes")

    def columns_of(
        form: str, value: Callable[[int, Sample], float], **fields: str
    ) -> Iterator[Column]:
        for name, title in fields.items():
            yield Column(title, lambda one, name=name: value(getattr(one, name), one), form)

    sizes = {"gpu_tokens": "GPU", "cpu_tokens": "CPU tier", "pool_tokens": "pool"}
    places = {"hit_gpu": "in GPU", "hit_cpu": "in CPU tier", "hit_pool": "in pool"}
    moved = {"hit_pool": "read, GiB", "stored": "stored, GiB", "written": "written, GiB"}
    return [
        *columns_of("{:.3g}", lambda tokens, one: _share(tokens, conditions), **sizes),
        Column("policy", policy, left=True),
        Column("hits", lambda one: one.hit_per_cent, "{:.1f} %"),
        *columns_of("{:.1f} %", lambda tokens, one: 100 * tokens / one.prompt_tokens, **places),
        *columns_of("{:,.0f}", lambda tokens, one: tokens * gib, **moved),
        Column("stranded", lambda one: 100 * one.stranded, "{:.1f} %"),
    ]


REPORTS = (
    Report(
        "simulate",
        "Simulated hit rates by size and policy",
        Sample,
        _tables,
        about="{simulated}",
        lines=_lines,
        columns=180,
    ),
)
