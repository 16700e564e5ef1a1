# SPDX-License-Identifier: Apache-2.0
"""A model whose weights can be replaced, its expected answers, and a server's processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import MODEL_NAME, Server, ServerSpec

from tests.e2e import faults_rig as rig
from tests.wait import wait_until

#: Half of the rig's pool: enough to exceed GPU memory and CPU tier together.
PROMPTS = 6
NEW_SHAPE = replace(rig.SHAPE, seed=77)
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """Two sets of weights of one shape, and a model directory that has one of them."""

    directory: Path
    old: Path
    new: Path

    @classmethod
    def make(cls, directory: Path) -> Weights:
        """Make a model directory with the old weights."""
        old = make_model(rig.BUILD / "models", rig.SHAPE)
        shutil.copytree(old, directory)
        return cls(directory, old, make_model(rig.BUILD / "models", NEW_SHAPE))

    def put(self, model: Path) -> None:
        """Replace the weights by those of `model`, in the way new weights are published."""
        self.bring(model)
        self.publish()

    def bring(self, model: Path) -> None:
        """The slow part of `put`: copy the weights of `model` beside those in use."""
        shutil.copy(model / _WEIGHTS, self.directory / "fresh")

    def publish(self) -> None:
        """Replace the weights by those that were brought."""
        (self.directory / "fresh").rename(self.directory / _WEIGHTS)
        # The start time of a process is known in ticks: a process that starts in this tick would
        # treat these weights as changed during its start.
        time.sleep(2 / os.sysconf("SC_CLK_TCK"))


@dataclass(frozen=True)
class Scene:
    """The directory with model and pool, and the answers of each set of weights."""

    pool: Path
    weights: Weights
    faults: rig.Faults
    prompts: list[list[int]]
    old: list[list[int]]
    new: list[list[int]]

    def start(self, name: str, *arguments: str, step_tokens: int) -> Server:
        made = spec(self.pool, self.weights.directory, fault_injection=str(self.faults.path))
        made = replace(made, extra_args=arguments, max_num_batched_tokens=step_tokens)
        return rig.start(made, name)


def asked() -> list[list[int]]:
    return rig.prompts()[:PROMPTS]


def expected_of(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens per prompt, computed by the model's own code without vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers: list[list[int]] = []
    for prompt in prompts:
        tokens, cache = torch.tensor([list(prompt)]), None
        answers.append([])
        for _ in range(count):
            with torch.no_grad():
                out = llama(tokens, past_key_values=cache, use_cache=True)
            best = torch.log_softmax(out.logits[0, -1], -1).topk(2)
            assert best.values[0] - best.values[1] > 2 * rig.LOGPROB_TOLERANCE, "another seed"
            cache, tokens = out.past_key_values, best.indices[:1][None]
            answers[-1].append(int(tokens))
    return answers


def tokens_of(server: Server, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [answer.tokens for answer in rig.ask(server, prompts)]


def spec(pool: Path, model: Path, **extra: object) -> ServerSpec:
    """A server with this pool and model."""
    return replace(rig.spec(pool, **extra), model=model)


def post(server: Server, path: str, **params: Any) -> httpx.Response:
    """Call one of vLLM's administrative endpoints, which must succeed."""
    response = httpx.post(f"{server.url}{path}", params=params, timeout=60, trust_env=False)
    assert response.status_code == httpx.codes.OK, (path, params, response.text)
    return response


def call_workers(server: Server, method: str, **kwargs: Any) -> None:
    """vLLM's `collective_rpc`."""
    body = {"method": method, "kwargs": kwargs}
    response = httpx.post(f"{server.url}/collective_rpc", json=body, timeout=60, trust_env=False)
    assert response.status_code == httpx.codes.OK, (method, response.text)


def group(leader: int) -> dict[int, str]:
    """Process id → title of the live processes of a group."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == leader and state not in "ZX":
                title = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(stat.parent.name)] = title.decode(errors="replace").strip()
    return found


def with_priorities(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Ask all prompts at once; the last one has the highest priority."""

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            return list(await asyncio.gather(*(one(http, i) for i in range(len(prompts)))))

    async def one(http: httpx.AsyncClient, number: int) -> list[int]:
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompts[number], "temperature": 0}
        body |= {"max_tokens": rig.ANSWER_TOKENS, "ignore_eos": True, "return_token_ids": True}
        response = await http.post(
            f"{server.url}/v1/completions", json={**body, "priority": -number}
        )
        response.raise_for_status()
        return list(response.json()["choices"][0]["token_ids"])

    return asyncio.run(run())


def stored(server: Server, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answers' tokens; all chunks of the prompts are then in the pool."""
    return [answer.tokens for answer in rig.ask_and_settle(server, prompts)]


def returning(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    rig.forget_gpu(server)
    return tokens_of(server, prompts)


def wait_for_requests(server: Server) -> None:
    async def running() -> float:
        async with Client(server.url) as client:
            return (await client.metrics()).value("vllm:num_requests_running")

    wait_until("running requests", lambda: asyncio.run(running()) > 0)


def while_loads_run(
    server: Server, scene: Scene, act: Callable[[], None]
) -> list[Answer | BaseException]:
    """Ask for chunks that are read from the pool, and call `act` during the reads.

    The reads hang until `act` has begun, and then still for as long as a slow disk takes.
    """
    prompts = scene.prompts[::2]
    assert stored(server, prompts) == scene.old[::2]
    rig.forget_gpu(server)
    slow = {"read_delay_ms": 300, "write_delay_ms": 300}
    scene.faults.set(hang_reads=True, **slow)
    fired = scene.faults.fired("hang_reads")
    release = threading.Timer(0.3, scene.faults.set, kwargs=slow)

    def act_during_reads() -> None:
        wait_until("a read", lambda: scene.faults.fired("hang_reads") > fired)
        release.start()
        act()
        release.join()

    async def run() -> list[Answer | BaseException]:
        async with Client(server.url) as client:
            asked = [client.complete(p, rig.ANSWER_TOKENS) for p in prompts]
            answers = asyncio.gather(*asked, return_exceptions=True)
            await asyncio.to_thread(act_during_reads)
            return list(await answers)

    answers = asyncio.run(run())
    scene.faults.set()
    return answers
