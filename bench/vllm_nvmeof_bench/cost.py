# SPDX-License-Identifier: Apache-2.0
"""`bench cost`: the cost of offloading where it cannot help, measured on real servers.

Arms, each a separate `vllm serve`:

    none               without offloading
    ours               with default settings: chunks of prompts and of generated tokens are
                       stored in the CPU tier and written through to a pool
    ours_prompt_only   as ours, with `offload_prompt_only: true`

Cases, with prompts that no server has seen before:

    single   one request with a prompt of many chunks and few generated tokens
    batch    concurrent requests with short prompts, so that nearly all steps are decode steps

The model has 32 KiB of KV per token, so that a chunk is one block of 32 tokens, 1 MiB: close to
a model of 8 B parameters on a GPU. The cost depends on the number of chunks, which is large.

All servers run at the same time, and requests are sent to one at a time. Every round measures all
cases and arms in random order. Only arms of the same round are compared, because they are measured
within seconds of each other, with the same prompts.

vLLM publishes its connector's counters with the next step that computes something. Each reading of
the counters therefore follows a short request that is excluded from the measured times.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench import conditions
from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.home import OnProgress, drop_logs, home_in, progress, quiet_interpreter
from vllm_nvmeof_bench.reports.cost import ARMS, BASE, CASES, OURS, PROMPT_ONLY, Sample
from vllm_nvmeof_bench.results import BenchError, dump
from vllm_nvmeof_bench.serve.fleet import Fleet, serving
from vllm_nvmeof_bench.servers.client import Client
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, random_tokens
from vllm_nvmeof_bench.servers.server import (
    BLOCK_TOKENS,
    OffloadSpec,
    ServerSpec,
    group_cpu_s,
    on_blocks,
)
from vllm_nvmeof_bench.settings import check_names, check_positive, option, recorded
from vllm_nvmeof_offload.commands.scrape import Metrics
from vllm_nvmeof_offload.units import GIB

#: The GPU cache holds this many times the tokens of concurrent requests.
_ROOM = 4
_MODEL_BYTES = GIB // 2
#: The first number of the warm-up rounds, whose prompts thus differ from those of other rounds.
_WARM_UP = 1_000_000


@dataclass(frozen=True)
class Settings:
    """One run. warm_ups: rounds before the measured ones, to exclude the cost of first requests.

    staging_gib, pool_bytes: for each server that offloads. They are far below the defaults, with
    which several servers would not fit on one machine. idle_s: how long the CPU use of idle servers
    is measured.
    """

    directory: Path = option(
        Path("build/bench/disk"), "Directory for model and pools.", flag="--dir"
    )
    arms: tuple[str, ...] = option((BASE, OURS, PROMPT_ONLY), f"Servers: {','.join(ARMS)}.")
    pairs: int = option(20, "Rounds, each measuring every server.", min=1)
    seed: int = option(1, "Seed for prompts and order.")
    warm_ups: int = 2
    single_prompt_tokens: int = 1024
    single_answer_tokens: int = 16
    batch_requests: int = 8
    batch_prompt_tokens: int = 64
    batch_answer_tokens: int = 96
    staging_gib: float = 1.0
    pool_bytes: int = 2 * GIB
    idle_s: float = 5.0
    shape: ModelShape = field(default_factory=lambda: ModelShape(kv_heads=8))

    def __post_init__(self) -> None:
        check_names("arm", self.arms, ARMS)
        if BASE not in self.arms or len(set(self.arms)) < 2:
            raise BenchError(f"nothing to compare: give {BASE} and at least one other arm")
        check_positive(self, "pairs")

    def sizes_of(self, case: str) -> tuple[int, int, int]:
        """Return concurrent requests, tokens per prompt, and tokens per answer."""
        if case == "single":
            return 1, self.single_prompt_tokens, self.single_answer_tokens
        return self.batch_requests, self.batch_prompt_tokens, self.batch_answer_tokens

    @property
    def tokens_at_once(self) -> int:
        """The most tokens that concurrent requests occupy in any case."""
        sizes = map(self.sizes_of, CASES)
        return max(count * (prompt + answer) for count, prompt, answer in sizes)

    @property
    def model_len(self) -> int:
        sizes = map(self.sizes_of, CASES)
        return on_blocks(max(prompt + answer for _, prompt, answer in sizes) + 1)

    @property
    def gpu_blocks(self) -> int:
        return _ROOM * on_blocks(self.tokens_at_once) // BLOCK_TOKENS + 1

    @property
    def disk_bytes_max(self) -> int:
        """The most disk space used at any time, by the model and the pools."""
        return _MODEL_BYTES + (len(self.arms) - 1) * self.pool_bytes


# -- CPU time of a process group --------------------------------------------------------

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WINDOW_S = 0.25
#: An idle server's timers may cost a tick in each of two processes.
_QUIET_TICKS = 2
_QUIET_S_MAX = 120.0


def wait_until_quiet(
    cpu_s: Callable[[], float],
    now_s: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until `cpu_s` hardly grows any more; return the seconds that passed before that.

    Writes after the last token, and engine steps that wait for reports of these writes, still
    belong to the measured requests. vLLM's processes spin for a second after their last step, with
    offloading and without.

    Raises:
        BenchError: the server is still working after `_QUIET_S_MAX`.
    """
    start_s, before = now_s(), cpu_s()
    while True:
        window_start_s = now_s()
        sleep(_WINDOW_S)
        after = cpu_s()
        if after - before <= _QUIET_TICKS / _TICKS_PER_S:
            return window_start_s - start_s
        if now_s() - start_s > _QUIET_S_MAX:
            raise BenchError(
                f"a server still uses {(after - before) / _WINDOW_S:.0%} of a core "
                f"{_QUIET_S_MAX:.0f} s after its last token"
            )
        before = after


