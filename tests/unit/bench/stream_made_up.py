# SPDX-License-Identifier: Apache-2.0
"""MADE-UP samples of `bench stream` for tests of arithmetic and form. None was measured."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_nvmeof_bench.reports.stream import Sample

SIZES = (0.5, 1, 8)
CONDITIONS = {
    "parts": {
        "load": {"engine": "io_uring (made up)", "throttle": "made up"},
        "resume": {"preemptions": {"reload": 2}, "answers": {"compared": 10, "different": 0}},
        "admission": {"prompts": 12, "answers": {"compared": 5, "different": 0}},
    },
    "disk": {"file_system": "ext4", "device": "made-up"},
    "load_average_at_start": [0.1, 0.1, 0.1],
    "load_average_at_end": [0.2, 0.2, 0.2],
}


def times(
    part: str, case: str, arm: str, values: Sequence[Sequence[float]], at: float | None = None
) -> list[Sample]:
    """`values`: one sequence of seconds per round."""
    return [
        Sample(part, case, arm, at, number, index, seconds, 1 << 30, 0.2, 100)
        for number, row in enumerate(values)
        for index, seconds in enumerate(row)
    ]


def load(size: float, ours: Sequence[float], case: str = "memory") -> list[Sample]:
    """Reading takes a second per CPU tier, copying a tenth."""
    rounds = len(ours)
    return [
        *times("load", case, "ours", [[value] for value in ours], size),
        *times("load", case, "read", [[size]] * rounds, size),
        *times("load", case, "copy", [[size / 10]] * rounds, size),
        *times("load", case, "two_phase", [[1.1 * size]] * rounds, size),
    ]


def everything() -> list[Sample]:
    """Every part and arm, made up so that all targets are reached."""
    found = [
        sample
        for case in ("memory", "paced")
        for size in SIZES
        for sample in load(size, [1.01 * size, 1.05 * size, 1.02 * size], case)
    ]
    for part, case, ours, other in (
        ("resume", "crowd", "reload", "recompute"),
        ("prefetch", "turn", "on", "off"),
        ("prefetch", "total", "on", "off"),
    ):
        found += times(part, case, ours, [[0.1, 0.2], [0.15]])
        found += times(part, case, other, [[0.3], [0.4, 0.5]])
    found += times("admission", "ttft", "never", [[0.5, 0.5]] * 2)
    for at, always, auto in ((10, 1.0, 0.52), (200, 0.2, 0.21), (0, 0.1, 0.1)):
        found += times("admission", "ttft", "always", [[always] * 2] * 2, at)
        found += times("admission", "ttft", "auto", [[auto] * 2] * 2, at)
    return found
