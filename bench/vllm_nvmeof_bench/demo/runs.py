# SPDX-License-Identifier: Apache-2.0
"""The requests to each of the demo's servers, and what is kept of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console

from vllm_nvmeof_bench.demo.workload import (
    Conversation,
    CrowdResult,
    Plan,
    Turn,
    conversations,
    run_crowd,
    run_turn,
)
from vllm_nvmeof_bench.servers.client import Answer, Client, Metrics
from vllm_nvmeof_bench.servers.model import ModelShape, random_tokens
from vllm_nvmeof_bench.servers.server import Server
from vllm_nvmeof_offload.errors import OffloadError

#: Waiting for the last writes to the pool: seconds before giving up.
_SETTLE_S_MAX = 60.0
_UNSETTLED = ("vllm:nvmeof_writes_pending", "vllm:nvmeof_write_backlog")


@dataclass
class Session:
    """One server's turns and crowd, and its counters at the end."""

    startup_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    crowd: CrowdResult | None = None
    external_hit_tokens: int = 0
    reloaded_tokens: int = 0
    recomputed_tokens: int = 0

    def answers(self) -> dict[str, Answer]:
        """Return the answers by a name that is the same on every server."""
        out = {f"{t.conversation}, turn {t.number}": t.answer for t in self.turns}
        if self.crowd is not None:
            out |= {f"crowd request {i + 1}": a for i, a in enumerate(self.crowd.answers)}
        return out


class Runs:
    """The workload of `plan` on three servers, to be run in the order of the methods.

    `restarted` goes on where `offloaded` ended: the conversations live here.
    """

    def __init__(
        self,
        plan: Plan,
        shape: ModelShape,
        say: Callable[[str], None] = lambda _: None,
        console: Console | None = None,
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._say = say
        self._console = console if console is not None else Console(quiet=True)
        self._main, self._others = conversations(plan, shape)

    async def baseline(self, server: Server) -> Session:
        """Without offloading: all turns of each conversation in a row, and the crowd."""
        main, others = conversations(self._plan, self._shape)
        async with Client(server.url) as client:
            session = await self._open(client, server)
            for turns, group in ((4, main), (3, others)):
                for one in group:
                    for _ in range(turns):
                        await self._turn(client, session, one)
            await self._crowd(client, session)
        return session

    async def offloaded(self, server: Server) -> Session:
        """Cold, from the CPU tier, pushed out by others, from the pool; then the crowd."""
        main, others = self._main, self._others
        async with Client(server.url) as client:
            session = await self._open(client, server)
            for one in (*main, *main, *others, *main, *others):
                await self._turn(client, session, one)
            await self._crowd(client, session)
            await self._settle(client)
            await self._close(client, session)
        return session

    async def restarted(self, server: Server) -> Session:
        """Everyone comes back once."""
        async with Client(server.url) as client:
            session = await self._open(client, server)
            for one in (*self._main, *self._others):
                await self._turn(client, session, one)
            await self._close(client, session)
        return session

    async def _open(self, client: Client, server: Server) -> Session:
        """Start a session; one short request first takes what only a first request costs."""
        await client.complete(self._filler(), 4)
        return Session(startup_s=server.startup_s)

    async def _close(self, client: Client, session: Session) -> None:
        end = await client.metrics()
        session.external_hit_tokens = int(end.value("vllm:external_prefix_cache_hits_total"))
        session.reloaded_tokens = int(end.value("vllm:nvmeof_reloaded_tokens_total"))
        session.recomputed_tokens = int(end.value("vllm:nvmeof_recomputed_tokens_total"))

    async def _turn(self, client: Client, session: Session, one: Conversation) -> None:
        with self._console.status(f"{one.name}, turn {one.turns + 1}"):
            turn = await run_turn(client, one, self._plan.answer_tokens)
        session.turns.append(turn)
        found = turn.gpu_hit_tokens + turn.external_hit_tokens
        self._say(
            f"  {turn.conversation}, turn {turn.number}: {turn.prompt_tokens} tokens, "
            f"{found:4} found, {turn.case:>8}: first token after {turn.answer.ttft_s:6.3f} s"
        )

    async def _crowd(self, client: Client, session: Session) -> None:
        count = self._plan.crowd.count
        with self._console.status(f"{count} requests at once") as status:

            def show(now: Metrics) -> None:
                running, waiting = (
                    int(now.value(f"vllm:num_requests_{state}")) for state in ("running", "waiting")
                )
                preempted = int(now.value("vllm:num_preemptions_total"))
                status.update(f"{running} running, {waiting} waiting, {preempted} preemptions")

            result = await run_crowd(client, self._plan, self._shape, show)
        session.crowd = result
        times = ", ".join(f"{t:.2f}" for t in result.resumes_s) or "none"
        self._say(
            f"  {count} requests at once: {result.preemptions} preemptions; "
            f"from room to the next token, s: {times}"
        )

    async def _settle(self, client: Client) -> None:
        """Wait until the pool has everything; a short request makes vLLM publish its gauges.

        Raises:
            OffloadError: writes are still pending after `_SETTLE_S_MAX`.
        """
        deadline = time.monotonic() + _SETTLE_S_MAX
        with self._console.status("waiting for the last writes to the pool"):
            while time.monotonic() < deadline:
                await client.complete(self._filler(), 2)
                now = await client.metrics()
                if all(now.has(name) and now.value(name) == 0 for name in _UNSETTLED):
                    return
        raise OffloadError(f"writes to the pool were still pending after {_SETTLE_S_MAX:.0f} s")

    def _filler(self) -> list[int]:
        """Return a prompt shorter than a chunk: nothing of it is stored."""
        return random_tokens(np.random.default_rng(self._plan.seed + 1), 48, self._shape)
