# SPDX-License-Identifier: Apache-2.0
"""The users of a replay, against one server: they come, ask, wait for the answer, think, ask.

A session's next request goes out when its answer has come and the user has thought: a server
that falls behind is asked later, not more, and what its users' contexts have lost meanwhile it
computes again. That is the spiral which the replay shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from vllm_nvmeof_bench.replay.prompts import Vocabulary
from vllm_nvmeof_bench.replay.samples import Sample
from vllm_nvmeof_bench.serve.client import Reply
from vllm_nvmeof_bench.traces.model import Request, Session, Trace
from vllm_nvmeof_bench.traces.schedule import Pace, in_order, thinking_s

__all__ = ["Replay", "Server"]


class Server(Protocol):
    """What is needed of `serve.client.Client`."""

    async def complete(self, prompt: list[int], answer_tokens: int) -> Reply: ...


class Replay:
    """One arm's. `run` once; then `samples`, and `asked`, the ids of all blocks asked for."""

    def __init__(
        self,
        arm: str,
        server: Server,
        trace: Trace,
        pace: Pace,
        vocabulary: Vocabulary,
        tell: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.samples: list[Sample] = []
        self.asked: set[int] = set()
        self._arm = arm
        self._server = server
        self._trace = trace
        self._pace = pace
        self._vocabulary = vocabulary
        self._tell = tell
        self._begun_s = 0.0

    async def run(self, duration_s: float) -> None:
        """Until every session is through, or the time is up; what is under way then is cut."""
        self._begun_s = time.perf_counter()
        order = in_order(self._trace, self._pace.seed)
        timed = [one for one in order if one.start_s is not None]
        waiting = iter(one for one in order if one.start_s is None)
        users = min(self._pace.users, len(order) - len(timed))
        everyone = [
            *(self._arrive(one) for one in timed),
            *(self._user(waiting, number * self._pace.ramp_s) for number in range(users)),
        ]
        tasks = [asyncio.ensure_future(one) for one in everyone]
        try:
            done, _ = await asyncio.wait(tasks, timeout=duration_s)
            for task in done:
                task.result()  # a mistake of ours is not a slow server
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _arrive(self, session: Session) -> None:
        await asyncio.sleep((session.start_s or 0.0) * self._pace.time_scale)
        await self._play(session)

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
        try:
            reply = await self._server.complete(prompt, request.output_tokens)
        except asyncio.CancelledError:
            now_s = time.perf_counter()
            self._note(session, sent_s, Reply(sent_s, None, now_s - sent_s, len(prompt), 0), "cut")
            raise
        self._note(session, sent_s, reply, "failed" if reply.failure else "whole")

    def _note(self, session: str, sent_s: float, reply: Reply, ended: str) -> None:
        self.samples.append(
            Sample(
                arm=self._arm,
                session=session,
                at_s=sent_s - self._begun_s,
                ttft_s=reply.ttft_s,
                end_s=reply.end_s,
                tokens_in=reply.tokens_in,
                tokens_out=reply.tokens_out,
                ended=ended,
                why=reply.failure or "",
            )
        )
        self._tell(len(self.samples))
