# SPDX-License-Identifier: Apache-2.0
"""Our router and vLLM's before two real servers that share: equal tokens, and both are used."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.router import RunningRouter, dual_path_router
from vllm_nvmeof_bench.servers.server import ReservedPort, Server

from tests.e2e import servers as rig
from tests.e2e.servers import LOADED
from tests.process import wait_until

ROOT = Path(__file__).resolve().parents[2]
#: The router of the package index that this test was seen to pass with.
ROUTER = "vllm-router==0.1.17"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
#: Read queues are polled every 100 ms: with so slow a link some poll sees one.
LINK_BYTES_PER_S = 8_000_000


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    directory = tmp_path_factory.mktemp("router")
    with ExitStack() as running:
        found = []
        for name in "ab":
            faults = rig.Faults(directory / f"{name}.json")
            faults.set(bytes_per_s=LINK_BYTES_PER_S)
            one = rig.spec(directory / "pool", share="host", fault_injection=str(faults.path))
            found.append(running.enter_context(rig.start(one, f"router-{name}")))
        yield found


def ask_at_once(url: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    async def run() -> list[Answer]:
        async with Client(url) as client:
            asked = (client.complete(prompt, rig.ANSWER_TOKENS) for prompt in prompts)
            return list(await asyncio.gather(*asked))

    return asyncio.run(run())


def ask_in_turn(url: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    async def run() -> list[Answer]:
        async with Client(url) as client:
            return [await client.complete(prompt, rig.ANSWER_TOKENS) for prompt in prompts]

    return asyncio.run(run())


def test_a_crowd_is_answered_by_both_servers_and_loads_on_both(servers: list[Server]) -> None:
    reference = rig.reference()
    asked = sum(map(len, reference.prompts))
    with RunningRouter(dual_path_router(servers), rig.BUILD / "logs" / "router.log") as router:
        before = [rig.metrics(one) for one in servers]
        assert rig.same(ask_at_once(router.url, reference.prompts), reference.answers)
        taken = [
            rig.grown(one, then, PROMPT_TOKENS) for one, then in zip(servers, before, strict=True)
        ]
        assert sum(taken) == asked
        assert min(taken) > asked / 4, "each gets what the other one has no room for"
        for one in servers:
            rig.settle(one)
            rig.forget_gpu(one)
        before = [rig.metrics(one) for one in servers]
        assert rig.same(ask_at_once(router.url, reference.prompts), reference.answers)
        for one, then in zip(servers, before, strict=True):
            assert rig.grown(one, then, LOADED) > 0


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_vllms_own_router_needs_nothing_of_ours(servers: list[Server], policy: str) -> None:
    """In turn, an odd number of prompts meets the other server the second time, which loads what
    the first one has stored. The policy of examples/router sends them to the same server."""
    flags = f"--policy {policy}"
    if policy == "cache_aware":
        assert flags in (ROOT / "examples" / "router" / "README.md").read_text()
    tool = [str(Path(sys.executable).with_name("uv")), "tool", "run", "--quiet", "--from", ROUTER]
    if subprocess.run([*tool, "vllm-router", "--help"], capture_output=True).returncode:
        pytest.skip(f"{ROUTER} cannot be had here")
    asked = rig.prompts(seed=len(policy), count=6)[:5]
    with ReservedPort() as unused:
        figures = ["--prometheus-port", str(unused.number)]
    urls = [one.url for one in servers]
    command = [*tool, "vllm-router", "--worker-urls", *urls, *flags.split(), *figures]
    with RunningRouter(command, rig.BUILD / "logs" / f"vllm-router-{policy}.log") as router:
        wait_until("the router", lambda: httpx.get(f"{router.url}/health").is_success)
        first = ask_in_turn(router.url, asked)
        for one in servers:
            rig.settle(one)
            rig.forget_gpu(one)
        before = [rig.metrics(one) for one in servers]
        assert rig.same(ask_in_turn(router.url, asked), first)
    loaded = {
        source: sum(
            rig.grown(one, then, LOADED, source=source)
            for one, then in zip(servers, before, strict=True)
        )
        for source in ("cpu", "pool", "shared")
    }
    assert sum(loaded.values()) > sum(map(len, asked)) / 2
    if policy == "round_robin":
        assert loaded["shared"] > 0
    else:  # a busy server's prompt may go to the other one
        assert loaded["shared"] < loaded["cpu"] + loaded["pool"]