# -- servers ----------------------------------------------------------------------------


def extra_config(arm: str, settings: Settings, target: Path) -> dict[str, Any]:
    """Return the `kv_connector_extra_config` of an arm that offloads."""
    extra: dict[str, Any] = {"targets": [str(target)], "pool_bytes": settings.pool_bytes}
    return extra | ({"offload_prompt_only": True} if arm == PROMPT_ONLY else {})


def server_spec(arm: str, settings: Settings, model: Path, home: Path) -> ServerSpec:
    offload = None
    if arm != BASE:
        offload = OffloadSpec(settings.staging_gib, extra_config(arm, settings, home / arm))
    return ServerSpec(
        model, settings.model_len, settings.gpu_blocks, cores_reserved=0, offload=offload
    )


def cpu_s_of(fleet: Fleet) -> dict[str, float]:
    """Return each server's CPU seconds so far, by arm."""
    return {arm: group_cpu_s(server.pid) for arm, server in fleet.servers.items()}


# -- one sample -------------------------------------------------------------------------

_HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")


def prompts_of(settings: Settings, case: str, number: int) -> list[list[int]]:
    """Return a round's prompts: the same ones for every arm, other ones in every round."""
    dice = np.random.default_rng([settings.seed, CASES.index(case), number])
    count, length, _ = settings.sizes_of(case)
    return [random_tokens(dice, length, settings.shape) for _ in range(count)]


async def ask(
    client: Client, prompts: Sequence[Sequence[int]], answer_tokens: int
) -> tuple[float, float]:
    """Send all prompts at once; return the seconds to the first token (median) and to the last.

    Raises:
        BenchError: a request failed or an answer is incomplete.
    """
    start_s = time.perf_counter()
    asked = (client.attempt(prompt, answer_tokens) for prompt in prompts)
    answers = await asyncio.gather(*asked)
    for answer in answers:
        if answer.failure is not None:
            raise BenchError(f"a request failed: {answer.failure}")
    first_s = statistics.median(answer.times[0] for answer in answers)
    return first_s - start_s, max(answer.times[-1] for answer in answers) - start_s


def _measure(fleet: Fleet, settings: Settings, arm: str, case: str, number: int) -> Sample:
    """Send the requests of `case` to the server of `arm` while the other servers are idle."""
    for name, server in fleet.servers.items():
        if not server.running:
            raise BenchError(f"arm {name}: its server has exited; see {server.log_path}")
    prompts, (_, _, answer) = prompts_of(settings, case, number), settings.sizes_of(case)
    before = _counters(fleet, arm)
    wait_until_quiet(lambda: sum(cpu_s_of(fleet).values()))
    cpu_before = cpu_s_of(fleet)
    ttft_s, seconds = fleet.run(ask(fleet.clients[arm], prompts, answer))
    quiet_after_s = wait_until_quiet(lambda: cpu_s_of(fleet)[arm])
    cpu = {name: now - cpu_before[name] for name, now in cpu_s_of(fleet).items()}
    after = _counters(fleet, arm)

    def grown(name: str) -> int:
        return round(after.value(name) - before.value(name))

    def seconds_of(name: str) -> float | None:
        """Return the counted seconds; None if there is no such counter or it did not grow."""
        full = f"vllm:nvmeof_{name}_seconds_total"
        return (after.value(full) - before.value(full)) or None

    return Sample(
        arm=arm,
        case=case,
        round=number,
        ttft_s=ttft_s,
        seconds=seconds,
        answer_tokens=answer * len(prompts),
        tokens=sum(len(prompt) + answer for prompt in prompts),
        cpu_s=cpu.pop(arm),
        others_cpu_s=sum(cpu.values()),
        quiet_after_s=quiet_after_s,
        stored_bytes=grown("vllm:kv_offload_store_bytes_total"),
        loaded_bytes=grown("vllm:kv_offload_load_bytes_total"),
        written_bytes=grown("vllm:nvmeof_target_written_bytes_total"),
        hits=sum(grown(name) for name in _HITS),
        preemptions=grown("vllm:num_preemptions_total"),
        scheduler_s=seconds_of("scheduler"),
        scheduler_steps=grown("vllm:nvmeof_scheduler_steps_total") or None,
        step_s=seconds_of("step"),
        step_tokens=grown("vllm:nvmeof_step_tokens_total") or None,
    )


