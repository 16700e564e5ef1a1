# SPDX-License-Identifier: Apache-2.0
"""Names and meaning of what this package exports through vLLM's `/metrics`.

Every name that is emitted must be declared here: vLLM drops, or dies of, any other.
docs/METRICS.md is made from this module by `tools/metrics_doc.py`; a test holds them together.

What a metric is, and how a table of them is written.

How things stand: the gauges of `metrics.py`, and what `config_info` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

__all__ = [
    "CONFIG_LABELS",
    "COUNTERS",
    "DIRECTION",
    "GAUGES",
    "NO",
    "PREFIX",
    "TARGET",
    "Label",
    "Metric",
    "metrics",
    "one_of",
]


PREFIX = "vllm:nvmeof_"


@dataclass(frozen=True, slots=True)
class Label:
    """values: all it can have; none given: they come from the deployment, as `of` says."""

    name: str
    values: tuple[str, ...] = ()
    of: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """name: with prefix, a counter's without `_total`. unit: what one of it is."""

    name: str
    unit: str
    help: str
    labels: tuple[Label, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    def series(self, targets: int) -> Sequence[tuple[str, ...]]:
        """Label values of all series, with so many targets; none if they are not known ahead."""
        values = [_TARGETS(targets) if one is TARGET else one.values for one in self.labels]
        return list(product(*values))


def _TARGETS(count: int) -> tuple[str, ...]:  # noqa: N802
    return tuple(map(str, range(count)))


#: A target's number: its place in the list of targets, from 0. `target_info` has its directory.
TARGET = Label("target", of="the configured targets, by number")
DIRECTION = Label("direction", ("store", "load"))


def metrics(*rows: tuple[str, str, str, tuple[Label, ...]]) -> dict[str, Metric]:
    """By name. rows: name without prefix, unit, meaning, labels."""
    return {name: Metric(PREFIX + name, unit, text, labels) for name, unit, text, labels in rows}


def one_of(name: str, *values: str) -> tuple[Label, ...]:
    """One label, which has one of `values`."""
    return (Label(name, values),)


#: No labels.
NO: tuple[Label, ...] = ()


#: What `config_info` says, once a server: each fixed while it runs.
CONFIG_LABELS = (
    "version",
    "io_engine",
    "copy_engine",
    "eviction_policy",
    "write_policy",
    "admission",
    "prompts_only",
    "keyspace",
    "engine_index",
    "adopts",
)

GAUGES = metrics(
    # -- room
    ("entries", "chunks", "Chunks in the index.", NO),
    ("cache_slots", "slots", "Cache slots of the CPU tier.", NO),
    ("cache_slots_used", "slots", "Cache slots taken.", NO),
    (
        "held_cache_slots",
        "slots",
        "Cache slots held for requests to come, by reason.",
        one_of("reason", "reload", "queue"),
    ),
    ("stream_slots", "slots", "Stream slots, through which loads pass; all ranks.", NO),
    ("stream_slots_used", "slots", "Stream slots taken, when the ranks last reported.", NO),
    ("pool_slots", "slots", "Pool slots, without the retired ones.", NO),
    ("pool_slots_used", "slots", "Pool slots taken.", NO),
    ("slot_bytes", "bytes", "Size of a slot on one rank, header included.", NO),
    ("capacity_tokens", "tokens", "Tokens that a tier holds.", one_of("tier", "cpu", "pool")),
    # -- queues
    ("writes_pending", "chunks", "Writes to the pool that were sent and not reported.", NO),
    ("write_backlog", "chunks", "Chunks in the CPU tier that wait for their write.", NO),
    (
        "queued_operations",
        "operations",
        (
            "Chunks that wait in the workers, all ranks, when they last reported: for a stream "
            "slot; for their read, of a load or ahead of need; for their write."
        ),
        one_of("queue", "stream_slot", "read", "prefetch", "write"),
    ),
    (
        "operations_in_flight",
        "operations",
        "Reads (load) and writes (store) with the I/O engine, likewise.",
        (DIRECTION,),
    ),
    (
        "requests_waiting",
        "requests",
        "Requests, preempted or in vLLM's queue, whose chunks are looked after.",
        NO,
    ),
    (
        "stores_suspended",
        "requests",
        (
            "Running requests that are not stored because weights may have changed after a part "
            "of their KV was computed. A request leaves when it ends or starts again."
        ),
        NO,
    ),
    # -- learned
    (
        "prefill_tokens_per_second",
        "tokens/s",
        "Learned: how fast prompts are computed; 0: unknown.",
        NO,
    ),
    ("pool_read_bytes_per_second", "bytes/s", "Learned: of the slowest rank; 0: unknown.", NO),
    (
        "load_overhead_seconds",
        "seconds",
        "Learned: what a load from the pool takes beyond its bytes over the read rate.",
        NO,
    ),
    (
        "target_read_bytes_per_second",
        "bytes/s",
        "Learned: of the slowest rank, by target; 0: unknown.",
        (TARGET,),
    ),
    (
        "target_write_bytes_per_second",
        "bytes/s",
        "Learned: of the slowest rank, by target; 0: unknown.",
        (TARGET,),
    ),
    # -- health
    ("suspect_targets", "targets", "Targets that at least one rank finds suspect or gone.", NO),
    (
        "target_verdict",
        "verdict",
        "The worst rank's: 0 ok, 1 degraded, 2 suspect, 3 gone.",
        (TARGET,),
    ),
    (
        "fallbacks",
        "parts",
        (
            "Parts that run slower than they could, as start-up said, all ranks: threads instead "
            "of io_uring, unregistered memory, the page cache instead of O_DIRECT, GPU copies "
            "without the batch call or the kernel."
        ),
        one_of("part", "io_uring", "registration", "o_direct", "copies"),
    ),
    # -- facts
    ("adoption_seconds", "seconds", "What the slowest rank took to read its pool at start.", NO),
    (
        "target_info",
        "1",
        "Which directory a target is.",
        (TARGET, Label("path", of="the configured targets")),
    ),
    (
        "config_info",
        "1",
        "How this server runs, by its labels.",
        tuple(Label(name, of="this server") for name in CONFIG_LABELS),
    ),
)


_STAGES = (DIRECTION, Label("stage", ("gpu", "pool")))
_OUTCOMES = ("io_error", "checksum_mismatch", "stale", "deadline", "cancelled")

COUNTERS = metrics(
    # -- what requests find
    (
        "lookups",
        "chunks",
        "Chunks looked up, by the tier that had them.",
        one_of("source", "cpu", "pool", "miss"),
    ),
    (
        "loaded_tokens",
        "tokens",
        "Tokens whose KV a load was started for, by source.",
        one_of("source", "cpu", "pool"),
    ),
    ("failed_load_tokens", "tokens", "Those of them that did not come: computed again.", NO),
    ("declined_tokens", "tokens", "Tokens found and not loaded: computing was to be sooner.", NO),
    (
        "admissions",
        "hits",
        "Hits that vLLM went on with, by what was decided on them.",
        one_of("decision", "load", "partial", "recompute"),
    ),
    ("loads_cut", "loads", "Loads cut off: computing would have been sooner by now.", NO),
    # -- preempted requests
    ("preemptions", "requests", "Preemptions seen by the scheduler.", NO),
    ("reloaded_tokens", "tokens", "Tokens of resumed, preempted requests that were loaded.", NO),
    (
        "recomputed_tokens",
        "tokens",
        "Tokens of resumed, preempted requests that had been computed and were not found.",
        NO,
    ),
    (
        "resumed_chunk_tokens",
        "tokens",
        (
            "Tokens of resumed requests in full chunks that had been computed before the "
            "preemption and were not in GPU memory any more."
        ),
        NO,
    ),
    ("resumed_chunk_tokens_lost", "tokens", "Those of them that were computed again.", NO),
    # -- ahead of need
    (
        "prefetches",
        "chunks",
        "Chunks fetched from the pool ahead of need, by reason.",
        one_of("reason", "reload", "queue", "probe"),
    ),
    (
        "prefetches_ended",
        "chunks",
        "What became of them.",
        one_of("how", "used", "wasted", "cancelled", "failed", "probe"),
    ),
    # -- stores, writes, evictions
    ("stored_chunks", "chunks", "Chunks whose store into the CPU tier was planned.", NO),
    ("refused_stores", "chunks", "New chunks that found no room in the CPU tier.", NO),
    ("below_threshold_chunks", "chunks", "New chunks not seen often enough to be stored.", NO),
    ("refused_writes", "chunks", "Chunks dropped from the CPU tier before being written.", NO),
    ("written_chunks", "chunks", "Chunks written to the pool by every rank.", NO),
    ("evictions", "chunks", "Chunks evicted from a tier.", one_of("tier", "cpu", "pool")),
    # -- bytes and time
    (
        "transfer_operations",
        "operations",
        (
            "Operations that ended, all ranks. Stage gpu: batches of copies between GPU and pinned "
            "memory; stage pool: reads and writes of a slot."
        ),
        _STAGES,
    ),
    (
        "transfer_bytes",
        "bytes",
        "Bytes that they moved; failed operations count none.",
        _STAGES,
    ),
    (
        "transfer_seconds",
        "seconds",
        (
            "Time that transfers took, each from its hand-over to its outcome; they overlap. On a "
            "GPU those of stage gpu include the wait for the forward pass that runs at their "
            "hand-over, so bytes divided by seconds are not the link's rate."
        ),
        _STAGES,
    ),
    ("read_bytes", "bytes", "Bytes read from the pool for loads and fetches, all ranks.", NO),
    ("written_bytes", "bytes", "Bytes written to the pool, all ranks: the wear of flash.", NO),
    ("target_written_bytes", "bytes", "As written_bytes, by target.", (TARGET,)),
    # -- what goes wrong
    (
        "failed_chunks",
        "chunks",
        "Chunks whose operation failed; a store touches no target.",
        (
            Label("operation", ("store", "load", "write", "fetch", "reset")),
            Label("outcome", _OUTCOMES),
            Label("target", of="as everywhere, and none"),
        ),
    ),
    ("retired_pool_slots", "slots", "Pool slots given up after failed writes.", NO),
    ("verdict_changes", "changes", "Times that a target's usability changed.", NO),
    ("resets", "resets", "Times that everything stored was declared void.", NO),
    # -- start
    ("adopted_chunks", "chunks", "Chunks taken over from the pool at start.", NO),
    (
        "unadopted_chunks",
        "chunks",
        "Chunks that a rank found in the pool and that are not on every rank.",
        NO,
    ),
    # -- what it costs
    ("scheduler_seconds", "seconds", "In the connector's scheduler side, vLLM's half too.", NO),
    ("scheduler_steps", "steps", "Engine steps that computed tokens.", NO),
    ("step_seconds", "seconds", "What these steps took.", NO),
    ("step_tokens", "tokens", "Tokens that they computed.", NO),
)
