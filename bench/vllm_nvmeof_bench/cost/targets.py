# SPDX-License-Identifier: Apache-2.0
"""What must be reached, and what the samples say in plain words.

A cost is within its target if the median ratio is within 2 %, or if the interval contains 1:
the difference is then inside the noise. Both are for the default settings, `ours`. A target
whose samples are not all there, or whose interval is missing, is judged by what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nvmeof_bench.cost.paired import Paired, ratios_of
from vllm_nvmeof_bench.cost.samples import Sample, select
from vllm_nvmeof_bench.cost.settings import BASE, CASES, OURS

__all__ = ["COST_MAX", "Row", "evaluate", "scheduler_share"]

COST_MAX = 0.02
SCHEDULER_SHARE_MAX = 0.05
#: vLLM's own processes wake up now and then; a server that goes on stepping takes a core.
IDLE_CORES_MAX = 0.05


@dataclass(frozen=True)
class Row:
    """One target. reached: None if it was not measured."""

    target: str
    required: str
    measured: str = ""
    n: int = 0
    reached: bool | None = None


def evaluate(samples: Sequence[Sample], conditions: Mapping[str, Any]) -> list[Row]:
    """The table: the two costs, our scheduler's share, and what makes the run a fair one."""
    ttft = ratios_of(samples, OURS, BASE, "single", "ttft_ms")
    throughput = ratios_of(samples, OURS, BASE, "batch", "tokens_per_s")
    rows = [
        _cost_row("TTFT, ours / none", ttft, more_is_worse=True),
        _cost_row("throughput, ours / none", throughput, more_is_worse=False),
    ]
    rows += [_share_row(samples, case) for case in CASES]
    return [*rows, _fair_row(samples), _idle_row(conditions)]


def within(ratio: Paired, more_is_worse: bool) -> bool:
    """Within 2 %, or inside the noise of the interval, whichever is larger."""
    return _cost(ratio, more_is_worse) <= COST_MAX or ratio.contains(1.0)


def scheduler_share(samples: Sequence[Sample], arm: str, case: str) -> float | None:
    """Our scheduler side's part of the steps' time, over all rounds; None if not known."""
    pairs = [(one.scheduler_s, one.step_s) for one in select(samples, arm, case)]
    known = [(ours, steps) for ours, steps in pairs if ours is not None and steps]
    if not known or len(known) < len(pairs):
        return None
    return sum(ours for ours, _ in known) / sum(steps for _, steps in known)


def _cost(ratio: Paired, more_is_worse: bool) -> float:
    return ratio.middle - 1 if more_is_worse else 1 - ratio.middle


def _cost_row(target: str, ratio: Paired | None, more_is_worse: bool) -> Row:
    required = f"{'≤' if more_is_worse else '≥'} {1 + COST_MAX if more_is_worse else 1 - COST_MAX}"
    required += ", or inside the noise"
    if ratio is None:
        return Row(target, required)
    measured = f"{ratio.middle:.3f}"
    if ratio.low is not None and ratio.high is not None:
        measured += f" ({ratio.low:.3f} to {ratio.high:.3f})"
    if _cost(ratio, more_is_worse) > COST_MAX and ratio.contains(1.0):
        measured += ", inside the noise"
    return Row(target, required, measured, ratio.n, within(ratio, more_is_worse))


def _share_row(samples: Sequence[Sample], case: str) -> Row:
    target = f"our scheduler / steps, {case}"
    required = f"≤ {SCHEDULER_SHARE_MAX:.0%}"
    share = scheduler_share(samples, OURS, case)
    if share is None:
        return Row(target, required)
    n = len(select(samples, OURS, case))
    return Row(target, required, f"{share:.2%}", n, share <= SCHEDULER_SHARE_MAX)


def _fair_row(samples: Sequence[Sample]) -> Row:
    target, required = "cache hits, preemptions, loads", "0, 0, 0"
    if not samples:
        return Row(target, required)
    hits = sum(one.hits for one in samples)
    preemptions = sum(one.preemptions for one in samples)
    loaded = sum(one.loaded_bytes for one in samples)
    fair = hits == preemptions == loaded == 0
    return Row(target, required, f"{hits}, {preemptions}, {loaded}", len(samples), fair)


def _idle_row(conditions: Mapping[str, Any]) -> Row:
    target, required = "cores that an idle server uses", f"≤ {IDLE_CORES_MAX:g}"
    idle: Mapping[str, float] = conditions.get("idle_cores") or {}
    if not idle:
        return Row(target, required)
    worst = max(idle, key=lambda arm: idle[arm])
    fine = idle[worst] <= IDLE_CORES_MAX
    return Row(target, required, f"{idle[worst]:.3f} ({worst})", len(idle), fine)
