# SPDX-License-Identifier: Apache-2.0
"""One sample: requests to one server, its CPU time until it is quiet, its counters.

vLLM publishes what its connector counted with the next step that computes something. So every
reading of the counters follows a short request of its own, whose prompt fills no block: nothing
of it is stored, and it lies outside the time and the CPU seconds that are taken.
"""

from __future__ import annotations

import time

import numpy as np

from vllm_nvmeof_bench.cost.cpu import wait_until_quiet
from vllm_nvmeof_bench.cost.fleet import Fleet
from vllm_nvmeof_bench.cost.samples import Sample
from vllm_nvmeof_bench.cost.settings import BLOCK_TOKENS, CASES, Settings
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.model import random_tokens

__all__ = ["idle_shares", "measure", "prompts_of"]

_HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
_FILLER_TOKENS = BLOCK_TOKENS // 2
_FILLER_ANSWER = 2


def prompts_of(settings: Settings, case: str, number: int) -> list[list[int]]:
    """The prompts of a round: the same for every arm, never the same in two rounds."""
    dice = np.random.default_rng([settings.seed, CASES.index(case), number])
    count, length = 1, settings.single_prompt_tokens
    if case == "batch":
        count, length = settings.batch_requests, settings.batch_prompt_tokens
    return [random_tokens(dice, length, settings.shape) for _ in range(count)]


def measure(fleet: Fleet, settings: Settings, arm: str, case: str, number: int) -> Sample:
    """Ask `arm`'s server what `case` asks for, while the others have nothing to do.

    Raises:
        BenchError: a server has ended, a request failed, or the server does not get quiet.
    """
    fleet.check()
    client = fleet.clients[arm]
    prompts = prompts_of(settings, case, number)
    answer = settings.batch_answer_tokens if case == "batch" else settings.single_answer_tokens
    before = _counters(fleet, settings, arm)
    wait_until_quiet(lambda: sum(fleet.cpu_s().values()))
    cpu_before = fleet.cpu_s()
    timed = fleet.run(client.ask(prompts, answer))
    quiet_after_s = wait_until_quiet(lambda: fleet.cpu_s()[arm])
    cpu = {name: now - cpu_before[name] for name, now in fleet.cpu_s().items()}
    after = _counters(fleet, settings, arm)

    def grown(name: str) -> int:
        return round(after.value(name) - before.value(name))

    def ours(name: str) -> float | None:
        """None for a counter that the server does not have, or never raises."""
        full = f"vllm:nvmeof_{name}_total"
        return (after.value(full) - before.value(full)) or None

    steps, step_tokens = ours("scheduler_steps"), ours("step_tokens")

    return Sample(
        arm=arm,
        case=case,
        round=number,
        ttft_s=timed.ttft_s,
        seconds=timed.seconds,
        answer_tokens=answer * len(prompts),
        tokens=sum(len(prompt) + answer for prompt in prompts),
        cpu_s=cpu.pop(arm),
        others_cpu_s=sum(cpu.values()),
        quiet_after_s=quiet_after_s,
        stored_bytes=grown("vllm:kv_offload_store_bytes_total"),
        loaded_bytes=grown("vllm:kv_offload_load_bytes_total"),
        written_bytes=grown("vllm:nvmeof_written_bytes_total"),
        hits=sum(grown(name) for name in _HITS),
        preemptions=grown("vllm:num_preemptions_total"),
        scheduler_s=ours("scheduler_seconds"),
        scheduler_steps=None if steps is None else round(steps),
        step_s=ours("step_seconds"),
        step_tokens=None if step_tokens is None else round(step_tokens),
    )


def idle_shares(fleet: Fleet, settings: Settings) -> dict[str, float]:
    """Cores that each server uses while nobody asks it anything."""
    wait_until_quiet(lambda: sum(fleet.cpu_s().values()))
    before, start_s = fleet.cpu_s(), time.perf_counter()
    time.sleep(settings.idle_s)
    after, seconds = fleet.cpu_s(), time.perf_counter() - start_s
    return {arm: round((after[arm] - before[arm]) / seconds, 4) for arm in before}


def _counters(fleet: Fleet, settings: Settings, arm: str) -> Metrics:
    """Everything that the server has counted up to now."""
    client = fleet.clients[arm]
    filler = random_tokens(np.random.default_rng(), _FILLER_TOKENS, settings.shape)
    fleet.run(client.ask([filler], _FILLER_ANSWER))
    metrics: Metrics = fleet.run(client.metrics())
    return metrics
