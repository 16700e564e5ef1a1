# SPDX-License-Identifier: Apache-2.0
"""The metrics that this package exports through vLLM's `/metrics`: name, kind, unit, labels, HELP.

The code counts under a metric's name, to which `/metrics` adds `PREFIX` and, for a counter,
`_total`. vLLM drops a metric that is not declared here, or fails because of it.
tools/metrics_doc.py generates docs/metrics.md from this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from vllm_nvmeof_offload.errors import OutcomeKind

PREFIX = "vllm:nvmeof_"

#: A metric's name or, if the metric has labels, a tuple of the name and the labels' values.
Series = str | tuple[str, ...]


class Counts(dict[Series, float]):
    """Amounts by series; 0 for a series that was never counted."""

    def __missing__(self, series: Series) -> float:
        return 0

    def add(self, others: Mapping[Series, float]) -> None:
        for series, amount in others.items():
            self[series] += amount


@dataclass(frozen=True, slots=True)
class Label:
    """A label. `values` is empty if its values depend on the deployment, as `source` describes."""

    name: str
    values: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or gauge. `name` includes `PREFIX`, but not a counter's `_total`."""

    name: str
    kind: str
    unit: str
    labels: tuple[Label, ...]
    help: str


#: A target's number is its position in the list of targets, from 0.
_TARGET = Label("target", source="number of a configured target")
_LANE = Label("lane", source="number of a configured target, or peer and the peer's number")
_DIRECTION = Label("direction", ("store", "load"))
_TRANSFER = (_DIRECTION, Label("stage", ("gpu", "pool")))
_SLOTS = Label("kind", ("cache", "stream", "pool"))
_TIERS = ("cpu", "pool")
_OUTCOMES = tuple(kind.value for kind in OutcomeKind if kind is not OutcomeKind.OK)

#: The labels of `config_info`, whose values are constant while a server runs.
CONFIG_LABELS = (
    *("version", "io", "copies", "eviction_policy", "write_policy", "admission"),
    *("prompts_only", "keyspace", "engine_index", "adopts", "vllm"),
)

_Row = tuple[str, str, tuple[Label, ...], str]


def _row(name: str, unit: str, labels: tuple[Label, ...], text: str) -> _Row:
    return name, unit, labels, text


def _table(kind: str, *rows: _Row) -> dict[str, Metric]:
    return {
        name: Metric(PREFIX + name, kind, unit, labels, text) for name, unit, labels, text in rows
    }


def _one(name: str, *values: str) -> tuple[Label, ...]:
    return (Label(name, values),)


