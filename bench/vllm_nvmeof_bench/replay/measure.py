# SPDX-License-Identifier: Apache-2.0
"""`bench replay`: each arm gets the same sessions of a trace, at the same pace, one arm at a time.

A session's next request is sent when its answer has come and the user has thought: a server that
falls behind is asked later, not more, and computes again the contexts that its users have lost
meanwhile. The replay shows that spiral.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from vllm_nvmeof_bench.benchmark import Command
from vllm_nvmeof_bench.replay.report import Sample
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.arms import ServerSettings, Sizes, arms_option
from vllm_nvmeof_bench.serve.client import Tokens
from vllm_nvmeof_bench.serve.fleet import Part, Run
from vllm_nvmeof_bench.serve.fleet import run as run_parts
from vllm_nvmeof_bench.servers.client import Answer
from vllm_nvmeof_bench.settings import option
from vllm_nvmeof_bench.traces import (
    TRACE_HELP,
    Pace,
    Request,
    Session,
    Trace,
    in_order,
    read_trace,
    thinking_s,
)

#: The first id of a tail: no trace has so many blocks.
_TAIL = 1 << 50


@dataclass(frozen=True)
class Vocabulary:
    """Token ids from `low` to below `high`, which the model must have, none of them special.

    Prompts made of them have the prefix structure of a trace. Equal block ids give equal tokens,
    different ids different tokens, on every machine and for the same seed. Tokens behind the last
    whole block follow from that block; only prompts with exactly the same blocks share them.
    """

    low: int = 300
    high: int = 2000
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high - 1:
            raise BenchError(f"token ids from {self.low} to {self.high}: give at least two")

    def prompt(self, request: Request, block_tokens: int) -> list[int]:
        """The request's `input_tokens` token ids.

        Of each block id come `block_tokens` tokens: first its digits, so that no two ids are
        alike, then the values of a mixing function of id and place.
        """
        count = request.input_tokens
        blocks = -(-count // block_tokens)
        ids = request.blocks[:blocks]
        last = int(ids[-1]) if len(ids) else 0
        tail = _TAIL + last * 4096 + np.arange(max(0, blocks - len(ids)), dtype=np.int64)
        base = np.uint64(self.high - self.low)
        places = np.arange(block_tokens, dtype=np.uint64)
        names = np.concatenate((ids, tail)).astype(np.uint64)[:, None]
        digits = _mix(names * np.uint64(block_tokens) + places + _mix(np.uint64(self.seed))) % base
        for place in range(min(2, block_tokens)):
            digits[:, place] = names[:, 0] // base ** np.uint64(place) % base
        found: list[int] = (digits.ravel() + np.uint64(self.low)).tolist()
        return found[:count]


def _mix(values: np.typing.ArrayLike) -> np.typing.NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the input changes half of the output's."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(values, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Settings(ServerSettings):
    """One replay; `pace` has the seed."""

    arms: tuple[str, ...] = arms_option("none", "cpu", "pool")
    token_ids: str = option("300:2000", "Token ids of the prompts, LOW:HIGH, in the vocabulary.")
    directory: Path = option(
        Path("build/bench/replay-disk"),
        "Directory for the pools of the servers started here.",
        flag="--dir",
    )
    trace: Path = option(Path(), TRACE_HELP, argument=True)
    pace: Pace = field(default_factory=Pace)
    duration_s: float = option(300.0, "Seconds per arm.", flag="--duration")
    context_tokens_max: int = option(
        131_072, "A session ends before its first longer request.", flag="--context-max", min=1
    )
    block_tokens: int = option(
        0, "Tokens that replay one block of the trace; 0: as many as it stands for.", min=0
    )
    sessions: int = option(0, "Sessions of the trace, drawn from the seed; 0: all.", min=0)
    gpu_tokens: int = option(8192, "Tokens in the GPU cache of servers started here.", min=64)
    third_tokens: int = option(
        0,
        "Tokens in a CPU tier that holds a third. 0: a third of the whole trace, of which a short "
        "run may never ask for more.",
        min=0,
    )

    def __post_init__(self) -> None:
        if self.duration_s <= 0:
            raise BenchError(f"a duration of {self.duration_s:g} s measures nothing")

    @property
    def vocabulary(self) -> Vocabulary:
        tokens = Tokens.parse(self.token_ids)
        return Vocabulary(tokens.low, tokens.high, self.pace.seed)


def _measure(settings: Settings, json_path: Path) -> None:
    trace = trace_of(settings, settings.trace)
    replays = partial(_replays, settings, trace)
    part = Part(settings, _sizes(settings, trace), replays, json_path, quiet=False)
    run_parts({"replay": part}, lambda what: not what.endswith("requests"))


def trace_of(settings: Settings, path: Path) -> Trace:
    """The part of the trace that is replayed.

    Raises:
        BenchError: it cannot be read, or nothing of it is left.
    """
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
            f"{path}: no session begins with less than {settings.context_tokens_max} tokens"
        )
    return trace


def _sizes(settings: Settings, trace: Trace) -> Sizes:
    """Sizes of servers that are started here."""
    longest = max(one.input_tokens + one.output_tokens for one in trace.requests())
    return settings.sizes_of(
        trace.unique_tokens() + sum(one.output_tokens for one in trace.requests()),
        longest,
        max(settings.gpu_tokens, longest + 64),
        third_tokens=settings.third_tokens or None,
        max_num_seqs=max(16, settings.pace.users),
    )


def _replays(settings: Settings, trace: Trace, run: Run) -> None:
    fleet, conditions = run.fleet, run.conditions
    conditions["settings"]["trace"] = trace.name
    conditions["sessions"] = len(trace.sessions)
    conditions["requests"] = sum(1 for _ in trace.requests())
    conditions["block_tokens"] = trace.block_tokens
    conditions["hits"], conditions["working_set_tokens"] = {}, {}
    for number, (arm, client) in enumerate(fleet.clients.items()):

        def on_request(done: int, arm: str = arm, number: int = number) -> None:
            run.on_progress(number, len(fleet.clients), f"{arm} · {done} requests")

        on_request(0)
        before = fleet.run(client.hits())
        replay = Replay(arm, client, trace, settings.pace, settings.vocabulary, on_request)
        fleet.run(replay.run(settings.duration_s))
        after = fleet.run(client.hits())
        conditions["hits"][arm] = asdict(after - before)
        conditions["working_set_tokens"][arm] = len(replay.asked) * trace.block_tokens
        run.samples.extend(replay.samples)
    run.on_progress(len(fleet.clients), len(fleet.clients), "done")


class Server(Protocol):
    """The part of `serve.client.Client` that a replay uses; tests have a server of their own."""

    async def complete(self, prompt: Sequence[int], answer_tokens: int) -> Answer: ...


class Replay:
    """The users of one arm. `run` once; then `samples`, and `asked`, the ids of all blocks asked
    for, are complete."""

    def __init__(
        self,
        arm: str,
        server: Server,
        trace: Trace,
        pace: Pace,
        vocabulary: Vocabulary,
        on_request: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.samples: list[Sample] = []
        self.asked: set[int] = set()
        self._arm = arm
        self._server = server
        self._trace = trace
        self._pace = pace
        self._vocabulary = vocabulary
        self._on_request = on_request
        self._begun_s = 0.0

    async def run(self, duration_s: float) -> None:
        """Run until every session has ended, or the time is up; requests under way are then cut."""
        self._begun_s = time.perf_counter()
        order = in_order(self._trace, self._pace.seed)
        timed = [one for one in order if one.start_s is not None]
        waiting = iter(one for one in order if one.start_s is None)
        users = min(self._pace.users, len(order) - len(timed))
        everyone = [
            *(self._user(iter([one]), (one.start_s or 0.0) * self._pace.time_scale)
              for one in timed),
            *(self._user(waiting, number * self._pace.ramp_s) for number in range(users)),
        ]  # fmt: skip
        tasks = [asyncio.ensure_future(one) for one in everyone]
        try:
            done, _ = await asyncio.wait(tasks, timeout=duration_s)
            for task in done:
                task.result()  # a mistake of ours is not a slow server
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _user(self, waiting: Iterator[Session], after_s: float) -> None:
        await asyncio.sleep(after_s)
        for session in waiting:
            await self._play(session)

    async def _play(self, session: Session) -> None:
        for step in session.steps:
            if isinstance(step, Request):
                await asyncio.sleep(thinking_s(step, self._pace))
                await self._ask(session.name, step)
            else:
                await asyncio.gather(*(self._play(child) for child in step))

    async def _ask(self, session: str, request: Request) -> None:
        self.asked.update(request.blocks.tolist())
        prompt = self._vocabulary.prompt(request, self._trace.block_tokens)
        sent_s = time.perf_counter()
        reply = Answer(sent_s, tokens_in=len(prompt))
        ended = "cut"
        try:
            reply = await self._server.complete(prompt, request.output_tokens)
            ended = "failed" if reply.failure else "whole"
        except asyncio.CancelledError:
            reply.ended = time.perf_counter()
            raise
        finally:
            self.samples.append(
                Sample(
                    arm=self._arm,
                    session=session,
                    at_s=sent_s - self._begun_s,
                    ttft_s=reply.ttft_s if reply.times else None,
                    end_s=reply.end_s,
                    tokens_in=reply.tokens_in,
                    tokens_out=reply.tokens_out,
                    ended=ended,
                    why=reply.failure or "",
                )
            )
            self._on_request(len(self.samples))


COMMANDS = (
    Command(
        "replay",
        "Replay agentic sessions against servers: TTFT, throughput, hits by tier, over time.\n\n"
        "Users arrive one after the other, think as long as the trace records, and share prefixes "
        "as far as the trace does. Without --base-url one small server per arm is started on the "
        "CPU; shrink the trace for them, as with --block-tokens 2 --context-max 4000 "
        "--time-scale 0.1.",
        Settings,
        _measure,
    ),
)
