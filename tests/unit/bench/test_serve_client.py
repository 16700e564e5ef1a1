# SPDX-License-Identifier: Apache-2.0
"""The client of whole servers and its reading of `/metrics`; arms by name and by URL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from vllm_nvmeof_bench.results import BenchError
from vllm_nvmeof_bench.serve.arms import ARMS, Sizes, arms_of, offload_of, server_spec
from vllm_nvmeof_bench.servers import client as client_module
from vllm_nvmeof_bench.servers.client import Client, Hits, Metrics, Tokens
from vllm_nvmeof_bench.servers.server import split_extra

from tests.unit.bench.made_up_server import SEPARATOR, MadeUpServer
from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.units import GIB

SIZES = Sizes(working_tokens=9600, request_tokens_max=1000, gpu_tokens=1024)
LONG = list(range(100, 200))


def on(server: MadeUpServer, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
    async def both() -> Any:
        client = Client(server.url, model="")
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(both())


def test_a_stream_is_timed_and_counted() -> None:
    with MadeUpServer() as server:
        reply = on(server, lambda client: client.attempt([1, 2, 3], 2))
    assert reply.failure is None
    assert 0 < reply.ttft_s <= reply.end_s
    assert (reply.tokens_in, reply.tokens_out) == (3, 2)
    assert (reply.tokens, reply.text) == ([6, 7], f"<6{SEPARATOR}><7{SEPARATOR}>")


def test_a_refused_request_is_a_failure_with_its_reason() -> None:
    with MadeUpServer(fails=3) as server:
        reply = on(server, lambda client: client.attempt([1, 2, 3], 2))
    assert reply.failure == "HTTP 503: overloaded"
    assert reply.times == []
    assert reply.tokens_out == 0


def test_a_stopped_server_is_a_failure_too() -> None:
    with MadeUpServer() as server:
        url = server.url

    async def gone() -> Any:
        client = Client(url, model="made-up")
        try:
            return await client.attempt([1], 1)
        finally:
            await client.close()

    assert "ConnectError" in str(asyncio.run(gone()).failure)


@pytest.mark.parametrize(("idle_s_max", "made"), [(3600.0, 1), (0.0, 2)])
def test_a_connection_that_was_idle_too_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, idle_s_max: float, made: int
) -> None:
    """vLLM's server closes it after five seconds, which may be just when a request is sent."""
    assert client_module._IDLE_S_MAX < 5 / 2
    monkeypatch.setattr(client_module, "_IDLE_S_MAX", idle_s_max)
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def read_twice() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        async with server, Client(f"http://{host}:{port}") as client:
            await client.metrics()
            await client.metrics()
        await asyncio.gather(*filter(None, served))

    asyncio.run(read_twice())
    assert len(served) == made


def test_hits_are_counted_by_source() -> None:
    async def work(client: Client) -> list[Hits]:
        found = [await client.hits()]
        for reset in (False, False, True):
            if reset:
                assert await client.forget_gpu()
            await client.attempt(LONG, 1)
            found.append(await client.hits())
        return found

    with MadeUpServer() as server:
        none, first, again, after = on(server, work)
    # Each reading follows a prompt of three tokens.
    assert first - none == Hits(prompt=103)
    assert again - first == Hits(prompt=103, gpu=100)
    assert after - again == Hits(prompt=103, cpu=100)


def test_our_counters_take_precedence_over_vllms() -> None:
    text = (
        "vllm:external_prefix_cache_hits_total 100\n"
        'vllm:nvmeof_loaded_tokens_total{source="cpu"} 30\n'
        'vllm:nvmeof_loaded_tokens_total{source="pool"} 60\n'
        'vllm:prompt_tokens_cached_by_source_total{source="host"} 100\n'
    )
    assert Hits.of(Metrics(text)) == Hits(cpu=30, pool=60, other=10)


def test_a_server_without_these_routes_gives_zeros() -> None:
    async def work(client: Client) -> tuple[Hits, bool]:
        await client.settle()
        return await client.hits(), await client.forget_gpu()

    with MadeUpServer(resets=False, metrics=False) as server:
        assert on(server, work) == (Hits(), False)


def test_arms_by_name_and_by_url() -> None:
    assert [arm.name for arm in arms_of(["pool", "peer"], [])] == ["pool", "peer"]
    first, second = arms_of(["pool"], ["ours=http://a:1/v1/", "http://b:2"])
    assert (first.name, first.url) == ("ours", "http://a:1")
    assert (second.name, second.url) == ("server2", "http://b:2")


@pytest.mark.parametrize(
    ("names", "urls", "needed"),
    [
        (["poool"], [], "no arm 'poool'; choose from none, cpu"),
        ([], [], "nothing to measure"),
        ([], ["a=http://x", "a=http://y"], "the same name"),
        ([], ["localhost:8000"], "NAME=http://HOST:PORT"),
    ],
)
def test_invalid_arms_are_refused(names: list[str], urls: list[str], needed: str) -> None:
    with pytest.raises(BenchError, match=needed):
        arms_of(names, urls)


@pytest.mark.parametrize("text", ["", "5", "9:3", "-1:100", "a:b"])
def test_invalid_token_ids_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="token ids"):
        Tokens.parse(text)


@pytest.mark.parametrize(("ours", "theirs"), [("full", "peer_full"), ("pool", "peer")])
def test_the_peer_gets_what_its_counterpart_gets(ours: str, theirs: str, tmp_path: Path) -> None:
    mine, rival = (offload_of(ARMS[name], SIZES, tmp_path) for name in (ours, theirs))
    assert mine is not None and mine.size_gib is not None and rival is not None
    assert mine.size_gib * GIB == rival.extra["cpu_bytes_to_use"]
    settings = parse_config(*split_extra(mine.extra))
    block_bytes = rival.extra["block_size"] * SIZES.shape.kv_bytes_per_token
    assert settings.chunk_bytes_min == block_bytes
    assert settings.offload_prompt_only is rival.extra["offload_prompt_only"] is False


def test_arms_differ_from_a_plain_server_only_in_offloading(tmp_path: Path) -> None:
    commands = {
        name: server_spec(arm, SIZES, tmp_path, tmp_path).command(1) for name, arm in ARMS.items()
    }
    bare = commands.pop("none")
    assert all(command[: len(bare)] == bare for command in commands.values())
    third, whole = SIZES.staging_bytes("third"), SIZES.staging_bytes("all")
    assert 0.3 < third / whole < 0.4
    cpu = offload_of(ARMS["cpu"], SIZES, tmp_path)
    assert cpu is not None and parse_config(*split_extra(cpu.extra)).pool_bytes == 0