# fmt: off
COUNTERS = _table(
    "counter",
    # -- what requests find
    _row("lookups", "chunks", _one("source", "cpu", "pool", "shared", "miss"),
         "Chunks looked up, by source; shared is another engine's pool. A look-up ends at its "
         "first miss, so the counts give no hit rate in tokens. A look-up that is repeated while "
         "its request waits is counted once."),
    _row("loaded_tokens", "tokens", _one("source", "cpu", "pool", "shared"),
         "Tokens whose load was started, by source; shared is another engine's pool."),
    _row("recomputed_tokens", "tokens", _one("reason", "load_failed", "declined", "no_boundary"),
         "Tokens found in a tier but recomputed, by reason. declined: recomputing was expected to "
         "be faster; no_boundary: chunks of full attention were found past the last loadable "
         "boundary, but not the windows or states from which to resume there."),
    _row("admissions", "hits", _one("decision", "load", "partial", "recompute"),
         "Hits for which vLLM allocated GPU blocks, by the decision on the hit."),
    _row("loads_cut", "loads", (),
         "Loads cancelled because recomputing had become the faster choice."),
    _row("prefill_seconds", "seconds", (Label("result", ("saved", "lost")), Label("tier", _TIERS)),
         "Time that loads saved or lost, by the slowest tier read. A load adds the difference "
         "between the estimated time of computing its tokens and the time that the request "
         "waited. Nothing is counted while the prefill rate is unknown."),
    _row("gpu_seconds", "seconds", (Label("result", ("saved", "lost")), Label("tier", _TIERS)),
         "Time of vllm:nvmeof_prefill_seconds multiplied by the number of ranks: a lower bound, "
         "because GPUs can serve other requests during a load."),
    # -- preempted requests
    _row("resumed_tokens", "tokens", _one("source", "loaded", "recomputed"),
         "Tokens of requests that resumed after a preemption. loaded: from a tier; recomputed: "
         "computed before the preemption, and neither in GPU memory nor found in a tier."),
    _row("resumed_chunk_tokens", "tokens", _one("source", "found", "recomputed"),
         "Tokens in full chunks of resumed requests that had been computed before the preemption "
         "and were no longer in GPU memory: found in a tier, or recomputed."),
    # -- other engines' chunks
    _row("borrowed_chunks", "chunks", (),
         "Chunks that every rank read from another engine's pool."),
    _row("borrow_failures", "chunks", _one("reason", *_OUTCOMES[:-1], "attach"),
         "Chunks of another engine's pool that could not be read, by reason. Such a chunk is "
         "recomputed and stored again. attach counts engines whose files a rank could "
         "not open."),

    # -- reads through peers
    _row("peer_bytes", "bytes", _one("direction", "pulled", "served"),
         "Bytes that peers read for this server (pulled) and that this server read for peers "
         "(served), summed over ranks. Not updated while an engine only serves peers."),
    _row("peer_pulls_failed", "chunks", _one("reason", *_OUTCOMES),
         "Chunks that a peer failed to deliver, by reason, and that this server then read itself. "
         "io_error: also if the peer was lost or has not opened the pool yet."),
    _row("peer_events", "events", _one("event", "session_lost", "rest", "secret_refused"),
         "Events between this server and peers. session_lost: the peer violated the protocol, "
         "stopped answering or was disconnected. rest: this server paused a peer that slowed eight "
         "loads in a row, failed eight reads in a row, or was lost or stalled three times in 10 s. "
         "secret_refused: a connection attempt, repeated every few seconds, failed because a "
         "share secret is missing or differs from the peer's."),
    _row("peer_hints", "helpers", _one("helper", "known", "unknown", "malformed"),
         "Helpers named in the kv_transfer_params of requests. known: listed in peers; unknown: "
         "not listed and not used; malformed: hints that were ignored."),
    # -- ahead of need
    _row("prefetches", "chunks", _one("reason", "reload", "queue", "probe"),
         "Chunks prefetched from the pool into the CPU tier, by reason."),
    _row("prefetches_ended", "chunks",
         _one("how", "used", "wasted", "cancelled", "failed", "probe"),
         "Prefetched chunks, by the outcome of the prefetch."),
    _row("kv_hints", "actions",
         _one("advice", "prefetch", "retain", "drop", "demote", "unknown", "malformed"),
         "Actions in the kv_hints or kv_transfer_params of requests, by advice; kv.fetch counts as "
         "prefetch, and retain_s of 0 as drop. Unknown and malformed actions were ignored."),
    # -- stores, writes, evictions
    _row("stored_chunks", "chunks", (),
         "Chunks scheduled to be stored in the CPU tier."),
    _row("unstored_chunks", "chunks", _one("reason", "no_room", "incomplete", "below_threshold"),
         "Chunks not stored, by reason. no_room: the CPU tier was still full when the request "
         "ended. incomplete (summed over ranks): vLLM passed only some of the blocks. "
         "below_threshold: fewer requests than store_threshold had contained the chunk."),
    _row("written_chunks", "chunks", (),
         "Chunks written to the pool by every rank."),
    _row("unwritten_chunks", "chunks", _one("reason", "evicted", "superseded", "shared"),
         "Chunks stored but not written to the pool, by reason. evicted: the CPU tier evicted "
         "the chunk first, because no target accepts writes or the tier is too small for the "
         "windows and states of running requests. Later chunks of the same prefix are then not "
         "found. superseded: windows and states of a request with a later boundary. shared: "
         "another live engine's pool has the chunk."),
    _row("evictions", "chunks", _one("tier", "cpu", "pool"),
         "Chunks evicted, by tier."),
    # -- bytes and time
    _row("transfer_operations", "operations", _TRANSFER,
         "Finished operations, summed over ranks. Stage gpu counts batches of copies between GPU "
         "and pinned memory; stage pool counts reads and writes of slots."),
    _row("transfer_bytes", "bytes", _TRANSFER,
         "Bytes moved by transfer operations, summed over ranks; a failed operation counts 0."),
    _row("transfer_seconds", "seconds", _TRANSFER,
         "Time from submission to outcome, summed over operations, which may overlap. On a GPU, "
         "stage gpu includes the wait for the running forward pass, so bytes divided by seconds do "
         "not give the link's rate."),
    _row("target_written_bytes", "bytes", (_TARGET,),
         "Bytes written to the pool by target, summed over ranks; writes wear out flash memory."),
    # -- failures
    _row("failed_chunks", "chunks",
         (Label("operation", ("store", "load", "write", "fetch", "reset")),
          Label("outcome", _OUTCOMES),
          Label("target", source=_TARGET.source)),
         "Chunks whose operation failed, by operation, outcome and target; the target is none for "
         "an operation without a target."),
    _row("retired_pool_slots", "slots", (),
         "Pool slots taken out of use after failed reads or writes."),
    _row("verdict_changes", "changes", (),
         "Changes of a target between usable and unusable."),
    _row("resets", "resets", (),
         "Resets that invalidated all chunks stored earlier."),
    # -- start
    _row("adoption_chunks", "chunks", _one("outcome", "adopted", "incomplete"),
         "Chunks of an earlier run found in the pool at start: adopted, or not adopted because "
         "some rank lacks the chunk (incomplete)."),
    # -- cost
    _row("scheduler_seconds", "seconds", (),
         "Time spent in the scheduler side of the connector, including vLLM's own code."),
    _row("scheduler_steps", "steps", (),
         "Engine steps that computed tokens."),
    _row("step_seconds", "seconds", (),
         "Time taken by engine steps that computed tokens."),
    _row("step_tokens", "tokens", (),
         "Tokens computed by engine steps."),
)

