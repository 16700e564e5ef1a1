# SPDX-License-Identifier: Apache-2.0
"""Names and meaning of what this package exports through vLLM's `/metrics`.

Every name that is emitted must be declared here: vLLM drops, or dies of, any other.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COUNTERS", "GAUGES", "Metric"]

_PREFIX = "vllm:nvmeof_"


@dataclass(frozen=True, slots=True)
class Metric:
    """Prometheus name without `_total`, help text, label names."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


def _metric(name: str, text: str, *labels: str) -> Metric:
    return Metric(_PREFIX + name, text, labels)


COUNTERS = {
    m.name.removeprefix(_PREFIX): m
    for m in (
        _metric("lookups", "Chunks looked up, by the tier that had them.", "source"),
        _metric("loaded_tokens", "Tokens whose KV a load was started for, by source.", "source"),
        _metric("reloaded_tokens", "Tokens of resumed, preempted requests that were loaded."),
        _metric(
            "recomputed_tokens",
            "Tokens of resumed, preempted requests that had been computed and were not found.",
        ),
        _metric("preemptions", "Preemptions seen by the scheduler."),
        _metric(
            "resumed_chunk_tokens",
            "Tokens of resumed requests in full chunks that had been computed before the "
            "preemption and were not in GPU memory any more.",
        ),
        _metric("resumed_chunk_tokens_lost", "Those of them that were not loaded: recomputed."),
        _metric(
            "admissions", "Hits that vLLM went on with, by what was decided on them.", "decision"
        ),
        _metric("loads_cut", "Loads cut off because computing would have been sooner by now."),
        _metric("declined_tokens", "Tokens found and not loaded: computing was to be sooner."),
        _metric("prefetches", "Chunks fetched from the pool ahead of need, by reason.", "reason"),
        _metric(
            "prefetches_ended",
            "What became of them: used by a load, cancelled, failed, or wasted.",
            "how",
        ),
        _metric(
            "scheduler_seconds", "Time in the connector's scheduler side, vLLM's half included."
        ),
        _metric("scheduler_steps", "Engine steps that computed tokens."),
        _metric("step_seconds", "What these steps took."),
        _metric("step_tokens", "Tokens that they computed."),
        _metric("stored_chunks", "Chunks whose store into the CPU tier was planned."),
        _metric("refused_stores", "New chunks that found no room in the CPU tier."),
        _metric("below_threshold_chunks", "New chunks not seen often enough to be stored."),
        _metric("refused_writes", "Chunks dropped from the CPU tier before their write began."),
        _metric("written_chunks", "Chunks written to the pool by every rank."),
        _metric("evictions", "Chunks evicted from a tier.", "tier"),
        _metric("failed_chunks", "Chunks whose operation failed, by outcome.", "outcome"),
        _metric("read_bytes", "Bytes read from the pool, all ranks."),
        _metric("written_bytes", "Bytes written to the pool, all ranks."),
        _metric("target_written_bytes", "As written_bytes, by target: its wear.", "target"),
        _metric("adopted_chunks", "Chunks taken over from the pool at start."),
        _metric("resets", "Times that everything stored was declared void."),
        _metric("retired_pool_slots", "Pool slots given up after failed writes."),
        _metric("verdict_changes", "Times that a target stopped to be usable, or became so again."),
    )
}

GAUGES = {
    m.name.removeprefix(_PREFIX): m
    for m in (
        _metric("entries", "Chunks in the index."),
        _metric("cache_slots", "Cache slots of the CPU tier."),
        _metric("cache_slots_used", "Cache slots taken."),
        _metric("pool_slots", "Pool slots, without the retired ones."),
        _metric("pool_slots_used", "Pool slots taken."),
        _metric("writes_pending", "Writes to the pool that were sent and not reported."),
        _metric("write_backlog", "Chunks in the CPU tier that wait for their write."),
        _metric("fallbacks", "Parts that run slower than they could, as start-up said, all ranks."),
        _metric("held_cache_slots", "Cache slots held for requests to come, by reason.", "reason"),
        _metric("prefill_tokens_per_second", "Learned: how fast prompts are computed; 0: unknown."),
        _metric("pool_read_bytes_per_second", "Learned: of the slowest rank; 0: unknown."),
        _metric(
            "load_overhead_seconds",
            "Learned: what a load from the pool takes beyond its bytes over the read rate.",
        ),
        _metric("suspect_targets", "Targets that at least one rank finds suspect or gone."),
        _metric(
            "target_verdict",
            "The worst rank's: 0 ok, 1 degraded, 2 suspect, 3 gone; targets as they are listed.",
            "target",
        ),
    )
}
