# SPDX-License-Identifier: Apache-2.0
"""Time to first token of one request against its prompt's length: computed, and brought back.

Every arm first gets every prompt once (phase "cold"); then the writes behind it are waited for.
In each round each prompt of that round returns once to each arm (phase "back"), one request at
a time, the arms in an order drawn from the seed, after the GPU's prefix cache was emptied. There
are as many prompts of each length as rounds, so that what returns has been pushed out of a CPU
tier that holds a third of it all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.serve.arms import Sizes
from vllm_nvmeof_bench.serve.client import Reply
from vllm_nvmeof_bench.serve.fleet import ServeFleet
from vllm_nvmeof_bench.serve.hits import Hits
from vllm_nvmeof_bench.serve.prompts import Tokens, nudge

__all__ = ["ARMS_DEFAULT", "Settings", "TtftSample", "measure"]

ARMS_DEFAULT = ("none", "full", "pool", "peer_full", "peer")
_ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Settings:
    """lengths: of prompts, in tokens. rounds: of everything that returns. seed: of the prompts."""

    lengths: tuple[int, ...] = (256, 1024, 4096)
    rounds: int = 3
    seed: int = 1
    target_mb_per_s: int = 200
    server_args: str = ""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise BenchError("lengths are numbers of tokens, at least one")
        if self.rounds < 1:
            raise BenchError("rounds are at least 1")

    def sizes(self) -> Sizes:
        """Of servers that are started here."""
        longest = max(self.lengths) + _ANSWER_TOKENS
        total = self.rounds * sum(length + _ANSWER_TOKENS for length in self.lengths)
        return Sizes(
            total,
            longest,
            longest + 64,
            target_mb_per_s=self.target_mb_per_s,
            server_args=self.server_args,
        )


@dataclass(frozen=True)
class TtftSample:
    """One request. Seconds; tokens of the prompt by where they were found; as `Hits` has them.

    same: whether the answer is the one that the first arm gave when it computed the prompt;
    None if one of the two failed.
    """

    arm: str
    phase: str
    length: int
    round: int
    ttft_s: float | None
    end_s: float
    gpu: int
    cpu: int
    pool: int
    other: int
    same: bool | None
    failure: str | None


def measure(
    fleet: ServeFleet,
    settings: Settings,
    tokens: Tokens,
    samples: list[TtftSample],
    on_progress: OnProgress,
) -> dict[str, object]:
    """Add to `samples`, one after the other; return what is to go into the conditions.

    Raises:
        BenchError: a server does not settle, or does not empty its prefix cache.
    """
    run = _Run(fleet, settings, tokens)
    total = 2 * len(fleet.arms) * settings.rounds * len(settings.lengths)
    for number in range(settings.rounds):
        for length in settings.lengths:
            for arm in run.order("cold", number, length):
                on_progress(len(samples), total, f"cold · {length} tokens · {arm}")
                samples.append(run.ask(arm, "cold", length, number))
    for arm in fleet.clients:
        fleet.run(fleet.clients[arm].settle(nudge(tokens)))
    emptied: dict[str, bool] = {}
    for number in range(settings.rounds):
        for length in settings.lengths:
            for arm in run.order("back", number, length):
                on_progress(len(samples), total, f"back · {length} tokens · {arm}")
                emptied[arm] = fleet.run(fleet.clients[arm].forget_gpu())
                samples.append(run.ask(arm, "back", length, number))
    return {"gpu_cache_emptied": emptied}


class _Run:
    def __init__(self, fleet: ServeFleet, settings: Settings, tokens: Tokens) -> None:
        self._fleet = fleet
        self._seed = settings.seed
        rng = np.random.default_rng([settings.seed, 11])
        self._nudge = nudge(tokens)
        self._prompts = {
            (length, number): tokens.draw(rng, length)
            for number in range(settings.rounds)
            for length in settings.lengths
        }
        self._first: dict[tuple[int, int], Reply] = {}

    def order(self, *words: object) -> Sequence[str]:
        """The arms, in an order of this moment's own."""
        dice = random.Random(f"{self._seed} {words}")
        return dice.sample(list(self._fleet.clients), len(self._fleet.clients))

    def ask(self, arm: str, phase: str, length: int, number: int) -> TtftSample:
        client = self._fleet.clients[arm]
        before: Hits = self._fleet.run(client.hits(self._nudge))
        reply: Reply = self._fleet.run(
            client.complete(self._prompts[length, number], _ANSWER_TOKENS)
        )
        hits: Hits = self._fleet.run(client.hits(self._nudge)) - before
        same = None
        if reply.failure is None:
            first = self._first.setdefault((length, number), reply)
            same = (first.tokens, first.text) == (reply.tokens, reply.text)
        return TtftSample(
            arm=arm,
            phase=phase,
            length=length,
            round=number,
            ttft_s=reply.ttft_s if reply.failure is None else None,
            end_s=reply.end_s,
            gpu=hits.gpu,
            cpu=hits.cpu,
            pool=hits.pool,
            other=hits.other,
            same=same,
            failure=reply.failure,
        )
