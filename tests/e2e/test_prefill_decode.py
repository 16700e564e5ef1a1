# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server, with NIXL between them and our connector in both, which share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from vllm_nvmeof_bench.servers.client import Answer
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.router import RunningRouter, dual_path_router
from vllm_nvmeof_bench.servers.server import (
    MODEL_NAME,
    OffloadSpec,
    ReservedPort,
    Server,
    ServerSpec,
)

from tests.e2e import servers as rig
from tests.e2e.servers import HITS, LOADED, PLACES, plain_answers

PENDING = "vllm:nvmeof_writes_pending"
PROMPTS, ANSWER_TOKENS = 2, 40  # the answer fills another chunk
ASK_A_PEER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def spec(place: Path, role: str, port: int) -> ServerSpec:
    """A server with both connectors; NIXL comes first where it brings the whole prompt."""
    base = rig.spec(place, share="host")
    assert base.offload is not None
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_buffer_device": "cpu",
    }
    ours = {
        "kv_connector": "NVMeoFOffloadingConnector",
        "kv_connector_extra_config": dict(base.offload.extra),
    }
    children = [nixl, ours] if role == "consumer" else [ours, nixl]
    transfer = {"kv_connector": "NVMeoFMultiConnector", "kv_role": "kv_both"}
    env = {
        **base.env,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
    }
    offload = OffloadSpec(base.offload.size_gib, {"connectors": children}, transfer)
    return replace(base, offload=offload, env=env)


