# SPDX-License-Identifier: Apache-2.0
"""New weights in servers that share: never tokens of old weights, and sharing by the weights' name.

Servers A and B begin with the same weights on one directory. The tests go on from one another.
The expected answers are those of servers without offloading, of each set of weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from vllm_nvmeof_bench.servers.client import Answer, Metrics
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import BORROWED, FAILED, LOADED, REFUSED, knows, written
from tests.process import wait_until

NAME_WEIGHTS = "nvmeof_weights_version"
NEW_MODEL = make_model(rig.BUILD / "models", rig.NEW_SHAPE)


@pytest.fixture(scope="module")
def old() -> rig.Reference:
    return rig.reference()


@pytest.fixture(scope="module")
def new(old: rig.Reference) -> list[Answer]:
    with rig.start(replace(rig.spec(), model=NEW_MODEL), "share-weights-reference") as server:
        answers = rig.ask(server, old.prompts)
    assert min(min(a.gaps) for a in answers) > 2 * rig.LOGPROB_TOLERANCE, "choose another seed"
    assert not any(map(same_one, answers, old.answers)), "the weights differ in every answer"
    return answers


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    """Resets keep no name by themselves: `weights_never_change` is not set."""
    return rig.spec(tmp_path_factory.mktemp("share") / "pool", share="host")


@pytest.fixture(scope="module")
def a(spec: ServerSpec) -> Iterator[Server]:
    with rig.start(spec, "share-weights-a") as server:
        yield server


@pytest.fixture(scope="module")
def b(spec: ServerSpec, a: Server) -> Iterator[Server]:
    with rig.start(spec, "share-weights-b") as server:
        yield server


def same_one(answer: Answer, expected: Answer) -> bool:
    return rig.same([answer], [expected])


def chunks_of(prompts: list[list[int]]) -> int:
    """The different whole chunks of the prompts; pairs of prompts share their first halves."""
    per_prompt = [len(prompt) // rig.CHUNK_TOKENS for prompt in prompts]
    return sum(per_prompt) - len(prompts) // 2 * (rig.PROMPT_TOKENS // 2 // rig.CHUNK_TOKENS)


def load(server: Server, **more: str) -> None:
    """Load the new weights into the running server, and forget KV in GPU memory."""
    rig.call_workers(server, "reload_weights", weights_path=str(NEW_MODEL), **more)
    rig.forget_gpu(server)


def name(server: Server, version: object) -> httpx.Response:
    body = {"method": NAME_WEIGHTS, "args": [version]}
    return httpx.post(f"{server.url}/collective_rpc", json=body, timeout=60, trust_env=False)


def borrows(server: Server, before: Metrics) -> float:
    return rig.grown(server, before, BORROWED)


def test_new_weights_in_one_while_the_other_borrows(
    a: Server, b: Server, old: rig.Reference, new: list[Answer]
) -> None:
    """Each answer is one of the weights that its server has, from the first one on."""
    rig.store_all(a, old)
    before = knows(b, written(a))
    stop, rounds = threading.Event(), []

    def ask_b() -> None:
        while not stop.is_set():
            rounds.append(rig.ask(b, old.prompts))
            rig.forget_gpu(b)

    asking = threading.Thread(target=ask_b)
    asking.start()
    try:
        assert rig.same(rig.ask(a, old.prompts[:2]), old.answers[:2])
        wait_until("a chunk that B borrows", lambda: borrows(b, before) > 0)
        load(a)
        for _ in range(2):
            assert rig.same(rig.ask(a, old.prompts), new)
            rig.forget_gpu(a)
    finally:
        stop.set()
        asking.join()
    assert rounds
    assert all(rig.same(answers, old.answers) for answers in rounds)


def test_other_weights_are_not_borrowed_although_their_chunks_are_known(
    a: Server, b: Server, old: rig.Reference, new: list[Answer]
) -> None:
    """The control: both have chunks under the same keys, and only the tag tells them apart."""
    assert name(a, "step-2").json()["results"][0].startswith("the weights are named 'step-2'")
    assert name(b, "step-1").status_code == httpx.codes.OK
    rig.forget_gpu(a)
    assert rig.same(rig.ask_and_settle(a, old.prompts), new)
    before = knows(b, written(a))
    rig.forget_gpu(b)
    assert rig.same(rig.ask(b, old.prompts), old.answers)
    assert borrows(b, before) == 0
    assert rig.grown(b, before, LOADED, source="shared") == 0
    assert rig.grown(b, before, REFUSED) == 0, "they are not even read"


def test_equal_weights_are_not_shared_before_they_have_a_name(
    a: Server, b: Server, old: rig.Reference, new: list[Answer]
) -> None:
    load(b)
    before = knows(b, written(a))
    assert rig.same(rig.ask(b, old.prompts[:2]), new[:2])
    assert borrows(b, before) == 0


def test_weights_with_the_same_name_are_shared(
    a: Server, b: Server, old: rig.Reference, new: list[Answer]
) -> None:
    """B finds what A has stored before B's weights got their name, and after."""
    assert name(b, "step-2").status_code == httpx.codes.OK
    chunks = written(a)
    before = knows(b, chunks)
    rig.forget_gpu(b)
    assert rig.same(rig.ask(b, old.prompts), new)
    assert borrows(b, before) > 0.5 * chunks
    fresh = rig.prompts(seed=20, count=2)
    answers = rig.ask(a, fresh)
    before = knows(b, written(a))
    assert rig.same(rig.ask(b, fresh), answers)
    assert borrows(b, before) > 0
    assert rig.metrics(b).value(FAILED) == 0


