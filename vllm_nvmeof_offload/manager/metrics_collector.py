# SPDX-License-Identifier: Apache-2.0
"""Collects the metrics of one engine. Pure.

Counters are exported as increases and gauges when they change, because most steps change few. Now
and then all gauges are exported: each of several API servers receives only the steps of its own
requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from vllm_nvmeof_offload import __version__
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.requests import Suspension
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, GAUGES, Counts, Series, first_counts
from vllm_nvmeof_offload.protocol import LevelReport, RankHello

#: What a fallback's line begins with → the part that runs slower, where the two differ.
_PARTS = {"io_uring registered": "registration"}
_QUEUES = ("stream_slot", "read", "prefetch", "write")


class MetricsCollector:
    """Reads one core's counters and gauges. config: the values of `CONFIG_LABELS`."""

    def __init__(
        self,
        core: ManagerCore,
        suspension: Suspension,
        hellos: Sequence[RankHello],
        config: Mapping[str, str],
    ) -> None:
        self._core = core
        self._suspension = suspension
        self._zeros = first_counts(len(core.capacity.pool_slots))
        self._counted = Counts()  # as of the last `take_increases`
        self._shown: dict[Series, float] = {}  # as of the last `take_gauges`
        self._constant = gauges = Counts()
        gauges["config_info", *(config[name] for name in CONFIG_LABELS)] = 1
        for target, path in enumerate(hellos[0].targets):
            gauges["target_info", str(target), path] = 1
        for part in GAUGES["fallbacks"].labels[0].values:
            gauges["fallbacks", part] = 0
        for line in (line for hello in hellos for line in hello.fallbacks):
            head = re.split("[→:]", line, maxsplit=1)[0]
            gauges["fallbacks", _PARTS.get(head, head)] += 1
        gauges["adoption_seconds"] = max(hello.adoption_s for hello in hellos)
        gauges["stream_slots"] = sum(hello.stream_slots for hello in hellos)
        gauges["slot_bytes"] = core.capacity.slot_bytes
        gauges["slot_fill"] = core.capacity.slot_fill
        slots, sets = core.capacity.cache_slots, core.capacity.set_sizes
        gauges["capacity_tokens", "cpu"] = core.config.tokens_in(slots, sets)

    def take_increases(self) -> dict[Series, float]:
        """Counters' increases since the last call; the first has every series, if only as 0."""
        counts, before = self._core.counters, self._counted
        increases, self._zeros = self._zeros, {}
        for series, count in counts.items():
            if count != before[series]:
                increases[series] = count - before[series]
        self._counted = Counts(counts)
        return increases

    def take_gauges(self, *, unchanged_too: bool = False) -> dict[Series, float]:
        """Gauges that have changed since the last call, or all of them."""
        before, self._shown = self._shown, self._gauges()
        if unchanged_too:
            return self._shown
        return {s: value for s, value in self._shown.items() if before.get(s) != value}

    def _gauges(self) -> dict[Series, float]:
        core = self._core
        gauges: dict[Series, float] = {
            series: value
            for series, value in core.gauges().items()
            if (series if isinstance(series, str) else series[0]) in GAUGES
        }
        slots, sets = int(gauges["pool_slots"]), core.capacity.set_sizes
        gauges["capacity_tokens", "pool"] = core.config.tokens_in(slots, sets)
        for target, verdict in enumerate(core.targets.worst_verdicts()):
            gauges["target_verdict", str(target)] = verdict
            gauges["target_read_bytes_per_second", str(target)] = core.targets.read_rates[target]
            gauges["target_write_bytes_per_second", str(target)] = core.targets.write_rates[target]
        levels = core.levels.values()
        gauges["stores_suspended"] = len(self._suspension.requests)
        gauges["stream_slots_used"] = sum(one.stream_slots_used for one in levels)
        for queue in _QUEUES:
            waiting = sum(getattr(one, f"{queue}_waiting") for one in levels)
            gauges["queued_operations", queue] = waiting
        gauges.update(_read_queues(levels, len(core.targets.read_rates)))
        gauges["operations_in_flight", "load"] = sum(one.reads_in_flight for one in levels)
        gauges["operations_in_flight", "store"] = sum(one.writes_in_flight for one in levels)
        gauges.update(self._constant)
        return gauges


def _read_queues(levels: Iterable[LevelReport], targets: int) -> Counts:
    """By lane, of all ranks: the targets by their numbers, and then the peers."""
    gauges = Counts()
    for number in range(targets):
        gauges["read_queue_bytes", str(number)] = gauges["read_queue_seconds", str(number)] = 0
    for level in levels:
        for number, (size, seconds) in enumerate(level.read_queues):
            lane = str(number) if number < targets else f"peer{number - targets}"
            gauges["read_queue_bytes", lane] += size
            slowest = max(gauges["read_queue_seconds", lane], seconds)
            gauges["read_queue_seconds", lane] = slowest
    return gauges


def config_labels(hellos: Sequence[RankHello], policies: CoreConfig) -> dict[str, str]:
    """The values of `CONFIG_LABELS` on rank 0; the start line has what differs on other ranks."""
    first = hellos[0]
    return {
        "version": __version__,
        "io": first.io_engine,
        "copies": first.copy_engine,
        "eviction_policy": policies.eviction_policy,
        "write_policy": policies.write_policy.value,
        "admission": "auto" if policies.admission else "always",
        "keyspace": first.keyspace,
        "engine_index": str(first.engine_index),
        "adopts": "no" if any(hello.volatile for hello in hellos) else "yes",
    }
