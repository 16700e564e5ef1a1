# SPDX-License-Identifier: Apache-2.0
"""One engine's metrics, and its log lines about the start and failures. Pure.

Counters are exported as increases, and gauges when they change, because most steps change only a
few. All gauges are also exported periodically, because each of several API servers receives only
the steps of its own requests.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm_nvmeof_offload import __version__, logger
from vllm_nvmeof_offload.errors import OutcomeKind
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore
from vllm_nvmeof_offload.manager.handshake import Capacity
from vllm_nvmeof_offload.manager.requests import Suspension
from vllm_nvmeof_offload.metrics import CONFIG_LABELS, GAUGES, Counts, Series, first_counts
from vllm_nvmeof_offload.protocol import LevelReport, RankHello
from vllm_nvmeof_offload.units import format_bytes

#: Metric labels, by the start of the fallback's line, where the two differ.
_PARTS = {"io_uring registered": "registration"}
_QUEUES = ("stream_slot", "read", "prefetch", "write")


class MetricsCollector:
    """A reader of one core's counters and gauges. `config` maps `CONFIG_LABELS` to their values."""

    def __init__(
        self,
        core: ManagerCore,
        suspension: Suspension,
        hellos: Sequence[RankHello],
        config: Mapping[str, str],
    ) -> None:
        self._core = core
        self._suspension = suspension
        self._zeros = self._uncounted = first_counts(len(core.capacity.pool_slots))
        self._counted = Counts()  # at the last `take_increases`
        self._shown: dict[Series, float] = {}  # at the last `take_gauges`
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
        gauges["slots", "stream"] = sum(hello.stream_slots for hello in hellos)
        gauges["slot_bytes"] = core.capacity.slot_bytes
        gauges["slot_fill"] = core.capacity.slot_fill
        slots, sets = core.capacity.cache_slots, core.capacity.set_sizes
        gauges["capacity_tokens", "cpu"] = core.config.tokens_in(slots, sets)

    def take_increases(self) -> dict[Series, float]:
        """Return the counters' increases since the last call, or every series at the first call."""
        counts, before = self._core.counters, self._counted
        increases, self._zeros = self._zeros, {}
        for series, count in counts.items():
            if count != before[series]:
                increases[series] = count - before[series]
        self._counted = Counts(counts)
        return increases

    def take_gauges(self, *, unchanged_too: bool = False) -> dict[Series, float]:
        """Return the gauges that changed since the last call, or all gauges."""
        before, self._shown = self._shown, self._gauges()
        if unchanged_too:
            return self._shown
        return {s: value for s, value in self._shown.items() if before.get(s) != value}

    def snapshot(self) -> tuple[Mapping[Series, float], Mapping[Series, float]]:
        """Return the latest snapshot of all counters and gauges. Thread-safe: its mappings never
        change."""
        return self._uncounted | self._counted, self._shown

    def _gauges(self) -> dict[Series, float]:
        core = self._core
        gauges: dict[Series, float] = {
            series: value
            for series, value in core.gauges().items()
            if (series if isinstance(series, str) else series[0]) in GAUGES
        }
        slots, sets = int(gauges["slots", "pool"]), core.capacity.set_sizes
        gauges["capacity_tokens", "pool"] = core.config.tokens_in(slots, sets)
        targets = core.targets
        for target, verdict in enumerate(targets.worst_verdicts()):
            gauges["target_verdict", str(target)] = verdict
            gauges["target_bytes_per_second", str(target), "load"] = targets.read_rates[target]
            gauges["target_bytes_per_second", str(target), "store"] = targets.write_rates[target]
        levels = core.levels.values()
        gauges["stores_suspended"] = len(self._suspension.requests)
        gauges["slots_used", "stream"] = sum(one.stream_slots_used for one in levels)
        for queue in _QUEUES:
            waiting = sum(getattr(one, f"{queue}_waiting") for one in levels)
            gauges["queued_operations", queue] = waiting
        gauges.update(_read_queues(levels, len(targets.read_rates)))
        gauges["operations_in_flight", "load"] = sum(one.reads_in_flight for one in levels)
        gauges["operations_in_flight", "store"] = sum(one.writes_in_flight for one in levels)
        gauges.update(self._constant)
        return gauges