def _idle_shares(fleet: Fleet, settings: Settings) -> dict[str, float]:
    """Return how many cores' CPU time each server uses while it receives no requests."""
    wait_until_quiet(lambda: sum(cpu_s_of(fleet).values()))
    before, start_s = cpu_s_of(fleet), time.perf_counter()
    time.sleep(settings.idle_s)
    after, seconds = cpu_s_of(fleet), time.perf_counter() - start_s
    return {arm: round((after[arm] - before[arm]) / seconds, 4) for arm in before}


def _counters(fleet: Fleet, arm: str) -> Metrics:
    """Return the server's counters, up to date."""
    metrics: Metrics = fleet.run(fleet.clients[arm].counted())
    if not metrics.has("vllm:prompt_tokens_total"):
        raise BenchError(f"arm {arm}: the server's /metrics cannot be read")
    return metrics


# -- the run ----------------------------------------------------------------------------


def _rounds(
    fleet: Fleet, settings: Settings, found: dict[str, Any], on_progress: OnProgress
) -> list[Sample]:
    """Warm up, measure idle servers, and run the rounds. found: conditions, which are extended."""
    total = settings.pairs * len(CASES) * len(settings.arms)
    for number in range(settings.warm_ups):
        for case in CASES:
            for arm in settings.arms:
                on_progress(0, total, f"warming up · {case} · {arm}")
                _measure(fleet, settings, arm, case, _WARM_UP + number)
    on_progress(0, total, "measuring idle servers")
    found["idle_cores"] = _idle_shares(fleet, settings)
    samples: list[Sample] = []
    for number in range(settings.pairs):
        for case in CASES:
            for arm in fleet.shuffled(f"{settings.seed} {number} {case}"):
                on_progress(len(samples), total, f"round {number + 1} · {case} · {arm}")
                gc.collect()
                samples.append(_measure(fleet, settings, arm, case, number))
    return samples


def _conditions(settings: Settings, home: Path) -> dict[str, Any]:
    """Return versions, machine, disk, and the configuration of each arm."""
    arms: dict[str, Any] = {BASE: {}}
    for name in settings.arms:
        if name != BASE:
            extra = extra_config(name, settings, home)
            del extra["targets"]
            arms[name] = {"kv_offloading_size": settings.staging_gib, "extra_config": extra}
    model = {name: getattr(settings.shape, name) for name in ("parameters", "kv_bytes_per_token")}
    return {
        **conditions.at_start(home),
        "settings": recorded(settings),
        "gpu_tokens": (settings.gpu_blocks - 1) * BLOCK_TOKENS,
        "model": model,
        "arms": arms,
    }


def measure(settings: Settings, json_path: Path) -> None:
    """Run the benchmark and write the JSON file; keep the servers' logs next to it on failure.

    Raises:
        BenchError: there is too little space, or a server failed or did not start.
    """
    logs = json_path.parent / "cost-logs"
    with (
        progress() as on_progress,
        home_in(settings.directory, settings.disk_bytes_max) as home,
        quiet_interpreter(),
    ):
        found = _conditions(settings, home)
        on_progress(0, 0, "making the model")
        model = make_model(home / "models", settings.shape)
        specs = {arm: server_spec(arm, settings, model, home) for arm in settings.arms}
        with serving(specs, logs, partial(on_progress, 0, 0), {}) as fleet:
            samples = _rounds(fleet, settings, found, on_progress)
        found["load_average_at_end"] = conditions.load_average()
    drop_logs(logs, settings.arms)
    dump(json_path, "cost", samples, found)


COMMANDS = (
    Command(
        "cost",
        """Measure what offloading costs when no lookup ever hits and everything fits.

        Starts a real `vllm serve` per arm, all at once, sends requests to one at a time, and
        compares each with the server without offloading, round by round. Takes about 10 minutes,
        6 GiB of memory and up to 5 GiB of disk, freed at the end. Nothing else should run then.
        """,
        Settings,
        measure,
    ),
)
