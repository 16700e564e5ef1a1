# SPDX-License-Identifier: Apache-2.0
"""Throughput against the share of prompts that were seen before: many unique prompts at once.

Every arm first gets the prompts that are to be found later, then its writes are waited for. A
measurement empties the GPU's prefix cache and sends `count` prompts at once; at a hit rate of
50 % every other one is of those. What is not has never been seen by any server.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.serve.arms import Sizes
from vllm_nvmeof_bench.serve.client import Client, Reply
from vllm_nvmeof_bench.serve.fleet import ServeFleet
from vllm_nvmeof_bench.serve.prompts import Tokens, nudge

__all__ = ["ARMS_DEFAULT", "HitSample", "Settings", "measure", "prompts_of"]

ARMS_DEFAULT = ("none", "full", "pool", "peer_full", "peer")
_SEQUENCES = 16


@dataclass(frozen=True)
class Settings:
    """count: prompts at once, of `prompt_tokens`. rates: per cent of them that were seen."""

    rates: tuple[int, ...] = (0, 25, 50, 75, 100)
    count: int = 32
    prompt_tokens: int = 512
    answer_tokens: int = 4
    rounds: int = 2
    seed: int = 1
    target_mb_per_s: int = 200
    server_args: str = ""

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 100 for rate in self.rates):
            raise BenchError("hit rates are per cent, from 0 to 100")
        if min(self.count, self.prompt_tokens, self.answer_tokens, self.rounds) < 1:
            raise BenchError("counts, tokens and rounds are at least 1")

    def sizes(self) -> Sizes:
        """Of servers that are started here. The GPU cache holds all that runs at once; a CPU tier
        of a third holds that much of what is to be found.
        """
        one = self.prompt_tokens + self.answer_tokens
        fresh = sum(self.count - round(self.count * rate / 100) for rate in self.rates)
        total = (self.count + fresh * self.rounds) * one
        at_once = min(self.count, _SEQUENCES) * -(-(one + 1) // 32) * 32
        return Sizes(
            total,
            one,
            at_once,
            third_tokens=self.count * one // 3,
            max_num_seqs=_SEQUENCES,
            target_mb_per_s=self.target_mb_per_s,
            server_args=self.server_args,
        )


@dataclass(frozen=True)
class HitSample:
    """One batch. seconds: from the first request to the last token. Tokens: of all prompts, of
    all answers, and of the prompts by where they were found.

    ttft_s: median. same, compared: answers to prompts seen before that equal the first arm's.
    """

    arm: str
    rate: int
    round: int
    requests: int
    failures: int
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float | None
    gpu: int
    cpu: int
    pool: int
    other: int
    same: int
    compared: int

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that were served, computed or not, and answers', a second."""
        return (self.prompt_tokens + self.answer_tokens) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.failures) / self.seconds


def prompts_of(
    settings: Settings, tokens: Tokens, rate: int, number: int
) -> list[tuple[str, list[int]]]:
    """(name, prompt) of one batch: the first `rate` per cent were seen, in a drawn order."""
    hits = round(settings.count * rate / 100)
    fresh = np.random.default_rng([settings.seed, 23, rate, number])
    batch = [(f"seen {i}", _seen(settings, tokens, i)) for i in range(hits)]
    batch += [
        (f"new {rate} {number} {i}", tokens.draw(fresh, settings.prompt_tokens))
        for i in range(settings.count - hits)
    ]
    random.Random(f"{settings.seed} {rate} {number}").shuffle(batch)
    return batch


def _seen(settings: Settings, tokens: Tokens, number: int) -> list[int]:
    rng = np.random.default_rng([settings.seed, 29, number])
    return tokens.draw(rng, settings.prompt_tokens)


def measure(
    fleet: ServeFleet,
    settings: Settings,
    tokens: Tokens,
    samples: list[HitSample],
    on_progress: OnProgress,
) -> dict[str, object]:
    """Add to `samples`, one after the other; return what is to go into the conditions.

    Raises:
        BenchError: a server does not settle, or does not empty its prefix cache.
    """
    arms = list(fleet.clients)
    total = settings.rounds * len(settings.rates) * len(arms)
    first: dict[str, Reply] = {}
    for arm in arms:
        on_progress(0, total, f"storing what is to be found · {arm}")
        stored = prompts_of(settings, tokens, 100, 0)
        replies = fleet.run(_all(fleet.clients[arm], stored, settings.answer_tokens))
        for (name, _), reply in zip(stored, replies, strict=True):
            first.setdefault(name, reply)
        fleet.run(fleet.clients[arm].settle(nudge(tokens)))
    emptied: dict[str, bool] = {}
    for number in range(settings.rounds):
        for rate in settings.rates:
            batch = prompts_of(settings, tokens, rate, number)
            dice = random.Random(f"{settings.seed} {number} {rate}")
            for arm in dice.sample(arms, len(arms)):
                on_progress(len(samples), total, f"round {number + 1} · {rate} % · {arm}")
                client = fleet.clients[arm]
                emptied[arm] = fleet.run(client.forget_gpu())
                one = fleet.run(_measure(client, settings, tokens, batch, first))
                samples.append(HitSample(arm=arm, rate=rate, round=number, **one))
                fleet.run(client.settle(nudge(tokens)))
    return {"gpu_cache_emptied": emptied}


async def _all(
    client: Client, batch: list[tuple[str, list[int]]], answer_tokens: int
) -> list[Reply]:
    return await asyncio.gather(*(client.complete(prompt, answer_tokens) for _, prompt in batch))


async def _measure(
    client: Client,
    settings: Settings,
    tokens: Tokens,
    batch: list[tuple[str, list[int]]],
    first: dict[str, Reply],
) -> dict[str, object]:
    before = await client.hits(nudge(tokens))
    start_s = time.perf_counter()
    replies = await _all(client, batch, settings.answer_tokens)
    seconds = time.perf_counter() - start_s
    hits = await client.hits(nudge(tokens)) - before
    whole = [reply for reply in replies if reply.failure is None]
    ttfts = [reply.ttft_s for reply in whole if reply.ttft_s is not None]
    known = [
        (first[name], reply)
        for (name, _), reply in zip(batch, replies, strict=True)
        if name in first and reply.failure is None
    ]
    return {
        "requests": len(replies),
        "failures": len(replies) - len(whole),
        "seconds": seconds,
        "prompt_tokens": sum(reply.tokens_in for reply in whole),
        "answer_tokens": sum(reply.tokens_out for reply in whole),
        "ttft_s": sorted(ttfts)[len(ttfts) // 2] if ttfts else None,
        "gpu": hits.gpu,
        "cpu": hits.cpu,
        "pool": hits.pool,
        "other": hits.other,
        "same": sum((a.tokens, a.text) == (b.tokens, b.text) for a, b in known),
        "compared": len(known),
    }
