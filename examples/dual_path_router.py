# SPDX-License-Identifier: Apache-2.0
"""Route OpenAI requests to prefill and decode servers with DualPath's scheduling.

    python examples/dual_path_router.py --port 8000 \
        --prefill http://a:8100 --prefill http://b:8100 \
        --decode http://c:8200,c:7300 --decode http://d:8200,d:7300

The part after a comma is the address at which that server reads for others, as named in the other
servers' `peers`. The router sends such addresses as a hint to the server that computes a prompt,
which decides which server reads each chunk. Without --decode the prefill servers also answer, and a
request counts until its answer is complete.

`dual_path.py` chooses the servers. Outstanding tokens are this router's own counts; read queues are
the servers' gauges, polled every 100 ms. A server without that gauge counts as idle. A text's
tokens are estimated from its length.

While no server has room, up to `--waiting` requests wait in order of arrival; further requests are
refused with 503. The router needs httpx, starlette and uvicorn, which vLLM installs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from dual_path import choose_decode, choose_helpers, choose_prefill
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

QUEUE = re.compile(
    r'^vllm:nvmeof_read_queue_seconds\{[^}]*lane="(?!peer)[^}]*\} (\S+)', re.MULTILINE
)
POLL_S, SCRAPE_S = 0.1, 1.0
HELPERS = 3
BYTES_PER_TOKEN = 4
ANSWER_TOKENS = 256  # assumed for a request without a maximum
#: The parameters that vLLM's NixlConnector needs to compute a prompt for another server.
FOR_ANOTHER = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


class RefusedError(Exception):
    """A refusal by the router, with an HTTP status and a one-line message."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Engine:
    """A server. `tokens` and `requests` count this router's outstanding work. `queue_s` is the
    server's longest read queue at the last poll. `up` is whether the server answered the last
    request."""

    url: str
    helper: str = ""
    tokens: int = 0
    requests: int = 0
    queue_s: float = 0.0
    up: bool = True

    @classmethod
    def of(cls, text: str) -> Engine:
        url, _, helper = text.partition(",")
        return cls(url.rstrip("/"), helper)

    def take(self, tokens: int) -> None:
        self.tokens += tokens
        self.requests += 1

    def give_back(self, tokens: int) -> None:
        self.tokens -= tokens
        self.requests -= 1


@dataclass(frozen=True)
class Limits:
    """Limits on the outstanding tokens of a prefill and of a decode server (0: no limit), and on
    the waiting requests."""

    prefill_tokens_max: int = 2_000_000
    decode_tokens_max: int = 0
    waiting_max: int = 1000


