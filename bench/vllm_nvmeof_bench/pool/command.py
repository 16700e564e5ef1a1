# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench pool`: run with a progress bar, write; read a file again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress, progress
from vllm_nvmeof_bench.pool import report
from vllm_nvmeof_bench.pool.run import run
from vllm_nvmeof_bench.pool.samples import Sample, dump, load, median_of
from vllm_nvmeof_bench.pool.settings import BenchError, Settings
from vllm_nvmeof_bench.pool.targets import Row, evaluate
from vllm_nvmeof_offload.units import MIB

__all__ = ["FILE_COLUMNS", "beside", "draw", "measure", "read", "report"]

_MANAGER_ENTRIES = 1_000_000
#: What a single measurement's description has more of; a log gets only the others.
_STEP_PARTS = 3
FILE_COLUMNS = 120
_BESIDE_BYTES = 2 * MIB


def measure(settings: Settings, directory: Path, json_path: Path, with_targets: bool) -> None:
    """Run, and write the JSON file.

    Raises:
        BenchError: it cannot run here, or an arm failed.
    """
    with progress(_is_logged) as on_progress:
        samples, conditions = run(settings, directory, on_progress)
        manager = _measure_manager(on_progress) if with_targets else None
    dump(json_path, samples, conditions, manager)


def read(json_path: Path) -> tuple[list[Sample], dict[str, Any], list[Row]]:
    """Samples, conditions, targets.

    Raises:
        BenchError: not such a file.
    """
    samples, conditions, manager = load(json_path)
    return samples, conditions, evaluate(samples, manager)


def draw(path: Path, samples: Sequence[Sample], conditions: dict[str, Any]) -> None:
    """The PNG; matplotlib is imported only for it."""
    from vllm_nvmeof_bench.pool.plot import plot

    plot(path, samples, conditions)


def beside(samples: Sequence[Sample]) -> dict[str, str]:
    """Reads of 2 MiB as shares of fio's throughput."""
    rates = {
        arm: median_of(samples, arm, "batch_read", _BESIDE_BYTES)
        for arm in ("ours", "vllm_fs", "fio")
    }
    fio = rates.pop("fio")
    names = {
        "ours": "reads of 2 MiB, ours / fio",
        "vllm_fs": "reads of 2 MiB, vLLM's fs tier / fio",
    }
    return {names[arm]: f"{rate / fio:.0%}" for arm, rate in rates.items() if rate and fio}


def _measure_manager(on_progress: OnProgress) -> dict[str, Any] | None:
    """The manager's own figures, if that benchmark is there; in a process without vLLM."""
    try:
        from vllm_nvmeof_bench import manager
    except ImportError:
        return None
    on_progress(1, 1, "the manager at a million entries")
    program = (
        f"import json; from {manager.__name__} import measure_manager; "
        f"print(json.dumps(measure_manager({_MANAGER_ENTRIES})))"
    )
    paths = [str(Path(manager.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise BenchError(f"the manager's benchmark failed: {lines[-1]}")
    return dict(json.loads(done.stdout))


def _is_logged(what: str) -> bool:
    return what.count(" · ") < _STEP_PARTS
