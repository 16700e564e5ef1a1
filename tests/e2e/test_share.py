# SPDX-License-Identifier: Apache-2.0
"""Two servers on one directory load each other's chunks, if model and weights are the same.

Server A computes and stores; server B never computes what A has. The tests go on from one another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig
from tests.e2e.servers import (
    BORROWED,
    FAILED,
    HITS,
    LOADED,
    PLACES,
    REFUSED,
    knows,
    whole_tokens,
    written,
)
from tests.e2e.stranger import stranger

WRITTEN = "vllm:nvmeof_written_chunks_total"
#: Of what A itself finds.
HIT_SHARE_MIN = 0.95
IDLE_S = 5.0


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    pool = tmp_path_factory.mktemp("share") / "pool"
    return rig.spec(pool, share="host", weights_never_change=True)


@pytest.fixture(scope="module")
def a(spec: ServerSpec) -> Iterator[Server]:
    with rig.start(spec, "share-a") as server:
        yield server


@pytest.fixture(scope="module")
def b(spec: ServerSpec, a: Server) -> Iterator[Server]:
    with rig.start(spec, "share-b") as server:
        yield server


def test_what_one_has_stored_the_other_loads(
    a: Server, b: Server, reference: rig.Reference
) -> None:
    rig.store_all(a, reference)
    knows(b, written(a))
    rig.forget_gpu(a)
    before_a, before_b = rig.metrics(a), rig.metrics(b)
    assert rig.same(rig.ask(a, reference.prompts), reference.answers)
    assert rig.same(rig.ask(b, reference.prompts), reference.answers)
    own, others = rig.grown(a, before_a, HITS), rig.grown(b, before_b, HITS)
    assert own > 0.5 * whole_tokens(reference.prompts)
    assert others >= HIT_SHARE_MIN * own
    assert rig.grown(b, before_b, LOADED, source="shared") >= HIT_SHARE_MIN * others
    assert rig.grown(b, before_b, BORROWED) * rig.CHUNK_TOKENS >= HIT_SHARE_MIN * others
    for server in (a, b):
        assert rig.metrics(server).value(REFUSED) == 0
        assert rig.metrics(server).value(FAILED) == 0
    assert rig.metrics(a).value(BORROWED) == 0, "B has nothing that A has not"


def test_a_borrowed_chunk_is_not_written_again(b: Server, reference: rig.Reference) -> None:
    whole = whole_tokens(reference.prompts) // rig.CHUNK_TOKENS
    assert written(b) < 0.05 * whole
    assert rig.metrics(b).value(WRITTEN) < 0.05 * whole


@pytest.mark.parametrize(
    ("puts", "idle_s"), [(50_000, IDLE_S), pytest.param(1_000_000, 60.0, marks=pytest.mark.soak)]
)
def test_the_first_look_up_of_an_idle_server_finds_what_came_meanwhile(
    a: Server, b: Server, spec: ServerSpec, puts: int, idle_s: float
) -> None:
    """What A has stored, however much others store while B is idle. These are a made-up server."""
    assert spec.offload is not None
    (target,) = spec.offload.extra["targets"]
    fresh = rig.prompts(seed=puts + 12, count=2)
    answers = rig.ask(a, fresh)
    written(a)
    before = rig.metrics(b)
    with stranger(Path(target), puts, idle_s) as others:
        assert others.stdout is not None
        assert others.stdout.readline() == b"written\n"  # after so many seconds
        first = slice(1)
        assert rig.same(rig.ask(b, fresh[first]), answers[first])
        assert rig.grown(b, before, HITS) >= HIT_SHARE_MIN * whole_tokens(fresh[first])
        assert rig.same(rig.ask(b, fresh), answers)
        # What both prompts begin with is in GPU memory, and so is the first one.
        assert rig.grown(b, before, HITS) >= HIT_SHARE_MIN * (
            whole_tokens(fresh) - rig.PROMPT_TOKENS // 2
        )
        knows(b, puts)
    rig.wait_for(b, "their end", lambda m: m.value(PLACES) < puts)


def test_after_its_own_reset_a_server_takes_only_what_is_written_later(
    a: Server, b: Server, reference: rig.Reference
) -> None:
    rig.forget_all(b)
    before = rig.metrics(b)
    few = slice(2)
    assert rig.same(rig.ask(b, reference.prompts[few]), reference.answers[few])
    assert rig.grown(b, before, LOADED, source="shared") == 0
    assert rig.grown(b, before, BORROWED) == 0
    fresh = rig.prompts(seed=13, count=2)
    answers = rig.ask(a, fresh)
    known = rig.metrics(a).value(WRITTEN)
    assert written(a) and rig.metrics(a).value(WRITTEN) >= known
    knows(b, len(fresh[0]) // rig.CHUNK_TOKENS)
    assert rig.same(rig.ask(b, fresh), answers)
    assert rig.grown(b, before, LOADED, source="shared") > 0


def test_resets_of_one_while_the_other_borrows(
    a: Server, b: Server, reference: rig.Reference
) -> None:
    """No request fails, and none gets other tokens; what A voided B does not find."""
    stop = threading.Event()

    def reset() -> None:
        while not stop.is_set():
            rig.forget_all(a)
            rig.ask(a, reference.prompts[::3])

    resets = threading.Thread(target=reset)
    resets.start()
    try:
        for _ in range(4):
            answers = rig.ask_at_once(b, reference.prompts)
            assert rig.same(answers, reference.answers)
            rig.forget_gpu(b)
    finally:
        stop.set()
        resets.join()
    rig.forget_all(a)
    rig.wait_for(b, "an empty table", lambda m: m.value(PLACES) == 0)


def test_the_chunks_of_a_killed_server_are_found(
    a: Server, b: Server, reference: rig.Reference
) -> None:
    fresh = rig.prompts(seed=14, count=2)
    answers = rig.ask(a, fresh)
    chunks = written(a)
    a.kill()
    before = knows(b, chunks)
    assert rig.same(rig.ask(b, fresh), answers)
    assert rig.grown(b, before, LOADED, source="shared") > 0


@pytest.mark.parametrize("differs", ["weights", "seed of hashes"])
def test_a_server_of_other_weights_or_hashes_borrows_nothing(
    spec: ServerSpec, b: Server, reference: rig.Reference, differs: str
) -> None:
    if differs == "weights":
        model = make_model(rig.BUILD / "models", replace(rig.SHAPE, seed=78))
        other = replace(spec, model=model)
    else:
        other = replace(spec, env={**spec.env, "PYTHONHASHSEED": "7"})
    with rig.start(other, "share-other") as server:
        rig.ask(server, reference.prompts[:2])
        now = rig.wait_for(server, "figures", rig.has_figures)
        assert now.value(PLACES) == now.value(HITS) == now.value(BORROWED) == 0


def test_each_of_two_ranks_reads_its_part(tmp_path: Path) -> None:
    """The follower knows rank 0's tables only; rank 1 finds its own files."""
    reference = rig.split_reference()
    spec = rig.split_spec(tmp_path / "pool", "--tensor-parallel-size", share="host")
    with rig.start(spec, "share-ranks-a") as one, rig.start(spec, "share-ranks-b") as other:
        answers = rig.ask_and_settle(one, reference.prompts, rig.SPLIT_TOKENS)
        assert rig.same(answers, reference.answers)
        before = knows(other, written(one))
        assert rig.same(rig.split_ask(other, reference.prompts), reference.answers)
        assert rig.grown(other, before, LOADED, source="shared") >= rig.CHUNK_TOKENS * 15
        now = rig.metrics(other)
        assert now.value(REFUSED) == now.value(FAILED) == 0


