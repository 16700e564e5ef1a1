# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_nvmeof_bench.gpu --json build/bench/copy.json`: all of it, on the first GPU."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.gpu.loops import measure_loops
from vllm_nvmeof_bench.gpu.measure import ARMS, measure
from vllm_nvmeof_bench.gpu.samples import Sample, dump, median_of
from vllm_nvmeof_bench.gpu.settings import Settings
from vllm_nvmeof_bench.gpu.targets import evaluate
from vllm_nvmeof_bench.gpu.world import World
from vllm_nvmeof_offload.copy.driver import Cuda
from vllm_nvmeof_offload.copy.nvrtc import compile_kernels
from vllm_nvmeof_offload.errors import OffloadError
from vllm_nvmeof_offload.units import GIB, format_bytes

_PACKAGES = ("torch", "cuda-bindings", "cuda-core", "numpy", "nvidia-cuda-nvrtc")


def main() -> int:
    """Exit code 0: measured and all targets reached; 1: a target missed; 2: not possible here."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path, default=Path("build/bench/copy.json"))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--gib", type=float, default=4.0, help="on each side")
    options.add_argument("--no-loops", action="store_true", help="copies alone; needs no torch")
    given = options.parse_args()
    settings = Settings(rounds=given.rounds, bytes_max=int(given.gib * GIB))
    try:
        cuda = Cuda(0)
        code = compile_kernels(cuda.facts.arch)
    except OffloadError as error:
        print(f"bench copy: {error}", file=sys.stderr)
        return 2
    world = World(cuda, cuda.load_kernel(code, "copy_blocks"), settings.bytes_max)
    try:
        samples = measure(world, settings, lambda what: print(what, file=sys.stderr))
        if not given.no_loops:
            import torch

            samples += measure_loops(world, settings, torch)
        dump(given.json, samples, conditions(world, settings))
    finally:
        world.close()
    return show(samples)


def conditions(world: World, settings: Settings) -> dict[str, Any]:
    """Versions, GPU, machine, settings and what preparing took; no dates and no paths."""
    facts = world.cuda.facts
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "gpu": {"name": facts.name, "arch": facts.arch, "numa_node": facts.numa_node},
        "driver": facts.driver_version,
        "batch_call": world.cuda.has_batch,
        "numa_bound": world.numa_bound,
        "versions": versions,
        "cpus": len(os.sched_getaffinity(0)),
        "settings": asdict(settings),
        "seconds": world.seconds,
        "cells": [asdict(c) | {"direction": c.direction.value} for c in world.cells],
        "load_average_at_end": os.getloadavg(),
    }


def show(samples: Sequence[Sample]) -> int:
    """Print medians and targets; 1 if a target is missed."""
    columns = ("contiguous", *ARMS)
    for case in ("transfer", "few", "both"):
        keys = {(s.direction, s.block_bytes, s.count) for s in samples if s.case == case}
        print(f"\n{case}, GB/s".ljust(34), *(arm.rjust(11) for arm in columns))
        for direction, size, count in sorted(keys):
            wanted = {"direction": direction, "block_bytes": size, "count": count}
            rates = [median_of(samples, case=case, arm=arm, **wanted) for arm in columns]
            name = f"{direction} {count} × {format_bytes(size)}".ljust(33)
            print(name, *(("-" if r is None else f"{r:.2f}").rjust(11) for r in rates))
    for case in sorted({s.case for s in samples if s.case.startswith("loop")}):
        arms = dict.fromkeys(s.arm for s in samples if s.case == case)
        rates = [f"{arm} {median_of(samples, case=case, arm=arm):.1f}" for arm in arms]
        print(f"\n{case}, steps/s: " + ", ".join(rates))
    print()
    rows = evaluate(samples)
    for row in rows:
        verdict = {True: "reached", False: "MISSED", None: "not measured"}[row.reached]
        print(f"{row.target}: {row.measured} ({row.required}) {verdict} {row.where}")
    return int(any(row.reached is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
