# SPDX-License-Identifier: Apache-2.0
"""Names and meaning of what this package exports through vLLM's `/metrics`.

Every name that is emitted must be declared here: vLLM drops, or dies of, any other.
docs/METRICS.md is made from this module by `tools/metrics_doc.py`; a test holds them together.
"""

from __future__ import annotations

from vllm_nvmeof_offload.gauges import CONFIG_LABELS, GAUGES
from vllm_nvmeof_offload.metric import (
    DIRECTION,
    NO,
    PREFIX,
    TARGET,
    Label,
    Metric,
    metrics,
    one_of,
)

__all__ = ["CONFIG_LABELS", "COUNTERS", "GAUGES", "PREFIX", "Label", "Metric"]

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