def _read_queues(levels: Iterable[LevelReport], targets: int) -> Counts:
    """Return the longest wait in any rank's read queue, by lane: targets first, then peers."""
    gauges = Counts({("read_queue_seconds", str(number)): 0 for number in range(targets)})
    for level in levels:
        for number, seconds in enumerate(level.read_waits_s):
            lane = str(number) if number < targets else f"peer{number - targets}"
            series = "read_queue_seconds", lane
            gauges[series] = max(gauges[series], seconds)
    return gauges


def config_labels(hellos: Sequence[RankHello], policies: CoreConfig) -> dict[str, str]:
    """Return rank 0's values of `CONFIG_LABELS`; the start line lists those of other ranks."""
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


_UNUSED_MAX = 0.25  # the start line warns if a larger share of the slots' bytes is unused


def start_line(
    hellos: Sequence[RankHello], core: ManagerCore, alone: str | None = None, group: str = ""
) -> str:
    """Return one log line for all ranks. Values that differ are listed by rank. `alone` is the
    reason why other servers' chunks are not loaded: empty if they are loaded, None if sharing is
    off. `group` names the servers whose chunks are loaded; empty for all servers on this host."""
    first, ranks, capacity = hellos[0], len(hellos), core.capacity
    config, adopted = core.config, int(core.counters["adoption_chunks", "adopted"])
    size = capacity.slot_bytes
    pinned = sum((hello.cache_slots + hello.stream_slots) * hello.slot_bytes for hello in hellos)
    replica = f"replica {first.replica}: " if first.replica is not None else ""
    tier = (
        f"{replica}CPU tier of {_tokens(config, capacity, capacity.cache_slots)} "
        f"({capacity.cache_slots} cache slots of {format_bytes(size)}) and {first.stream_slots} "
        f"stream slots in {format_bytes(pinned)} of pinned memory on "
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
    )
    parts = [
        tier,
        _pool(first, capacity, config, ranks),
        *_groups(config, capacity),
        f"engine {_by_rank(hellos, 'io_engine')}",
        *([f"checksums read {_by_rank(hellos, 'checksums')}"] if first.checksums else ()),
        f"copies by {_by_rank(hellos, 'copy_engine')}",
        f"evicts by {config.eviction_policy}",
        _adopted(config, adopted),
        f"keyspace {first.keyspace}",
    ]
    lines = {line: None for hello in hellos for line in hello.fallbacks}
    parts += [f"FALLBACK {line}" for line in lines]
    reasons = {reason: None for hello in hellos for reason in hello.volatile}
    if reasons:
        parts.append(f"NOTHING IS ADOPTED: {'; '.join(reasons)}")
    if first.lease_name:
        parts.append(f"holds the lease on its pool as {_by_rank(hellos, 'lease_name')}")
    if alone is not None:
        of = f"group {group}" if group else "this host"
        loads = f"loads chunks stored by other servers of {of}"
        parts.append(f"SHARES NOTHING: {alone}" if alone else loads)
    return "; ".join(parts)


def _tokens(config: CoreConfig, capacity: Capacity, slots: int) -> str:
    at_most = "at most " if config.boundary_slots else ""
    return f"{at_most}{config.tokens_in(slots, capacity.set_sizes):,} tokens"


def _groups(config: CoreConfig, capacity: Capacity) -> Iterable[str]:
    if max(capacity.set_sizes) > 1:
        ranks = ", ".join(map(str, capacity.set_sizes))
        yield f"one copy of KV that is equal on {ranks} ranks"
    if config.full_attention_only:
        return
    sizes = ", ".join(map(format_bytes, capacity.group_bytes))
    kinds = ", ".join(group.kind.name.lower() for group in config.groups)
    count = len(config.groups)
    yield f"{count} KV cache {'group' if count == 1 else 'groups'} ({kinds}) with chunks of {sizes}"
    if config.boundary_slots:
        yield f"each boundary's windows and states take {config.boundary_slots} slots"
    unused = 1 - capacity.slot_fill
    if unused > _UNUSED_MAX:
        yield f"WARNING {unused:.0%} of the slots' bytes are unused: groups' chunks differ in size"


