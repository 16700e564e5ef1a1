# SPDX-License-Identifier: Apache-2.0
"""MADE-UP samples of `bench cost` for tests of arithmetic and form. None was measured."""

from __future__ import annotations

from dataclasses import replace

from vllm_nvmeof_bench.reports.cost import Sample

from vllm_nvmeof_offload.units import MIB

#: A round's disturbance, which hits all arms alike.
NOISE = (1.0, 1.3, 0.9, 1.1, 2.0, 1.0, 1.2, 0.8)
CONDITIONS = {
    "idle_cores": {"none": 0.001, "ours": 0.002},
    "model": {"parameters": 65_000_000, "kv_bytes_per_token": 32768},
    "load_average_at_start": [0.1, 0.1, 0.1],
    "load_average_at_end": [1.9, 1.0, 0.5],
}


def sample(arm: str, case: str, number: int, seconds: float, **given: object) -> Sample:
    """One made-up sample of 1,000 tokens."""
    one = Sample(
        arm=arm,
        case=case,
        round=number,
        ttft_s=seconds / 2,
        seconds=seconds,
        answer_tokens=500,
        tokens=1000,
        cpu_s=2 * seconds,
        others_cpu_s=0.0,
        quiet_after_s=0.25,
        stored_bytes=0 if arm == "none" else 30 * MIB,
        loaded_bytes=0,
        written_bytes=0 if arm == "none" else 31 * MIB,
        hits=0,
        preemptions=0,
    )
    return replace(one, **given)  # type: ignore[arg-type]


def rounds(arm: str, case: str, factor: float = 1.0, **given: object) -> list[Sample]:
    """One sample per round, `factor` times as slow as without offloading in the same round."""
    return [sample(arm, case, i, factor * noise, **given) for i, noise in enumerate(NOISE)]


def everything(ours: float = 1.01, known: bool = True) -> list[Sample]:
    """All arms and cases; with or without the counters of our scheduler's time."""
    counted = {"scheduler_s": 0.004, "scheduler_steps": 20, "step_s": 0.4, "step_tokens": 1000}
    given = counted if known else {}
    samples = []
    for case in ("single", "batch"):
        samples += rounds("none", case)
        samples += rounds("ours", case, ours, **given)
        prompt_only = {"stored_bytes": 10 * MIB, "written_bytes": 10 * MIB, **given}
        samples += rounds("ours_prompt_only", case, 1.0, **prompt_only)
    return samples
