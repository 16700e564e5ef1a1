# SPDX-License-Identifier: Apache-2.0
"""The router example before small made-up servers in this process; none of them has a model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

PATH = Path(__file__).parents[3] / "examples" / "dual_path_router.py"
LINES_MAX = 300
PROMPT = {"model": "m", "prompt": list(range(100)), "max_tokens": 10}


def loaded() -> ModuleType:
    sys.path.insert(0, str(PATH.parent))  # as for a script
    specification = importlib.util.spec_from_file_location("dual_path_router", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["dual_path_router"] = module
    specification.loader.exec_module(module)
    return module


example = loaded()


class FakeServer:
    """Answers after its gate is open. queue_s: its gauge, which it exports unless it is None."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue_s: float | None = None
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        routes = [
            Route("/metrics", self._metrics),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _metrics(self, _: Request) -> Response:
        if self.queue_s is None:
            return PlainTextResponse("vllm:other 1.0\n")
        lanes = {"0": self.queue_s / 2, "1": self.queue_s, "peer c:7300": 99.0}
        lines = (
            f'vllm:nvmeof_read_queue_seconds{{engine="0",lane="{lane}"}} {value}\n'
            for lane, value in lanes.items()
        )
        return PlainTextResponse("".join(lines))

    async def _complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.arrived.set()
        await self.gate.wait()
        transfer = {"remote_engine_id": self.name}
        return JSONResponse({"server": self.name, "kv_transfer_params": transfer}, self.status)


class Rig:
    """A router over two prefill and two decode servers. A server whose host is not known cannot be
    reached."""

    def __init__(self, decode: bool = True, **limits: int) -> None:
        self.servers = {name: FakeServer(name) for name in ("p0", "p1", "d0", "d1")}
        self.lost: set[str] = set()
        first = [f"http://{name}" + ("" if decode else f",{name}:7300") for name in ("p0", "p1")]
        second = [f"http://{name},{name}:7300" for name in ("d0", "d1")] if decode else []
        engines = [list(map(example.Engine.of, texts)) for texts in (first, second)]
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._pass))
        self.router = example.Router(*engines, client, example.Limits(**limits))
        transport = httpx.ASGITransport(example.application(self.router))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router")

    async def _pass(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.lost:
            raise httpx.ConnectError("refused")
        transport = httpx.ASGITransport(self.servers[request.url.host].app)
        return await transport.handle_async_request(request)

    async def ask(self, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=PROMPT | more)

    async def scrape(self) -> None:
        for engine in self.engines():
            await self.router.scrape(engine)

    def engines(self) -> list[Any]:
        return [*self.router.prefill, *self.router.decode]

    def held(self) -> list[tuple[int, int]]:
        return [(one.tokens, one.requests) for one in self.engines()]

    def asked(self) -> dict[str, int]:
        return {name: len(server.bodies) for name, server in self.servers.items()}


def play(scenario: Callable[[Rig], Awaitable[None]], decode: bool = True, **limits: int) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scenario(Rig(decode, **limits)), timeout=20)

    asyncio.run(whole())


def test_a_prompt_is_computed_on_one_server_and_answered_by_another_one() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(stream_options={"include_usage": True})
        assert answer.json()["server"] == "d0"
        prompt, passed = rig.servers["p0"].bodies[0], rig.servers["d0"].bodies[0]
        assert (prompt["max_tokens"], prompt["stream"]) == (1, False)
        assert "stream_options" not in prompt
        assert prompt["kv_transfer_params"]["do_remote_decode"] is True
        assert prompt["kv_transfer_params"]["nvmeof"] == {"helpers": ["d0:7300", "d1:7300"]}
        assert passed["max_tokens"] == 10
        assert passed["kv_transfer_params"] == {"remote_engine_id": "p0"}
        assert rig.held() == [(0, 0)] * 4

    play(scenario)


def test_prompts_avoid_tokens_and_long_queues_and_helpers_come_by_their_queues() -> None:
    async def scenario(rig: Rig) -> None:
        servers = rig.servers
        servers["p0"].queue_s, servers["p1"].queue_s, servers["d0"].queue_s = 0.5, 0.01, 0.2
        await rig.scrape()
        assert [one.queue_s for one in rig.engines()] == [0.5, 0.01, 0.2, 0.0]
        servers["p1"].gate.clear()
        first = asyncio.create_task(rig.ask())
        await servers["p1"].arrived.wait()
        assert rig.held() == [(0, 0), (100, 1), (110, 1), (0, 0)]
        servers["p0"].queue_s = 0.02  # now its link is short too, and it has no tokens
        await rig.scrape()
        second = await rig.ask()
        assert second.json()["server"] == "d1"
        hint = servers["p0"].bodies[0]["kv_transfer_params"]["nvmeof"]
        assert hint == {"helpers": ["d1:7300", "d0:7300"]}
        servers["p1"].gate.set()
        await first
        assert rig.held() == [(0, 0)] * 4

    play(scenario)