GAUGES = _table(
    "gauge",
    # -- room
    _row("entries", "chunks", (), "Chunks in the index, in either tier."),
    _row("slots", "slots", (_SLOTS,),
         "Slots by kind: cache slots of the CPU tier, stream slots of all ranks, and pool slots "
         "that are not retired. Loads from the pool pass through stream slots."),
    _row("slots_used", "slots", (_SLOTS,),
         "Slots in use, by kind. Stream slots are counted at the ranks' last reports; retired pool "
         "slots are not counted."),
    _row("slots_retained", "slots", _one("tier", "cache", "pool"),
         "Slots with chunks that requests asked to retain, by tier, except slots in use."),
    _row("held_cache_slots", "slots", _one("reason", "reload", "queue"),
         "Cache slots held for waiting requests, by reason."),
    _row("slot_bytes", "bytes", (), "Size of one slot on one rank, including its header."),
    _row("slot_fill", "1", (),
         "Average share of a slot that a chunk fills, over the KV cache groups; the largest "
         "group's chunk determines the slot size."),
    _row("capacity_tokens", "tokens", _one("tier", "cpu", "pool"),
         "Tokens that each tier can hold if no windows and states are stored."),
    # -- other engines' chunks
    _row("shared_entries", "chunks", (),
         "Known chunks in other engines' pools, readable by this engine or not."),
    _row("shared_age_seconds", "seconds", (),
         "Time since other engines' tables were last read; 0 if never."),
    # -- queues
    _row("writes_pending", "chunks", _one("state", "waiting", "sent"),
         "Pending writes to the pool. waiting: not yet sent to the ranks; sent: not yet reported "
         "by the ranks."),
    _row("queued_operations", "operations",
         _one("queue", "stream_slot", "read", "prefetch", "write"),
         "Chunks waiting at the ranks' last reports, by queue, summed over ranks: for a stream "
         "slot, a load's read, a prefetch's read, or a write."),
    _row("operations_in_flight", "operations", (_DIRECTION,),
         "Reads (load) and writes (store) submitted to the I/O engine at the ranks' last reports."),
    _row("read_queue_seconds", "seconds", (_LANE,),
         "Estimated wait of a new read on the slowest rank at its last report, by lane; 0 without "
         "a wait or while the rate is unknown."),
    _row("requests_waiting", "requests", (),
         "Preempted and queued requests whose chunks are kept or prefetched."),
    _row("stores_suspended", "requests", (),
         "Running requests whose KV is not stored because weights may have changed after part of "
         "the KV was computed. A request counts until the request ends or starts again."),
    # -- learned
    _row("prefill_tokens_per_second", "tokens/s", (),
         "Learned rate at which the model computes prompts in large steps; 0 if unknown."),
    _row("pool_read_bytes_per_second", "bytes/s", (),
         "Learned rate at which the slowest rank reads the pool; 0 if unknown."),
    _row("load_slowness", "ratio", (),
         "Smoothed ratio of the time that loads from the pool take to the time that the learned "
         "rates predict."),
    _row("target_bytes_per_second", "bytes/s", (_TARGET, _DIRECTION),
         "Learned rate at which the slowest rank reads (load) or writes (store) each target; 0 if "
         "unknown."),
    # -- health
    _row("target_verdict", "verdict", (_TARGET,),
         "Worst verdict of all ranks on a target: 0 ok, 1 degraded, 2 suspect, 3 gone."),
    _row("fallbacks", "parts", _one("part", "io_uring", "registration", "o_direct", "copies"),
         "Parts replaced with a slower alternative at start, summed over ranks. io_uring: threads "
         "instead; registration: unregistered memory; o_direct: the page cache instead; copies: "
         "no batch call or no kernel on the GPU."),
    # -- facts
    _row("adoption_seconds", "seconds", (),
         "Time that the slowest rank took to read its pool at start."),
    _row("target_info", "1", (_TARGET, Label("path", source="directory of a configured target")),
         "Directory of each target, as a label; the value is always 1."),
    _row("config_info", "1",
         tuple(Label(name, source="a fact of this server") for name in CONFIG_LABELS),
         "Configuration of this server, as labels; the value is always 1."),
)
# fmt: on

METRICS = COUNTERS | GAUGES


def exported(series: Series) -> tuple[str, tuple[str, ...]]:
    name, *labels = (series,) if isinstance(series, str) else series
    metric = METRICS[name]
    assert len(labels) == len(metric.labels), f"{series}: the labels differ from the declaration"
    return metric.name, tuple(labels)


def first_counts(target_count: int) -> dict[Series, float]:
    """Return 0 for every series that a server with `target_count` targets can count. Prometheus'
    increase() misses a series' first event unless the series started at 0."""
    zeros: dict[Series, float] = {}
    targets = tuple(map(str, range(target_count)))
    for name, metric in COUNTERS.items():
        values = [targets if label is _TARGET else label.values for label in metric.labels]
        for labels in product(*values):
            zeros[(name, *labels) if labels else name] = 0
    for outcome in _OUTCOMES:  # not every operation uses a target
        for operation in ("store", "load", "reset"):
            zeros["failed_chunks", operation, outcome, "none"] = 0
        for operation, target in product(("load", "write", "fetch"), targets):
            zeros["failed_chunks", operation, outcome, target] = 0
    return zeros
