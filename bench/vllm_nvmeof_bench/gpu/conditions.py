# SPDX-License-Identifier: Apache-2.0
"""Under which conditions copies were measured; no dates and no paths."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any

from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_offload.fabric.machine import read_gpus

__all__ = ["conditions"]

_PACKAGES = (
    *("torch", "vllm", "triton", "numpy"),
    *("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc"),
)


def conditions(world: World, settings: Settings, theirs: str) -> dict[str, Any]:
    """Versions, GPU and its link, machine, settings, what preparing took.

    theirs: the version of the vLLM whose copy code ran, or why none did.
    """
    facts = world.cuda.facts
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    links = [asdict(gpu.pcie) for gpu in read_gpus() if gpu.uuid == facts.uuid and gpu.pcie]
    return {
        "gpu": {"name": facts.name, "arch": facts.arch, "numa_node": facts.numa_node},
        "pcie": links[0] if links else None,
        "driver": facts.driver_version,
        "batch_call": world.cuda.has_batch,
        "numa_bound": world.numa_bound,
        "versions": versions,
        "vllm_arm": theirs,
        "failed_arms": world.failed,
        "cpus": len(os.sched_getaffinity(0)),
        "settings": asdict(settings),
        "seconds": world.seconds,
        "cells": [asdict(c) | {"direction": c.direction.value} for c in world.cells],
        "load_average_at_end": os.getloadavg(),
    }
