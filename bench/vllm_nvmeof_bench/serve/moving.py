# SPDX-License-Identifier: Apache-2.0
"""`bench serve moving`: conversations whose turns alternate between servers, as with a stateless
router.

    ours    two of our servers on one directory; each turn is sent to the other server
    sticky  the same servers; each conversation stays on one
    peer    two servers with vLLM's tiering on one directory; each turn is sent to the other server

Each server's CPU tier holds a quarter of all conversations at their final length. GPU memory holds
one request and is emptied before each, so that returning tokens must be loaded or computed. All
arms use the same prompts; a salt per arm and round keeps their chunks separate.

All conversations run their first turn in random order, then their second, and so on. The servers
share this machine, so requests run one at a time, with pauses: after a step, vLLM's worker polls
for a second, on a core that another server needs.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm_nvmeof_bench.reports.moving import OURS, PEER, STICKY, Sample
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.fleet import Arm, Run, ServerSettings, Sizes, command
from vllm_nvmeof_bench.servers.client import Answer, Client, Hits
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS
from vllm_nvmeof_bench.settings import check_names, check_positive, option

_SERVERS = 2
_TIER_SHARE = 4
#: The number of measurements whose chunks a pool can hold.
_MEASUREMENTS = 2


class _Routing(NamedTuple):
    """A routing of turns to servers of the kind `servers`. moves: whether conversations change
    servers."""

    servers: str
    moves: bool


_ROUTINGS = {
    OURS: _Routing(OURS, True),
    STICKY: _Routing(OURS, False),
    PEER: _Routing(PEER, True),
}
_ABOUT = {
    OURS: "our CPU tier, which holds a quarter; both servers' pools are in one directory",
    PEER: "vLLM's tiering with fs; its CPU tier holds a quarter; both servers use one directory",
}


def servers_of(kind: str) -> list[str]:
    """Return the names of a kind's servers."""
    return [f"{kind}-{number}" for number in range(_SERVERS)]


def server_of(arm: str, conversation: int, turn: int) -> str:
    """Return the name of the server that answers this turn."""
    routing = _ROUTINGS[arm]
    return servers_of(routing.servers)[(conversation + turn * routing.moves) % _SERVERS]


@dataclass
class _Conversation:
    rng: np.random.Generator
    context: list[int] = field(default_factory=list)
    failed: bool = False


