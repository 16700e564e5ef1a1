# SPDX-License-Identifier: Apache-2.0
"""The requests of `bench cost`, against canned answers on the loopback address."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from vllm_nvmeof_bench.cost import ask as ask_at_once
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.servers.client import Client

TOKEN = '{"id":"x","choices":[{"index":0,"text":"a"}]}'
USAGE = '{"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


def ask(
    events: Sequence[str], status: str = "200 OK", prompts: int = 1
) -> tuple[tuple[float, float], int]:
    """Ask a server that answers every request with `events`; also return its number of requests."""
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        asked += 1
        body = "".join(f"data: {event}\n\n" for event in events)
        lines = (f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close")
        writer.write("\r\n".join((*lines, "", body)).encode())
        await writer.drain()
        writer.close()

    async def both() -> tuple[float, float]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            client = Client(f"http://{host}:{port}", model="made-up")
            try:
                return await ask_at_once(client, [[1, 2, 3]] * prompts, 2)
            finally:
                await client.close()

    return asyncio.run(both()), asked


def test_tokens_are_timed_and_the_usage_event_is_no_token() -> None:
    (ttft_s, seconds), asked = ask([TOKEN, TOKEN, USAGE, "[DONE]"], prompts=3)
    assert asked == 3
    assert 0 < ttft_s <= seconds


@pytest.mark.parametrize(
    ("events", "status", "needed"),
    [
        ([TOKEN, "[DONE]"], "200 OK", "1 of 2 tokens came"),
        ([USAGE, "[DONE]"], "200 OK", "2 of 2 tokens came"),
        ([TOKEN, USAGE.replace(":2}", ":1}"), "[DONE]"], "200 OK", "1 of 2 tokens came"),
        (['{"error":{"message":"made up"}}'], "200 OK", "made up"),
        (["overloaded"], "503 Service Unavailable", "HTTP 503: data: overloaded"),
    ],
)
def test_an_incomplete_answer_is_an_error(events: Sequence[str], status: str, needed: str) -> None:
    with pytest.raises(BenchError, match=needed):
        ask(events, status)


def test_a_stopped_server_is_an_error() -> None:
    async def gone() -> None:
        server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        client = Client(f"http://127.0.0.1:{port}", model="made-up")
        try:
            await ask_at_once(client, [[1]], 2)
        finally:
            await client.close()

    with pytest.raises(BenchError, match="a request failed"):
        asyncio.run(gone())
