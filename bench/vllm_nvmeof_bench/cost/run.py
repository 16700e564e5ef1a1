# SPDX-License-Identifier: Apache-2.0
"""One run: the servers of all arms side by side, every round all cases and arms in turn.

The order of the arms within a case is drawn from the seed, round by round. The arms of a round
are compared with each other alone: they were measured within seconds, with the same prompts.

Model and pools lie in one directory of ours inside the one given, and are deleted at the end,
on Ctrl-C and SIGTERM too. The servers' logs stay where a run failed.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.cost.fleet import Fleet, extra_config
from vllm_nvmeof_bench.cost.measure import idle_shares, measure
from vllm_nvmeof_bench.cost.samples import Sample
from vllm_nvmeof_bench.cost.settings import BASE, CASES, Settings
from vllm_nvmeof_bench.home import drop_logs, home_in, quiet_interpreter
from vllm_nvmeof_bench.pool import conditions as pool_conditions
from vllm_nvmeof_bench.pool.settings import Settings as PoolSettings

__all__ = ["run"]

#: Rounds of warming up have numbers of their own, so that their prompts do too.
_WARM_UP = 1_000_000


def run(
    settings: Settings,
    directory: Path,
    logs: Path,
    on_progress: OnProgress = lambda done, total, what: None,
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the conditions.

    Raises:
        BenchError: too little space, a server that does not start, or one that failed.
    """
    total = settings.pairs * len(CASES) * len(settings.arms)
    with home_in(directory, settings.disk_bytes_max) as home, quiet_interpreter():
        conditions = _conditions(settings, home)
        with Fleet(settings, home, logs, lambda what: on_progress(0, total, what)) as fleet:
            samples = _rounds(fleet, settings, conditions, on_progress, total)
            conditions["load_average_at_end"] = _load()
    drop_logs(logs, settings.arms)
    return samples, conditions


def _rounds(
    fleet: Fleet,
    settings: Settings,
    conditions: dict[str, Any],
    on_progress: OnProgress,
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
