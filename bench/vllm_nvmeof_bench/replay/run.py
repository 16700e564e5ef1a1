# SPDX-License-Identifier: Apache-2.0
"""One run: each arm gets the same sessions, at the same pace, one arm after the other."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.home import drop_logs, home_in
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.replay.samples import Sample
from vllm_nvmeof_bench.replay.settings import Settings
from vllm_nvmeof_bench.replay.users import Replay
from vllm_nvmeof_bench.serve.arms import Arm, Sizes, arms_of
from vllm_nvmeof_bench.serve.fleet import ServeFleet, conditions_of
from vllm_nvmeof_bench.traces.model import Trace
from vllm_nvmeof_bench.traces.read import read_trace

__all__ = ["run", "trace_of"]

_NUDGE = (5, 6, 7)
_SPARE_BYTES = 1 << 30
#: Nothing is started by these.
_ANY = Sizes(working_tokens=1, request_tokens_max=1, gpu_tokens=1)


def trace_of(settings: Settings, path: Path) -> Trace:
    """The part of the trace that is replayed.

    Raises:
        BenchError: it cannot be read, or nothing of it is left.
    """
    trace = read_trace(path)
    trace = trace.scaled(settings.block_tokens or trace.block_tokens)
    trace = trace.capped(settings.context_tokens_max)
    if settings.sessions is not None:
        dice = random.Random(settings.pace.seed)
        count = min(settings.sessions, len(trace.sessions))
        chosen = sorted(dice.sample(range(len(trace.sessions)), count))
        trace = replace(trace, sessions=tuple(trace.sessions[number] for number in chosen))
    if not trace.sessions:
        raise BenchError(
            f"{path}: no session begins with less than {settings.context_tokens_max} tokens"
        )
    return trace


def run(
    settings: Settings,
    trace_path: Path,
    directory: Path,
    logs: Path,
    on_progress: OnProgress = lambda done, total, what: None,
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the conditions.

    Raises:
        BenchError: the trace cannot be read, a server does not start or does not answer.
    """
    arms = arms_of(settings.arms, settings.base_urls)
    on_progress(0, 0, "reading the trace")
    trace = trace_of(settings, trace_path)
    sizes = _sizes(settings, trace, arms)
    with home_in(directory, _disk_bytes(arms, sizes)) as home:
        conditions = conditions_of(arms, sizes, home)
        conditions["settings"] = {**asdict(settings), "trace": trace.name}
        conditions["sessions"] = len(trace.sessions)
        conditions["requests"] = sum(1 for _ in trace.requests())
        conditions["block_tokens"] = trace.block_tokens
        tell = partial(on_progress, 0, 0)
        with ServeFleet(arms, sizes or _ANY, home, logs, tell) as fleet:
            samples = _replays(fleet, trace, settings, conditions, on_progress)
        conditions["load_average_at_end"] = [round(one, 2) for one in os.getloadavg()]
    drop_logs(logs, [arm.name for arm in arms if arm.url is None])
    return samples, conditions


def _replays(
    fleet: ServeFleet,
    trace: Trace,
    settings: Settings,
    conditions: dict[str, Any],
    on_progress: OnProgress,
) -> list[Sample]:
    samples: list[Sample] = []
    conditions["hits"], conditions["working_set_tokens"] = {}, {}
    for number, arm in enumerate(fleet.arms):
        client = fleet.clients[arm.name]

        def tell(done: int, name: str = arm.name, number: int = number) -> None:
            on_progress(number, len(fleet.arms), f"{name} · {done} requests")

        tell(0)
        before = fleet.run(client.hits(_NUDGE))
        replay = Replay(arm.name, client, trace, settings.pace, settings.vocabulary, tell)
        fleet.run(replay.run(settings.duration_s))
        after = fleet.run(client.hits(_NUDGE))
        conditions["hits"][arm.name] = asdict(after - before)
        conditions["working_set_tokens"][arm.name] = len(replay.asked) * trace.block_tokens
        samples += replay.samples
    on_progress(len(fleet.arms), len(fleet.arms), "done")
    return samples


def _sizes(settings: Settings, trace: Trace, arms: Sequence[Arm]) -> Sizes | None:
    """Of servers that are started here; None if there are none."""
    if all(arm.url is not None for arm in arms):
        return None
    longest = max(one.input_tokens + one.output_tokens for one in trace.requests())
    answers = sum(one.output_tokens for one in trace.requests())
    sizes = Sizes(
        working_tokens=trace.unique_tokens() + answers,
        request_tokens_max=longest,
        gpu_tokens=max(settings.gpu_tokens, longest + 64),
        third_tokens=settings.third_tokens,
        max_num_seqs=max(16, settings.pace.users),
        target_mb_per_s=settings.target_mb_per_s,
    )
    if settings.vocabulary.high > sizes.shape.vocab:
        raise BenchError(
            f"token ids up to {settings.vocabulary.high}: the model that is started here has "
            f"{sizes.shape.vocab}"
        )
    return sizes


def _disk_bytes(arms: Sequence[Arm], sizes: Sizes | None) -> int:
    if sizes is None:
        return 0
    return _SPARE_BYTES + sizes.pool_bytes * sum(arm.pool for arm in arms)
