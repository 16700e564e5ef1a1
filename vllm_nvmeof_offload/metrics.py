# SPDX-License-Identifier: Apache-2.0
"""Every metric that this package exports through vLLM's `/metrics`: name, kind, unit, labels, HELP.

A metric has one name: the code counts under this name, and `/metrics` adds `PREFIX` to it (and
`_total` to a counter's). vLLM drops a metric that is not declared here, or fails because of it.
tools/metrics_doc.py generates docs/metrics.md from this module; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

PREFIX = "vllm:nvmeof_"

#: A series of a metric: the metric's name or, if it has labels, the name and the labels' values.
Series = str | tuple[str, ...]


class Counts(dict[Series, float]):
    """Amounts by series; reading a series that was never counted gives 0."""

    def __missing__(self, series: Series) -> float:
        return 0

    def add(self, others: Mapping[Series, float]) -> None:
        for series, amount in others.items():
            self[series] += amount


@dataclass(frozen=True, slots=True)
class Label:
    """A label. `values` is empty if the values depend on the deployment, as `source` describes."""

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


#: A target's number, which is its position in the list of targets, from 0.
_TARGET = Label("target", source="number of a configured target")
_LANE = Label("lane", source="number of a configured target, or peer and the number of one")
_DIRECTION = Label("direction", ("store", "load"))
_TRANSFER = (_DIRECTION, Label("stage", ("gpu", "pool")))
_SLOTS = Label("kind", ("cache", "stream", "pool"))
_TIERS = ("cpu", "pool")
_OUTCOMES = ("io_error", "checksum_mismatch", "stale", "deadline", "cancelled")

#: The labels of `config_info`. Their values stay the same while a server runs.
CONFIG_LABELS = (
    *("version", "io", "copies", "eviction_policy", "write_policy", "admission"),
    *("prompts_only", "keyspace", "engine_index", "adopts", "vllm"),
)

_Row = tuple[str, str, tuple[Label, ...], str]


def _row(name: str, unit: str, labels: tuple[Label, ...], text: str) -> _Row:
    return name, unit, labels, text


def _table(kind: str, *rows: _Row) -> dict[str, Metric]:
    """Return metrics by name."""
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
         "Chunks looked up, by tier; shared is another engine's pool. A look-up ends at its first "
         "miss, so the counts give no hit rate in tokens. A cached answer counts once."),
    _row("loaded_tokens", "tokens", _one("source", "cpu", "pool", "shared"),
         "Tokens whose load was started, by tier; shared is another engine's pool."),
    _row("recomputed_tokens", "tokens", _one("reason", "load_failed", "declined", "no_boundary"),
         "Tokens found in a tier but recomputed, by reason. declined: recomputing was expected to "
         "be faster; no_boundary: past the last loadable boundary, full attention was found, but "
         "no windows or states to resume from."),
    _row("admissions", "hits", _one("decision", "load", "partial", "recompute"),
         "Hits for which vLLM allocated GPU blocks, by the decision on the hit."),
    _row("loads_cut", "loads", (),
         "Loads cancelled because recomputing would have been faster by then."),
    _row("prefill_seconds", "seconds", (Label("result", ("saved", "lost")), Label("tier", _TIERS)),
         "Time that loads saved, by the slowest tier read: the estimated time of computing the "
         "loaded tokens, less the time that the request waited. A load that computing would have "
         "beaten counts as lost. Nothing counts while the prefill rate is unknown."),
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
         "recomputed, or stored again when needed. attach counts engines whose files a rank could "
         "not open."),

    # -- reads through peers
    _row("peer_bytes", "bytes", _one("direction", "pulled", "served"),
         "Bytes of requested chunks that peers read for loads here (pulled) or that were read "
         "here for peers (served), all ranks. Not updated while an engine only serves peers."),
    _row("peer_pulls_failed", "chunks", _one("reason", *_OUTCOMES),
         "Chunks that a peer failed to deliver, by reason; this server then reads the chunk "
         "itself. io_error includes a peer that was lost or has not opened the pool yet."),
    _row("peer_events", "events", _one("event", "session_lost", "rest", "secret_refused"),
         "Events between this server and peers. session_lost: the peer violated the protocol, "
         "stopped answering or was disconnected. rest: this server paused a peer that slowed eight "
         "loads in a row, failed eight reads in a row, or was lost or stalled three times in 10 s. "
         "secret_refused: a connection attempt, repeated every few seconds, failed because a "
         "share secret is missing or the two differ."),
    _row("peer_hints", "helpers", _one("helper", "known", "unknown", "malformed"),
         "Helpers that requests named in kv_transfer_params. known: listed in peers; unknown: not "
         "listed, so not used; malformed: hints that were ignored."),
    # -- ahead of need
    _row("prefetches", "chunks", _one("reason", "reload", "queue", "probe"),
         "Chunks fetched from the pool into the CPU tier ahead of need, by reason."),
    _row("prefetches_ended", "chunks",
         _one("how", "used", "wasted", "cancelled", "failed", "probe"),
         "Prefetched chunks, by the outcome of the prefetch."),
    _row("kv_hints", "actions",
         _one("advice", "prefetch", "retain", "drop", "demote", "unknown", "malformed"),
         "Actions in the kv_hints or the kv_transfer_params of requests, by the advice given; "
         "kv.fetch counts as prefetch, and retain_s of 0 as drop. Unknown and malformed actions "
         "were ignored."),
    # -- stores, writes, evictions
    _row("stored_chunks", "chunks", (),
         "Chunks whose store into the CPU tier was planned."),
    _row("unstored_chunks", "chunks", _one("reason", "no_room", "incomplete", "below_threshold"),
         "Chunks not stored, by reason. no_room: the CPU tier was still full when the request "
         "ended. incomplete: vLLM passed only some of the blocks, all ranks. "
         "below_threshold: fewer requests than store_threshold had contained the chunk."),
    _row("written_chunks", "chunks", (),
         "Chunks written to the pool by every rank."),
    _row("unwritten_chunks", "chunks", _one("reason", "evicted", "superseded", "shared"),
         "Chunks stored but not written to the pool, by reason. evicted: no target takes writes, "
         "or the CPU tier is too small for running requests' windows and states; no chunk after "
         "such a gap is found. superseded: windows and states of a request that has a later "
         "boundary. shared: another live engine's pool has the chunk."),
    _row("evictions", "chunks", _one("tier", "cpu", "pool"),
         "Chunks evicted, by tier."),
    # -- bytes and time
    _row("transfer_operations", "operations", _TRANSFER,
         "Finished operations, all ranks. Stage gpu counts batches of copies between GPU and "
         "pinned memory; stage pool counts slot reads and writes."),
    _row("transfer_bytes", "bytes", _TRANSFER,
         "Bytes moved by transfer operations, all ranks; a failed operation counts 0."),
    _row("transfer_seconds", "seconds", _TRANSFER,
         "Time from submission to outcome, summed over operations, which may overlap. On a GPU, "
         "stage gpu includes the wait for the running forward pass, so bytes divided by seconds do "
         "not give the link's rate."),
    _row("target_written_bytes", "bytes", (_TARGET,),
         "Bytes written to the pool, all ranks, by target; writes wear out the flash."),
    # -- failures
    _row("failed_chunks", "chunks",
         (Label("operation", ("store", "load", "write", "fetch", "reset")),
          Label("outcome", _OUTCOMES),
          Label("target", source=_TARGET.source)),
         "Chunks whose operation failed, by operation, outcome and target; the target is none if "
         "the operation used no target."),
    _row("retired_pool_slots", "slots", (),
         "Pool slots taken out of use after failed reads or writes."),
    _row("verdict_changes", "changes", (),
         "Changes of a target between usable and unusable."),
    _row("resets", "resets", (),
         "Resets that invalidated everything stored so far."),
    # -- start
    _row("adoption_chunks", "chunks", _one("outcome", "adopted", "incomplete"),
         "Chunks of an earlier run found in the pool at start: adopted, or not adopted because "
         "some rank lacks the chunk (incomplete)."),
    # -- cost
    _row("scheduler_seconds", "seconds", (),
         "Time spent in the scheduler's side of the connector, vLLM's own code included."),
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
         "Slots: cache slots of the CPU tier, stream slots of all ranks, through which loads pass, "
         "and pool slots except retired ones."),
    _row("slots_used", "slots", (_SLOTS,),
         "Slots in use; stream slots as of the ranks' last reports, pool slots except retired "
         "ones."),
    _row("slots_retained", "slots", _one("tier", "cache", "pool"),
         "Slots whose chunks requests have asked to retain, except slots in use, by tier."),
    _row("held_cache_slots", "slots", _one("reason", "reload", "queue"),
         "Cache slots held for waiting requests, by reason."),
    _row("slot_bytes", "bytes", (), "Size of one slot on one rank, header included."),
    _row("slot_fill", "1", (),
         "Average share of a slot that a chunk fills, over the KV cache groups; the largest "
         "group's chunk sets the slot's size."),
    _row("capacity_tokens", "tokens", _one("tier", "cpu", "pool"),
         "Tokens that each tier can hold if no windows and states are stored."),
    # -- other engines' chunks
    _row("shared_entries", "chunks", (),
         "Known chunks in other engines' pools, readable by this engine or not."),
    _row("shared_age_seconds", "seconds", (),
         "Time since other engines' tables were last read; 0 if never."),
    # -- queues
    _row("writes_pending", "chunks", _one("state", "waiting", "sent"),
         "Chunks in the CPU tier that wait to be written to the pool (waiting), and writes sent "
         "to the ranks but not yet reported (sent)."),
    _row("queued_operations", "operations",
         _one("queue", "stream_slot", "read", "prefetch", "write"),
         "Chunks waiting at the ranks' last reports, all ranks, by queue: for a stream slot, a "
         "load's read, a prefetch's read, or a write."),
    _row("operations_in_flight", "operations", (_DIRECTION,),
         "Reads (load) and writes (store) submitted to the I/O engine at the ranks' last reports."),
    _row("read_queue_seconds", "seconds", (_LANE,),
         "Estimated wait of a new read on the slowest rank at its last report, by lane; 0 if "
         "there is no wait or the rate is unknown."),
    _row("requests_waiting", "requests", (),
         "Requests, preempted or in vLLM's queue, whose chunks are kept or prefetched."),
    _row("stores_suspended", "requests", (),
         "Running requests not stored because weights may have changed after part of their KV was "
         "computed. A request counts until the request ends or starts again."),
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
         "Verdict of the worst rank on a target: 0 ok, 1 degraded, 2 suspect, 3 gone."),
    _row("fallbacks", "parts", _one("part", "io_uring", "registration", "o_direct", "copies"),
         "Parts replaced with a slower alternative at the start, all ranks. io_uring: threads "
         "instead; registration: unregistered memory; o_direct: the page cache instead; copies: "
         "no batch call or no kernel on the GPU."),
    # -- facts
    _row("adoption_seconds", "seconds", (),
         "Time the slowest rank took to read its pool at start."),
    _row("target_info", "1", (_TARGET, Label("path", source="directory of a configured target")),
         "Directory of each target, as a label; the value is always 1."),
    _row("config_info", "1",
         tuple(Label(name, source="a fact of this server") for name in CONFIG_LABELS),
         "Configuration of this server, as labels; the value is always 1."),
)
# fmt: on

METRICS = COUNTERS | GAUGES


def exported(series: Series) -> tuple[str, tuple[str, ...]]:
    """Return the exported name and the label values of a series, which must be declared."""
    name, *labels = (series,) if isinstance(series, str) else series
    metric = METRICS[name]
    assert len(labels) == len(metric.labels), f"{series}: other labels than declared"
    return metric.name, tuple(labels)


def first_counts(target_count: int) -> dict[Series, float]:
    """Return 0 for every series that a server with this many targets can count.

    Every series is exported as 0 before its first event, so that increase() sees that event.
    """
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
