# SPDX-License-Identifier: Apache-2.0
"""The figures behind `/metrics`: what was counted, and how things stand. Pure.

`metrics.py` says what each means. Counters are told as increases, and once as nothing, so that
every series is there before its first event: who watches for an increase would miss that one
otherwise. Gauges are told when they have changed, for most steps change few, and now and then all:
of several API servers each hears of the steps of its own requests alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.manager.resumes import Resume
from vllm_nvmeof_offload.manager.waiting import Attempt
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, COUNTERS
from vllm_nvmeof_offload.protocol import RankHello

__all__ = ["Figures", "Told"]

Series = tuple[str, tuple[str, ...]]

#: The core's counter → our metric and its label values.
_CORE_COUNTERS: dict[str, Series] = {
    "stored": ("stored_chunks", ()),
    "store_refused": ("refused_stores", ()),
    "below_threshold": ("below_threshold_chunks", ()),
    "write_refused": ("refused_writes", ()),
    "written": ("written_chunks", ()),
    "evicted_cpu": ("evictions", ("cpu",)),
    "evicted_pool": ("evictions", ("pool",)),
    "adopted": ("adopted_chunks", ()),
    "unadopted": ("unadopted_chunks", ()),
    "resets": ("resets", ()),
    "pool_slots_retired": ("retired_pool_slots", ()),
    "verdict_changes": ("verdict_changes", ()),
    "loads_cut": ("loads_cut", ()),
}

#: Our gauge and its label values → the core's figure.
_GAUGE_SOURCES: dict[Series, str] = {
    ("entries", ()): "entries",
    ("cache_slots", ()): "cache_slots",
    ("cache_slots_used", ()): "cache_slots_taken",
    ("held_cache_slots", ("reload",)): "held_reload",
    ("held_cache_slots", ("queue",)): "held_queue",
    ("pool_slots", ()): "pool_slots",
    ("pool_slots_used", ()): "pool_slots_taken",
    ("writes_pending", ()): "writes_pending",
    ("write_backlog", ()): "write_backlog",
    ("suspect_targets", ()): "suspect_targets",
    ("requests_waiting", ()): "requests_waiting",
    ("stores_suspended", ()): "stores_suspended",
    ("prefill_tokens_per_second", ()): "prefill_tokens_per_s",
    ("pool_read_bytes_per_second", ()): "read_bytes_per_s",
    ("load_overhead_seconds", ()): "load_overhead_s",
}

#: What a fallback's line begins with → the part that is slower for it.
_PARTS = {"io_uring registered": "registration"}
_MICROSECONDS = "transfer_us"


@dataclass(frozen=True, slots=True)
class Told:
    """By metric and label values: increases, and what has another value than before."""

    counters: Mapping[Series, float]
    gauges: Mapping[Series, float]


class Figures:
    """Of one engine. `add` counts what the core does not."""

    def __init__(self, core: ManagerCore, tokens_per_chunk: int) -> None:
        self._core = core
        self._tokens_per_chunk = tokens_per_chunk
        self._counts: defaultdict[Series, float] = defaultdict(float)
        self._core_seen: Counter[str] = Counter()
        self._gauges_told: dict[Series, float] = {}
        self._fixed: dict[Series, float] = {}

    def attach(self, hellos: Sequence[RankHello], config: Mapping[str, str]) -> None:
        """Learn what does not change any more. config: the values of `CONFIG_LABELS`."""
        capacity = self._core.capacity
        fixed, first = self._fixed, hellos[0]
        fixed["config_info", tuple(config[name] for name in CONFIG_LABELS)] = 1
        for target, path in enumerate(first.targets):
            fixed["target_info", (str(target), path)] = 1
        for part in ("io_uring", "registration", "o_direct", "copies"):
            fixed["fallbacks", (part,)] = 0
        for hello in hellos:
            for line in hello.fallbacks:
                head = re.split("[→:]", line, maxsplit=1)[0]
                part = _PARTS.get(head, head)
                fixed["fallbacks", (part,)] = fixed.get(("fallbacks", (part,)), 0) + 1
        fixed["adoption_seconds", ()] = max(hello.adoption_s for hello in hellos)
        fixed["stream_slots", ()] = sum(hello.stream_slots for hello in hellos)
        fixed["slot_bytes", ()] = capacity.slot_bytes
        fixed["capacity_tokens", ("cpu",)] = capacity.cache_slots * self._tokens_per_chunk
        for name, metric in COUNTERS.items():
            for labels in metric.series(capacity.target_count):
                self._counts[name, labels] += 0
        self._fail_nothing("none", ("store", "load"))
        for target in range(capacity.target_count):
            self._fail_nothing(str(target), ("load", "write", "fetch"))

    def _fail_nothing(self, target: str, operations: Sequence[str]) -> None:
        for outcome in COUNTERS["failed_chunks"].labels[1].values:
            for operation in operations:
                self._counts["failed_chunks", (operation, outcome, target)] += 0

    def add(self, name: str, amount: float, *labels: str) -> None:
        if amount:
            self._counts[name, labels] += amount

    def count_resume(self, resume: Resume) -> None:
        """A preempted request was resumed."""
        self.add("reloaded_tokens", resume.reloaded)
        self.add("recomputed_tokens", resume.recomputed)
        self.add("resumed_chunk_tokens", resume.chunk_tokens)
        self.add("resumed_chunk_tokens_lost", resume.chunk_tokens_lost)

    def count_attempt(self, attempt: Attempt) -> None:
        """vLLM went on with what was decided on a hit."""
        self.add("admissions", 1, attempt.decision)
        self.add("declined_tokens", attempt.declined)

    def add_from_workers(self, counters: Mapping[str, int]) -> None:
        """What the ranks have counted, summed: `metric:label value:…`; time in microseconds."""
        for key, count in counters.items():
            name, *labels = key.split(":")
            if name == _MICROSECONDS:
                self.add("transfer_seconds", count / 1e6, *labels)
            elif name == "written_bytes":
                self.add("written_bytes", count)
                self.add("target_written_bytes", count, *labels)
            elif name in COUNTERS:
                self.add(name, count, *labels)

    @property
    def waiting(self) -> bool:
        """Something was counted that was not told."""
        return bool(self._counts)

    def take(self, *, all_gauges: bool = False) -> Told:
        """Everything since the last call. all_gauges: also those that stand as they did."""
        self._count_core()
        counters = dict(self._counts)
        self._counts.clear()
        now = self._gauges()
        told = self._gauges_told
        gauges = {s: value for s, value in now.items() if all_gauges or told.get(s) != value}
        self._gauges_told = now
        return Told(counters, gauges)

    def _count_core(self) -> None:
        for name, count in self._core.counters.items():
            increase = count - self._core_seen[name]
            if not increase:
                continue
            if name in _CORE_COUNTERS:
                self._counts[_CORE_COUNTERS[name]] += increase
            elif name == "failed_load_chunks":
                self.add("failed_load_tokens", increase * self._tokens_per_chunk)
            elif ":" in name:
                metric, *labels = name.split(":")
                self.add(metric, increase, *labels)
        self._core_seen = Counter(self._core.counters)

    def _gauges(self) -> dict[Series, float]:
        core = self._core
        figures = {**core.gauges(), **core.learned()}
        gauges = {series: figures[source] for series, source in _GAUGE_SOURCES.items()}
        gauges["capacity_tokens", ("pool",)] = figures["pool_slots"] * self._tokens_per_chunk
        by_target: tuple[tuple[str, Sequence[float]], ...] = (
            ("target_verdict", core.targets.worst_verdicts()),
            ("target_read_bytes_per_second", core.targets.read_rates),
            ("target_write_bytes_per_second", core.targets.write_rates),
        )
        for name, values in by_target:
            for target, value in enumerate(values):
                gauges[name, (str(target),)] = value
        levels = core.levels.values()
        gauges["stream_slots_used", ()] = sum(one.stream_slots_used for one in levels)
        for queue in ("stream_slot", "read", "prefetch", "write"):
            waiting = sum(getattr(one, f"{queue}_waiting") for one in levels)
            gauges["queued_operations", (queue,)] = waiting
        gauges["operations_in_flight", ("load",)] = sum(one.reads_in_flight for one in levels)
        gauges["operations_in_flight", ("store",)] = sum(one.writes_in_flight for one in levels)
        gauges.update(self._fixed)
        return gauges
