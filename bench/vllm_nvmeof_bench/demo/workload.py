# SPDX-License-Identifier: Apache-2.0
"""The requests that each of the demo's servers receives, and the recorded results.

A conversation opens with a long prompt; each later turn sends the conversation so far and a new
question. Turns run one at a time. The server's counters are read before and after each turn, which
shows where its KV came from.

A crowd is many concurrent requests whose prompts fit into the GPU cache but whose answers do not,
so that vLLM preempts some requests. A preempted request waits until another one finishes.
`resume_times_s` finds the time from that moment to its next token: one scheduling step plus loading
or recomputing the KV.

The real model receives texts (`demo.chat`), the random model receives random tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.markup import escape

from vllm_nvmeof_bench.demo import chat
from vllm_nvmeof_bench.servers import smollm2
from vllm_nvmeof_bench.servers.client import Answer, Client, Message
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import ModelShape, random_tokens
from vllm_nvmeof_bench.servers.server import (
    BLOCK_TOKENS,
    OffloadSpec,
    Server,
    ServerSpec,
    on_blocks,
)
from vllm_nvmeof_offload.commands.scrape import Metrics
from vllm_nvmeof_offload.units import KIB, MIB

_PREEMPTIONS = "vllm:num_preemptions_total"
_RESUMED = "vllm:nvmeof_resumed_tokens_total"
#: A pause between two tokens counts as a preemption if another request received at least this many
#: tokens during the pause.
_PREEMPTED_TOKENS_MIN = 8
#: Tokens of a request that arrive less than this apart were delayed, because a step takes longer.
_BURST_S = 0.005


@dataclass(frozen=True)
class CrowdPlan:
    """The sizes of a crowd. Request i generates `answer_tokens + i * answer_step` tokens."""

    seed: int = 21
    count: int = 12
    prompt_tokens: int = 400
    answer_tokens: int = 256
    answer_step: int = 12


@dataclass(frozen=True)
class Plan:
    """The sizes of the workload, in tokens and conversations.

    main: conversations whose KV is loaded from the CPU tier, then from the pool. others:
    conversations that evict the main ones, and are then loaded from the pool too.
    cpu_tier_conversations: the number of conversations that fit into the CPU tier.
    """

    seed: int = 7
    main: int = 3
    others: int = 2
    prompt_tokens: int = 4000
    question_tokens: int = 40
    answer_tokens: int = 24
    gpu_tokens: int = 5088
    cpu_tier_conversations: float = 3.3
    crowd: CrowdPlan = field(default_factory=CrowdPlan)

    @property
    def conversation_tokens_max(self) -> int:
        """The length of a conversation after its last turn."""
        return self.prompt_tokens + 4 * (self.question_tokens + self.answer_tokens)


_COUNTS = ("prompt_tokens", "gpu_hit_tokens", "external_hit_tokens", "cpu_tokens", "pool_tokens")


@dataclass(frozen=True)
class Turn:
    """One turn, with the tokens of KV that each source supplied. question: "" if prompts are not
    text."""

    conversation: str
    number: int
    prompt_tokens: int
    answer: Answer
    gpu_hit_tokens: int
    external_hit_tokens: int
    cpu_tokens: int
    pool_tokens: int
    question: str = ""

    @property
    def found_tokens(self) -> int:
        return self.gpu_hit_tokens + self.external_hit_tokens

    @property
    def case(self) -> str:
        """The source of most of the prompt's KV: gpu, cpu_tier or pool; partial if less than half
        of the prompt was found, and cold if nothing was."""
        if self.found_tokens == 0:
            return "cold"
        if self.found_tokens < self.prompt_tokens / 2:
            return "partial"
        if self.gpu_hit_tokens > max(self.cpu_tokens, self.pool_tokens):
            return "gpu"
        return "cpu_tier" if self.cpu_tokens > self.pool_tokens else "pool"

    def facts(self) -> dict[str, object]:
        return {
            "conversation": self.conversation,
            "turn": self.number,
            "case": self.case,
            "ttft_s": round(self.answer.ttft_s, 4),
            **{name: getattr(self, name) for name in _COUNTS},
            **({"question": self.question, "answer": self.answer.text} if self.question else {}),
        }


class Conversation:
    """A conversation of random tokens."""

    def __init__(self, name: str, seed: Sequence[int], plan: Plan, shape: ModelShape) -> None:
        self.name = name
        self.turns = 0
        self.question = ""
        self._rng = np.random.default_rng(list(seed))
        self._plan = plan
        self._shape = shape
        self._said: list[int] = []

    def next_prompt(self) -> list[int]:
        """Add the user's next message, and return the whole conversation."""
        plan = self._plan
        count = plan.question_tokens if self.turns else plan.prompt_tokens
        self._said += random_tokens(self._rng, count, self._shape)
        self.turns += 1
        return list(self._said)

    def add(self, answer: Answer) -> None:
        self._said += answer.tokens


@dataclass(frozen=True)
class CrowdResult:
    """A crowd's answers, its preemptions, and the resumes that a client can measure."""

    answers: list[Answer] = field(default_factory=list)
    preemptions: int = 0
    resumes_s: list[float] = field(default_factory=list)


