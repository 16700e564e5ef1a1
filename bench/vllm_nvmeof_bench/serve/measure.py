# SPDX-License-Identifier: Apache-2.0
"""`bench serve ttft`, `hits` and `turns`: the measurements on the servers of a `Fleet`.

ttft: every arm first receives every prompt once (phase "cold") and completes its writes. Then each
round sends its prompts again to each arm (phase "back"), one request at a time, with an empty GPU
prefix cache. Each round has separate prompts, one per length, so that a CPU tier that holds a third
of all prompts has evicted those that return. With `restart`, the servers restart between phases.

hits: every arm first receives the prompts that return later and completes its writes. This is
repeated on all arms as long as any CPU tier has no room for some chunks. A measurement empties the
GPU's prefix cache and sends `count` prompts at once. At a hit rate of 50 %, half of the prompts
were sent before; the others are new to every server. With `drive`, two more arms measure the
minimum time to read the returning bytes, at the start of each round: `drive` reads that many bytes
from the disk, bypassing the page cache, and `stand_in` does so under a stand-in's throttle, if any.

turns: at concurrency C there are C conversations. A turn is sent with the whole conversation so far
as soon as the previous answer is complete, as in the OpenFlex Data24 table. All arms receive the
same first prompts and new tokens, and continue with their own answers. Every measurement uses new
conversations.

In every round the arms run in a random order that depends on the seed.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import random
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nvmeof_bench.home import sync_file_system
from vllm_nvmeof_bench.reports.serve import HitSample, TtftSample, TurnSample
from vllm_nvmeof_bench.results import MB, BenchError
from vllm_nvmeof_bench.serve.fleet import Run, ServerSettings, Sizes, arms_option, command
from vllm_nvmeof_bench.servers.client import UNSTORED, WRITTEN, Answer, Client, Hits, Tokens
from vllm_nvmeof_bench.servers.server import on_blocks
from vllm_nvmeof_bench.settings import check_positive, option
from vllm_nvmeof_bench.throttle import Throttle
from vllm_nvmeof_offload.units import MIB

_SEQUENCES = 16
_TTFT_ANSWER_TOKENS = 4
#: The number of conversations that fit into the GPU cache.
_GPU_CONVERSATIONS = 4
#: The pause before each measurement. After a step, vLLM's worker polls for a second, on a core that
#: the next arm needs.
_PAUSE_S = 1.2


def _interleaved(
    run: Run, settings: HitSettings | TurnSettings, levels: Sequence[int], unit: str
) -> Iterator[tuple[int, int, str, Client]]:
    """Yield each measurement's round, level, arm and client; wait for its writes afterwards.

    Dirty pages of earlier measurements are written out first, because they would delay reads.
    """
    total = settings.rounds * len(levels) * len(run.fleet.clients)
    done = itertools.count()
    for number, level in itertools.product(range(settings.rounds), levels):
        for arm in run.fleet.shuffled(f"{settings.seed} {number} {level}"):
            run.on_progress(next(done), total, f"round {number + 1} · {level} {unit} · {arm}")
            sync_file_system(settings.directory)
            time.sleep(_PAUSE_S)
            yield number, level, arm, run.fleet.clients[arm]
            run.fleet.run(run.fleet.clients[arm].settle())


@dataclass(frozen=True)
class TtftSettings(ServerSettings):
    """Settings for `bench serve ttft`."""

    lengths: tuple[int, ...] = option((256, 1024, 4096), "Prompt lengths in tokens.")
    rounds: int = option(3, "Rounds, with the arms interleaved.", min=1)
    restart: bool = option(False, "Restart the servers before the prompts return.")
    seed: int = option(1, "Seed for prompts and the order of arms.")

    def __post_init__(self) -> None:
        check_positive(self, "lengths", "rounds")

    def sizes(self) -> Sizes:
        """Return sizes for the servers to start."""
        longest = max(self.lengths) + _TTFT_ANSWER_TOKENS
        return self.sizes_of(
            self.rounds * sum(length + _TTFT_ANSWER_TOKENS for length in self.lengths),
            longest,
            longest + 64,
        )

    def measure(self, run: Run) -> None:
        """Run; raise BenchError or ClientError if a cache is not emptied or writes do not end."""
        fleet, tokens, samples = run.fleet, run.tokens, run.samples
        rng = np.random.default_rng([self.seed, 11])
        places = [(number, length) for number in range(self.rounds) for length in self.lengths]
        prompts = {place: tokens.draw(rng, place[1]) for place in places}
        first: dict[tuple[int, int], Answer] = {}
        emptied = run.conditions["gpu_cache_emptied"] = {}
        written = run.conditions["written_bytes"] = {}
        total = 2 * len(fleet.clients) * len(places)
        for phase in ("cold", "back"):
            for place in places:
                number, length = place
                for arm in fleet.shuffled(f"{self.seed} {(phase, number, length)}"):
                    run.on_progress(len(samples), total, f"{phase} · {length} tokens · {arm}")
                    client = fleet.clients[arm]
                    if phase == "back":
                        emptied[arm] = fleet.run(client.forget_gpu())
                    time.sleep(_PAUSE_S)
                    reply, hits = fleet.run(_ask(client, prompts[place]))
                    failed = reply.failure is not None
                    samples.append(
                        TtftSample(
                            arm=arm,
                            phase=phase,
                            length=length,
                            round=number,
                            ttft_s=None if failed else reply.ttft_s,
                            end_s=reply.end_s,
                            same=None if failed else first.setdefault(place, reply).same(reply),
                            failure=reply.failure,
                            **hits.by_place,
                        )
                    )
            if phase == "back":
                break
            for arm, client in fleet.clients.items():
                found = fleet.run(client.settle())
                written[arm] = sum(found.value(name) for name in WRITTEN)
            sync_file_system(self.directory)  # write-back would slow down whichever arm is next
            if self.restart:
                fleet.restart()


async def _ask(client: Client, prompt: list[int]) -> tuple[Answer, Hits]:
    before = await client.hits()
    reply = await client.attempt(prompt, _TTFT_ANSWER_TOKENS)
    return reply, await client.hits() - before


_Batch = list[tuple[str, list[int]]]  # (name, prompt)
#: The maximum number of times that each server receives the prompts that return later.
_STORES_MAX = 16


@dataclass(frozen=True)
class HitSettings(ServerSettings):
    """Settings for `bench serve hits`."""

    rates: tuple[int, ...] = option((0, 25, 50, 75, 100), "Shares of returning prompts in %.")
    count: int = option(32, "Concurrent prompts.", min=1)
    prompt_tokens: int = option(512, "Tokens per prompt.", min=1)
    answer_tokens: int = 4
    rounds: int = option(2, "Rounds, with the arms interleaved.", min=1)
    drive: bool = option(False, "Also measure bare reads of the returning bytes from the disk.")
    seed: int = option(1, "Seed for prompts and the order of arms.")

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 100 for rate in self.rates):
            raise BenchError("hit rates must be percentages from 0 to 100")
        check_positive(self, "count", "prompt_tokens", "answer_tokens", "rounds")

    def sizes(self) -> Sizes:
        """Return sizes for the servers to start. The GPU cache holds all concurrent requests; a
        CPU tier that holds a third has room for a third of the returning prompts."""
        one = self.prompt_tokens + self.answer_tokens
        fresh = sum(self.count - round(self.count * rate / 100) for rate in self.rates)
        return self.sizes_of(
            (self.count + fresh * self.rounds) * one,
            one,
            min(self.count, _SEQUENCES) * on_blocks(one + 1),
            third_tokens=self.count * one // 3,
            max_num_seqs=_SEQUENCES,
        )

    def measure(self, run: Run) -> None:
        """Run; raise BenchError or ClientError if a server does not answer, complete its writes or
        empty its prefix cache."""
        fleet = run.fleet
        first = self._store(run)
        emptied = run.conditions["gpu_cache_emptied"] = {}
        with closing(self._least()) as least:
            for number, rate, arm, client in _interleaved(run, self, self.rates, "%"):
                if self.drive and all(one.round < number for one in run.samples):
                    found = [replace(one, round=number) for one in next(least)]
                    run.conditions["arms"] |= {one.arm: {"says": _LEAST[one.arm]} for one in found}
                    run.samples.extend(found)
                emptied[arm] = fleet.run(client.forget_gpu())
                batch = prompts_of(self, run.tokens, rate, number)
                before_s = fleet.cpu_s(arm)
                one = fleet.run(self._measure(client, batch, first))
                if one["failures"] == one["requests"]:
                    raise BenchError(f"arm {arm}: all {one['requests']} requests failed")
                after_s = fleet.cpu_s(arm)
                spent_s = None if before_s is None or after_s is None else after_s - before_s
                how = {"arm": arm, "rate": rate, "round": number, "cpu_s": spent_s}
                run.samples.append(HitSample(**how, **one))

    def _store(self, run: Run) -> dict[str, Answer]:
        """Send every server the prompts that return later; return name → first answer.

        A CPU tier refuses chunks if a step computes more KV than it holds. When such a prompt
        returns, it is found in GPU memory, and the refused chunks are stored. All servers receive
        the prompts the same number of times.
        """
        fleet, stored = run.fleet, prompts_of(self, run.tokens, 100, 0)
        first: dict[str, Answer] = {}
        refused = dict.fromkeys(fleet.clients, 0.0)
        for _ in range(_STORES_MAX):
            before = refused.copy()
            for arm, client in fleet.clients.items():
                run.on_progress(0, 0, f"storing the returning prompts · {arm}")
                replies = fleet.run(self._send(client, stored))
                for (name, _), reply in zip(stored, replies, strict=True):
                    first.setdefault(name, reply)
                refused[arm] = fleet.run(client.settle()).value(UNSTORED, reason="no_room")
            if refused == before:
                break
        return first

    def _least(self) -> Generator[list[HitSample]]:
        """Repeatedly measure the minimum time to read the bytes of all returning prompts."""
        tokens = self.count * self.prompt_tokens
        count = tokens * self.sizes().kv_bytes_per_token
        is_throttled = any(arm.throttled for arm in self.servers())
        rates = [None, self.target_mb_per_s * MB] if is_throttled else [None]
        none = dict.fromkeys(("gpu", "cpu", "pool", "other", "same", "compared"), 0)
        with closing(read_times(self.directory, count, rates)) as times:
            for seconds in times:
                yield [
                    HitSample(
                        arm=arm,
                        rate=100,
                        round=0,
                        requests=self.count,
                        failures=0,
                        seconds=one,
                        prompt_tokens=tokens,
                        answer_tokens=0,
                        ttft_s=None,
                        **none,
                    )
                    for arm, one in zip(_LEAST, seconds, strict=False)
                ]

    async def _send(self, client: Client, batch: _Batch) -> list[Answer]:
        asked = (client.attempt(prompt, self.answer_tokens) for _, prompt in batch)
        return await asyncio.gather(*asked)

    async def _measure(
        self, client: Client, batch: _Batch, first: dict[str, Answer]
    ) -> dict[str, Any]:
        before = await client.hits()
        start_s = time.perf_counter()
        replies = await self._send(client, batch)
        seconds = time.perf_counter() - start_s
        hits = await client.hits() - before
        whole = [reply for reply in replies if reply.failure is None]
        ttfts = sorted(reply.ttft_s for reply in whole)
        compared = [
            first[name].same(reply)
            for (name, _), reply in zip(batch, replies, strict=True)
            if name in first and reply.failure is None
        ]
        return {
            "requests": len(replies),
            "failures": len(replies) - len(whole),
            "seconds": seconds,
            "prompt_tokens": sum(reply.tokens_in for reply in whole),
            "answer_tokens": sum(reply.tokens_out for reply in whole),
            "ttft_s": ttfts[len(ttfts) // 2] if ttfts else None,
            **hits.by_place,
            "same": sum(compared),
            "compared": len(compared),
        }


_LEAST = {
    "drive": "the returning bytes, read from the disk past the page cache",
    "stand_in": "the same, disk throttled",
}
_PIECE_BYTES, _READERS = 2 * MIB, 8


def read_times(
    directory: Path, count: int, rates: Sequence[int | None] = (None,)
) -> Generator[list[float]]:
    """Endlessly read about `count` bytes once per rate, bypassing the page cache, and yield the
    seconds. rates: this process's limits in bytes/s; None: no limit. Close the generator at the
    end."""
    pieces = max(1, count // _PIECE_BYTES)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(pieces):
            file.write(os.urandom(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)

        def read(piece: int) -> int:
            with mmap.mmap(-1, _PIECE_BYTES) as buffer:
                return os.preadv(fd, [buffer], piece * _PIECE_BYTES)

        try:
            with ThreadPoolExecutor(_READERS) as pool:
                while True:
                    found = []
                    for rate in rates:
                        with _limited(directory, rate):
                            begin_s = time.perf_counter()
                            done = sum(pool.map(read, range(pieces)))
                            found.append((time.perf_counter() - begin_s) * count / done)
                    yield found
        finally:
            os.close(fd)


@contextmanager
def _limited(directory: Path, rate: int | None) -> Iterator[None]:
    """Limit this process's reads to `rate` bytes per second, if given."""
    if rate is None:
        yield
        return
    with Throttle(directory, rate, rate) as throttle:
        throttle.add(os.getpid())
        yield


