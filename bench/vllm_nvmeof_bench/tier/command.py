# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench tier`: run with a progress bar, write; read a file again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.pool.targets import Row
from vllm_nvmeof_bench.tier import report
from vllm_nvmeof_bench.tier.run import run
from vllm_nvmeof_bench.tier.samples import Sample, dump, load, round_ratios
from vllm_nvmeof_bench.tier.settings import Settings
from vllm_nvmeof_bench.tier.targets import evaluate

__all__ = ["FILE_COLUMNS", "beside", "draw", "measure", "read", "report"]

#: What a single load's description has more of; a log gets only the others.
_STEP_PARTS = 3
FILE_COLUMNS = 140
_BESIDE_SIZE = 8


def measure(settings: Settings, directory: Path, json_path: Path) -> None:
    """Run, and write the JSON file after each part.

    Raises:
        BenchError, OffloadError: it cannot run here, or a part failed.
    """
    with progress(_is_logged) as on_progress:
        run(
            settings,
            directory,
            on_progress,
            lambda samples, conditions: dump(json_path, samples, conditions),
        )


def read(json_path: Path) -> tuple[list[Sample], dict[str, Any], list[Row]]:
    """Samples, conditions, targets.

    Raises:
        BenchError: not such a file.
    """
    samples, conditions = load(json_path)
    return samples, conditions, evaluate(samples, conditions)


def draw(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """The PNG; matplotlib is imported only for it."""
    from vllm_nvmeof_bench.tier.plot import plot

    plot(path, samples, conditions)


def beside(samples: Sequence[Sample]) -> dict[str, str]:
    """The largest load: streamed over two phases, medians of the rounds' ratios."""
    ratios = round_ratios(samples, "load", "ours", ("two_phase",), "memory", _BESIDE_SIZE)
    if not ratios:
        return {}
    name = "a load of 8 × the CPU tier, streamed / through the tier"
    return {name: f"{statistics.median(ratios):.2f} (median of {len(ratios)} rounds)"}


def _is_logged(what: str) -> bool:
    return not what.startswith("load") or what.count(" · ") < _STEP_PARTS
