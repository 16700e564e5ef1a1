# SPDX-License-Identifier: Apache-2.0
"""`bench serve stall`: requests decode on a server while a prompt of thousands of chunks returns.

The model is as small as one can be, and so is a chunk: one block of 32 tokens, 8 KiB. What is moved
takes next to no time; what a chunk costs the threads that the decoding requests wait for remains.

Every server first gets the prompt once, and its writes are waited for. In each round, and for each
server in turn, in an order drawn from the seed, requests start to decode; after `alone_s` seconds
(phase "alone") the prompt is sent again, and their gaps count until its first token:

    back    GPU memory has lost the prompt: it is loaded, or computed by a server that cannot load
    in_gpu  GPU memory has it: all that such a prompt costs beside its load, its way through the
            HTTP server and this client included

A request that has decoded all its tokens before the prompt's first one, because a fast server
computes the prompt instead of loading it, begins again with the same prompt, and so generates the
same chunks. The time between the two is no gap, and the sample counts it as a restart. They have
different numbers of tokens to decode, so that the others see what happens meanwhile.

The client shares the cores with the server; gaps are the same to all arms in this.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.reports.stall import ALONE, BACK, IN_GPU, Sample
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.arms import ServerSettings, Sizes, arms_option
from vllm_nvmeof_bench.serve.fleet import Part, Run
from vllm_nvmeof_bench.serve.fleet import run as run_parts
from vllm_nvmeof_bench.servers.client import Answer, Client, Hits
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import ModelShape
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS, on_blocks
from vllm_nvmeof_bench.settings import check_positive, option

_ANSWER_TOKENS = 4
#: Of each request that decodes, behind its prompt, until it begins again.
_DECODED_MAX = 4096
_STARTED_TOKENS = 8
_START_S_MAX = 120.0
_POLL_S = 0.005
#: One layer, one head of the least size that vLLM's attention on a CPU has.
_SHAPE = ModelShape(
    layers=1, hidden=64, intermediate=128, heads=2, kv_heads=1, positions_max=131_072
)


@dataclass(frozen=True)
class Settings(ServerSettings):
    """decode_prompt_tokens: of each request that decodes."""

    arms: tuple[str, ...] = arms_option("none", "full", "pool", "peer_full")
    chunks: int = option(3072, "Chunks of the prompt that returns, of 32 tokens each.", min=1)
    decoding: int = option(8, "Requests that decode meanwhile.", min=1)
    rounds: int = option(5, "Rounds of everything, with the arms interleaved.", min=1)
    alone_s: float = option(2.0, "Seconds for which they decode before the prompt returns.")
    seed: int = option(1, "Seed of the prompts and of the order of the arms.")
    decode_prompt_tokens: int = 64
    shape: ModelShape = field(default_factory=lambda: _SHAPE)

    def __post_init__(self) -> None:
        check_positive(self, "chunks", "decoding", "rounds")

    @property
    def prompt_tokens(self) -> int:
        """One token more than the chunks: vLLM computes at least one."""
        return self.chunks * BLOCK_TOKENS + 1

    def sizes(self) -> Sizes:
        """Sizes of servers that are started here. The GPU cache holds all that runs at once; the
        CPU tier of an arm that holds all also has what is generated."""
        decoded = self.decoding * on_blocks(self.decode_prompt_tokens + _DECODED_MAX + 1)
        prompt = on_blocks(self.prompt_tokens + _ANSWER_TOKENS + 1)
        shape = {"shape": self.shape} if has_cpu_engine() else {}
        return self.sizes_of(
            prompt + 2 * self.rounds * decoded,
            self.prompt_tokens + _ANSWER_TOKENS,
            prompt + decoded + BLOCK_TOKENS,
            third_tokens=prompt // 3,
            **shape,
        )

    def measure(self, run: Run) -> None:
        """Raises: BenchError, ClientError: a request failed, or a server does not settle."""
        fleet = run.fleet
        rng = np.random.default_rng([self.seed, 21])
        prompt = run.tokens.draw(rng, self.prompt_tokens)
        run.conditions.update(prompt_tokens=len(prompt), prompt_chunks=self.chunks)
        first: Answer | None = None
        for arm, client in fleet.clients.items():
            run.on_progress(0, 0, f"computing the prompt once · {arm}")
            answer = fleet.run(_whole(client.attempt(prompt, _ANSWER_TOKENS)))
            first = first or answer
            fleet.run(client.settle())
        assert first is not None
        turns = itertools.count()
        for number in range(self.rounds):
            others = run.tokens.draw(rng, 2 * self.decoding * self.decode_prompt_tokens)
            prompts = np.array(others).reshape(2, self.decoding, -1).tolist()
            for arm in fleet.shuffled(f"{self.seed} {number}"):
                total = self.rounds * len(fleet.clients)
                run.on_progress(next(turns), total, f"round {number + 1} · {arm}")
                for phase, decoding in zip((BACK, IN_GPU), prompts, strict=True):
                    watched = Watched(fleet.clients[arm], phase, decoding, prompt)
                    alone, found = fleet.run(watched.run(self.alone_s))
                    for name, one in ((ALONE, alone), (phase, found)):
                        if name == ALONE and phase == IN_GPU:
                            continue  # one per round
                        run.samples.append(one.sample(arm, name, number, first))
                    fleet.run(fleet.clients[arm].settle())


@dataclass(frozen=True)
class Window:
    """What the decoding requests did from one time to another. asked: each of them, and those that
    it began again, in their order.
    """

    asked: Sequence[Sequence[Answer]]
    begin: float
    end: float
    answer: Answer | None = None
    hits: Hits = field(default_factory=Hits)

    def sample(self, arm: str, phase: str, number: int, first: Answer) -> Sample:
        every = [one for answers in self.asked for one in answers]
        turns = [turn for answers in self.asked for turn in itertools.pairwise(answers)]
        gaps = [max(self._longest(one.times) for one in answers) for answers in self.asked]
        return Sample(
            arm=arm,
            phase=phase,
            round=number,
            gaps_ms=[round(1000 * gap, 3) for gap in gaps],
            tokens=sum(self.begin <= t <= self.end for one in every for t in one.times),
            restarts=sum(self._sees(*turn) for turn in turns),
            seconds=self.end - self.begin,
            ttft_s=None if self.answer is None else self.answer.ttft_s,
            same=None if self.answer is None else self.answer.same(first),
            **self.hits.by_place,
        )

    def _sees(self, ended: Answer, again: Answer) -> bool:
        """Whether a part of the time between two requests is inside."""
        return ended.times[-1] <= self.end and (not again.times or again.times[0] >= self.begin)

    def _longest(self, times: Sequence[float]) -> float:
        """The longest gap that ends in the window; beside the prompt also one that begins there,
        because what the prompt holds up may come after its own first token."""
        last = self.end if self.answer is None else math.inf
        pairs = itertools.pairwise(times)
        found = [b - a for a, b in pairs if self.begin <= b <= last and a <= self.end]
        return max(found, default=0.0)


@dataclass
class Watched:
    """Requests that decode on a server, and the prompt that returns. A request that has decoded all
    its tokens, `tokens_max` at most and half of it at least, begins again.
    """

    client: Client
    phase: str
    decoding: Sequence[Sequence[int]]
    prompt: Sequence[int]
    tokens_max: int = _DECODED_MAX

    async def run(self, alone_s: float) -> tuple[Window, Window]:
        """What they did alone, and while the prompt returned."""
        if self.phase == BACK and not await self.client.forget_gpu():
            raise BenchError("the server cannot empty its prefix cache")
        before = await self.client.hits()
        asked = [[Answer(sent=time.perf_counter())] for _ in self.decoding]
        tasks = [
            asyncio.create_task(self._decode(prompt, self._limit(number), asked[number]))
            for number, prompt in enumerate(self.decoding)
        ]
        try:
            await self._started(asked)
            begin = time.perf_counter()
            await asyncio.sleep(alone_s)
            sent = time.perf_counter()
            answer = await _whole(self.client.attempt(self.prompt, _ANSWER_TOKENS))
            end = answer.times[0]
            await self._later(asked, end)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        hits = await self.client.hits() - before
        return Window(asked, begin, sent), Window(asked, sent, end, answer, hits)

    def _limit(self, number: int) -> int:
        """Tokens of this one of the requests that decode."""
        return self.tokens_max - number * self.tokens_max // (2 * len(self.decoding))

    async def _decode(self, prompt: Sequence[int], tokens: int, answers: list[Answer]) -> None:
        """Ask again and again, until a request fails. answers: those so far, the last one empty."""
        while not (await self.client.attempt(prompt, tokens, answers[-1])).failure:
            answers.append(Answer(sent=time.perf_counter()))

    async def _started(self, asked: Sequence[Sequence[Answer]]) -> None:
        """Wait until all of them decode."""
        end_s = time.monotonic() + _START_S_MAX
        while min(len(answers[0].times) for answers in asked) < _STARTED_TOKENS:
            if time.monotonic() > end_s:
                raise BenchError("the requests do not begin to decode")
            await asyncio.sleep(_POLL_S)

    async def _later(self, asked: Sequence[Sequence[Answer]], end: float) -> None:
        """Wait until each has a token behind `end`: a gap may last longer.

        Raises: BenchError: one has failed.
        """

        def is_later(answers: Sequence[Answer]) -> bool:
            return any(one.times and one.times[-1] > end for one in answers)

        while not all(map(is_later, asked)):
            failed = [answers[-1].failure for answers in asked if answers[-1].failure]
            if failed:
                raise BenchError(f"a request that decodes failed: {failed[0]}")
            await asyncio.sleep(_POLL_S)


async def _whole(asked: Coroutine[Any, Any, Answer]) -> Answer:
    """Raises: BenchError: the request failed."""
    answer = await asked
    if answer.failure is not None:
        raise BenchError(f"the prompt failed: {answer.failure}")
    return answer


def _measure(settings: Settings, json_path: Path) -> None:
    sizes = settings.sizes()
    run_parts({"stall": Part(settings, sizes, settings.measure, json_path)})


COMMANDS = (
    Command(
        "stall",
        """Measure how long requests that decode wait while a prompt of 3,000 chunks returns.

        Starts a real `vllm serve` for each arm, with a very small model: without offloading, ours
        with and without all chunks in the CPU tier, and vLLM's tiering. Takes 15 minutes, most of
        them for computing the prompt where it cannot be loaded. Nothing else should run meanwhile.
        """,
        Settings,
        _measure,
    ),
)
