# SPDX-License-Identifier: Apache-2.0
"""The part "resume": what a preempted request waits, reloading its KV or recomputing it.

The demo's crowd, which its GPU cache cannot hold, with another seed each round and the same on
both servers. `demo.workload.resume_times_s` says what a client sees of a resume.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.demo.workload import Plan, offload_spec, run_crowd, server_spec
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.servers.client import Client
from vllm_nvmeof_bench.servers.model import ModelShape, make_model
from vllm_nvmeof_bench.servers.server import Server
from vllm_nvmeof_bench.tier.samples import Sample
from vllm_nvmeof_bench.tier.serving import Agreement, Tell, served
from vllm_nvmeof_bench.tier.settings import Settings

__all__ = ["measure_resume", "steps"]

_ARMS = ("recompute", "reload")
_RELOADED = "vllm:nvmeof_reloaded_tokens_total"


def steps(settings: Settings) -> int:
    return settings.server_rounds * len(_ARMS)


def measure_resume(
    settings: Settings, home: Path, tell: Tell
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples, and what the crowds met.

    Raises:
        BenchError: a crowd was not preempted.
        OffloadError: a server or a request failed.
    """
    plan, shape = Plan(), ModelShape()
    plain = server_spec(plan, make_model(settings.models.resolve(), shape))
    samples: list[Sample] = []
    preemptions: dict[str, int] = {}
    agreement = Agreement()
    for arm in _ARMS:
        target = home / "resume-pool"
        offload = offload_spec(plan, shape, target) if arm == "reload" else None
        with served(replace(plain, offload=offload), f"resume {arm}", home, tell) as server:
            crowds = asyncio.run(_crowds(server, arm, plan, settings, agreement, tell))
        found, preemptions[arm] = crowds
        if not found:
            raise BenchError(f"resume, {arm}: no preemption that a client can see")
        samples += found
    return samples, {
        "preemptions": preemptions,
        "requests": plan.crowd.count,
        "prompt_tokens": plan.crowd.prompt_tokens,
        "gpu_tokens": plan.gpu_tokens,
        "hidden": shape.hidden,
        "layers": shape.layers,
        "answers": agreement.facts(),
    }


async def _crowds(
    server: Server, arm: str, plan: Plan, settings: Settings, agreement: Agreement, tell: Tell
) -> tuple[list[Sample], int]:
    samples, preemptions = [], 0
    async with Client(server.url) as client:
        await client.complete([5, 6, 7], 4)  # takes what only a first request costs
        for number in range(settings.server_rounds):
            tell(f"resume · round {number + 1} · a crowd that preempts · {arm}")
            crowd = replace(plan.crowd, seed=plan.crowd.seed + 100 * settings.seed + number)
            before = await client.metrics()
            result = await run_crowd(client, replace(plan, crowd=crowd), ModelShape())
            grown = (await client.metrics()).value(_RELOADED) - before.value(_RELOADED)
            each = round(grown / max(1, result.preemptions))
            preemptions += result.preemptions
            for index, answer in enumerate(result.answers):
                agreement.add(f"{number} {index}", answer)
            samples += [
                Sample("resume", "crowd", arm, None, number, i, round(s, 6), loaded_tokens=each)
                for i, s in enumerate(result.resumes_s)
            ]
    return samples, preemptions
