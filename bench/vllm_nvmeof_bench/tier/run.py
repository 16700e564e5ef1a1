# SPDX-License-Identifier: Apache-2.0
"""One run: its parts one after the other, in a directory of ours that is deleted at the end.

Deleted on Ctrl-C and SIGTERM too. What the parts before brought is handed on after each, so
that a later one that fails costs nothing but itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.tier import admission, load, prefetch, resume
from vllm_nvmeof_bench.tier.conditions import at_end, at_start
from vllm_nvmeof_bench.tier.samples import Sample
from vllm_nvmeof_bench.tier.settings import Settings
from vllm_nvmeof_offload.units import format_bytes

__all__ = ["Progress", "run", "steps"]

#: (measurements done, of all, what comes now).
Progress = Callable[[int, int, str], None]
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
    on_progress: Progress = lambda done, total, what: None,
    on_part: Callable[[list[Sample], dict[str, Any]], None] = lambda samples, conditions: None,
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the conditions. `on_part`: what is there after a part.

    Raises:
        BenchError: too little space, or a transfer failed.
        OffloadError: this machine cannot throttle, or a server failed.
    """
    with home_in(directory, settings) as home:
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


@contextlib.contextmanager
def home_in(directory: Path, settings: Settings) -> Iterator[Path]:
    """A new directory inside `directory`, which is deleted with all that is in it."""
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        home = Path(tempfile.mkdtemp(prefix="vllm-nvmeof-bench-", dir=directory)).resolve()
    except OSError as error:
        raise BenchError(f"{directory}: cannot be used ({error.strerror})") from None
    with _sigterm_as_interrupt():
        try:
            status = os.statvfs(home)
            free = status.f_bavail * status.f_frsize
            if free < settings.disk_bytes_max:
                raise BenchError(
                    f"{directory} has {format_bytes(free)} free; this run takes up to "
                    f"{format_bytes(settings.disk_bytes_max)}: give another --dir"
                )
            yield home
        finally:
            shutil.rmtree(home, ignore_errors=True)
            if made:
                with contextlib.suppress(OSError):
                    directory.rmdir()


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
