# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench pool` behind its options: run with a progress bar, print, write, draw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress, progress
from vllm_nvmeof_bench.pool import report
from vllm_nvmeof_bench.pool.run import run
from vllm_nvmeof_bench.pool.samples import dump, load
from vllm_nvmeof_bench.pool.settings import BenchError, Settings
from vllm_nvmeof_bench.pool.targets import evaluate, missed
from vllm_nvmeof_bench.show import show as show_all

__all__ = ["measure", "show"]

_MANAGER_ENTRIES = 1_000_000
#: What a single measurement's description has more of; a log gets only the others.
_STEP_PARTS = 3
_FILE_COLUMNS = 120


def measure(settings: Settings, directory: Path, json_path: Path, with_targets: bool) -> None:
    """Run, and write the JSON file.

    Raises:
        BenchError: it cannot run here, or an arm failed.
    """
    with progress(_is_logged) as on_progress:
        samples, conditions = run(settings, directory, on_progress)
        manager = _measure_manager(on_progress) if with_targets else None
    dump(json_path, samples, conditions, manager)


def show(json_path: Path, plot_path: Path | None, with_targets: bool) -> bool:
    """Print (and draw) what a file holds; True unless a target is missed.

    Raises:
        BenchError: not such a file, or no matplotlib.
    """
    samples, conditions, manager = load(json_path)
    rows = evaluate(samples, manager) if with_targets else []

    def draw(path: Path) -> None:
        from vllm_nvmeof_bench.pool.plot import plot

        plot(path, samples, conditions)

    found = (samples, conditions, rows)
    show_all(json_path, plot_path, report, found, draw, _FILE_COLUMNS)
    return not missed(rows)


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
