# SPDX-License-Identifier: Apache-2.0
"""One run: the servers of all arms side by side, every round all cases and arms in turn.

The order of the arms within a case is drawn from the seed, round by round. The arms of a round
are compared with each other alone: they were measured within seconds, with the same prompts.

Model and pools lie in one directory of ours inside the one given, and are deleted at the end,
on Ctrl-C and SIGTERM too. The servers' logs stay where a run failed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.cost.fleet import Fleet, extra_config
from vllm_nvmeof_bench.cost.measure import idle_shares, measure
from vllm_nvmeof_bench.cost.samples import Sample
from vllm_nvmeof_bench.cost.settings import BASE, CASES, Settings
from vllm_nvmeof_bench.pool import conditions as pool_conditions
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.pool.settings import Settings as PoolSettings
from vllm_nvmeof_offload.units import format_bytes

__all__ = ["Progress", "run"]

#: (measurements done, of all, what comes now).
Progress = Callable[[int, int, str], None]
#: Rounds of warming up have numbers of their own, so that their prompts do too.
_WARM_UP = 1_000_000


def run(
    settings: Settings,
    directory: Path,
    logs: Path,
    on_progress: Progress = lambda done, total, what: None,
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the conditions.

    Raises:
        BenchError: too little space, a server that does not start, or one that failed.
    """
    total = settings.pairs * len(CASES) * len(settings.arms)
    with _home(directory, settings) as home, _quiet_interpreter():
        conditions = _conditions(settings, home)
        with Fleet(settings, home, logs, lambda what: on_progress(0, total, what)) as fleet:
            samples = _rounds(fleet, settings, conditions, on_progress, total)
            conditions["load_average_at_end"] = _load()
    shutil.rmtree(logs, ignore_errors=True)
    return samples, conditions


def _rounds(
    fleet: Fleet,
    settings: Settings,
    conditions: dict[str, Any],
    on_progress: Progress,
    total: int,
) -> list[Sample]:
    for number in range(settings.warm_ups):
        for case in CASES:
            for arm in settings.arms:
                on_progress(0, total, f"warming up · {case} · {arm}")
                measure(fleet, settings, arm, case, _WARM_UP + number)
    on_progress(0, total, "looking what idle servers use")
    conditions["idle_cores"] = idle_shares(fleet, settings)
    samples: list[Sample] = []
    for number in range(settings.pairs):
        dice = random.Random(f"{settings.seed} {number}")
        for case in CASES:
            for arm in dice.sample(settings.arms, len(settings.arms)):
                on_progress(len(samples), total, f"round {number + 1} · {case} · {arm}")
                gc.collect()
                samples.append(measure(fleet, settings, arm, case, number))
    on_progress(total, total, "stopping the servers")
    return samples


def _conditions(settings: Settings, home: Path) -> dict[str, Any]:
    """Versions, machine and disk as `bench pool` says them, and what each arm is."""
    common = pool_conditions.at_start(PoolSettings(), home)
    kept = ("versions", "machine", "disk", "load_average_at_start")
    arms: dict[str, Any] = {}
    for name in settings.arms:
        arms[name] = {}
        if name != BASE:
            extra = extra_config(name, settings, home)
            extra.pop("targets")
            arms[name] = {"kv_offloading_size": settings.staging_gib, "extra_config": extra}
    shape = settings.shape
    model = {"parameters": shape.parameters, "kv_bytes_per_token": shape.kv_bytes_per_token}
    return {
        **{name: common[name] for name in kept},
        "settings": asdict(settings),
        "gpu_tokens": (settings.gpu_blocks - 1) * 32,
        "model": model,
        "arms": arms,
    }


def _load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


@contextlib.contextmanager
def _home(directory: Path, settings: Settings) -> Iterator[Path]:
    """A new directory inside `directory`, which is deleted with all that is in it."""
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        home = Path(tempfile.mkdtemp(prefix="vllm-nvmeof-cost-", dir=directory.resolve()))
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


@contextlib.contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """No garbage collection inside a measurement."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
