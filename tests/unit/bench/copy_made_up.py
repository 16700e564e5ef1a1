# SPDX-License-Identifier: Apache-2.0
"""MADE-UP samples of `bench copy` for tests of arithmetic and form. None was measured."""

from __future__ import annotations

from vllm_nvmeof_bench.reports.copy import Sample

from vllm_nvmeof_offload.units import KIB, MIB

SIZES = tuple((4 * KIB) << k for k in range(13))
CONDITIONS = {
    "gpu": {"name": "Made-up GPU", "arch": "sm_90", "numa_node": None},
    "pcie": {"speed": 32.0, "width": 16},
    "driver": 13010,
    "vllm_arm": "0.0.0 (made up)",
    "versions": {"vllm": "0.0.0"},
    "seconds": {"populate": 0.5, "register": 0.4},
    "load_average_at_end": [0.2, 0.2, 0.2],
}
#: Share of a made-up 50 GB/s; auto is as good as the better of dma and kernel.
_SHARES = {"contiguous": 1.0, "dma": 0.98, "dma_overlap": 0.98, "kernel": 0.8, "vllm": 0.7}


def one(case: str, arm: str, direction: str, size: int, count: int, value: float) -> list[Sample]:
    """Three rounds around `value`, which is their median."""
    return [
        Sample(case, arm, direction, size, count, number, value * share)
        for number, share in enumerate((0.97, 1.0, 1.02))
    ]


def everything() -> list[Sample]:
    """Every case and arm, made up so that all targets are reached."""
    found = []
    for direction in ("store", "load"):
        for size in SIZES:
            rate = 50 * min(1.0, size / (512 * KIB))
            for arm, share in (*_SHARES.items(), ("auto", 0.98)):
                found += one("transfer", arm, direction, size, 1000, rate * share)
        for arm in ("dma", "kernel", "auto"):
            found += one("few", arm, direction, 4 * KIB, 16, 5.0)
        found += one("both", "dma", direction, 2 * MIB, 500, 50.0)
        found += one("submit", "dma", direction, 512 * KIB, 1000, 30.0)
    found += one("both", "dma", "both", 2 * MIB, 1000, 85.0)
    found += one("mix", "dma", "load 25%", 2 * MIB, 1000, 70.0)
    for arm, rate in (("alone", 100.0), ("dma", 98.0), ("dma_overlap", 98.5), ("kernel", 90.0)):
        found += one("loop_matrix", arm, "both", 0, 0, rate)
        found += one("loop_memory", arm, "both", 0, 0, 0.9 * rate)
    for arm, steps, rate in (("few", 99.5, 5.1), ("many", 98.0, 12.5), ("best", 99.2, 12.5)):
        found += one("crc_matrix", arm, "both", 0, 0, steps)
        found += one("crc_beside", arm, "load", 2 * MIB, 1, rate)
    found += one("crc_matrix", "alone", "both", 0, 0, 100.0)
    for arm, rate in (("streamed", 6.0), ("two_phase", 4.0), ("read", 6.2)):
        found += one("disk", arm, "load", 2 * MIB, 2048, rate)
    return found