def prompts_of(settings: HitSettings, tokens: Tokens, rate: int, number: int) -> _Batch:
    """Return a batch in random order: `rate` per cent of its prompts return; the others are new."""

    def draw(*words: int) -> np.random.Generator:
        return np.random.default_rng([settings.seed, *words])

    hits = round(settings.count * rate / 100)
    fresh, length = draw(23, rate, number), settings.prompt_tokens
    batch = [(f"seen {i}", tokens.draw(draw(29, i), length)) for i in range(hits)]
    new = range(settings.count - hits)
    batch += [(f"new {rate} {number} {i}", tokens.draw(fresh, length)) for i in new]
    random.Random(f"{settings.seed} {rate} {number}").shuffle(batch)
    return batch


@dataclass(frozen=True)
class TurnSettings(ServerSettings):
    """Settings for `bench serve turns`."""

    arms: tuple[str, ...] = arms_option("none", "pool", "target", "peer", "peer_target")
    concurrency: tuple[int, ...] = option((4, 8, 16), "Concurrent conversations.")
    turns: int = 4
    first_tokens: int = option(448, "Tokens in the first turn's prompt.", min=1)
    grow_tokens: int = option(160, "Tokens added by each later turn.", min=1)
    answer_tokens: int = option(16, "Tokens per answer.", min=1)
    rounds: int = option(2, "Rounds, with the arms interleaved.", min=1)
    seed: int = option(1, "Seed for prompts and the order of arms.")

    def __post_init__(self) -> None:
        check_positive(self, "concurrency", "turns", "first_tokens", "grow_tokens")
        check_positive(self, "answer_tokens", "rounds")

    def sizes(self) -> Sizes:
        """Return the sizes that servers need at the highest concurrency."""
        growth = (self.turns - 1) * self.grow_tokens
        one = self.first_tokens + growth + self.turns * self.answer_tokens
        return self.sizes_of(
            max(self.concurrency) * one,
            one,
            _GPU_CONVERSATIONS * on_blocks(one + 1),
            max_num_seqs=_SEQUENCES,
        )

    def measure(self, run: Run) -> None:
        """Run; raise ClientError if a server does not complete its writes."""
        for number, level, arm, client in _interleaved(run, self, self.concurrency, "at once"):
            one = self._measure(client, run.tokens, arm, level, number)
            run.samples.extend(run.fleet.run(one))

    async def _measure(
        self, client: Client, tokens: Tokens, arm: str, level: int, number: int
    ) -> list[TurnSample]:
        before = await client.hits()
        start_s = time.perf_counter()
        seeds = [[self.seed, 31, level, number, one] for one in range(level)]
        conversations = await asyncio.gather(
            *(self._converse(client, tokens, seed) for seed in seeds)
        )
        hits = (await client.hits() - before).by_place
        return [
            TurnSample(
                arm=arm,
                concurrency=level,
                round=number,
                conversation=conversation,
                turn=turn,
                start_s=reply.sent - start_s,
                ttft_s=reply.ttft_s if reply.failure is None else None,
                end_s=reply.end_s,
                prompt_tokens=reply.tokens_in,
                answer_tokens=reply.tokens_out,
                digest=reply.digest,
                failure=reply.failure,
                **(hits if conversation == turn == 0 else {}),
            )
            for conversation, replies in enumerate(conversations)
            for turn, reply in enumerate(replies)
        ]

    async def _converse(self, client: Client, tokens: Tokens, words: list[int]) -> list[Answer]:
        """Run a conversation; stop at the first failure. words: its seed."""
        rng = np.random.default_rng(words)
        context: list[int] = []
        replies: list[Answer] = []
        for length in (self.first_tokens, *[self.grow_tokens] * (self.turns - 1)):
            context += tokens.draw(rng, length)
            reply = await client.attempt(context, self.answer_tokens)
            replies.append(reply)
            if reply.failure is not None:
                break
            context += reply.tokens
        return replies


COMMANDS = (
    command(
        "ttft",
        "Measure the time to the first token of computed and loaded prompts, by length.\n\n"
        "With --base-url, any servers with an OpenAI API are compared. Without it, small servers "
        "are started with the installed vLLM, in about half a minute each.",
        TtftSettings,
    ),
    command(
        "hits",
        "Measure the throughput of many concurrent prompts by the share of returning ones.\n\n"
        "Servers are chosen as in `bench serve ttft`.",
        HitSettings,
    ),
    command(
        "turns",
        "Measure tokens/s and TTFT of concurrent four-turn conversations with growing context.\n\n"
        "Servers are chosen as in `bench serve ttft`. The arm `target` is a stand-in for an "
        "NVMe-oF target: a directory on this disk, throttled by a control group (usually as root).",
        TurnSettings,
    ),
)
