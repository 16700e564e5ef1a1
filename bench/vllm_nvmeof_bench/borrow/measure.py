# SPDX-License-Identifier: Apache-2.0
"""`bench borrow`: time to first token of a prompt that is in another server's pool.

Two of our servers have one directory. Each of them gets prompts that only it has, of one length.
Then the second one gets them in pairs, one of its own and one of the other's, in a drawn order. Its
CPU tier has room for two, so that its own come from its pool. GPU memory is emptied before each.

With `--idle-s` the server has no request for so long before each of them, while a made-up server in
the same directory stores `--puts` chunks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.borrow.report import BORROWED, KINDS, OWN, Sample
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.arms import Arm, ServerSettings, Sizes
from vllm_nvmeof_bench.serve.fleet import Part, Run
from vllm_nvmeof_bench.serve.fleet import run as run_parts
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS
from vllm_nvmeof_bench.servers.stranger import stranger
from vllm_nvmeof_bench.settings import check_positive, option

_ANSWER_TOKENS = 4
_OWNER, _BORROWER = "owner", "borrower"
_PLACE = "shared"
_SERVER_OF = {OWN: _BORROWER, BORROWED: _OWNER}
_TIER_PROMPTS = 2
_KNOWS_S_MAX = 60.0
_PAUSE_S = 0.1
_SHARED = "vllm:nvmeof_shared_entries"


@dataclass(frozen=True)
class Settings(ServerSettings):
    """Prompts that another server has stored. arms: not chosen here."""

    arms: tuple[str, ...] = (_OWNER, _BORROWER)
    base_urls: tuple[str, ...] = ()
    tokens: int = option(2048, "Tokens of each prompt.", min=BLOCK_TOKENS)
    pairs: int = option(24, "Pairs of prompts; one more warms up.", min=1)
    idle_s: float = option(0.0, "Seconds without a request before each prompt.", min=0)
    puts: int = option(1_000_000, "Chunks that a made-up server stores meanwhile.", min=1)
    seed: int = option(1, "Seed of the prompts and of the order.")

    def __post_init__(self) -> None:
        check_positive(self, "tokens", "pairs", "puts")

    def servers(self) -> list[Arm]:
        """The servers to start."""
        about = "our CPU tier, holds two prompts, and pool, in one directory with the other one"
        return [Arm(name, about, "third", pool=True, place=_PLACE) for name in self.arms]

    def sizes(self) -> Sizes:
        """Sizes of the servers. GPU memory holds one request."""
        one = self.tokens + _ANSWER_TOKENS
        every = (self.pairs + 1) * one
        tier = _TIER_PROMPTS * one
        return self.sizes_of(every, one, one + 2 * BLOCK_TOKENS, third_tokens=tier)

    def measure(self, run: Run) -> None:
        """Raises: BenchError, ClientError: a server fails to store, to follow or to settle."""
        rng = np.random.default_rng([self.seed, 41])
        prompts = {
            kind: [run.tokens.draw(rng, self.tokens) for _ in range(self.pairs + 1)]
            for kind in KINDS
        }
        stored = {
            kind: run.fleet.run(_store(run.fleet.clients[_SERVER_OF[kind]], prompts[kind]))
            for kind in KINDS
        }
        chunks = (self.pairs + 1) * (self.tokens // BLOCK_TOKENS)
        run.fleet.run(_wait_known(run.fleet.clients[_BORROWER], chunks))
        for number in range(self.pairs + 1):
            dice = random.Random(f"{self.seed} {number}")
            for kind in dice.sample(list(KINDS), len(KINDS)):
                words = f"pair {number} · {kind}" if number else f"warming up · {kind}"
                run.on_progress(number, self.pairs + 1, words)
                asked = prompts[kind][number], stored[kind][number]
                sample = run.fleet.run(self._ask(run, (kind, number), *asked))
                run.samples.extend([sample] if number else [])

    async def _ask(
        self, run: Run, which: tuple[str, int], prompt: Sequence[int], right: Answer
    ) -> Sample:
        """which: kind and number of the pair. right: the answer when the prompt was stored."""
        client = run.fleet.clients[_BORROWER]
        if not await client.forget_gpu():
            raise BenchError("the server does not empty its GPU memory")
        before = await client.hits()
        with ExitStack() as meanwhile:
            if self.idle_s:
                directory = _directory_of(run)
                others = meanwhile.enter_context(stranger(directory, self.puts, self.idle_s))
                assert others.stdout is not None
                await asyncio.to_thread(others.stdout.readline)  # when all is written
            answer = await client.attempt(prompt, _ANSWER_TOKENS)
        hits = await client.hits() - before
        return Sample(
            *which,
            ttft_s=answer.ttft_s if answer.failure is None else None,
            prompt_tokens=len(prompt),
            gpu=hits.gpu,
            cpu=hits.cpu,
            pool=hits.pool,
            shared=hits.shared,
            other=hits.other - hits.shared,
            same=answer.failure is None and answer.same(right),
            failure=answer.failure,
        )


def _directory_of(run: Run) -> Path:
    offload = run.fleet.servers[_BORROWER].spec.offload
    assert offload is not None
    (target,) = offload.extra["targets"]
    return Path(target)


async def _store(client: Client, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Raises: BenchError: one of them is not answered."""
    answers = [await client.attempt(prompt, _ANSWER_TOKENS) for prompt in prompts]
    for answer in answers:
        if answer.failure is not None:
            raise BenchError(f"a prompt cannot be stored: {answer.failure}")
    await client.settle()
    return answers


async def _wait_known(client: Client, chunks: int) -> None:
    """Raises: BenchError: the server does not see that the other one has so many chunks."""
    end_s = time.monotonic() + _KNOWS_S_MAX
    while (known := (await client.counted()).value(_SHARED)) < chunks:
        if time.monotonic() > end_s:
            raise BenchError(f"the server knows {known:.0f} of the other one's {chunks} chunks")
        await asyncio.sleep(_PAUSE_S)


def _measure(settings: Settings, json_path: Path) -> None:
    sizes, arms = settings.sizes(), settings.servers()
    part = Part(settings, sizes, settings.measure, json_path, arms=arms)
    run_parts({"borrow": part})


COMMANDS = (
    Command(
        "borrow",
        """Measure TTFT of a prompt in another server's pool, beside one in the own pool.

        Starts two of our servers on one directory, half a minute in all, and takes a minute more.
        """,
        Settings,
        _measure,
    ),
)
