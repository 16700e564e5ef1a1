# SPDX-License-Identifier: Apache-2.0
"""MADE-UP samples for tests of arithmetic and form. None was measured."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_nvmeof_bench.reports.pool import Sample

ROUNDS = 3


def rounds(
    arm: str,
    case: str,
    block_bytes: int,
    mib_per_s: Sequence[float],
    cpu_s_per_gib: float | None = 0.1,
    p99_us: float | None = None,
) -> list[Sample]:
    """One made-up sample per round."""
    return [
        Sample(arm, case, block_bytes, number, value, cpu_s_per_gib, None, p99_us)
        for number, value in enumerate(mib_per_s)
    ]


def everything(blocks: Sequence[int], ours: float = 2000.0) -> list[Sample]:
    """Every arm and case, made up so that all targets on samples are reached."""
    found = []
    for block in blocks:
        for case in ("batch_write", "batch_read", "mixed", "single_write", "single_read"):
            for arm, value, cpu in (
                ("ours", ours, 0.01),
                ("ours_threads", 1900.0, 0.05),
                ("fio", 2050.0, 0.02),
                ("ring", 2100.0, 0.005),
                ("ring_slots", 2080.0, 0.005),
                ("vllm_fs", 450.0, 0.4),
            ):
                found += rounds(arm, case, block, [value, value - 10, value + 10], cpu)
        for arm, p99 in (("ours", 5000.0), ("ours_threads", 9000.0), ("vllm_fs", 40000.0)):
            found += rounds(arm, "read_beside_writes", block, [100.0] * 3, None, p99)
            found += rounds(arm, "writes_beside_read", block, [900.0] * 3)
            found += rounds(arm, "writes_alone", block, [1000.0] * 3)
    return found
