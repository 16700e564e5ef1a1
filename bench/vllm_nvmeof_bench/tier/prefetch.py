# SPDX-License-Identifier: Apache-2.0
"""The part "prefetch": requests that wait in vLLM's queue, their KV in a throttled pool only.

The server runs one request at a time. In each round the next prompts of a circle are sent at
once; while one is answered the others' KV could come. A request's turn begins when the one
before has its last token, and is over with its own first token. The circle is too large for
GPU and CPU memory, so that a prompt that returns is always in the pool alone.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_nvmeof_bench.servers.client import Client
from vllm_nvmeof_bench.servers.server import Server
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_bench.tier.samples import Sample
from vllm_nvmeof_bench.tier.serving import (
    SHAPE,
    Agreement,
    ReturnPlan,
    Tell,
    loaded_tokens,
    served,
    settle,
)
from vllm_nvmeof_bench.tier.settings import MB, Settings

__all__ = ["measure_prefetch", "steps"]

_AT_ONCE = 6
_PLAN = ReturnPlan(count=18, tier_prompts=8.2, answer_tokens=64)
_ARMS: dict[str, dict[str, Any]] = {
    "off": {"prefetch_cache_share": 0.0, "reload_cache_share": 0.0},
    "on": {},
}
#: Of the computed answers that those with loaded KV are compared with.
_FIRST_TOKENS = 8
_PREFETCHES = "vllm:nvmeof_prefetches_total"


def steps(settings: Settings) -> int:
    return settings.server_rounds * len(_ARMS)


def measure_prefetch(
    settings: Settings, home: Path, tell: Tell
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples, and what was fetched.

    Raises:
        OffloadError: a server or a request failed, or this machine cannot throttle.
    """
    samples: list[Sample] = []
    agreement = Agreement()
    prefetched: dict[str, int] = {}
    kind = ""
    for arm, extra in _ARMS.items():
        # Loads alone are compared here: no arm may find that computing is sooner.
        keys = {"admission": "always", **extra}
        spec = _PLAN.server(settings.models, home / f"prefetch-{arm}", keys)
        with Throttle(home) as throttle, served(spec, f"prefetch {arm}", home, tell) as server:
            kind = throttle.kind
            measured = _rounds(server, throttle, arm, settings, agreement, tell)
            found, prefetched[arm] = asyncio.run(measured)
        samples += found
    return samples, {
        "throttle": kind,
        "read_mb_per_s": settings.prefetch_mb_per_s,
        "prompts": _PLAN.count,
        "sent_at_once": _AT_ONCE,
        "prompt_tokens": _PLAN.prompt_tokens,
        "answer_tokens": _PLAN.answer_tokens,
        "tier_prompts": _PLAN.tier_prompts,
        "kv_bytes_per_token": SHAPE.kv_bytes_per_token,
        "prefetched_chunks": prefetched,
        "answers": agreement.facts(),
    }


async def _rounds(
    server: Server,
    throttle: Throttle,
    arm: str,
    settings: Settings,
    agreement: Agreement,
    tell: Tell,
) -> tuple[list[Sample], int]:
    prompts = _PLAN.prompts(settings.seed)
    samples: list[Sample] = []
    async with Client(server.url) as client:
        tell(f"prefetch · computing everything once, {arm}")
        for index, prompt in enumerate(prompts):
            agreement.add(str(index), await client.complete(prompt, _FIRST_TOKENS))
        await settle(client, offloads=True)
        throttle.add_group(server.pid)
        throttle.limit(read_bytes_per_s=settings.prefetch_mb_per_s * MB)
        for number in range(settings.server_rounds):
            tell(f"prefetch · round {number + 1} · {_AT_ONCE} requests at once · {arm}")
            first = number * _AT_ONCE
            chosen = [(first + i) % len(prompts) for i in range(_AT_ONCE)]
            before = await loaded_tokens(client)
            sent = (client.complete(prompts[i], _PLAN.answer_tokens) for i in chosen)
            answers = await asyncio.gather(*sent)
            each = round((await loaded_tokens(client) - before) / _AT_ONCE)
            for index, answer in zip(chosen, answers, strict=True):
                agreement.add(str(index), answer)
            ordered = sorted(answers, key=lambda answer: answer.times[0])
            turns = [right.times[0] - left.times[-1] for left, right in pairwise(ordered)]
            samples += [
                Sample("prefetch", "turn", arm, None, number, i, round(s, 6), loaded_tokens=each)
                for i, s in enumerate(turns)
            ]
            total = max(one.times[-1] for one in answers) - min(one.sent for one in answers)
            samples.append(
                Sample(
                    "prefetch", "total", arm, None, number, 0, round(total, 6), loaded_tokens=each
                )
            )
        prefetched = int((await client.metrics()).value(_PREFETCHES))
    return samples, prefetched
