# SPDX-License-Identifier: Apache-2.0
"""`bench serve stall`: requests decode while a prompt of thousands of chunks returns.

The model is as small as possible, and a chunk is one block of 32 tokens, 8 KiB. Copies and I/O thus
take almost no time, which leaves the cost per chunk on the threads that decoding waits for.

Every server first receives the prompt once and completes its writes. Each round measures the
servers in random order: requests start to decode; after `alone_s` seconds (phase "alone") the
prompt is sent again, and gaps between tokens count until the prompt's first token:

    back    the prompt is not in GPU memory, and is loaded or else computed
    in_gpu  the prompt is in GPU memory, which measures its cost without a load, including that of
            the HTTP server and this client

If the server computes the prompt instead of loading it, a request can finish before the prompt's
first token. It is then sent again, and generates the same chunks. The sample counts the restart,
but the time in between is not a gap. Requests decode different numbers of tokens, so that they do
not all restart at once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_nvmeof_bench.reports.stall import ALONE, BACK, IN_GPU, Sample
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.fleet import Run, ServerSettings, Sizes, arms_option, command
from vllm_nvmeof_bench.servers.client import Answer, Client, Hits
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import ModelShape
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS, on_blocks
from vllm_nvmeof_bench.settings import check_positive, option

_ANSWER_TOKENS = 4
#: The maximum number of tokens that a decoding request generates before it is sent again.
_DECODED_MAX = 4096
_STARTED_TOKENS = 8
_START_S_MAX = 120.0
_POLL_S = 0.005
#: One layer and the smallest head that vLLM's CPU attention supports.
_SHAPE = ModelShape(
    layers=1, hidden=64, intermediate=128, heads=2, kv_heads=1, positions_max=131_072
)


@dataclass(frozen=True)
class Settings(ServerSettings):
    """Settings for the run. decode_prompt_tokens: the prompt length of the decoding requests."""

    arms: tuple[str, ...] = arms_option("none", "full", "pool", "peer_full")
    chunks: int = option(3072, "Chunks of 32 tokens in the returning prompt.", min=1)
    decoding: int = option(8, "Decoding requests.", min=1)
    rounds: int = option(5, "Rounds, with the arms interleaved.", min=1)
    alone_s: float = option(2.0, "Seconds of decoding before the prompt returns.")
    seed: int = option(1, "Seed for prompts and the order of arms.")
    decode_prompt_tokens: int = 64
    shape: ModelShape = field(default_factory=lambda: _SHAPE)

    def __post_init__(self) -> None:
        check_positive(self, "chunks", "decoding", "rounds")

    @property
    def prompt_tokens(self) -> int:
        """The number of the chunks' tokens plus one, because vLLM computes at least one."""
        return self.chunks * BLOCK_TOKENS + 1

    def sizes(self) -> Sizes:
        """Return sizes for the servers to start. The GPU cache holds all concurrent requests; a CPU
        tier that holds all also has room for generated tokens."""
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
        """Run; raise BenchError or ClientError if a request fails or writes do not complete."""
        fleet = run.fleet
        rng = np.random.default_rng([self.seed, 21])
        prompt = run.tokens.draw(rng, self.prompt_tokens)
        run.conditions.update(prompt_tokens=len(prompt), prompt_chunks=self.chunks)
        first: Answer | None = None
        for arm, client in fleet.clients.items():
            run.on_progress(0, 0, f"computing the prompt · {arm}")
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
    """The decoding requests' answers during a period. asked: each request's answers in order; there
    are several if the request was sent again."""

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
        """Return whether the time between two answers to a request overlaps the window."""
        return ended.times[-1] <= self.end and (not again.times or again.times[0] >= self.begin)

    def _longest(self, times: Sequence[float]) -> float:
        """Return the longest gap that ends in the window or, if the prompt was sent, begins in it,
        because tokens that the prompt delays can arrive after the prompt's first token."""
        last = self.end if self.answer is None else math.inf
        pairs = itertools.pairwise(times)
        found = [b - a for a, b in pairs if self.begin <= b <= last and a <= self.end]
        return max(found, default=0.0)


@dataclass
class Watched:
    """Decoding requests on a server, and the returning prompt. Each request decodes between half of
    `tokens_max` and `tokens_max` tokens, and is then sent again."""

    client: Client
    phase: str
    decoding: Sequence[Sequence[int]]
    prompt: Sequence[int]
    tokens_max: int = _DECODED_MAX

    async def run(self, alone_s: float) -> tuple[Window, Window]:
        """Return the window before the prompt is sent, and the one from then to its first token."""
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
        return self.tokens_max - number * self.tokens_max // (2 * len(self.decoding))

    async def _decode(self, prompt: Sequence[int], tokens: int, answers: list[Answer]) -> None:
        """Send a request repeatedly until it fails, and append an unfinished answer for each."""
        while not (await self.client.attempt(prompt, tokens, answers[-1])).failure:
            answers.append(Answer(sent=time.perf_counter()))

    async def _started(self, asked: Sequence[Sequence[Answer]]) -> None:
        end_s = time.monotonic() + _START_S_MAX
        while min(len(answers[0].times) for answers in asked) < _STARTED_TOKENS:
            if time.monotonic() > end_s:
                raise BenchError("the requests do not start decoding")
            await asyncio.sleep(_POLL_S)

    async def _later(self, asked: Sequence[Sequence[Answer]], end: float) -> None:
        """Wait until each request has received a token after `end`, because a gap can begin before
        `end`. Raise BenchError if a request failed."""

        def is_later(answers: Sequence[Answer]) -> bool:
            return any(one.times and one.times[-1] > end for one in answers)

        while not all(map(is_later, asked)):
            failed = [answers[-1].failure for answers in asked if answers[-1].failure]
            if failed:
                raise BenchError(f"a decoding request failed: {failed[0]}")
            await asyncio.sleep(_POLL_S)


async def _whole(asked: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the answer; raise BenchError if the request failed."""
    answer = await asked
    if answer.failure is not None:
        raise BenchError(f"the prompt failed: {answer.failure}")
    return answer


COMMANDS = (
    command(
        "stall",
        """Measure how long decoding requests wait while a prompt of 3,000 chunks returns.

        Starts a `vllm serve` with a tiny model per arm: without offloading, ours with and without
        all chunks in the CPU tier, and vLLM's tiering. Takes 15 minutes, mostly to compute the
        prompt where it cannot be loaded. Nothing else should run at the same time.
        """,
        Settings,
    ),
)
