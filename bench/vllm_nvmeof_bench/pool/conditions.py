# SPDX-License-Identifier: Apache-2.0
"""Under which conditions the samples were taken: versions, machine, disk, sizes, load.

No dates and no absolute paths: a file of samples can be published as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.conditions import at_start as conditions_at_start
from vllm_nvmeof_bench.conditions import load_average, mount_of
from vllm_nvmeof_bench.pool.arms import engine, flat, vllm_fs
from vllm_nvmeof_bench.pool.settings import Settings

__all__ = ["at_end", "at_start", "mount_of"]


def at_start(settings: Settings, directory: Path) -> dict[str, Any]:
    """What is known before the first measurement."""
    return {
        **conditions_at_start(directory),
        "settings": {
            "arms": list(settings.arms),
            "cases": list(settings.cases),
            "block_bytes": list(settings.blocks),
            "rounds": settings.rounds,
            "bytes_per_round": settings.bytes_per_round,
            "single_bytes": settings.single_bytes,
            "depth": settings.depth,
            "seed": settings.seed,
            "queued_bytes": settings.queued_bytes,
            "episode_bytes": settings.episode_bytes,
            "reads": settings.reads,
            "read_gap_s": settings.read_gap_s,
            "beside_block_bytes": settings.beside_block_bytes,
            "settle_s": settings.settle_s,
            "engine": engine.limits(),
        },
    }


def at_end(
    conditions: dict[str, Any], settings: Settings, engines: dict[str, str], missing: dict[str, str]
) -> dict[str, Any]:
    """Add what each arm really was, and the load average now."""
    arms: dict[str, Any] = {}
    for name in settings.arms:
        if name in missing:
            arms[name] = {"available": False, "reason": missing[name]}
            continue
        arms[name] = {"available": True}
        if name in engines:
            arms[name]["runs"] = engines[name]
    if arms.get("vllm_fs", {}).get("available"):
        arms["vllm_fs"] |= vllm_fs.describe()
    if arms.get("fio", {}).get("available"):
        arms["fio"]["registered"] = flat.FioArm.registered
    return {**conditions, "arms": arms, "load_average_at_end": load_average()}
