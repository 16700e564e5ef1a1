# SPDX-License-Identifier: Apache-2.0
"""The samples of `bench simulate`: tables and picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench import plots
from vllm_nvmeof_bench.benchmark import Benchmark, Conditions
from vllm_nvmeof_bench.plots import Style, finish
from vllm_nvmeof_bench.results import distinct, median_of, select
from vllm_nvmeof_bench.tables import Column, Table
from vllm_nvmeof_offload.units import GIB

_DEFAULT = "credited_lru"


@dataclass(frozen=True)
class Sample:
    """One simulated run. sweep: `pool`, `cpu`, `writes`, or `alone` (one tier alone, of
    `pool_tokens`). All counts are tokens: sizes; prompts, and where they were found; stored in the
    CPU tier, written to the pool. stranded: share of the chunks in the tiers at the end that
    nothing finds, because their predecessor is in none."""

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
        """Share of the prompts' tokens that were found anywhere."""
        return (self.hit_gpu + self.hit_cpu + self.hit_pool) / self.prompt_tokens

    @property
    def hit_per_cent(self) -> float:
        return 100 * self.hit


def _share(tokens: int, conditions: Conditions) -> float:
    return tokens / max(1, int(conditions["working_set_tokens"]))


def _lines(conditions: Conditions) -> Iterator[str]:
    settings = conditions["settings"]
    pace, working = settings["pace"], conditions["working_set_tokens"]
    yield (
        f"{conditions['trace']}: {conditions['sessions']:,} sessions, "
        f"{conditions['requests']:,} requests, {conditions['prompt_tokens'] / 1e6:,.1f} M prompt "
        f"tokens, of which {100 * conditions['reusable']:.1f} % come again; context up to "
        f"{settings['context_tokens_max']:,}; seed {pace['seed']}"
    )
    yield (
        f"{pace['users']} users (a trace with a clock has its own), think times × "
        f"{pace['time_scale']:g}, at most {pace['think_s_max']:g} s; chunks of "
        f"{conditions['chunk_tokens']} tokens"
    )
    kv_bytes = settings["kv_bytes_per_token"]
    yield (
        f"working set {working / 1e6:,.2f} M tokens, {working * kv_bytes / GIB:,.0f} GiB at "
        f"{kv_bytes // 1024} KiB per token; sizes below are shares of it"
    )
    yield str(conditions["simulated"])


def _tables(samples: Sequence[Sample], conditions: Conditions) -> Iterator[Table | str]:
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
    columns = [
        *columns_of("{:.3g}", lambda tokens, one: _share(tokens, conditions), **sizes),
        Column("policy", policy, left=True),
        Column("hits", lambda one: one.hit_per_cent, "{:.1f} %"),
        *columns_of("{:.1f} %", lambda tokens, one: 100 * tokens / one.prompt_tokens, **places),
        *columns_of("{:,.0f}", lambda tokens, one: tokens * gib, **moved),
        Column("stranded", lambda one: 100 * one.stranded, "{:.1f} %"),
    ]
    for sweep, title in (
        ("pool", "Over the size of the pool"),
        ("cpu", "Over the size of the CPU tier"),
        ("writes", "Over what is written, and when"),
    ):
        if rows := select(samples, sweep=sweep):
            yield Table(title, columns, rows)
    if alone := select(samples, sweep="alone"):

        def hit(name: str) -> Callable[[int], float | None]:
            return lambda size: median_of(alone, "hit_per_cent", policy=name, pool_tokens=size)

        columns = [
            Column("size", lambda size: _share(size, conditions), "{:.3g}"),
            *(Column(name, hit(name), "{:.1f} %") for name in distinct(alone, "policy")),
        ]
        title = "One tier alone: hits by order of eviction"
        yield Table(title, columns, distinct(alone, "pool_tokens"))
        yield "best: Belady's, which knows the future; s3_fifo: Yang et al., SOSP '23"