class Pair:
    """The two servers, and what a router does for a request."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill = prefill
        self.decode = decode

    def ask(self, prompt: Sequence[int]) -> Answer:
        return complete(self.decode, prompt, ANSWER_TOKENS, self.computed(prompt))

    def computed(self, prompt: Sequence[int]) -> Mapping[str, Any]:
        """Let the prefill server compute the prompt; return where its KV is."""
        return post(self.prefill, prompt, 1, ASK_A_PEER)["kv_transfer_params"]


def post(
    server: Server | RunningRouter,
    prompt: Sequence[int],
    tokens: int,
    transfer: Mapping[str, Any] | None,
) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "kv_transfer_params": transfer,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def complete(
    server: Server | RunningRouter,
    prompt: Sequence[int],
    tokens: int,
    transfer: Mapping[str, Any] | None = None,
) -> Answer:
    (choice,) = post(server, prompt, tokens, transfer)["choices"]
    answer = Answer(0.0)
    answer.tokens, answer.logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    return answer


@pytest.fixture(scope="module")
def reference() -> rig.Reference:
    asked = rig.prompts(seed=35, count=PROMPTS)
    answers = plain_answers(make_model(rig.BUILD / "models", rig.SHAPE), asked, ANSWER_TOKENS)
    assert min(min(a.gaps) for a in answers) > 2 * rig.LOGPROB_TOLERANCE, "choose another seed"
    return rig.Reference(asked, answers)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefill-decode") / "pool"


@pytest.fixture(scope="module")
def pair(place: Path) -> Iterator[Pair]:
    with ExitStack() as running:
        servers = []
        for role in ("producer", "consumer"):
            port = ReservedPort()
            running.enter_context(port)
            one = spec(place, role, port.number)
            servers.append(running.enter_context(rig.start(one, f"prefill-decode-{role}")))
        yield Pair(*servers)


def whole(tokens: int) -> int:
    return tokens // rig.CHUNK_TOKENS * rig.CHUNK_TOKENS


def test_what_one_computes_the_other_decodes(pair: Pair, reference: rig.Reference) -> None:
    for prompt, answer in zip(reference.prompts, reference.answers, strict=True):
        before = rig.metrics(pair.decode)
        assert rig.same([pair.ask(prompt)], [answer])
        assert rig.grown(pair.decode, before, HITS) >= len(prompt) - 1, "NIXL brought it"
        assert rig.grown(pair.decode, before, LOADED) == 0
        rig.forget_gpu(pair.decode)


def test_the_next_turns_prefill_borrows_what_was_decoded(
    pair: Pair, reference: rig.Reference
) -> None:
    """The prefill server has the prompt's chunks, and never computed the answer's."""
    rig.wait_for(pair.decode, "the last write", lambda m: m.value(PENDING, state="sent") == 0)
    chunks = rig.metrics(pair.decode).value("vllm:nvmeof_slots_used", kind="pool")
    rig.wait_for(pair.prefill, "its chunks", lambda m: m.value(PLACES) >= chunks)
    for prompt, answer in zip(reference.prompts, reference.answers, strict=True):
        rig.forget_gpu(pair.prefill)
        before = rig.metrics(pair.prefill)
        asked = [*prompt, *answer.tokens[:-1]]
        again = complete(pair.prefill, asked, 1)
        assert again.tokens == answer.tokens[-1:]
        decoded = whole(len(asked) - 1) - whole(len(prompt))
        assert decoded > 0
        assert rig.grown(pair.prefill, before, LOADED, source="shared") == decoded
        assert rig.grown(pair.prefill, before, LOADED) == whole(len(asked) - 1)


def test_each_has_stored_what_it_had(pair: Pair, reference: rig.Reference) -> None:
    """Both have the prompts; the decode server has its answers too."""
    for server, tokens in ((pair.prefill, 0), (pair.decode, ANSWER_TOKENS - 1)):
        for prompt, answer in zip(reference.prompts, reference.answers, strict=True):
            rig.forget_gpu(server)
            before = rig.metrics(server)
            asked = [*prompt, *answer.tokens[:tokens]]
            again = complete(server, asked, ANSWER_TOKENS - tokens)
            assert again.tokens == answer.tokens[tokens:]
            assert np.allclose(
                again.logprobs, answer.logprobs[tokens:], rtol=0, atol=rig.LOGPROB_TOLERANCE
            )
            assert rig.grown(server, before, LOADED) == whole(len(asked) - 1)


def test_the_router_example_stands_before_them(pair: Pair, reference: rig.Reference) -> None:
    servers = (pair.prefill, pair.decode)
    command = dual_path_router([pair.prefill], [pair.decode])
    with RunningRouter(command, rig.BUILD / "logs" / "prefill-decode-router.log") as router:
        for prompt, answer in zip(reference.prompts, reference.answers, strict=True):
            for one in servers:
                rig.forget_gpu(one)
            before = [rig.metrics(one) for one in servers]
            assert rig.same([complete(router, prompt, ANSWER_TOKENS)], [answer])
            assert rig.grown(pair.prefill, before[0], LOADED) == whole(len(prompt) - 1)
            assert rig.grown(pair.decode, before[1], HITS) >= len(prompt) - 1, "NIXL brought it"


def test_what_a_dead_peer_does_not_bring_is_computed_and_stored_right(
    pair: Pair, place: Path
) -> None:
    """A load that fails leaves no wrong KV in our tiers: it is stored after it was computed."""
    asked = rig.prompts(seed=30, count=2)
    wanted = [complete(pair.prefill, prompt, ANSWER_TOKENS) for prompt in asked]
    where = [pair.computed(prompt) for prompt in asked]
    pair.prefill.kill()
    (its_pool,) = place.glob("*/engine-0")  # it was the first to start
    shutil.rmtree(its_pool)  # or what it had computed would be borrowed
    rig.wait_for(pair.decode, "none of its chunks", lambda m: m.value(PLACES) == 0)
    for _ in range(2):
        rig.forget_gpu(pair.decode)
        before = rig.metrics(pair.decode)
        for prompt, there, answer in zip(asked, where, wanted, strict=True):
            assert rig.same([complete(pair.decode, prompt, ANSWER_TOKENS, there)], [answer])
        where = [{}, {}]
        assert "NIXL transfer failure" in pair.decode.log(), "the first time"
    assert rig.grown(pair.decode, before, LOADED) > 0, "the second time from our tiers"
