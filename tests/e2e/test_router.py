# SPDX-License-Identifier: Apache-2.0
"""The router example before two real servers that share: equal tokens, and each does its part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.router import RunningRouter, dual_path_router
from vllm_nvmeof_bench.servers.server import Server

from tests.e2e import faults_rig as rig

PROMPT_TOKENS = "vllm:prompt_tokens_total"
LOADED = "vllm:nvmeof_loaded_tokens_total"
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
