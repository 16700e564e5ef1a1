# SPDX-License-Identifier: Apache-2.0
"""MADE-UP samples and traces for tests of arithmetic and form. None was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.reports.copy import Sample as Copied
from vllm_nvmeof_bench.reports.pool import Sample

from vllm_nvmeof_offload.units import KIB, MIB

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


# MADE-UP samples of `bench copy` for tests of arithmetic and form. None was measured.


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


def one(case: str, arm: str, direction: str, size: int, count: int, value: float) -> list[Copied]:
    """Three rounds around `value`, which is their median."""
    return [
        Copied(case, arm, direction, size, count, number, value * share)
        for number, share in enumerate((0.97, 1.0, 1.02))
    ]


def every_copy() -> list[Copied]:
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


# Tiny made-up traces in the two public formats, as files.


def entry(t: float, ids: list[int], out: int = 5, **more: Any) -> dict[str, Any]:
    """A request in kv-cache-tester's format, 10 tokens longer than its whole blocks of 64."""
    common = {"t": t, "type": "s", "model": "m", "in": 64 * len(ids) + 10, "out": out}
    return {**common, "hash_ids": ids, "input_types": ["text"], "stop": "", **more}


def session_file(folder: Path, name: str, requests: list[Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    content = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}
    path.write_text(json.dumps({**content, **more}))
    return path


def agentic(folder: Path) -> Path:
    """Two sessions; the first has two sub-agents side by side between its requests."""
    children = [
        {"t": 20.0, "type": "subagent", "agent_id": name, "requests": [entry(0.0, ids)]}
        for name, ids in (("a", [9, 10]), ("b", [9, 11]))
    ]
    first = [
        entry(0.0, [1, 2], api_time=4.0, think_time=0.0),
        *children,
        entry(30.0, [1, 2, 3], api_time=2.0, think_time=6.0),
        entry(41.0, [1, 2, 3, 4]),
    ]
    session_file(folder, "trace_1", first)
    session_file(folder, "trace_2", [entry(0.0, [1, 2, 3]), entry(7.0, [1, 2, 3, 4, 5])])
    return folder


def mooncake(path: Path) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1500, "output_length": 900, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
