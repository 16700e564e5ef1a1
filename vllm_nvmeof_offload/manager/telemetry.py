# SPDX-License-Identifier: Apache-2.0
"""The figures behind `/metrics`: what was counted, and how things stand. Pure.

`metrics.py` says what each means. Counters are told as increases, and once as nothing, so that
every series is there before its first event: who watches for an increase would miss that one
otherwise. Gauges are told when they have changed, for most steps change few, and now and then all:
of several API servers each hears of the steps of its own requests alone.

What is said at start of how this engine runs: one log line, and the labels of `config_info`.

Failed operations as log lines: the first of a kind at once, then one line a minute at most.

A kind is an operation with an outcome on a target. A line has the number of chunks since the
last one of its kind, so that none is left out.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.errors import Outcome, OutcomeKind
from vllm_nvmeof_offload.manager.adoption import Capacity
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.requests import Attempt, Resume
from vllm_nvmeof_offload.manager.suspension import Suspension
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, COUNTERS
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.protocol import RankHello
from vllm_nvmeof_offload.units import format_bytes

__all__ = [
    "PERIOD_S",
    "Complaints",
    "Figures",
    "Told",
    "config_of",
    "start_line",
]


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

    def __init__(
        self,
        core: ManagerCore,
        suspension: Suspension,
        hellos: Sequence[RankHello],
        config: Mapping[str, str],
    ) -> None:
        """config: the values of `CONFIG_LABELS`."""
        self._core = core
        self._suspension = suspension
        self._tokens_per_chunk = core.config.tokens_per_chunk
        self._counts: defaultdict[Series, float] = defaultdict(float)
        self._core_seen: Counter[str] = Counter()
        self._gauges_told: dict[Series, float] = {}
        self._fixed: dict[Series, float] = {}

        self._begin(hellos, config)

    def _begin(self, hellos: Sequence[RankHello], config: Mapping[str, str]) -> None:
        """Set the gauges that never change, and begin every series at 0."""
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
        figures["stores_suspended"] = len(self._suspension)
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


def start_line(hellos: Sequence[RankHello], core: ManagerCore) -> str:
    """Of all ranks together; what differs between them is named with its ranks."""
    first, ranks, capacity = hellos[0], len(hellos), core.capacity
    adopted, tokens_per_chunk = core.counters["adopted"], core.config.tokens_per_chunk
    size = capacity.slot_bytes
    pinned = sum((hello.cache_slots + hello.stream_slots) * hello.slot_bytes for hello in hellos)
    replica = f"replica {first.replica}: " if first.replica is not None else ""
    tier = (
        f"{replica}CPU tier of {capacity.cache_slots * tokens_per_chunk:,} tokens "
        f"({capacity.cache_slots} cache slots of {format_bytes(size)}) and {first.stream_slots} "
        f"stream slots in {format_bytes(pinned)} of pinned memory on {_ranks(ranks)}"
    )
    parts = [
        tier,
        _pool(first, capacity, tokens_per_chunk, ranks),
        f"engine {_each(hellos, [hello.io_engine for hello in hellos])}",
        f"copies by {_each(hellos, [hello.copy_engine for hello in hellos])}",
        f"evicts by {core.config.eviction_policy}",
        f"{adopted} chunks adopted ({adopted * tokens_per_chunk:,} tokens)",
        f"keyspace {first.keyspace}",
    ]
    lines = {line: None for hello in hellos for line in hello.fallbacks}
    parts += [f"FALLBACK {line}" for line in lines]
    reasons = {reason: None for hello in hellos for reason in hello.volatile}
    if reasons:
        parts.append(f"NOTHING IS ADOPTED: {'; '.join(reasons)}")
    return "; ".join(parts)


def config_of(hellos: Sequence[RankHello], policies: CoreConfig) -> dict[str, str]:
    """As on rank 0; the others run alike, or the start line says what differs."""
    first = hellos[0]
    return {
        "version": __version__,
        "io_engine": first.io_engine,
        "copy_engine": first.copy_engine,
        "eviction_policy": policies.eviction_policy,
        "write_policy": policies.write_policy.value,
        "admission": "auto" if policies.admission.automatic else "always",
        "keyspace": first.keyspace,
        "engine_index": str(first.engine_index),
        "adopts": "no" if any(hello.volatile for hello in hellos) else "yes",
    }


def _pool(first: RankHello, capacity: Capacity, tokens_per_chunk: int, ranks: int) -> str:
    if not capacity.pool_slots:
        return "no pool: what leaves the CPU tier is gone"
    size = format_bytes(capacity.pool_slots * capacity.slot_bytes * ranks)
    return (
        f"pool of {capacity.pool_slots * tokens_per_chunk:,} tokens ({capacity.pool_slots} slots, "
        f"{size} over all ranks) in engine-{first.engine_index} on {', '.join(first.targets)}"
    )


def _each(hellos: Sequence[RankHello], values: Sequence[str]) -> str:
    """What all ranks have in common, or what each has."""
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(
        f"{value} on rank {hello.rank}" for hello, value in zip(hellos, values, strict=True)
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


logger = logging.getLogger(LOGGER_NAME)

PERIOD_S = 60.0

#: Operation → what could not be done, and what follows from that.
_SAID = {
    "store": ("copied from the GPU", "they are not offloaded"),
    "load": ("loaded", "their tokens are computed again"),
    "fetch": ("fetched ahead of need", "who needs them computes them again"),
    "write": ("written", "they stay in the CPU tier alone"),
    "reset": ("voided on disk", "what this server stores is not found by another start"),
}


class Complaints:
    """`look` after every step's reports; says nothing of what was cancelled."""

    def __init__(
        self,
        core: ManagerCore,
        targets: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """targets: their directories."""
        self._core = core
        self._clock = clock
        self._targets = targets
        self._seen: Counter[str] = Counter()
        self._said_s: dict[str, float] = {}

    def look(self) -> None:
        """Say what is new, and due."""
        for name, outcome in self._core.last_failures.items():
            new = self._core.counters[name] - self._seen[name]
            if not new or outcome.kind is OutcomeKind.CANCELLED:
                continue
            now_s = self._clock()
            if now_s - self._said_s.get(name, float("-inf")) < PERIOD_S:
                continue
            self._said_s[name] = now_s
            self._seen[name] += new
            self._say(name, new, outcome)

    def _say(self, name: str, chunks: int, outcome: Outcome) -> None:
        _, operation, _, target = name.split(":")
        number = int(target) if target.isdigit() else None
        place = ""
        if number is not None:
            known = number < len(self._targets)
            place = f" on target {self._targets[number] if known else number}"
        what = "1 chunk" if chunks == 1 else f"{chunks} chunks"
        done, follows = _SAID[operation]
        logger.warning("%s could not be %s%s: %s; %s", what, done, place, outcome, follows)