def test_without_gauges_the_routers_own_counts_decide() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.scrape()
        for server in rig.servers.values():
            server.gate.clear()
        tasks = []
        for name in ("p0", "p1"):
            tasks.append(asyncio.create_task(rig.ask()))
            await rig.servers[name].arrived.wait()
        assert rig.asked() == {"p0": 1, "p1": 1, "d0": 0, "d1": 0}
        for server in rig.servers.values():
            server.gate.set()
        assert {(await task).json()["server"] for task in tasks} == {"d0", "d1"}

    play(scenario)


def test_without_decode_servers_the_one_that_computes_answers_and_others_may_read() -> None:
    async def scenario(rig: Rig) -> None:
        server = rig.servers["p0"]
        server.gate.clear()
        first = asyncio.create_task(rig.ask(stream_options={"include_usage": True}))
        await server.arrived.wait()
        assert rig.held() == [(100, 1), (0, 0)]
        assert (await rig.ask()).json()["server"] == "p1", "the first still counts"
        server.gate.set()
        assert (await first).json()["server"] == "p0"
        assert rig.held() == [(0, 0)] * 2
        (body,) = server.bodies
        assert body["max_tokens"] == 10
        assert "stream_options" in body
        assert body["kv_transfer_params"] == {"nvmeof": {"helpers": ["p1:7300"]}}
        rig.lost = {"p1"}
        await rig.scrape()
        await rig.ask()
        assert "kv_transfer_params" not in server.bodies[1], "nobody else reads"

    play(scenario, decode=False)


def test_a_server_that_is_gone_gets_nothing_until_it_answers_again() -> None:
    async def scenario(rig: Rig) -> None:
        rig.lost = {"p0"}
        assert (await rig.ask()).status_code == 502
        assert rig.held() == [(0, 0)] * 4
        assert (await rig.ask()).json()["server"] == "d0"
        assert rig.asked()["p1"] == 1
        rig.lost = {"p0", "d0", "d1"}
        await rig.scrape()
        refused = await rig.ask()
        assert refused.status_code == 503
        assert "no decode server answers" in refused.text
        rig.lost = set()
        await rig.scrape()
        assert (await rig.ask()).status_code == 200
        assert rig.asked()["p0"] == 1

    play(scenario)


def test_an_error_of_the_prefill_server_is_passed_on_and_nothing_stays_counted() -> None:
    async def scenario(rig: Rig) -> None:
        rig.servers["p0"].status = 400
        answer = await rig.ask()
        assert (answer.status_code, answer.json()["server"]) == (400, "p0")
        assert rig.asked()["d0"] == 0
        assert rig.held() == [(0, 0)] * 4
        bad = await rig.client.post("/v1/completions", content=b"{")
        assert bad.status_code == 400

    play(scenario)


def test_requests_wait_for_room_in_their_order_and_too_many_are_refused() -> None:
    async def scenario(rig: Rig) -> None:
        rig.lost = {"d1"}
        await rig.scrape()
        decode = rig.servers["d0"]
        decode.gate.clear()
        first = asyncio.create_task(rig.ask(user="first"))
        await decode.arrived.wait()  # 110 of 150 tokens are held
        later = []
        for user in ("second", "third"):
            later.append(asyncio.create_task(rig.ask(user=user)))
            while rig.router.waiting < len(later):
                await asyncio.sleep(0)
        refused = await rig.ask()
        assert refused.status_code == 503
        assert "too many" in refused.text
        decode.gate.set()
        for task in (first, *later):
            assert (await task).status_code == 200
        assert [body["user"] for body in decode.bodies] == ["first", "second", "third"]
        assert rig.held() == [(0, 0)] * 4

    play(scenario, decode_tokens_max=150, waiting_max=2)


def test_a_client_that_leaves_gives_its_room_back() -> None:
    async def scenario(rig: Rig) -> None:
        for name in ("p0", "d0"):
            server = rig.servers[name]
            server.gate.clear()
            server.arrived.clear()
            task = asyncio.create_task(rig.ask())
            await server.arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert rig.held() == [(0, 0)] * 4
            server.gate.set()

    play(scenario)


def test_tokens_are_counted_or_estimated() -> None:
    assert example.prompt_tokens({"prompt": [1, 2, 3]}) == 3
    assert example.prompt_tokens({"prompt": "x" * 400}) == 100
    messages = [{"role": "user", "content": "x" * 4000}]
    assert 1000 <= example.prompt_tokens({"messages": messages}) < 1020
    assert example.answer_tokens({"max_completion_tokens": 7, "max_tokens": 9}) == 7
    assert example.answer_tokens({}) == example.ANSWER_TOKENS
    asked = example.for_prefill({"max_completion_tokens": 7}, {"nvmeof": {}})
    assert asked["max_completion_tokens"] == 1
    json.dumps(asked)


def test_the_example_stays_short() -> None:
    assert len(PATH.read_text().splitlines()) <= LINES_MAX
