# SPDX-License-Identifier: Apache-2.0
"""Which of the core's figures is which of our metrics."""

from __future__ import annotations

__all__ = ["CORE_COUNTERS", "GAUGE_SOURCES"]

#: The core's counter → our metric and its label values.
CORE_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stored": ("stored_chunks", ()),
    "store_refused": ("refused_stores", ()),
    "below_threshold": ("below_threshold_chunks", ()),
    "write_refused": ("refused_writes", ()),
    "written": ("written_chunks", ()),
    "evicted_cpu": ("evictions", ("cpu",)),
    "evicted_pool": ("evictions", ("pool",)),
    "adopted": ("adopted_chunks", ()),
    "resets": ("resets", ()),
    "pool_slots_retired": ("retired_pool_slots", ()),
    "verdict_changes": ("verdict_changes", ()),
    "loads_cut": ("loads_cut", ()),
}

#: Our gauge and its label values → the core's figure.
GAUGE_SOURCES: dict[tuple[str, tuple[str, ...]], str] = {
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
    ("fallbacks", ()): "fallbacks",
    ("prefill_tokens_per_second", ()): "prefill_tokens_per_s",
    ("pool_read_bytes_per_second", ()): "read_bytes_per_s",
    ("load_overhead_seconds", ()): "load_overhead_s",
}
