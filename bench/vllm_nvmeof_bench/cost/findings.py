# SPDX-License-Identifier: Apache-2.0
"""What the samples say, as sentences: what storing decode chunks costs, and what bounds it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_nvmeof_bench.cost.paired import Paired, differences_of, ratios_of
from vllm_nvmeof_bench.cost.samples import Sample, median_of, select
from vllm_nvmeof_bench.cost.settings import BASE, CASES, CPU_ONLY, OURS, PROMPT_ONLY
from vllm_nvmeof_bench.cost.targets import COST_MAX
from vllm_nvmeof_offload.units import MIB

__all__ = ["sentences"]

_BOUNDS = (
    "`offload_prompt_only: true` stores none of them, and what a preempted request had generated "
    "is then recomputed; `store_threshold: 2` stores a chunk only when a second request has it."
)


def sentences(samples: Sequence[Sample]) -> list[str]:
    """In the order of the questions; what was not measured is left out or said so."""
    out = _noise(samples) + _scheduler(samples)
    if select(samples, PROMPT_ONLY, "batch") and select(samples, OURS, "batch"):
        out.append(_between("Storing decode chunks", samples, OURS, PROMPT_ONLY) + " " + _BOUNDS)
    if select(samples, CPU_ONLY, "batch"):
        out.append(_between("Storing into the CPU tier alone", samples, CPU_ONLY, BASE))
        if select(samples, OURS, "batch"):
            out.append(_between("Writing it to the pool besides", samples, OURS, CPU_ONLY))
    return out


def _between(what: str, samples: Sequence[Sample], arm: str, base: str) -> str:
    """`arm` less `base` in the batch, per 1,000 tokens (prompts and answers)."""
    parts = []
    cpu = differences_of(samples, arm, base, "batch", "cpu_s_per_1k_tokens")
    if cpu is not None:
        parts.append(f"{_signed(cpu, '.3f')} CPU s per 1,000 tokens")
    for measure, name in (
        ("stored_bytes_per_1k_tokens", "copied"),
        ("written_bytes_per_1k_tokens", "written"),
    ):
        above, below = (median_of(samples, one, "batch", measure) for one in (arm, base))
        if above is not None and below is not None:
            parts.append(f"{(above - below) / MIB:+.1f} MiB {name} per 1,000 tokens")
    throughput = ratios_of(samples, arm, base, "batch", "tokens_per_s")
    if throughput is not None:
        parts.append(f"throughput × {_plain(throughput)}")
    return f"{what} ({arm} against {base}, batch): {', '.join(parts)}."


def _scheduler(samples: Sequence[Sample]) -> list[str]:
    out = []
    for case in CASES:
        ours = select(samples, OURS, case)
        per_step = median_of(samples, OURS, case, "scheduler_us_per_step")
        per_1k = median_of(samples, OURS, case, "scheduler_us_per_1k_tokens")
        if per_step is not None and per_1k is not None:
            out.append(
                f"Our scheduler side, {case}: {per_step:,.0f} µs a step, {per_1k:,.0f} µs per "
                f"1,000 tokens (medians of {len(ours)} rounds)."
            )
        elif ours:
            out.append(
                f"Our scheduler side's time, {case}, is not known: the server does not count it "
                f"(vllm:nvmeof_scheduler_seconds, vllm:nvmeof_step_seconds)."
            )
    return out


def _noise(samples: Sequence[Sample]) -> list[str]:
    """Whether the run can tell 2 % at all."""
    out = []
    for case, measure, name in (("single", "ttft_ms", "TTFT"), ("batch", "tokens_per_s", "batch")):
        ratio = ratios_of(samples, OURS, BASE, case, measure)
        if ratio is None:
            continue
        if ratio.width is None:
            out.append(f"{name}: {ratio.n} rounds are too few for an interval: more --pairs.")
        elif ratio.width > 2 * COST_MAX:
            out.append(
                f"{name}: the interval is {ratio.width:.1%} wide, so a cost of 2 % could hide in "
                f"it: more --pairs, or a quieter machine."
            )
    return out


def _signed(value: Paired, form: str) -> str:
    text = f"{value.middle:+{form}}"
    if value.low is not None and value.high is not None:
        text += f" ({value.low:+{form}} to {value.high:+{form}})"
    return text


def _plain(value: Paired) -> str:
    text = f"{value.middle:.3f}"
    if value.low is not None and value.high is not None:
        text += f" ({value.low:.3f} to {value.high:.3f})"
    return text
