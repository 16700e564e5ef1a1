# SPDX-License-Identifier: Apache-2.0
"""One run: its parts one after the other, in a directory of ours that is deleted at the end.

Deleted on Ctrl-C and SIGTERM too. What the parts before brought is handed on after each, so
that a later one that fails costs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.home import home_in
from vllm_nvmeof_bench.tier import admission, load, prefetch, resume
from vllm_nvmeof_bench.tier.conditions import at_end, at_start
from vllm_nvmeof_bench.tier.samples import Sample
from vllm_nvmeof_bench.tier.settings import Settings

__all__ = ["run", "steps"]

Tell = Callable[[str], None]

_MEASURE: dict[str, Callable[[Settings, Path, Tell], tuple[list[Sample], dict[str, Any]]]] = {
    "load": load.measure_load,
    "resume": resume.measure_resume,
    "prefetch": prefetch.measure_prefetch,
    "admission": admission.measure_admission,
}
_STEPS: dict[str, Callable[[Settings], int]] = {
    "load": load.steps,
    "resume": resume.steps,
    "prefetch": prefetch.steps,
    "admission": admission.steps,
}


def steps(settings: Settings) -> int:
    """How many measurements there are."""
    return sum(_STEPS[part](settings) for part in settings.parts)


def run(
    settings: Settings,
    directory: Path,
    on_progress: OnProgress = lambda done, total, what: None,
    on_part: Callable[[list[Sample], dict[str, Any]], None] = lambda samples, conditions: None,
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the conditions. `on_part`: what is there after a part.

    Raises:
        BenchError: too little space, or a transfer failed.
        OffloadError: this machine cannot throttle, or a server failed.
    """
    with home_in(directory, settings.disk_bytes_max) as home:
        conditions = at_start(settings, home)
        samples: list[Sample] = []
        parts: dict[str, Any] = {}
        total, done = steps(settings), 0

        def tell(what: str) -> None:
            """Three parts and more: a measurement begins; fewer: something between them."""
            nonlocal done
            on_progress(done, total, what)
            done += what.count(" · ") >= _MEASUREMENT_PARTS

        for part in settings.parts:
            found, facts = _MEASURE[part](settings, home, tell)
            samples += found
            parts[part] = facts
            on_part(samples, at_end(conditions, parts))
        on_progress(total, total, "done")
        return samples, at_end(conditions, parts)


_MEASUREMENT_PARTS = 3
