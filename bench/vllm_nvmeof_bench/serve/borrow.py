# SPDX-License-Identifier: Apache-2.0
"""`bench serve borrow`: time to first token of prompts that are in another server's pool.

All servers are ours and share one directory. Each first stores its own prompts, all of the same
length. The borrowing servers then receive prompts in pairs: one that they stored themselves and one
that the owner stored, in random order. Their CPU tiers hold only two prompts, so their own prompts
must be loaded from their pools. GPU memory is emptied before each prompt.

With `--idle-s`, the servers are idle for this long before each prompt, while a simulated server in
the same directory stores `--puts` chunks. If there are several borrowing servers, they are idle at
the same time and then receive their prompts one after another.
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
from vllm_nvmeof_bench.reports.borrow import BORROWED, KINDS, OWN, Sample
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.arms import Arm, ServerSettings, Sizes
from vllm_nvmeof_bench.serve.fleet import Part, Run
from vllm_nvmeof_bench.serve.fleet import run as run_parts
from vllm_nvmeof_bench.servers.client import Answer, Client, Hits
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS
from vllm_nvmeof_bench.servers.stranger import stranger
from vllm_nvmeof_bench.settings import check_positive, option

_ANSWER_TOKENS = 4
_OWNER, _BORROWER = "owner", "borrower"
_PLACE = "shared"
_TIER_PROMPTS = 2
_KNOWS_S_MAX = 60.0
_PAUSE_S = 0.1
_SHARED = "vllm:nvmeof_shared_entries"
#: vLLM's worker spins for a second after an answer.
_REST_S = 1.2


@dataclass(frozen=True)
class _Asked:
    """A prompt to send to a server. right: the answer given when the prompt was stored."""

    kind: str
    pair: int
    server: str
    prompt: Sequence[int]
    right: Answer


@dataclass(frozen=True)
class Settings(ServerSettings):
    """The settings of this benchmark, whose arms are fixed."""

    arms: tuple[str, ...] = (_OWNER, _BORROWER)
    base_urls: tuple[str, ...] = ()
    tokens: int = option(2048, "Tokens per prompt.", min=BLOCK_TOKENS)
    pairs: int = option(24, "Pairs of prompts, after a warm-up pair per server.", min=1)
    borrowers: int = option(1, "Borrowing servers, which take turns with the pairs.", min=1)
    idle_s: float = option(0.0, "Seconds without requests before each prompt.", min=0)
    puts: int = option(1_000_000, "Chunks that a simulated server stores while idle.", min=1)
    seed: int = option(1, "Seed for prompts and order.")

    def __post_init__(self) -> None:
        check_positive(self, "tokens", "pairs", "borrowers", "puts")

    @property
    def all_pairs(self) -> int:
        """The number of pairs; the first ones are for warming up, one pair per server."""
        return self.pairs + self.borrowers

    def borrower(self, pair: int) -> str:
        """Return the borrowing server for a pair."""
        at = pair % self.borrowers
        return f"{_BORROWER}-{1 + at}" if at else _BORROWER

    def servers(self) -> list[Arm]:
        """Return the servers to start."""
        about = "our CPU tier, holds two prompts, and pool, in one directory with the others"
        names = [_OWNER, *map(self.borrower, range(self.borrowers))]
        return [Arm(name, about, "third", pool=True, place=_PLACE) for name in names]

    def sizes(self) -> Sizes:
        """Return the servers' sizes. GPU memory holds one request."""
        one = self.tokens + _ANSWER_TOKENS
        every = self.all_pairs * one
        tier = _TIER_PROMPTS * one
        return self.sizes_of(every, one, one + 2 * BLOCK_TOKENS, third_tokens=tier)

    def measure(self, run: Run) -> None:
        """Run; raise BenchError or ClientError if a server fails to store, follow or settle."""
        rng = np.random.default_rng([self.seed, 41])
        prompts = {
            kind: [run.tokens.draw(rng, self.tokens) for _ in range(self.all_pairs)]
            for kind in KINDS
        }
        stored = {kind: self._store(run, kind, prompts[kind]) for kind in KINDS}
        for first in range(0, self.all_pairs, self.borrowers):
            pairs = range(first, min(first + self.borrowers, self.all_pairs))
            orders = [
                random.Random(f"{self.seed} {pair}").sample(list(KINDS), len(KINDS))
                for pair in pairs
            ]
            for kinds in zip(*orders, strict=True):
                asked = [
                    _Asked(kind, pair, self.borrower(pair), prompts[kind][pair], stored[kind][pair])
                    for kind, pair in zip(kinds, pairs, strict=True)
                ]
                words = f"pair {first + 1 - self.borrowers}" if first else "warming up"
                run.on_progress(first, self.all_pairs, words)
                samples = run.fleet.run(self._ask_all(run, asked, idle=first > 0))
                run.samples.extend(samples if first else [])

    def _store(self, run: Run, kind: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Store each prompt on its server; wait until the borrowing servers see the chunks."""
        answers: dict[int, Answer] = {}
        servers = [self.borrower(pair) if kind == OWN else _OWNER for pair in range(len(prompts))]
        for name in dict.fromkeys(servers):
            pairs = [pair for pair, one in enumerate(servers) if one == name]
            mine = [prompts[pair] for pair in pairs]
            found = run.fleet.run(_store(run.fleet.clients[name], mine))
            answers.update(zip(pairs, found, strict=True))
        if kind == BORROWED:
            for at in range(self.borrowers):
                others = 2 * self.all_pairs - len(range(at, self.all_pairs, self.borrowers))
                chunks = others * (self.tokens // BLOCK_TOKENS)
                run.fleet.run(_wait_known(run.fleet.clients[self.borrower(at)], chunks))
        return [answers[pair] for pair in range(len(prompts))]

    async def _ask_all(self, run: Run, asked: Sequence[_Asked], idle: bool) -> list[Sample]:
        """Send the prompts one after another; if `idle`, let all the servers be idle first."""
        clients = [run.fleet.clients[one.server] for one in asked]
        before = []
        for client in clients:
            if not await client.forget_gpu():
                raise BenchError("the server cannot empty its GPU memory")
            before.append(await client.hits())
        samples = []
        with ExitStack() as meanwhile:
            if self.idle_s and idle:
                directory = _directory_of(run)
                others = meanwhile.enter_context(stranger(directory, self.puts, self.idle_s))
                assert others.stdout is not None
                await asyncio.to_thread(others.stdout.readline)  # returns when all is written
            for number, (client, one) in enumerate(zip(clients, asked, strict=True)):
                await asyncio.sleep(_REST_S if number else 0)
                samples.append(await self._ask(client, one, before[number]))
        return samples

    async def _ask(self, client: Client, asked: _Asked, before: Hits) -> Sample:
        answer = await client.attempt(asked.prompt, _ANSWER_TOKENS)
        hits = await client.hits() - before
        return Sample(
            asked.kind,
            asked.pair + 1 - self.borrowers,
            ttft_s=answer.ttft_s if answer.failure is None else None,
            prompt_tokens=len(asked.prompt),
            gpu=hits.gpu,
            cpu=hits.cpu,
            pool=hits.pool,
            shared=hits.shared,
            other=hits.other - hits.shared,
            same=answer.failure is None and answer.same(asked.right),
            failure=answer.failure,
        )


def _directory_of(run: Run) -> Path:
    offload = run.fleet.servers[_BORROWER].spec.offload
    assert offload is not None
    (target,) = offload.extra["targets"]
    return Path(target)


async def _store(client: Client, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Store prompts; raise BenchError if one is not answered."""
    answers = [await client.attempt(prompt, _ANSWER_TOKENS) for prompt in prompts]
    for answer in answers:
        if answer.failure is not None:
            raise BenchError(f"a prompt cannot be stored: {answer.failure}")
    await client.settle()
    return answers


async def _wait_known(client: Client, chunks: int) -> None:
    """Wait until the server knows this many chunks of other servers, or raise BenchError."""
    end_s = time.monotonic() + _KNOWS_S_MAX
    while (known := (await client.counted()).value(_SHARED)) < chunks:
        if time.monotonic() > end_s:
            raise BenchError(f"the server knows only {known:.0f} of the others' {chunks} chunks")
        await asyncio.sleep(_PAUSE_S)


def _measure(settings: Settings, json_path: Path) -> None:
    sizes, arms = settings.sizes(), settings.servers()
    part = Part(settings, sizes, settings.measure, json_path, arms=arms)
    run_parts({"borrow": part})


COMMANDS = (
    Command(
        "borrow",
        """Compare TTFT of prompts in another server's pool and in the server's own pool.

        Starts two of our servers on one directory, in half a minute, and measures for a minute;
        --idle-s adds two such pauses per pair.
        """,
        Settings,
        _measure,
    ),
)
