# SPDX-License-Identifier: Apache-2.0
"""`bench replay`: replay the same sessions of a trace at the same pace against each arm.

In every round the arms run one after another in random order. Prompts in different rounds share no
tokens. A session's next request is sent after the previous answer and the user's think time. A slow
server thus receives requests later, not more of them at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.reports.replay import Sample
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.fleet import Run, ServerSettings, arms_option, run
from vllm_nvmeof_bench.servers.client import Answer, Client, Hits, Tokens
from vllm_nvmeof_bench.settings import option
from vllm_nvmeof_bench.traces import (
    CONTEXT_HELP,
    TRACE_HELP,
    Pace,
    Request,
    Session,
    Trace,
    read_trace,
    starts,
    thinking_s,
)

#: The first ID for partial blocks, larger than any block ID in a trace.
_TAIL = 1 << 50


@dataclass(frozen=True)
class Vocabulary(Tokens):
    """A generator of prompts with the prefix structure of a trace.

    With the same seed, equal block IDs give equal tokens on every machine, and different IDs give
    different tokens. Tokens after the last ID are derived from that ID, so that only prompts with
    the same blocks share them.
    """

    low: int = 300
    high: int = 2000
    seed: int = 1

    def prompt(self, request: Request, block_tokens: int) -> list[int]:
        """Return the request's token IDs. A block's tokens begin with the digits of its ID, so that
        no two blocks are equal. A hash of seed and ID follows."""
        count, base = request.input_tokens, self.high - self.low
        blocks = -(-count // block_tokens)
        names = request.blocks[:blocks]
        tail = _TAIL + (int(names[-1]) if len(names) else 0) * 4096
        names = np.concatenate((names, tail + np.arange(blocks - len(names))))
        hashes = (hashlib.shake_128(b"%d %d" % (self.seed, name)) for name in names.tolist())
        text = b"".join(one.digest(4 * block_tokens) for one in hashes)
        tokens = np.frombuffer(text, "<u4").reshape(blocks, block_tokens) % base
        for place in range(min(2, block_tokens)):
            tokens[:, place] = names // base**place % base
        found: list[int] = (tokens.ravel() + self.low).tolist()
        return found[:count]


@dataclass(frozen=True)
class Settings(ServerSettings):
    """Settings for the run; the seed is in `pace`."""

    arms: tuple[str, ...] = arms_option("none", "cpu", "pool")
    token_ids: str = option("300:2000", "Range LOW:HIGH of the prompts' token IDs.")
    directory: Path = option(
        Path("build/bench/replay-disk"), "Directory for the pools of started servers.", flag="--dir"
    )
    trace: Path = option(Path(), TRACE_HELP, argument=True)
    pace: Pace = field(default_factory=Pace)
    duration_s: float = option(300.0, "Seconds per arm.", flag="--duration")
    context_tokens_max: int = option(
        131_072,
        CONTEXT_HELP,
        flag="--context-max",
        min=1,
    )
    block_tokens: int = option(0, "Replayed tokens per block; 0: as in the trace.", min=0)
    sessions: int = option(0, "Sessions to draw from the trace at random; 0: all.", min=0)
    gpu_tokens: int = option(8192, "Tokens in the GPU cache of started servers.", min=64)
    rounds: int = option(1, "Runs per arm.", min=1)

    def __post_init__(self) -> None:
        if self.duration_s <= 0:
            raise BenchError(f"duration of {self.duration_s:g} s: give more than 0 s")


def _measure(settings: Settings, json_path: Path) -> None:
    trace = trace_of(settings, settings.trace)
    longest = max(one.input_tokens + one.output_tokens for one in trace.requests())
    sizes = settings.sizes_of(
        trace.unique_tokens() + sum(one.output_tokens for one in trace.requests()),
        longest,
        max(settings.gpu_tokens, longest + 64),
        max_num_seqs=max(16, settings.pace.users),
    )
    run(
        "replay",
        settings,
        sizes,
        partial(_replays, settings, trace),
        json_path,
        quiet=False,
        logged=lambda what: not what.endswith("requests"),
    )


def trace_of(settings: Settings, path: Path) -> Trace:
    """Return the trace to replay; raise BenchError if it is unreadable or has no session left."""
    trace = read_trace(path)
    trace = trace.scaled(settings.block_tokens or trace.block_tokens)
    trace = trace.capped(settings.context_tokens_max)
    if settings.sessions:
        dice = random.Random(settings.pace.seed)
        count = min(settings.sessions, len(trace.sessions))
        chosen = sorted(dice.sample(range(len(trace.sessions)), count))
        trace = replace(trace, sessions=tuple(trace.sessions[number] for number in chosen))
    if not trace.sessions:
        raise BenchError(
            f"{path}: no session's first request fits into {settings.context_tokens_max} tokens"
        )
    return trace


def _replays(settings: Settings, trace: Trace, run: Run) -> None:
    fleet, conditions, tokens = run.fleet, run.conditions, run.tokens
    conditions["settings"]["trace"] = trace.name
    conditions["sessions"] = len(trace.sessions)
    conditions["requests"] = sum(1 for _ in trace.requests())
    conditions["block_tokens"] = trace.block_tokens
    hits = dict.fromkeys(fleet.clients, Hits())
    working = conditions["working_set_tokens"] = dict.fromkeys(fleet.clients, 0)
    turns = [
        (number, arm)
        for number in range(settings.rounds)
        for arm in fleet.shuffled(f"{settings.pace.seed} {number}")
    ]
    for done, (number, arm) in enumerate(turns):
        client = fleet.clients[arm]

        def on_request(count: int, arm: str = arm, done: int = done) -> None:
            run.on_progress(done, len(turns), f"{arm} · {count} requests")

        on_request(0)
        vocabulary = Vocabulary(tokens.low, tokens.high, settings.pace.seed + number)
        before = fleet.run(client.hits())
        replay = Replay(arm, client, trace, settings.pace, vocabulary, on_request, number)
        fleet.run(replay.run(settings.duration_s))
        fleet.run(client.settle())
        hits[arm] += fleet.run(client.hits()) - before
        working[arm] = max(working[arm], len(replay.asked) * trace.block_tokens)
        run.samples.extend(replay.samples)
    conditions["hits"] = {arm: asdict(found) for arm, found in hits.items()}
    run.on_progress(len(turns), len(turns), "done")


@dataclass
class Replay:
    """The users of one arm in round `number`. Call `run` once; it fills `samples`, and adds the IDs
    of all requested blocks to `asked`."""

    arm: str
    client: Client
    trace: Trace
    pace: Pace
    vocabulary: Vocabulary
    on_request: Callable[[int], None] = lambda done: None
    number: int = 0
    samples: list[Sample] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)

    async def run(self, duration_s: float) -> None:
        """Run until all sessions end or `duration_s` passes; then cut off requests in flight."""
        self._begun_s = time.perf_counter()
        begun, waiting = starts(self.trace, self.pace)
        everyone = (self._user(itertools.chain([one], waiting), at_s) for at_s, one in begun)
        tasks = [asyncio.ensure_future(one) for one in everyone]
        try:
            done, _ = await asyncio.wait(tasks, timeout=duration_s)
            for task in done:
                task.result()  # raise a user's error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _user(self, sessions: Iterator[Session], after_s: float) -> None:
        await asyncio.sleep(after_s)
        for session in sessions:
            await self._play(session)

    async def _play(self, session: Session) -> None:
        for step in session.steps:
            if isinstance(step, Request):
                await asyncio.sleep(thinking_s(step, self.pace))
                await self._ask(session.name, step)
            else:
                await asyncio.gather(*(self._play(child) for child in step))

    async def _ask(self, session: str, request: Request) -> None:
        self.asked.update(request.blocks.tolist())
        prompt = self.vocabulary.prompt(request, self.trace.block_tokens)
        sent_s = time.perf_counter()
        reply = Answer(sent_s, tokens_in=len(prompt))
        ended = "cut"
        try:
            reply = await self.client.attempt(prompt, request.output_tokens)
            ended = "failed" if reply.failure else "whole"
        except asyncio.CancelledError:
            reply.ended = time.perf_counter()
            raise
        finally:
            at_s, why = sent_s - self._begun_s, reply.failure or ""
            ttft_s = reply.ttft_s if reply.times else None
            counts = (ttft_s, reply.end_s, reply.tokens_in, reply.tokens_out)
            self.samples.append(Sample(self.arm, session, at_s, *counts, ended, why, self.number))
            self.on_request(len(self.samples))


COMMANDS = (
    Command(
        "replay",
        "Measure TTFT, throughput and hits by tier while agentic sessions are replayed.\n\n"
        "Think times and shared prefixes are as in the trace. Without --base-url, a small server "
        "per arm is started; shrink the trace for a CPU, for example with --block-tokens 2 "
        "--context-max 4000 --time-scale 0.1.",
        Settings,
        _measure,
    ),
)