User: TypeAlias = Conversation | chat.Chat


def conversations(plan: Plan, shape: ModelShape) -> tuple[list[User], list[User]]:
    """Return new main and other conversations, the same on every call."""

    def make(i: int) -> User:
        name = f"user {i + 1}"
        if shape == smollm2.SHAPE:
            return chat.Chat(name, i, plan.prompt_tokens)
        return Conversation(name, (plan.seed, i), plan, shape)

    made = [make(i) for i in range(plan.main + plan.others)]
    return made[: plan.main], made[plan.main :]


async def ask(
    client: Client, prompt: list[int] | list[Message], tokens: int, *, whole: bool = False
) -> Answer:
    """Request a completion of token IDs, or the next message of a chat."""
    if isinstance(prompt[0], dict):
        return await client.chat(prompt, tokens, whole=whole)
    return await client.complete(prompt, tokens)


@dataclass
class Session:
    """One server's turns, crowd and final counters."""

    startup_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    crowd: CrowdResult = field(default_factory=CrowdResult)
    external_hit_tokens: int = 0
    reloaded_tokens: int = 0
    recomputed_tokens: int = 0

    def answers(self) -> dict[str, Answer]:
        """Return name → answer, with the same names for every server."""
        out = {f"{t.conversation}, turn {t.number}": t.answer for t in self.turns}
        out |= {f"crowd request {i + 1}": a for i, a in enumerate(self.crowd.answers)}
        return out


class Runs:
    """The workload of `plan` on three servers. `restarted` continues the conversations of
    `offloaded`."""

    def __init__(self, plan: Plan, shape: ModelShape, console: Console | None = None) -> None:
        self._plan = plan
        self._shape = shape
        self._console = console or Console(quiet=True)
        self._main, self._others = conversations(plan, shape)

    async def baseline(self, server: Server) -> Session:
        """Run each conversation's turns consecutively, then the crowd."""
        main, others = conversations(self._plan, self._shape)
        turns = [one for one in main for _ in range(4)] + [one for one in others for _ in range(3)]
        return await self._session(server, turns, crowd=True)

    async def offloaded(self, server: Server) -> Session:
        """Run turns cold, from the CPU tier and, after eviction, from the pool; then the crowd."""
        main, others = self._main, self._others
        turns = (*main, *main, *others, *main, *others)
        return await self._session(server, turns, crowd=True, settle=True)

    async def restarted(self, server: Server) -> Session:
        """Run one more turn of every conversation."""
        return await self._session(server, (*self._main, *self._others))

    async def _session(
        self,
        server: Server,
        turns: Iterable[User],
        crowd: bool = False,
        settle: bool = False,
    ) -> Session:
        """Run a turn for each user in `turns`, then the crowd. settle: wait for all writes."""
        session = Session(startup_s=server.startup_s)
        async with Client(server.url) as client:
            # Warm up: the first request is slower. It is shorter than a chunk, so it is not stored.
            rng = np.random.default_rng(self._plan.seed + 1)
            await client.complete(random_tokens(rng, 48, self._shape), 4)
            for one in turns:
                session.turns.append(await self._turn(client, one))
            if crowd:
                session.crowd = await self._crowd(client)
            if settle:
                with self._console.status("waiting for the last writes to the pool"):
                    await client.settle()
            end = await client.metrics()
        session.external_hit_tokens = int(end.value("vllm:external_prefix_cache_hits_total"))
        session.reloaded_tokens = int(end.value(_RESUMED, source="loaded"))
        session.recomputed_tokens = int(end.value(_RESUMED, source="recomputed"))
        return session

    async def _turn(self, client: Client, one: User) -> Turn:
        """Run a user's next turn as the server's only request, and record the sources of its KV."""
        with self._console.status(f"{one.name}, turn {one.turns + 1}"):
            prompt = one.next_prompt()
            before = await client.metrics()
            answer = await ask(client, prompt, self._plan.answer_tokens)
            after = await client.metrics()
        one.add(answer)

        def grown(name: str, **labels: str) -> int:
            return int(after.value(name, **labels) - before.value(name, **labels))

        turn = Turn(
            conversation=one.name,
            number=one.turns,
            prompt_tokens=answer.tokens_in,
            answer=answer,
            gpu_hit_tokens=grown("vllm:prefix_cache_hits_total"),
            external_hit_tokens=grown("vllm:external_prefix_cache_hits_total"),
            cpu_tokens=grown("vllm:nvmeof_loaded_tokens_total", source="cpu"),
            pool_tokens=grown("vllm:nvmeof_loaded_tokens_total", source="pool"),
            question=one.question,
        )
        self._console.print(
            f"  {turn.conversation}, turn {turn.number}: {turn.prompt_tokens} tokens, "
            f"{turn.found_tokens:4} found, {turn.case:>8}: "
            f"first token after {answer.ttft_s:6.3f} s"
        )
        if turn.question:
            self._console.print(
                f"    [dim]{escape(turn.question)}[/]\n    {escape(chat.words(answer.text, 84))}"
            )
        return turn

    async def _crowd(self, client: Client) -> CrowdResult:
        count = self._plan.crowd.count
        with self._console.status(f"{count} requests at once") as status:

            def show(now: Metrics) -> None:
                running, waiting = (
                    int(now.value(f"vllm:num_requests_{state}")) for state in ("running", "waiting")
                )
                preempted = int(now.value(_PREEMPTIONS))
                status.update(f"{running} running, {waiting} waiting, {preempted} preemptions")

            result = await run_crowd(client, self._plan, self._shape, show)
        times = ", ".join(f"{t:.2f}" for t in result.resumes_s) or "none"
        self._console.print(
            f"  {count} requests at once: {result.preemptions} preemptions; "
            f"seconds from freed space to the next token: {times}"
        )
        return result


