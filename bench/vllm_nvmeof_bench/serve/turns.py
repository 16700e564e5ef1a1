# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns whose context grows, some at once: the OpenFlex Data24 table.

At concurrency C there are C conversations; each sends its next turn when it has its answer, with
everything said before in front. All arms get the same first prompts and the same new tokens; the
answers in between are their own. Every measurement has new conversations. Columns: tokens per
second, time to first token (average, P95, P99) and failures, with what they differ by from the
first arm.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_nvmeof_bench.bar import OnProgress
from vllm_nvmeof_bench.pool.settings import BenchError
from vllm_nvmeof_bench.serve.arms import Sizes
from vllm_nvmeof_bench.serve.client import Client, Reply
from vllm_nvmeof_bench.serve.fleet import ServeFleet
from vllm_nvmeof_bench.serve.prompts import Tokens, nudge

__all__ = ["ARMS_DEFAULT", "Settings", "TurnSample", "measure", "turn_tokens"]

ARMS_DEFAULT = ("none", "pool", "target", "peer", "peer_target")
_SEQUENCES = 16
#: Conversations that the GPU cache of a server started here holds.
_GPU_CONVERSATIONS = 4


@dataclass(frozen=True)
class Settings:
    """first_tokens: of the first turn's prompt; each later one adds grow_tokens."""

    concurrency: tuple[int, ...] = (4, 8, 16)
    turns: int = 4
    first_tokens: int = 448
    grow_tokens: int = 160
    answer_tokens: int = 16
    rounds: int = 2
    seed: int = 1
    target_mb_per_s: int = 200
    server_args: str = ""

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise BenchError("concurrency is one or more numbers, each at least 1")
        numbers = (self.turns, self.first_tokens, self.grow_tokens, self.answer_tokens)
        if min(*numbers, self.rounds) < 1:
            raise BenchError("turns, tokens and rounds are at least 1")

    @property
    def conversation_tokens(self) -> int:
        """Of a whole conversation, answers included."""
        growth = (self.turns - 1) * self.grow_tokens
        return self.first_tokens + growth + self.turns * self.answer_tokens

    def sizes(self) -> Sizes:
        """Of servers that are started here. The largest concurrency's conversations are all."""
        one = self.conversation_tokens
        blocks = -(-(one + 1) // 32) * 32
        return Sizes(
            max(self.concurrency) * one,
            one,
            _GPU_CONVERSATIONS * blocks,
            max_num_seqs=_SEQUENCES,
            target_mb_per_s=self.target_mb_per_s,
            server_args=self.server_args,
        )


@dataclass(frozen=True)
class TurnSample:
    """One turn of one conversation. start_s: of its request, from the measurement's start. digest:
    of the answer, so that arms can be compared. Hits are of the whole measurement and stand in
    the first turn of its first conversation, 0 elsewhere.
    """

    arm: str
    concurrency: int
    round: int
    conversation: int
    turn: int
    start_s: float
    ttft_s: float | None
    end_s: float
    prompt_tokens: int
    answer_tokens: int
    digest: str
    failure: str | None
    gpu: int = 0
    cpu: int = 0
    pool: int = 0
    other: int = 0


def turn_tokens(
    settings: Settings, tokens: Tokens, concurrency: int, number: int, conversation: int
) -> list[list[int]]:
    """What the user adds in each turn of one conversation."""
    words = [settings.seed, 31, concurrency, number, conversation]
    rng = np.random.default_rng(words)
    lengths = [settings.first_tokens] + [settings.grow_tokens] * (settings.turns - 1)
    return [tokens.draw(rng, length) for length in lengths]


def measure(
    fleet: ServeFleet,
    settings: Settings,
    tokens: Tokens,
    samples: list[TurnSample],
    on_progress: OnProgress,
) -> dict[str, object]:
    """Add to `samples`, one after the other; return what is to go into the conditions.

    Raises:
        BenchError: a server does not settle.
    """
    arms = list(fleet.clients)
    total = settings.rounds * len(settings.concurrency) * len(arms)
    done = 0
    for number in range(settings.rounds):
        for concurrency in settings.concurrency:
            dice = random.Random(f"{settings.seed} {number} {concurrency}")
            for arm in dice.sample(arms, len(arms)):
                on_progress(done, total, f"round {number + 1} · {concurrency} at once · {arm}")
                client = fleet.clients[arm]
                place = (arm, concurrency, number)
                samples += fleet.run(_measure(client, settings, tokens, place))
                fleet.run(client.settle(nudge(tokens)))
                done += 1
    return {}


async def _measure(
    client: Client, settings: Settings, tokens: Tokens, place: tuple[str, int, int]
) -> list[TurnSample]:
    arm, concurrency, number = place
    before = await client.hits(nudge(tokens))
    start_s = time.perf_counter()
    talks = (
        _converse(client, turn_tokens(settings, tokens, concurrency, number, one), settings)
        for one in range(concurrency)
    )
    conversations = await asyncio.gather(*talks)
    hits = await client.hits(nudge(tokens)) - before
    found = {"gpu": hits.gpu, "cpu": hits.cpu, "pool": hits.pool, "other": hits.other}
    samples = []
    for conversation, replies in enumerate(conversations):
        for turn, reply in enumerate(replies):
            samples.append(
                TurnSample(
                    arm=arm,
                    concurrency=concurrency,
                    round=number,
                    conversation=conversation,
                    turn=turn,
                    start_s=reply.sent_s - start_s,
                    ttft_s=reply.ttft_s if reply.failure is None else None,
                    end_s=reply.end_s,
                    prompt_tokens=reply.tokens_in,
                    answer_tokens=reply.tokens_out,
                    digest=_digest(reply),
                    failure=reply.failure,
                    **(found if conversation == turn == 0 else {}),
                )
            )
    return samples


async def _converse(
    client: Client, additions: Sequence[list[int]], settings: Settings
) -> list[Reply]:
    """One conversation; it ends at its first failure, as a user would."""
    context: list[int] = []
    replies: list[Reply] = []
    for added in additions:
        context += added
        reply = await client.complete(context, settings.answer_tokens)
        replies.append(reply)
        if reply.failure is not None:
            break
        context += reply.tokens
    return replies


def _digest(reply: Reply) -> str:
    text = " ".join(map(str, reply.tokens)) or reply.text
    return hashlib.sha256(text.encode()).hexdigest()[:16]