@dataclass(frozen=True)
class Settings(ServerSettings):
    """Settings for the run."""

    arms: tuple[str, ...] = option((OURS, STICKY, PEER), f"Arms: {','.join(_ROUTINGS)}.")
    conversations: int = option(4, "Number of conversations.", min=1)
    turns: int = option(6, "Turns per conversation.", min=2)
    first_tokens: int = option(1024, "Tokens in the first turn's prompt.", min=1)
    grow_tokens: int = option(256, "Tokens added by each later turn.", min=1)
    answer_tokens: int = option(8, "Tokens per answer.", min=1)
    think_s: float = option(
        1.2, "Pause before each request in seconds; below 1, the other server still polls."
    )
    rounds: int = option(6, "Rounds after a warm-up round, with the arms interleaved.", min=1)
    seed: int = option(1, "Seed for prompts and order.")

    def __post_init__(self) -> None:
        check_names("arm", self.arms, list(_ROUTINGS))
        check_positive(self, "conversations", "first_tokens", "grow_tokens", "answer_tokens")
        check_positive(self, "turns", "rounds")

    @property
    def kinds(self) -> list[str]:
        """The kinds of servers that the arms need."""
        return list(dict.fromkeys(_ROUTINGS[arm].servers for arm in self.arms))

    def servers(self) -> list[Arm]:
        """Return the servers to start, or those given by URL."""
        if self.base_urls:
            return super().servers()
        return [
            Arm(name, _ABOUT[kind], "third", pool=True, peer=kind == PEER, place=kind)
            for kind in self.kinds
            for name in servers_of(kind)
        ]

    def sizes(self) -> Sizes:
        """Return sizes for the servers to start. GPU memory holds one request."""
        one = self.first_tokens + (self.turns - 1) * self.grow_tokens
        one += self.turns * self.answer_tokens
        every = self.conversations * one
        measured = _MEASUREMENTS * every
        gpu = one + 2 * BLOCK_TOKENS
        return self.sizes_of(measured, one, gpu, third_tokens=every // _TIER_SHARE)

    def measure(self, run: Run) -> None:
        """Run; raise BenchError or ClientError if a server is missing, cannot empty its GPU memory
        or does not complete its writes."""
        needed = [name for kind in self.kinds for name in servers_of(kind)]
        if missing := sorted(set(needed) - run.fleet.clients.keys()):
            raise BenchError(f"no server {', '.join(missing)}: give --base-url NAME=URL for each")
        done, total = itertools.count(), (self.rounds + 1) * len(self.arms)
        for number in range(self.rounds + 1):
            dice = random.Random(f"{self.seed} {number}")
            for arm in dice.sample(self.arms, len(self.arms)):
                words = f"round {number} · {arm}" if number else f"warming up · {arm}"
                run.on_progress(next(done), total, words)
                measured = self._converse(run, arm, number)
                run.samples.extend(measured if number else [])

    def _converse(self, run: Run, arm: str, number: int) -> list[Sample]:
        """Run all turns of all conversations in round `number`; 0 is the warm-up."""
        fleet = run.fleet
        names = servers_of(_ROUTINGS[arm].servers)
        seen = {name: fleet.run(fleet.clients[name].hits()) for name in names}
        conversations = [
            _Conversation(np.random.default_rng([self.seed, 37, number, one]))
            for one in range(self.conversations)
        ]
        samples = []
        for turn in range(self.turns):
            length = self.grow_tokens if turn else self.first_tokens
            dice = random.Random(f"{self.seed} {number} {turn}")
            for which in dice.sample(range(len(conversations)), len(conversations)):
                one = conversations[which]
                if one.failed:
                    continue
                time.sleep(self.think_s)
                one.context += run.tokens.draw(one.rng, length)
                name = server_of(arm, which, turn)
                asked = _ask(fleet.clients[name], one.context, self, f"{arm} {number}")
                reply, hits = fleet.run(asked)
                found, seen[name] = hits - seen[name], hits
                one.context += reply.tokens
                one.failed = reply.failure is not None
                samples.append(_sample((arm, number, which, turn, name), reply, found))
        for name in names:
            fleet.run(fleet.clients[name].settle())
        return samples


async def _ask(
    client: Client, prompt: Sequence[int], settings: Settings, salt: str
) -> tuple[Answer, Hits]:
    """Return the answer and the server's hits so far; raise BenchError if the server cannot empty
    its GPU memory."""
    if not await client.forget_gpu():
        raise BenchError("a server has no /reset_prefix_cache: set VLLM_SERVER_DEV_MODE=1 there")
    reply = await client.attempt(prompt, settings.answer_tokens, cache_salt=salt)
    return reply, await client.hits()


def _sample(where: Iterable[Any], reply: Answer, hits: Hits) -> Sample:
    """Return a sample. where: the values of its fields up to `server`."""
    return Sample(
        *where,
        ttft_s=reply.ttft_s if reply.failure is None else None,
        end_s=reply.end_s,
        prompt_tokens=reply.tokens_in,
        answer_tokens=reply.tokens_out,
        gpu=hits.gpu,
        cpu=hits.cpu,
        pool=hits.pool,
        shared=hits.shared,
        other=hits.other - hits.shared,
        digest=reply.digest,
        failure=reply.failure,
    )


COMMANDS = (
    command(
        "moving",
        """Compare conversations that change servers at each turn with sticky routing.

        Starts two of our servers on one directory and two with vLLM's tiering on another. Takes 13
        minutes. With --base-url, name the servers ours-0, ours-1, peer-0, peer-1.
        """,
        Settings,
    ),
)