class Router:
    def __init__(
        self,
        prefill: list[Engine],
        decode: list[Engine],
        client: httpx.AsyncClient,
        limits: Limits,
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self._client, self._limits = client, limits
        self.waiting = 0
        self._turn = asyncio.Lock()  # held by the first request in line; later ones queue for it
        self._room = asyncio.Event()

    # -- gauges -------------------------------------------------------------------------

    async def poll(self) -> None:
        while True:
            await asyncio.gather(*map(self.scrape, [*self.prefill, *self.decode]))
            await asyncio.sleep(POLL_S)

    async def scrape(self, engine: Engine) -> None:
        try:
            answer = await self._client.get(f"{engine.url}/metrics", timeout=SCRAPE_S)
            answer.raise_for_status()
        except httpx.HTTPError:
            engine.up = False
            return
        queues = (float(value) for value in QUEUE.findall(answer.text))
        engine.queue_s, was_up, engine.up = max(queues, default=0.0), engine.up, True
        if not was_up:
            self._room.set()

    # -- choices ------------------------------------------------------------------------

    def choose(self, prompt: int, answer: int) -> tuple[Engine, Engine] | None:
        """Return a request's servers, or None if it must wait. Raises RefusedError if no server is
        up."""
        prefill = [one for one in self.prefill if one.up]
        decode = [one for one in self.decode if one.up]
        if not prefill or (self.decode and not decode):
            raise RefusedError(503, f"no {'decode' if prefill else 'prefill'} server answers")
        first = choose_prefill(
            [one.tokens for one in prefill],
            [one.queue_s for one in prefill],
            self._limits.prefill_tokens_max,
        )
        if not self.decode:
            return None if first is None else (prefill[first], prefill[first])
        tokens, requests = [one.tokens for one in decode], [one.requests for one in decode]
        room, need = self._limits.decode_tokens_max, prompt + answer
        second = choose_decode(tokens, requests, need, room)
        if second is None and not any(requests):
            second = 0  # the request fits nowhere: let a server refuse it
        return None if first is None or second is None else (prefill[first], decode[second])

    def hint(self, prefill: Engine, decode: Engine) -> dict[str, Any]:
        """Return the hint that names helpers for a prompt, its decode server first, or {} without
        any."""
        servers = self.decode or self.prefill
        able = [one for one in servers if one is decode or (one.up and one.helper)]
        queues_s = [one.queue_s for one in able]
        chosen = choose_helpers(able.index(decode), queues_s, HELPERS + (decode is prefill))
        names = [able[n].helper for n in chosen if able[n].helper and able[n] is not prefill]
        return {"nvmeof": {"helpers": names}} if names else {}

    async def place(self, prompt: int, answer: int) -> tuple[Engine, Engine]:
        """Wait for room, in order of arrival, and reserve it. Raises RefusedError if too many
        requests wait or no server is up."""
        if self.waiting >= self._limits.waiting_max:
            raise RefusedError(503, "too many requests are waiting")
        self.waiting += 1
        try:
            async with self._turn:
                while (chosen := self.choose(prompt, answer)) is None:
                    self._room.clear()
                    await self._room.wait()
                chosen[0].take(prompt)
                if chosen[1] is not chosen[0]:
                    chosen[1].take(prompt + answer)
                return chosen
        finally:
            self.waiting -= 1

    def free(self, engine: Engine, tokens: int) -> None:
        engine.give_back(tokens)
        self._room.set()

    # -- requests -----------------------------------------------------------------------

    async def complete(self, path: str, body: dict[str, Any]) -> Response:
        """Compute the prompt on one server, and stream the answer from that server or another."""
        prompt, answer = prompt_tokens(body), answer_tokens(body)
        prefill, decode = await self.place(prompt, answer)
        hint, alone = self.hint(prefill, decode), decode is prefill
        done = functools.partial(self.free, decode, prompt + answer * (not alone))
        try:
            if alone:
                hinted = (body.get("kv_transfer_params") or {}) | hint
                passed = body | ({"kv_transfer_params": hinted} if hinted else {})
                return Relayed(await self._send(decode, path, passed), done)
            try:
                computed = await self._send(prefill, path, for_prefill(body, hint))
                await computed.aread()
            finally:
                self.free(prefill, prompt)
            if computed.is_error:
                return Relayed(computed, done)
            transfer = computed.json().get("kv_transfer_params")
            passed = body | {"kv_transfer_params": transfer}
            return Relayed(await self._send(decode, path, passed), done)
        except BaseException:
            done()
            raise

    async def _send(self, engine: Engine, path: str, body: dict[str, Any]) -> httpx.Response:
        request = self._client.build_request("POST", engine.url + path, json=body)
        try:
            return await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            engine.up = False  # until the server answers a poll
            raise RefusedError(502, f"{engine.url} does not answer: {error!r}") from None


class Relayed(StreamingResponse):
    """A response that forwards a server's stream and calls `done` once, even if the client has
    left."""

    def __init__(self, answer: httpx.Response, done: Callable[[], None]) -> None:
        kind = answer.headers.get("content-type")
        super().__init__(answer.aiter_bytes(), answer.status_code, media_type=kind)
        self._answer, self._done = answer, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._done()
            await self._answer.aclose()


def for_prefill(body: dict[str, Any], hint: dict[str, Any]) -> dict[str, Any]:
    """Return the request that computes only the prompt."""
    asked = {key: value for key, value in body.items() if key != "stream_options"}
    asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": FOR_ANOTHER | hint}
    return asked | ({"max_completion_tokens": 1} if "max_completion_tokens" in body else {})


def prompt_tokens(body: dict[str, Any]) -> int:
    """Return the number of prompt tokens, estimated from the length of a text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
        return max(1, len(prompt))
    text = prompt if prompt is not None else body.get("messages", "")
    return max(1, len(str(text)) // BYTES_PER_TOKEN)


def answer_tokens(body: dict[str, Any]) -> int:
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or ANSWER_TOKENS)


def application(router: Router) -> Starlette:
    async def completions(request: Request) -> Response:
        try:
            return await router.complete(request.url.path, await request.json())
        except RefusedError as error:
            return JSONResponse({"error": {"message": str(error)}}, error.status)
        except ValueError:
            return JSONResponse({"error": {"message": "the body is not JSON"}}, 400)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        polling = asyncio.create_task(router.poll())
        yield
        polling.cancel()

    paths = ("/v1/completions", "/v1/chat/completions")
    routes = [Route(path, completions, methods=["POST"]) for path in paths]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description="Route requests with DualPath's scheduling.")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL[,HELPER]")
    parser.add_argument("--decode", action="append", default=[], metavar="URL[,HELPER]")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--decode-tokens", type=int, default=0, help="most per server")
    parser.add_argument("--waiting", type=int, default=1000, help="requests that may wait")
    given = parser.parse_args()
    engines = [list(map(Engine.of, texts)) for texts in (given.prefill, given.decode)]
    limits = Limits(decode_tokens_max=given.decode_tokens, waiting_max=given.waiting)
    # vLLM's server closes connections that are idle for 5 s; the router must close them earlier.
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(keepalive_expiry=2.0))
    router = Router(*engines, client, limits)
    uvicorn.run(application(router), host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
