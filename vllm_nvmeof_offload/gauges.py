# SPDX-License-Identifier: Apache-2.0
"""How things stand: the gauges of `metrics.py`, and what `config_info` says."""

from __future__ import annotations

from vllm_nvmeof_offload.metric import DIRECTION, NO, TARGET, Label, metrics, one_of

__all__ = ["CONFIG_LABELS", "GAUGES"]

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
