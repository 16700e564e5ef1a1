# SPDX-License-Identifier: Apache-2.0
"""Three servers on one directory are restarted one after the other while conversations go on.

A router takes a server out of its rotation before that server gets SIGTERM. Its successor takes the
server's directory back. Until then the others borrow what is in it, and the successor borrows what
the others have. So no request fails, and what is found of the prompts stays what it was.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.model import make_model, random_tokens
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import FAILED, LOADED, plain_answers
from tests.process import wait_until
from vllm_nvmeof_offload.errors import OffloadError

SERVERS = 3
#: They have more chunks than a server has room for in memory.
CONVERSATIONS, AT_ONCE = 12, 4
#: A turn begins with each restart. It adds a chunk, and the last 11 tokens are in no whole one.
TURNS = 1 + SERVERS
FIRST_TOKENS = 9 * rig.CHUNK_TOKENS + 11
ANSWER_TOKENS = 4
#: Between an answer and the next question of a conversation.
THINK_S = 0.05
#: Requests of a window: each conversation is in it about twice.
WINDOW = 2 * CONVERSATIONS
#: Of the prompts' tokens, in a crowd all of whose conversations are stored.
STEADY_SHARE = 0.9
SHARE_MIN = 0.8


class Conversations:
    """The prompts of all turns, and what the model answers without vLLM."""

    def __init__(self) -> None:
        rng = np.random.default_rng(31)
        longest = FIRST_TOKENS + (TURNS - 1) * rig.CHUNK_TOKENS
        whole = [random_tokens(rng, longest, rig.SHAPE) for _ in range(CONVERSATIONS)]
        ends = [FIRST_TOKENS + turn * rig.CHUNK_TOKENS for turn in range(TURNS)]
        self.prompts = [[tokens[:end] for end in ends] for tokens in whole]
        asked = [prompt for turns in self.prompts for prompt in turns]
        model = make_model(rig.BUILD / "models", rig.SHAPE)
        answers = plain_answers(model, asked, ANSWER_TOKENS)
        assert min(min(a.gaps) for a in answers) > 2 * rig.LOGPROB_TOLERANCE, "choose another seed"
        self.answers = [answers[at : at + TURNS] for at in range(0, len(answers), TURNS)]


@functools.cache
def conversations() -> Conversations:
    return Conversations()


class Crowd:
    """Asks each conversation's turn again and again, at the servers of the rotation by turns.

    Its thread asks; the test's thread changes `turn` and the rotation, and reads the counts.
    """

    def __init__(self, asked: Conversations, servers: list[Server]) -> None:
        self.turn = 0
        self.failures: list[str] = []
        self.shares: list[float] = []  # by window: of the prompts' tokens, what was found
        self.answered: dict[str, set[int]] = defaultdict(set)  # URL → conversations
        self._asked = asked
        self._rotation = servers
        self._under_way: Counter[str] = Counter()  # by URL
        self._window: list[Answer] = []
        self._stopping = False

    def leave(self, server: Server) -> None:
        """Take the server out of the rotation, and wait for its last answer."""
        self._rotation = [one for one in self._rotation if one is not server]
        wait_until("its last answer", lambda: self.failed or not self._under_way[server.url])

    def join(self, server: Server) -> None:
        """Add the server, and wait until each conversation had an answer from it."""
        self._rotation = [*self._rotation, server]
        wait_until(
            "an answer to each conversation",
            lambda: self.failed or len(self.answered[server.url]) == CONVERSATIONS,
        )

    def wait_windows(self, count: int) -> list[float]:
        """Wait for so many windows that begin from now on; return their shares."""
        first = len(self.shares) + 1
        wait_until("a window", lambda: self.failed or len(self.shares) >= first + count)
        return self.shares[first : first + count]

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield
        finally:
            self._stopping = True
            thread.join()

    async def _run(self) -> None:
        room = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._converse(number, room) for number in range(CONVERSATIONS)))

    async def _converse(self, number: int, room: asyncio.Semaphore) -> None:
        asked = number  # each conversation begins at another server
        while not self._stopping:
            async with room:
                rotation = self._rotation
                await self._ask(number, rotation[asked % len(rotation)].url)
            asked += 1
            await asyncio.sleep(THINK_S)

    async def _ask(self, number: int, url: str) -> None:
        turn = self.turn
        self._under_way[url] += 1
        try:
            async with Client(url) as client:
                answer = await client.complete(self._asked.prompts[number][turn], ANSWER_TOKENS)
        except (OffloadError, httpx.HTTPError) as error:
            self.failures.append(repr(error))
            return
        finally:
            self._under_way[url] -= 1
        if not rig.same([answer], [self._asked.answers[number][turn]]):
            self.failures.append(f"other tokens: conversation {number}, turn {turn}")
        self.answered[url].add(number)
        self._window.append(answer)
        if len(self._window) == WINDOW:
            found = sum(one.tokens_cached for one in self._window)
            self.shares.append(found / sum(one.tokens_in for one in self._window))
            self._window.clear()


def spec(target: Path) -> ServerSpec:
    base = rig.spec(target, share="host")
    return replace(base, extra_args=("--enable-prompt-tokens-details",))


def test_servers_that_restart_one_after_the_other(tmp_path: Path) -> None:
    with ExitStack() as open_:

        def start(name: str) -> Server:
            return open_.enter_context(rig.start(spec(tmp_path / "pool"), f"rolling-{name}"))

        asked = conversations()
        servers = [start(f"{number}") for number in range(SERVERS)]
        crowd = Crowd(asked, servers)
        with crowd.running():
            wait_until(
                "a steady crowd",
                lambda: crowd.failed or max(crowd.shares, default=0.0) > STEADY_SHARE,
            )
            first = len(crowd.shares)
            before = crowd.wait_windows(2)
            for number, server in enumerate(servers):
                crowd.turn += 1
                crowd.leave(server)
                server.stop()
                crowd.wait_windows(1)
                successor = start(f"{number}-again")
                crowd.join(successor)
                sources = rig.metrics(successor)
                assert sources.value(LOADED, source="pool") > 0, "it has its directory back"
                assert sources.value(LOADED, source="shared") > 0
                assert sources.value(FAILED) == 0
            crowd.wait_windows(1)
        assert crowd.failures == []
        print("found of the prompts' tokens, by window:", [f"{one:.3f}" for one in crowd.shares])
        assert min(crowd.shares[first:]) >= SHARE_MIN * sum(before) / len(before)
        pools = {path.name for path in (tmp_path / "pool").glob("*/engine-*")}
        assert pools == {f"engine-{number}" for number in range(SERVERS)}
