# SPDX-License-Identifier: Apache-2.0
"""The part "admission": is a returning prompt loaded where that is sooner, and only there?

The same prompts return, one at a time, to three servers: one without offloading computes them,
one always loads them, one decides. The target is throttled to several rates, in an order drawn
from the seed; at each rate, in each round, some requests pass before any is measured: those the
server has for learning that the rate has changed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

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
from vllm_nvmeof_offload.demo.client import Client
from vllm_nvmeof_offload.demo.server import Server

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
    kind = ""
    for arm, extra in _ARMS.items():
        target = None if extra is None else home / f"admission-{arm}"
        spec = _PLAN.server(settings.models, target, extra)
        with Throttle(home) as throttle, served(spec, f"admission {arm}", home, tell) as server:
            kind = throttle.kind
            one = _Server(server, throttle, arm, settings, agreement)
            samples += asyncio.run(one.run(tell))
    return samples, {
        "throttle": kind,
        "prompts": _PLAN.count,
        "prompt_tokens": _PLAN.prompt_tokens,
        "tier_prompts": _PLAN.tier_prompts,
        "kv_bytes_per_token": SHAPE.kv_bytes_per_token,
        "answers": agreement.facts(),
    }


class _Server:
    """One arm: its server and where in the circle of prompts it is."""

    def __init__(
        self,
        server: Server,
        throttle: Throttle,
        arm: str,
        settings: Settings,
        agreement: Agreement,
    ) -> None:
        self._server = server
        self._throttle = throttle
        self._arm = arm
        self._settings = settings
        self._agreement = agreement
        self._prompts = _PLAN.prompts(settings.seed)
        self._circle = itertools.cycle(range(_PLAN.count))

    async def run(self, tell: Tell) -> list[Sample]:
        offloads = self._arm != "never"
        rates = self._settings.admission_mb_per_s if offloads else (0,)
        samples: list[Sample] = []
        async with Client(self._server.url) as client:
            tell(f"admission · computing everything once, {self._arm}")
            for _ in range(_PLAN.count):
                await self._ask(client)
            await settle(client, offloads)
            if offloads:
                self._throttle.add_group(self._server.pid)
            for number in range(self._settings.server_rounds):
                dice = random.Random(f"{self._settings.seed} {number}")
                for rate in dice.sample(rates, len(rates)):
                    what = throttle_name(rate)
                    tell(f"admission · round {number + 1} · {what} · {self._arm}")
                    self._throttle.limit(read_bytes_per_s=rate * MB or None)
                    samples += await self._batch(client, number, rate if offloads else None)
        return samples

    async def _batch(self, client: Client, number: int, at: float | None) -> list[Sample]:
        for _ in range(self._settings.warm_requests):
            await self._ask(client)
        before = await loaded_tokens(client)
        times = [await self._ask(client) for _ in range(self._settings.requests)]
        each = round((await loaded_tokens(client) - before) / len(times))
        return [
            Sample("admission", "ttft", self._arm, at, number, i, round(s, 6), loaded_tokens=each)
            for i, s in enumerate(times)
        ]

    async def _ask(self, client: Client) -> float:
        """The next prompt of the circle; seconds to its first token."""
        index = next(self._circle)
        answer = await client.complete(self._prompts[index], _PLAN.answer_tokens)
        self._agreement.add(str(index), answer)
        return answer.ttft_s