def _adopted(config: CoreConfig, chunks: int) -> str:
    tokens = f" ({config.tokens_in(chunks):,} tokens)" if config.full_attention_only else ""
    return f"{chunks} chunks adopted{tokens}"


def _pool(first: RankHello, capacity: Capacity, config: CoreConfig, ranks: int) -> str:
    slots = capacity.pool_slots_total
    if not slots:
        return "no pool: chunks evicted from the CPU tier are lost"
    size = format_bytes(slots * capacity.slot_bytes * ranks)
    return (
        f"pool of {_tokens(config, capacity, slots)} ({slots} slots, "
        f"{size} over all ranks) in engine-{first.engine_index} on {', '.join(first.targets)}"
    )


def _by_rank(hellos: Sequence[RankHello], name: str) -> str:
    """Return a field of the hellos: one value if all are equal, else one value per rank."""
    values: dict[int, str] = {hello.rank: getattr(hello, name) for hello in hellos}
    if len(set(values.values())) == 1:
        return values[hellos[0].rank]
    return ", ".join(f"{value} on rank {rank}" for rank, value in values.items())


PERIOD_S = 60.0

#: By operation: the failure, and its consequence.
_FAILED = {
    "store": ("copied from the GPU", "they are not offloaded"),
    "load": ("loaded", "their tokens are recomputed"),
    "fetch": ("fetched ahead of need", "a request that needs them recomputes them"),
    "write": ("written", "they stay only in the CPU tier"),
    "reset": ("invalidated on disk", "a later start will not find what this server stores"),
}


class FailureLog:
    """A log of failed operations: the first of a kind is logged at once, later ones at most once
    per minute. A kind is an operation, an outcome and a target. Each line counts the chunks that
    failed since the last line of its kind. `targets` are directories. Cancelled operations are not
    logged."""

    def __init__(
        self, core: ManagerCore, targets: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._clock = core, clock
        self._targets = {str(number): path for number, path in enumerate(targets)}
        self._logged = Counts()
        self._logged_s: dict[Series, float] = {}
        self._unequal = 0  # the number of unequal groups that were logged
        self._has_lost = False  # whether the loss of unwritten chunks was logged

    def log_new(self) -> None:
        """Log new failures that are due. Call after the reports of every step."""
        for group in self._core.unequal_groups[self._unequal :]:
            logger.warning(
                "ranks that should hold equal KV stored different bytes of KV cache group %d: "
                "both tiers were emptied, and each rank now stores its own copies; "
                "please report this model and its parallel configuration, and leave out one_copy",
                self._core.config.groups[group].group_id,
            )
        self._unequal = len(self._core.unequal_groups)
        lost = int(self._core.counters["unwritten_chunks", "evicted"])
        if lost and not self._has_lost:
            self._has_lost = True
            logger.warning(
                "chunks are evicted from the CPU tier before they are written (%d so far), and "
                "later chunks of their prefixes are not found: no target takes writes, or the CPU "
                "tier is too small for running requests' windows and states; for later counts, see "
                'vllm:nvmeof_unwritten_chunks{reason="evicted"}',
                lost,
            )
        for kind, outcome in self._core.last_failures.items():
            new = self._core.counters[kind] - self._logged[kind]
            if not new or outcome.kind is OutcomeKind.CANCELLED:
                continue
            now_s = self._clock()
            if now_s - self._logged_s.get(kind, float("-inf")) < PERIOD_S:
                continue
            self._logged_s[kind] = now_s
            self._logged[kind] += new
            operation, target = kind[1], kind[3]
            place = "" if target == "none" else f" on target {self._targets.get(target, target)}"
            what = "1 chunk" if new == 1 else f"{new} chunks"
            failed, consequence = _FAILED[operation]
            logger.warning(
                "%s could not be %s%s: %s; %s", what, failed, place, outcome, consequence
            )