_TIERS = (
    ("hit_gpu", plots.GREY, "GPU"),
    ("hit_cpu", plots.ORANGE, "CPU tier"),
    ("hit_pool", plots.BLUE, "pool"),
)
_STYLES = {
    "best": Style(plots.GREY, label="best there could be", linestyle=":"),
    _DEFAULT: Style(plots.BLUE, label="credited LRU (default)"),
    "lru": Style(plots.RED, label="plain LRU", linestyle="--"),
    "s3_fifo": Style(plots.GREEN, label="S3-FIFO", linestyle="-."),
}
#: Colours of the user's own policies, in turn.
_OWN = (plots.PINK, plots.ORANGE, plots.SKY, plots.BLACK)


def _plot(path: Path, samples: Sequence[Sample], conditions: Conditions) -> None:
    """Left: hits by tier over the size of the pool, the default policy's as areas, the others' sums
    as lines. Middle: bytes written per prompt token. Right: orders of eviction on one tier."""
    title = (
        f"{conditions['trace']}: {conditions['requests']:,} requests, working set "
        f"{conditions['working_set_tokens'] / 1e6:,.1f} M tokens; simulated"
    )
    sweep, alone = select(samples, sweep="pool"), select(samples, sweep="alone")
    styles = _styles(samples)
    with plots.picture(path, title, "ABC", (5.7, 6.5)) as (_, (tiers, writes, orders)):
        _by_tier(tiers, sweep, conditions, styles)
        for panel, some, name in (
            (writes, [one for one in sweep if one.pool_tokens], "written"),
            (orders, alone, "hit_pool"),
        ):
            for policy, style in styles.items():
                if mine := select(some, policy=policy):
                    shares = [_share(one.pool_tokens, conditions) for one in mine]
                    found = [100 * getattr(one, name) / one.prompt_tokens for one in mine]
                    panel.plot(shares, found, **asdict(style))
        size, prompts = "size of the pool / working set", "prompt tokens found, %"
        written, tier = "written to the pool, % of prompt tokens", "size of the tier / working set"
        for panel, title, xlabel, ylabel in (
            (tiers, "where prompts are found", size, prompts),
            (writes, "writes to the pool's drives", size, written),
            (orders, "one tier alone, by order of eviction", tier, prompts),
        ):
            panel.set_ylim(0, None)
            finish(panel, title, legend=True, xlabel=xlabel, ylabel=ylabel)
        tiers.legend(loc="upper left", bbox_to_anchor=(0, 0.93))
        orders.set_xscale("log")
        sizes = sorted({round(_share(one.pool_tokens, conditions), 3) for one in alone})
        orders.set_xticks(sizes, [f"{one:.2g}" for one in sizes])
        orders.minorticks_off()


def _styles(samples: Sequence[Sample]) -> dict[str, Style]:
    """By policy, in the order of `_STYLES`, then the user's own policies."""
    there = distinct(samples, "policy")
    own = [name for name in there if name not in _STYLES]
    known = {name: style for name, style in _STYLES.items() if name in there}
    return known | {name: Style(_OWN[i % len(_OWN)], label=name) for i, name in enumerate(own)}


def _by_tier(
    panel: Any, samples: Sequence[Sample], conditions: Conditions, styles: Mapping[str, Style]
) -> None:
    names = [name for name in styles if select(samples, policy=name)]
    areas = _DEFAULT if _DEFAULT in names else names[0]
    ours = select(samples, policy=areas)
    panel.stackplot(
        [_share(one.pool_tokens, conditions) for one in ours],
        [[100 * getattr(one, name) / one.prompt_tokens for one in ours] for name, _, _ in _TIERS],
        colors=[colour for _, colour, _ in _TIERS],
        labels=[label for _, _, label in _TIERS],
        alpha=0.75,
    )
    for index, policy in enumerate(name for name in names if name != areas):
        some = select(samples, policy=policy)
        panel.plot(
            [_share(one.pool_tokens, conditions) for one in some],
            [one.hit_per_cent for one in some],
            ("--", ":", "-.")[index % 3],
            color=plots.BLACK,
            label=f"all tiers, {styles[policy].label}",
        )
    reusable = 100 * conditions["reusable"]
    panel.axhline(reusable, color=plots.BLACK, linewidth=1, linestyle=":")
    place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    panel.annotate("all that comes again", (1, reusable), (-4, 4), ha="right", **place)


BENCHES = (Benchmark("simulate", Sample, _lines, _tables, _plot, columns=180),)