def test_a_reset_keeps_the_name(a: Server, b: Server, new: list[Answer]) -> None:
    """Without `weights_never_change`: the operator has said which weights these are."""
    rig.forget_all(b)
    before = rig.metrics(b)
    fresh = rig.prompts(seed=21, count=2)
    answers = rig.ask(a, fresh)
    written(a)
    knows(b, chunks_of(fresh))
    assert rig.same(rig.ask(b, fresh), answers)
    assert borrows(b, before) > 0


def test_another_name_is_not_shared_and_the_call_that_loads_can_name(
    a: Server, b: Server, old: rig.Reference, new: list[Answer]
) -> None:
    load(a, weights_version="step-3")
    assert rig.same(rig.ask_and_settle(a, old.prompts), new)
    before = rig.metrics(b)
    rig.forget_all(b)
    assert rig.same(rig.ask(b, old.prompts[:4]), new[:4])
    assert borrows(b, before) == 0
    load(b, weights_version="step-3")
    before = knows(b, chunks_of(old.prompts))
    assert rig.same(rig.ask(b, old.prompts), new)
    assert borrows(b, before) > 0


def test_a_bad_name_is_refused_and_changes_nothing(b: Server, a: Server) -> None:
    for version in ("step 2", "x" * 200, 7):
        refused = name(b, version)
        assert refused.status_code != httpx.codes.OK
    assert b.running
    before = rig.metrics(b)
    fresh = rig.prompts(seed=22, count=2)
    answers = rig.ask(a, fresh)
    knows(b, written(a))
    assert rig.same(rig.ask(b, fresh), answers)
    assert borrows(b, before) > 0, "the name is still step-3"


def test_a_later_start_adopts_nothing_of_a_named_version(
    a: Server, spec: ServerSpec, old: rig.Reference
) -> None:
    """It has the weights of the files, whatever the pool was left with."""
    assert written(a) > 0
    a.stop()
    with rig.start(spec, "share-weights-again") as server:
        now = rig.wait_for(server, "figures", rig.has_figures)
        assert now.value("vllm:nvmeof_adoption_chunks_total", outcome="adopted") == 0
        assert rig.same(rig.ask(server, old.prompts[:2]), old.answers[:2])
        assert rig.metrics(server).value(BORROWED) == 0, "B has other weights"
