# SPDX-License-Identifier: Apache-2.0
"""The work of one server between two readings of its metrics, as the JSON that `top` prints.

A counter is `{"total": …, "per_s": …}`, where `per_s` is None without an earlier reading; a gauge
is a number. Both are by their labels' values, with spaces between these. All functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeAlias

from vllm_nvmeof_offload.commands.scrape import Metrics
from vllm_nvmeof_offload.metrics import METRICS, PREFIX, Metric

Reading: TypeAlias = dict[str, Any]

VERDICTS = ("ok", "degraded", "suspect", "gone")
#: The sources of prompt tokens by their names in `_prompt_tokens`.
PLACES = {
    "gpu": "GPU cache",
    "cpu": "CPU tier",
    "pool": "pool",
    "shared": "other engines' pools",
    "computed": "computed",
}
#: The tokens for which reading and computing are compared.
COMPARED_TOKENS = 1000
_TIERS = {"cpu": "cache", "pool": "pool"}
#: Gauges in these units are added over a server's engines; of all others the largest counts.
_ADDED_UNITS = ("chunks", "slots", "tokens", "operations", "requests", "parts")
#: Counters that should stay 0, and the consequence.
_HOLES = (
    ("unwritten_chunks", "evicted", "chunks evicted unwritten: later chunks are not found"),
    ("unstored_chunks", "no_room", "chunks not stored: the CPU tier was full"),
    ("failed_chunks", "", "failed operations on chunks"),
    ("peer_events", "rest", "pauses of peers"),
)


def growth(before: float, now: float) -> float:
    """Return how much a counter has grown; a restarted server counts from 0."""
    return now - before if now >= before else now


def read(url: str, before: Metrics | None, now: Metrics, seconds: float) -> Reading:
    """Return what the server did in the `seconds` since `before`, and its state."""
    amounts = {
        name: _measured(metric, before, now, seconds)
        for name, metric in METRICS.items()
        if not name.endswith("_info")
    }
    config = next((labels for labels, _ in now.samples(f"{PREFIX}config_info")), {})
    found: Reading = {
        "url": url,
        "interval_s": seconds if before else None,
        "config": config,
        "requests": {
            state: now.value(f"vllm:num_requests_{state}") for state in ("running", "waiting")
        },
        "tiers": {
            tier: {
                "slots": amounts["slots"].get(kind, 0),
                "used": amounts["slots_used"].get(kind, 0),
                "tokens": amounts["capacity_tokens"].get(tier, 0),
            }
            for tier, kind in _TIERS.items()
        },
        "prompt_tokens": _prompt_tokens(before, now, seconds),
        "targets": list(_targets(now, amounts)),
        "estimate": _estimate(amounts),
        "metrics": amounts,
    }
    return {**found, "attention": list(_attention(found))}


def _amounts(metric: Metric, found: Metrics) -> dict[str, float]:
    counted = metric.kind == "counter"
    by_key: dict[str, list[float]] = defaultdict(list)
    for labels, value in found.samples(metric.name + "_total" * counted):
        by_key[" ".join(labels.get(label.name, "") for label in metric.labels)].append(value)
    joined = sum if counted or metric.unit in _ADDED_UNITS else max
    return {key: joined(values) for key, values in by_key.items()}


def _measured(metric: Metric, before: Metrics | None, now: Metrics, seconds: float) -> Any:
    """Return a metric's amounts by its labels' values; without labels one amount, or None."""
    amounts: dict[str, Any] = dict(_amounts(metric, now))
    if metric.kind == "counter":
        first = _amounts(metric, before) if before else {}
        for key, total in amounts.items():
            per_s = growth(first.get(key, 0), total) / seconds if before else None
            amounts[key] = {"total": total, "per_s": per_s}
    return amounts if metric.labels else amounts.get("")


def _prompt_tokens(before: Metrics | None, now: Metrics, seconds: float) -> dict[str, Any]:
    """Return tokens by source, with each source's share of the interval and since the start."""
    loaded = f"{PREFIX}loaded_tokens_total"
    counters: dict[str, tuple[str, dict[str, str]]] = {
        "gpu": ("vllm:prefix_cache_hits_total", {}),
        **{source: (loaded, {"source": source}) for source in ("cpu", "pool", "shared")},
        "computed": ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    }
    found: dict[str, Any] = {}
    for source, (name, labels) in counters.items():
        total = now.value(name, **labels) if now.has(name) else None
        recent = None
        if before and total is not None:
            recent = growth(before.value(name, **labels), total)
        per_s = None if recent is None else recent / seconds
        found[source] = {"total": total, "per_s": per_s, "share": recent, "share_total": total}
    for share in ("share", "share_total"):
        amounts = [one[share] for one in found.values()]
        whole = 0 if None in amounts else sum(amounts)
        for one in found.values():
            one[share] = one[share] / whole if whole else None
    return found


def _targets(now: Metrics, amounts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    paths = {labels["target"]: labels["path"] for labels, _ in now.samples(f"{PREFIX}target_info")}
    for target, verdict in amounts["target_verdict"].items():
        failed = (v["total"] for k, v in amounts["failed_chunks"].items() if k.split()[2] == target)
        yield {
            "target": target,
            "path": paths.get(target, ""),
            "verdict": VERDICTS[int(verdict)],
            "written_bytes": amounts["target_written_bytes"].get(target),
            "read_bytes_per_s": amounts["target_bytes_per_second"].get(f"{target} load"),
            "write_bytes_per_s": amounts["target_bytes_per_second"].get(f"{target} store"),
            "failed_chunks": sum(failed),
        }


def _estimate(amounts: dict[str, Any]) -> dict[str, float | None]:
    """Return the seconds to compute `COMPARED_TOKENS`, and to read them; None if unknown.

    Reading includes the learned slowness, but no queue.
    """
    slots, tokens = amounts["slots"].get("pool"), amounts["capacity_tokens"].get("pool")
    prefill, rate = amounts["prefill_tokens_per_second"], amounts["pool_read_bytes_per_second"]
    read_s = None
    if slots and tokens and rate:
        token_bytes = amounts["slot_bytes"] * amounts["slot_fill"] * slots / tokens
        read_s = COMPARED_TOKENS * token_bytes / rate * (amounts["load_slowness"] or 1)
    return {"compute_s": COMPARED_TOKENS / prefill if prefill else None, "read_s": read_s}


def _attention(found: Reading) -> Iterator[str]:
    """Yield a line per condition that an operator should look at."""
    for one in found["targets"]:
        if one["verdict"] != VERDICTS[0]:
            yield f"target {one['target']} ({one['path']}) is {one['verdict']}"
    amounts = found["metrics"]
    for name, key, says in _HOLES:
        counts = amounts[name].items()
        if total := sum(one["total"] for have, one in counts if key in ("", have)):
            yield f"{total:,.0f} {says}"
    if suspended := amounts["stores_suspended"]:
        yield f"{suspended:,.0f} running requests are not stored: weights may have changed"
    if slower := [part for part, count in amounts["fallbacks"].items() if count]:
        yield f"slower alternatives are in use for {', '.join(slower)}"
