# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench latency`: run with a progress bar, write; read a file again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.latency import report
from vllm_nvmeof_bench.latency.run import run
from vllm_nvmeof_bench.latency.samples import Sample, dump, load, median_of, targets_of
from vllm_nvmeof_bench.latency.settings import Place, Point, Settings
from vllm_nvmeof_offload.units import KIB

__all__ = ["FILE_COLUMNS", "beside", "draw", "measure", "read", "report"]

FILE_COLUMNS = 170


def measure(settings: Settings, places: Sequence[Place], json_path: Path) -> None:
    """Run, and write the JSON file after each size.

    Raises:
        BenchError, ThrottleError: it cannot run here, or an arm failed.
    """
    with progress() as on_progress:
        run(settings, places, lambda *found: dump(json_path, *found), on_progress)


def read(json_path: Path) -> tuple[list[Sample], dict[str, Any], list[Any]]:
    """Samples and conditions; there are no targets."""
    samples, conditions = load(json_path)
    return samples, conditions, []


def draw(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """The PNG; matplotlib is imported only for it."""
    from vllm_nvmeof_bench.latency.plot import plot

    plot(path, samples, conditions)


def beside(samples: Sequence[Sample]) -> dict[str, str]:
    """fio's reads of 4 KiB on the first target, one in flight."""
    point = Point("read", 4 * KIB, 1, 1)
    target = next(iter(targets_of(samples)), "")
    value = median_of(samples, target, "fio", point, "p50_us")
    if value is None:
        return {}
    return {
        "one read in flight, attached directly": f"{value:.0f} µs on {target} (fio, 4 KiB, p50)"
    }