async def run_crowd(
    client: Client,
    plan: Plan,
    shape: ModelShape,
    progress: Callable[[Metrics], None] | None = None,
) -> CrowdResult:
    """Send all requests of the crowd at once, and wait for the answers."""
    crowd = plan.crowd
    rng = np.random.default_rng([crowd.seed, 1000])
    prompts: Sequence[list[int] | list[Message]]
    if shape == smollm2.SHAPE:
        prompts = chat.crowd(crowd.count, crowd.prompt_tokens)
    else:
        prompts = [random_tokens(rng, crowd.prompt_tokens, shape) for _ in range(crowd.count)]
    lengths = [crowd.answer_tokens + i * crowd.answer_step for i in range(crowd.count)]
    before = await client.metrics()
    watcher = asyncio.create_task(_watch(client, progress)) if progress is not None else None
    try:
        pairs = zip(prompts, lengths, strict=True)
        answers = await asyncio.gather(*(ask(client, p, n, whole=True) for p, n in pairs))
    finally:
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
    preemptions = int((await client.metrics()).value(_PREEMPTIONS) - before.value(_PREEMPTIONS))
    return CrowdResult(answers, preemptions, resume_times_s(answers))


async def _watch(client: Client, progress: Callable[[Metrics], None]) -> None:
    while True:
        progress(await client.metrics())
        await asyncio.sleep(1.0)


def resume_times_s(answers: Sequence[Answer]) -> list[float]:
    """Return, per preemption that a client can see, the seconds from freed space to the next token.

    A request was preempted during a pause between two of its tokens if another request received at
    least `_PREEMPTED_TOKENS_MIN` tokens in that pause. Tokens less than `_BURST_S` apart count as
    one, because they arrive in bursts on a busy machine. The resume begins when the last request
    that finished during the pause freed its space. If there is no such request, or it finished just
    before the pause ended, the pause is excluded.
    """
    out: list[float] = []
    for one in answers:
        others = [a for a in answers if a is not one]
        for left, right in pairwise(one.times):
            seen = max((_arrivals(a.times, left, right) for a in others), default=0)
            ends = [a.times[-1] for a in others if left < a.times[-1] < right - _BURST_S]
            if seen >= _PREEMPTED_TOKENS_MIN and ends:
                out.append(right - max(ends))
    return out


def _arrivals(times: Sequence[float], left: float, right: float) -> int:
    """Count the times between `left` and `right` that are at least `_BURST_S` apart."""
    count, last = 0, left
    for t in times:
        if last + _BURST_S <= t < right:
            count, last = count + 1, t
    return count


_CHUNK_BYTES = 512 * KIB
_POOL_BYTES_MIN = 512 * MIB
#: A GPU would compute the model for two cores instantly. This one is 15 times as large, with the
#: same KV.
_ON_A_GPU = ModelShape(hidden=4096, intermediate=14336, heads=32)


def model_shape() -> ModelShape:
    """Return the shape of the random model for the installed vLLM."""
    return ModelShape() if has_cpu_engine() else _ON_A_GPU


def server_spec(plan: Plan, model: Path) -> ServerSpec:
    """Return the spec for a server without offloading whose GPU cache holds `plan.gpu_tokens`."""
    return ServerSpec(
        model=model,
        max_model_len=on_blocks(plan.conversation_tokens_max + 1),
        gpu_blocks=plan.gpu_tokens // BLOCK_TOKENS + 1,
        cores_reserved=0,
    )


def offload_spec(
    plan: Plan, shape: ModelShape, target: Path, chunk_bytes: int = _CHUNK_BYTES
) -> OffloadSpec:
    """Size the CPU tier to hold `plan.cpu_tier_conversations`, and the pool to hold everything.
    target: the pool's directory. chunk_bytes: a chunk's payload, at least that of one block."""
    chunk_bytes = max(chunk_bytes, BLOCK_TOKENS * shape.kv_bytes_per_token)
    chunk_tokens = chunk_bytes // shape.kv_bytes_per_token
    tokens = plan.cpu_tier_conversations * plan.conversation_tokens_max
    conversation_bytes = plan.conversation_tokens_max * shape.kv_bytes_per_token
    pool_bytes = max(_POOL_BYTES_MIN, 12 * conversation_bytes)  # five conversations and the crowd
    return OffloadSpec.sized(math.ceil(tokens / chunk_tokens), chunk_bytes, pool_bytes, target)