@pytest.mark.soak
def test_one_overwrites_its_pool_while_the_other_borrows(
    tmp_path: Path, reference: rig.Reference
) -> None:
    """All that one stores is evicted while the other loads it; few loads come too late."""
    spec = rig.spec(tmp_path / "pool", share="host", weights_never_change=True)
    assert spec.offload is not None
    small = {**spec.offload.extra, "pool_bytes": 100 * rig.SLOT_BYTES}  # of some 150 chunks
    owner = replace(spec, offload=replace(spec.offload, extra=small))
    stop = threading.Event()
    with rig.start(owner, "share-small") as one, rig.start(spec, "share-reader") as other:

        def overwrite() -> None:
            while not stop.is_set():
                rig.ask(one, reference.prompts)

        overwrites = threading.Thread(target=overwrite)
        overwrites.start()
        try:
            for _ in range(6):
                rig.forget_all(other)  # it would load its own chunks
                assert rig.same(rig.ask(other, reference.prompts), reference.answers)
        finally:
            stop.set()
            overwrites.join()
        now = rig.metrics(other)
        assert rig.metrics(one).value("vllm:nvmeof_evictions_total", tier="pool") > 0
        assert now.value(BORROWED) > 0
        assert now.value(REFUSED) < 0.05 * now.value(BORROWED)
