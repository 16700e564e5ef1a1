# SPDX-License-Identifier: Apache-2.0
"""The part "admission": is a returning prompt loaded where that is sooner, and only there?

The same prompts return, one at a time, to three servers: one without offloading computes them,
one always loads them, one decides. All three run side by side and are asked in turn. The
targets are throttled to several rates, in an order drawn from the seed; at each rate, in each
round, some requests pass before any is measured: those the server has for learning that the
rate has changed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import ExitStack
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
from vllm_nvmeof_bench.tier.targets import throttle_name

__all__ = ["measure_admission", "steps"]

_PLAN = ReturnPlan(count=12, tier_prompts=4.0)
_ARMS: dict[str, dict[str, Any] | None] = {
    "never": None,
    "always": {"admission": "always"},
    "auto": {"admission": "auto"},
}


def steps(settings: Settings) -> int:
    return settings.server_rounds * (1 + 2 * len(settings.admission_mb_per_s))


def measure_admission(
    settings: Settings, home: Path, tell: Tell
) -> tuple[list[Sample], dict[str, Any]]:
    """Measure; return the samples and the configuration.

    Raises:
        OffloadError: a server or a request failed, or this machine cannot throttle.
    """
    samples: list[Sample] = []
    agreement = Agreement()
    with ExitStack() as running:
        throttle = running.enter_context(Throttle(home))
        arms = []
        for arm, extra in _ARMS.items():
            target = None if extra is None else home / f"admission-{arm}"
            spec = _PLAN.server(settings.models, target, extra)
            server = running.enter_context(served(spec, f"admission {arm}", home, tell))
            arms.append(_Arm(server, arm, settings, agreement))
        samples = asyncio.run(_run(arms, throttle, settings, tell))
        kind = throttle.kind
    return samples, {
        "throttle": kind,
        "prompts": _PLAN.count,
        "prompt_tokens": _PLAN.prompt_tokens,
        "tier_prompts": _PLAN.tier_prompts,
        "kv_bytes_per_token": SHAPE.kv_bytes_per_token,
        "answers": agreement.facts(),
    }


async def _run(
    arms: list[_Arm], throttle: Throttle, settings: Settings, tell: Tell
) -> list[Sample]:
    samples: list[Sample] = []
    for arm in arms:
        tell(f"admission · computing everything once, {arm.name}")
        await arm.prepare(throttle)
    for number in range(settings.server_rounds):
        dice = random.Random(f"{settings.seed} {number}")
        for place, rate in enumerate(
            dice.sample(settings.admission_mb_per_s, len(settings.admission_mb_per_s))
        ):
            throttle.limit(read_bytes_per_s=rate * MB or None)
            for arm in dice.sample(arms, len(arms)):
                if arm.offloads or not place:  # computing does not depend on the rate
                    tell(f"admission · round {number + 1} · {throttle_name(rate)} · {arm.name}")
                    samples += await arm.batch(number, rate if arm.offloads else None)
    return samples


class _Arm:
    """One arm: its server and where in the circle of prompts it is."""

    def __init__(self, server: Server, name: str, settings: Settings, agreement: Agreement) -> None:
        self.name = name
        self.offloads = name != "never"
        self._server = server
        self._settings = settings
        self._agreement = agreement
        self._prompts = _PLAN.prompts(settings.seed)
        self._circle = itertools.cycle(range(_PLAN.count))

    async def prepare(self, throttle: Throttle) -> None:
        """Compute and store everything once."""
        async with Client(self._server.url) as client:
            for _ in range(_PLAN.count):
                await self._ask(client)
            await settle(client, self.offloads)
        if self.offloads:
            throttle.add_group(self._server.pid)

    async def batch(self, number: int, at: float | None) -> list[Sample]:
        """Requests at one rate; the first of them are not kept."""
        async with Client(self._server.url) as client:
            for _ in range(self._settings.warm_requests):
                await self._ask(client)
            before = await loaded_tokens(client)
            times = [await self._ask(client) for _ in range(self._settings.requests)]
            each = round((await loaded_tokens(client) - before) / len(times))
        return [
            Sample("admission", "ttft", self.name, at, number, i, round(s, 6), loaded_tokens=each)
            for i, s in enumerate(times)
        ]

    async def _ask(self, client: Client) -> float:
        """The next prompt of the circle; seconds to its first token."""
        index = next(self._circle)
        answer = await client.complete(self._prompts[index], _PLAN.answer_tokens)
        self._agreement.add(str(index), answer)
        return answer.ttft_s
