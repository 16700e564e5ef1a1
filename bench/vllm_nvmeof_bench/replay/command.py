# SPDX-License-Identifier: Apache-2.0
"""`vllm-nvmeof bench replay` behind its options: run with a progress bar, print, write, draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_nvmeof_bench.bar import progress
from vllm_nvmeof_bench.replay import report
from vllm_nvmeof_bench.replay.run import run
from vllm_nvmeof_bench.replay.samples import Sample, dump, load, summary_of
from vllm_nvmeof_bench.replay.settings import Settings
from vllm_nvmeof_bench.traces.show import show as show_all

__all__ = ["beside", "measure", "show"]

_LOGS = "replay-logs"
#: The study's columns: GPU memory only, + CPU tier, + CPU tier + NVMe.
_STUDIED = ("none", "cpu", "pool")


def measure(settings: Settings, trace: Path, directory: Path, json_path: Path) -> None:
    """Run, and write the JSON file; the servers' logs stay beside it if the run fails.

    Raises:
        BenchError: it cannot run here, or a server failed.
    """
    with progress(lambda what: not what.endswith("requests")) as on_progress:
        samples, conditions = run(settings, trace, directory, json_path.parent / _LOGS, on_progress)
    dump(json_path, samples, conditions)


def show(json_path: Path, plot_path: Path | None) -> None:
    """Print (and draw) what a file holds.

    Raises:
        BenchError: not such a file, or no matplotlib.
    """
    found = load(json_path)

    def draw(path: Path) -> None:
        from vllm_nvmeof_bench.replay.plot import plot

        plot(path, *found)

    show_all(json_path, plot_path, found, report, draw)


def beside(samples: Sequence[Sample]) -> dict[str, str]:
    """Ours for the study's rows, one figure a column of it; empty unless all three ran."""
    found = [summary_of(samples, arm) for arm in _STUDIED]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return {}
    rows = {
        "requests completed": [f"{one.completed:,}" for one in known],
        "TTFT average": [f"{one.ttft_mean_s:.2f} s" for one in known],
        "TTFT median": [f"{one.ttft_median_s:.2f} s" for one in known],
        "TTFT P95": [f"{one.ttft_p95_s:.2f} s" for one in known],
        "input tokens/s": [f"{one.tokens_in_per_s:,.0f}" for one in known],
        "output tokens/s": [f"{one.tokens_out_per_s:,.1f}" for one in known],
    }
    return {key: " / ".join(texts) for key, texts in rows.items()}
