# SPDX-License-Identifier: Apache-2.0
"""One real server under one fault after another: it stays up, with the same tokens and counts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner
from vllm_nvmeof_bench.servers.client import Answer, Client, Metrics
from vllm_nvmeof_bench.servers.model import random_tokens
from vllm_nvmeof_bench.servers.server import Server

from tests.e2e import servers as rig
from tests.e2e.servers import FAILED, HITS, LOADED, whole_tokens
from vllm_nvmeof_offload.cli import app
from vllm_nvmeof_offload.metrics import METRICS

PROMPTS = "vllm:prompt_tokens_total"
RESUMED = "vllm:nvmeof_resumed_tokens_total"
#: A deadline and a recompute on a busy machine; an operation that hangs does so for much longer.
HANG_S_MAX = 60
#: Which requests meet is a matter of timing: a test that needs a preemption asks again, so often.
ROUNDS_MAX = 5
#: vLLM preempts all running requests, then fails a reset if another one waits for its load.
RESET_REFUSED = "running requests waiting for remote KV transfer, which is not supported yet"


@pytest.fixture(scope="module", params=["io_uring", "denied"])
def io(request: pytest.FixtureRequest) -> str:
    """denied: a process that may not use io_uring, as in a container; threads move its slots."""
    return str(request.param)


@pytest.fixture(scope="module")
def directory(io: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"faults-{io}")


@pytest.fixture(scope="module")
def faults(directory: Path) -> rig.Faults:
    return rig.Faults(directory / "faults.json")


@pytest.fixture(scope="module")
def server(
    io: str, directory: Path, faults: rig.Faults, reference: rig.Reference
) -> Iterator[Server]:
    options = {"fault_injection": str(faults.path), **rig.SHORT_DEADLINES}
    spec = rig.spec(directory / "pool", **options)
    if io == "denied":
        spec = replace(spec, program=(sys.executable, "-P", rig.DENIED))
    with rig.start(spec, f"faults-{io}") as server:
        engine = "threads" if io == "denied" else "io_uring"
        assert f"{engine} (" in server.log_path.read_text()
        if io == "io_uring":
            rig.keep_scrape(server)
        yield server
        if io == "io_uring":
            rig.keep_scrape(server)
        assert server.running


@pytest.fixture(autouse=True)
def _clean(server: Server, faults: rig.Faults, reference: rig.Reference) -> Iterator[None]:
    """Before each test remove all faults and store and write every chunk."""
    faults.set()
    rig.wait_for(server, "a usable target", rig.is_usable)
    rig.store_all(server, reference)
    yield
    faults.set()


def test_returning_prompts_come_from_the_pool(server: Server, reference: rig.Reference) -> None:
    before = rig.metrics(server)
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, HITS) > 0.7 * whole_tokens(reference.prompts)
    assert rig.grown(server, before, LOADED, source="pool") > 0.5 * whole_tokens(reference.prompts)
    assert rig.grown(server, before, FAILED) == 0


def test_try_and_top_report_what_the_metrics_say(server: Server) -> None:
    before = rig.metrics(server)
    words = ["try", "--url", server.url, "--tokens", str(rig.PROMPT_TOKENS), "--json"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    tried, whole = (
        json.loads(shown.stdout),
        rig.PROMPT_TOKENS // rig.CHUNK_TOKENS * rig.CHUNK_TOKENS,
    )
    assert tried["proved"] and tried["warnings"] == []
    assert tried["tokens"]["gpu"] == tried["tokens"]["shared"] == 0
    assert tried["tokens"]["computed"] == rig.PROMPT_TOKENS - whole
    for source in ("cpu", "pool"):
        assert tried["tokens"][source] == rig.grown(server, before, LOADED, source=source)
    shown = CliRunner().invoke(app, ["top", server.url, "--json", "--interval", "0.1"])
    now = rig.metrics(server)
    (found,) = json.loads(shown.stdout)
    for name, metric in METRICS.items():
        if name.endswith("_info"):
            continue
        amounts = found["metrics"][name] if metric.labels else {"": found["metrics"][name]}
        counted = metric.kind == "counter"
        total = sum(one["total"] if counted else one for one in amounts.values())
        assert total == pytest.approx(now.value(metric.name + "_total" * counted)), name
    assert sum(one["total"] for one in found["prompt_tokens"].values()) == now.value(PROMPTS)


def test_read_errors(server: Server, faults: rig.Faults, reference: rig.Reference) -> None:
    """One in five reads fails, and so does one in five of their retries.

    A higher rate would give the verdict gone: errors return at once and bytes only when the disk
    has read them, so that on a slow disk eight slots in a row fail before any read has ended. The
    test slows reads down, so that this happens in every run.
    """
    before = rig.metrics(server)
    faults.set(read_eio=0.2, seed=3, read_delay_ms=300)
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)
    assert faults.fired("read_eio") > 0
    assert rig.is_usable(rig.metrics(server))
    assert rig.grown(server, before, FAILED, outcome="io_error") > 0
    assert rig.grown(server, before, HITS) > 0, "chunks that did not fail are still loaded"


def test_write_errors(server: Server, faults: rig.Faults, reference: rig.Reference) -> None:
    before = rig.metrics(server)
    rig.forget_all(server)
    faults.set(write_eio=0.5)
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)
    rig.wait_for(server, "failed writes", lambda m: m.value(FAILED) > before.value(FAILED))
    faults.set()
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)


def test_prompts_that_are_stored_faster_than_written_have_no_holes(
    server: Server, faults: rig.Faults
) -> None:
    """Six prompts, of which the CPU tier takes two: whatever was stored of them is found by the
    first request that returns."""
    faults.set(write_delay_ms=5000)
    rng = np.random.default_rng(3)
    asked = [random_tokens(rng, rig.PROMPT_TOKENS, rig.SHAPE) for _ in range(6)]
    before = rig.metrics(server)
    answers = rig.ask(server, asked)
    faults.set()
    rig.settle(server)
    stored = rig.grown(server, before, "vllm:nvmeof_stored_chunks_total")
    assert stored >= before.value("vllm:nvmeof_slots", kind="cache")
    unstored = rig.grown(server, before, rig.UNSTORED, reason="no_room")
    assert unstored > 0, "the pool was not slower than the model"
    assert rig.grown(server, before, rig.UNWRITTEN, reason="evicted") == 0
    rig.forget_gpu(server)
    before = rig.metrics(server)
    assert rig.same(rig.ask(server, asked), answers)
    assert rig.grown(server, before, HITS) == stored * rig.CHUNK_TOKENS


def test_a_full_device(server: Server, faults: rig.Faults, reference: rig.Reference) -> None:
    slots = rig.metrics(server).value("vllm:nvmeof_slots", kind="pool")
    rig.forget_all(server)
    faults.set(enospc_writes=20)
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)
    now = rig.wait_for(
        server, "20 refused writes", lambda m: m.value("vllm:nvmeof_retired_pool_slots_total") >= 20
    )
    assert now.value("vllm:nvmeof_slots", kind="pool") <= slots - 20, (
        "the capacity shrinks to the space that exists"
    )
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)


def test_bytes_flipped_on_disk(server: Server, directory: Path, reference: rig.Reference) -> None:
    before = rig.metrics(server)
    assert rig.damage_slab(directory / "pool") > 100
    assert rig.same(rig.ask_and_settle(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, FAILED, outcome="checksum_mismatch") > 0
    # The CPU tier still had the last chunks.
    some = rig.Reference(reference.prompts[:6], reference.answers[:6])
    before = rig.metrics(server)
    assert rig.same(rig.ask(server, some.prompts), some.answers)
    assert rig.grown(server, before, FAILED) == 0
    assert rig.grown(server, before, HITS) > 0.7 * whole_tokens(some.prompts), (
        "recomputed once and stored"
    )


def test_reads_that_hang(server: Server, faults: rig.Faults, reference: rig.Reference) -> None:
    before = rig.metrics(server)
    faults.set(hang_reads=4)
    answers = rig.ask(server, reference.prompts)
    assert rig.same(answers, reference.answers)
    assert max(a.ttft_s for a in answers) < HANG_S_MAX, "bounded by the deadline and a recompute"
    assert rig.grown(server, before, FAILED, outcome="deadline") > 0
    assert not rig.is_usable(rig.metrics(server))
    faults.set()
    rig.wait_for(server, "a usable target", rig.is_usable)
    before = rig.metrics(server)
    rig.ask(server, reference.prompts)
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)
    assert rig.grown(server, before, LOADED, source="pool") > 0, "used again without a restart"


def test_writes_that_hang(server: Server, faults: rig.Faults, reference: rig.Reference) -> None:
    rig.forget_all(server)
    faults.set(hang_writes=2)
    answers = rig.ask(server, reference.prompts)
    assert rig.same(answers, reference.answers)
    rig.wait_for(server, "a suspect target", lambda m: not rig.is_usable(m))
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)


def test_aborts_during_a_load(server: Server, faults: rig.Faults, reference: rig.Reference) -> None:
    faults.set(read_delay_ms=900)
    fired = faults.fired("read_delay_ms")

    async def give_up() -> int:
        given_up = 0
        async with Client(server.url, timeout_s=0.4) as client:
            for prompt in reference.prompts:
                try:
                    await client.complete(prompt, rig.ANSWER_TOKENS)
                except httpx.TimeoutException:
                    given_up += 1
        return given_up

    assert asyncio.run(give_up()) > 0
    assert faults.fired("read_delay_ms") > fired, "no load was under way"
    faults.set()
    assert rig.same(rig.ask(server, reference.prompts), reference.answers)
    rig.wait_for(server, "idle", lambda m: m.value("vllm:num_requests_running") == 0)


def test_preemption_and_many_at_once(server: Server, reference: rig.Reference) -> None:
    before = rig.metrics(server)
    for _ in range(ROUNDS_MAX):
        # Long answers grow into a cache that holds three prompts: vLLM must preempt. A victim that
        # is resumed at once may still find all its blocks in GPU memory.
        answers = rig.ask_at_once(server, reference.prompts, 150)
        for answer, expected in zip(answers, reference.answers, strict=True):
            assert answer.tokens[: rig.ANSWER_TOKENS] == expected.tokens
        if rig.grown(server, before, RESUMED, source="loaded"):
            break
    assert rig.grown(server, before, "vllm:num_preemptions_total") > 0
    assert rig.grown(server, before, RESUMED, source="loaded") > 0
    again = rig.ask(server, reference.prompts, 150)
    assert [a.tokens for a in again] == [a.tokens for a in answers]


def test_reset_with_the_connector(server: Server, reference: rig.Reference) -> None:
    rig.forget_all(server)
    assert rig.metrics(server).value("vllm:nvmeof_entries") >= 0
    before = rig.metrics(server)
    # The first prompt of each pair that shares its first half: none may hit now.
    assert rig.same(rig.ask(server, reference.prompts[::2]), reference.answers[::2])
    assert rig.grown(server, before, HITS) == 0


def test_reset_while_requests_run(server: Server, reference: rig.Reference) -> None:
    """vLLM preempts the running requests, and the next step looks their chunks up (this once
    stopped the engine)."""
    before = rig.metrics(server)

    def preempted(now: Metrics) -> bool:
        name = "vllm:num_preemptions_total"
        return now.value(name) > before.value(name)

    async def run() -> tuple[list[Answer], int]:
        async with Client(server.url) as client, httpx.AsyncClient(trust_env=False) as http:
            asked = [client.complete(p, 150) for p in reference.prompts[:3]]
            answers = asyncio.gather(*asked)
            resets = 0
            # All may still wait for their loads: a reset then preempts none.
            while not answers.done() and resets < 3:
                await asyncio.wait([answers], timeout=0.02)
                if (await client.metrics()).value("vllm:num_requests_running"):
                    resets += await _reset(http, server)
            return list(await answers), resets

    for _ in range(ROUNDS_MAX):
        answers, resets = asyncio.run(run())
        for answer, expected in zip(answers, reference.answers, strict=False):
            assert answer.tokens[: rig.ANSWER_TOKENS] == expected.tokens
        if resets and preempted(rig.metrics(server)):
            return
    raise AssertionError("no request was running in any round, or one was always loading")


async def _reset(http: httpx.AsyncClient, server: Server) -> bool:
    """Reset vLLM's prefix cache while requests run; whether vLLM has done so."""
    url = f"{server.url}/reset_prefix_cache"
    response = await http.post(url, params={"reset_running_requests": "true"})
    if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR and RESET_REFUSED in response.text:
        return False
    response.raise_for_status()
    return True


@pytest.mark.parametrize("knob", ["flip_with_valid_crc", "swap_slots"])
def test_negative_control(
    server: Server, faults: rig.Faults, reference: rig.Reference, knob: str
) -> None:
    """Wrong KV with a valid CRC must be detected by the comparison, or the comparison is void."""
    faults.set(**{knob: True})
    answers = rig.ask(server, reference.prompts)
    faults.set()
    assert faults.fired(knob) > 0
    assert not rig.same(answers, reference.answers)
    rig.forget_all(server)  # the wrong chunks were promoted into both caches
