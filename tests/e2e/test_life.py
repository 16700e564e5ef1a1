# SPDX-License-Identifier: Apache-2.0
"""Events in a server's life: kills, pauses, sleep, resets, new weights, and the end.

All tests use one pool in turn: a server, and a process that makes one `LLM` after the other. After
each step the tokens are those that the model's own code computes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from vllm_nvmeof_bench.servers.client import Answer, Client
from vllm_nvmeof_bench.servers.server import Server

from tests.e2e import servers as rig
from tests.e2e.servers import HITS, LOADED
from tests.process import wait_until

MANY = (
    *("--api-server-count", "2", "--distributed-executor-backend", "mp"),
    *("--scheduling-policy", "priority", "--enable-log-requests", "--max-log-len", "8"),
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> rig.Scene:
    directory = tmp_path_factory.mktemp("life")
    weights = rig.Weights.make(directory / "model")
    prompts = rig.asked()
    answers = [
        rig.expected_of(model, prompts, rig.ANSWER_TOKENS) for model in (weights.old, weights.new)
    ]
    assert all(old != new for old, new in zip(*answers, strict=True))
    faults = rig.Faults(directory / "faults.json")
    return rig.Scene(directory / "pool", weights, faults, prompts, *answers)


@pytest.fixture(scope="module")
def server(scene: rig.Scene) -> Iterator[Server]:
    with scene.start("life", *MANY, step_tokens=256) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_faults(scene: rig.Scene) -> Iterator[None]:
    scene.faults.set()
    yield
    scene.faults.set()


def test_two_api_servers_priorities_and_chunked_prefill(server: Server, scene: rig.Scene) -> None:
    assert "Chunked prefill is enabled with max_num_batched_tokens=256" in server.log()
    before = rig.metrics(server)
    assert rig.stored(server, scene.prompts) == scene.old
    assert rig.grown(server, before, HITS) == 0
    # The last prompt asked is in the CPU tier. What requests that run at once find there depends on
    # their order, and so on the machine's speed.
    assert rig.returning(server, scene.prompts[-1:]) == scene.old[-1:]
    assert rig.with_priorities(server, scene.prompts) == scene.old
    for source in ("cpu", "pool"):
        assert rig.grown(server, before, LOADED, source=source) > 0, source

    def both_were_asked() -> bool:
        rig.ask(server, [[5, 6, 7]], 1)  # over a new connection, which either may accept
        received = [line for line in server.log().splitlines() if "Received request" in line]
        asked = [f"(ApiServer_{number} " for number in (0, 1)]
        return all(any(line.startswith(one) for line in received) for one in asked)

    wait_until("a request to each API server", both_were_asked)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_while_loads_run(server: Server, scene: rig.Scene, mode: str) -> None:
    def pause() -> None:
        # vLLM cannot clear caches and keep requests that wait for a load.
        rig.post(server, "/pause", mode=mode, clear_cache=mode != "keep")
        assert httpx.get(f"{server.url}/is_paused", trust_env=False).json()["is_paused"]
        rig.post(server, "/resume")

    answers = rig.while_loads_run(server, scene, pause)
    if mode != "abort":
        assert [a.tokens for a in answers if isinstance(a, Answer)] == scene.old[::2]
    assert rig.tokens_of(server, scene.prompts[::2]) == scene.old[::2]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_while_loads_run(server: Server, scene: rig.Scene, level: int) -> None:
    """On a CPU vLLM keeps weights and KV cache in sleep; the connector is notified as on a GPU."""

    def sleep() -> None:
        rig.post(server, "/sleep", level=level)
        assert httpx.get(f"{server.url}/is_sleeping", trust_env=False).json()["is_sleeping"]
        rig.post(server, "/wake_up")

    rig.while_loads_run(server, scene, sleep)
    before = rig.metrics(server)
    assert rig.tokens_of(server, scene.prompts[::2]) == scene.old[::2]
    assert rig.grown(server, before, HITS) > 0, "the weights are those from before sleep"
    assert rig.returning(server, scene.prompts[::2]) == scene.old[::2]


def test_resets_while_loads_and_stores_run(server: Server, scene: rig.Scene) -> None:
    def reset() -> None:
        for _ in range(5):
            rig.post(server, "/reset_prefix_cache", reset_external=True)
            rig.post(server, "/reset_prefix_cache")

    answers = rig.while_loads_run(server, scene, reset)
    assert [a.tokens for a in answers if isinstance(a, Answer)] == scene.old[::2]
    assert rig.returning(server, scene.prompts) == scene.old


def test_new_weights_in_a_server_without_a_reset(server: Server, scene: rig.Scene) -> None:
    before = rig.metrics(server)
    assert rig.returning(server, scene.prompts) == scene.old
    assert rig.grown(server, before, HITS) > 0, "the old weights' KV can be loaded"
    scene.weights.put(scene.weights.new)
    rig.call_workers(server, "reload_weights")
    before = rig.metrics(server)
    assert rig.stored(server, scene.prompts) == scene.new
    assert rig.grown(server, before, HITS) == 0
    # The last prompt asked is in the CPU tier; in the old order the prompts evict each other.
    assert rig.returning(server, scene.prompts[-1:]) == scene.new[-1:]
    assert rig.returning(server, scene.prompts) == scene.new
    for source in ("cpu", "pool"):
        assert rig.grown(server, before, LOADED, source=source) > 0, source


def test_new_weights_while_requests_run(server: Server, scene: rig.Scene) -> None:
    """These requests continue with KV of both weights; no other request may load any of it."""

    async def run() -> None:
        async with Client(server.url) as client:
            asked = [client.complete(p, 300) for p in scene.prompts[::2]]
            answers = asyncio.gather(*asked)
            await asyncio.to_thread(rig.wait_for_requests, server)
            scene.weights.publish()
            await asyncio.to_thread(rig.call_workers, server, "reload_weights")
            assert not answers.done(), "the requests ended before the weights changed"
            await answers

    rig.forget_gpu(server)
    scene.weights.bring(scene.weights.old)
    asyncio.run(run())
    before = rig.metrics(server)
    assert rig.tokens_of(server, scene.prompts) == scene.old
    assert rig.returning(server, scene.prompts) == scene.old
    assert rig.grown(server, before, HITS) > 0, "KV is stored again after the old requests ended"


def test_new_weights_during_sleep(server: Server, scene: rig.Scene) -> None:
    rig.post(server, "/sleep", level=2)
    scene.weights.put(scene.weights.new)
    rig.post(server, "/wake_up", tags="weights")
    rig.call_workers(server, "reload_weights")
    rig.post(server, "/wake_up", tags=["kv_cache", "scheduling"])
    before = rig.metrics(server)
    assert rig.stored(server, scene.prompts) == scene.new
    assert rig.grown(server, before, HITS) == 0
    assert rig.returning(server, scene.prompts) == scene.new
    assert rig.grown(server, before, LOADED, source="pool") > 0


def test_an_engine_ends_when_its_server_is_killed(server: Server, scene: rig.Scene) -> None:
    """vLLM itself would leave two API servers without an engine, which hold no resource."""
    rig.settle(server)
    os.kill(server.pid, signal.SIGKILL)

    def no_engine() -> bool:
        titles = rig.group(server.pid).values()
        return not any(name.startswith(("VLLM::EngineCore", "VLLM::Worker")) for name in titles)

    wait_until("the end of engine and worker", no_engine, 60)
    server.kill()


def test_one_llm_after_the_other_on_the_old_weights(scene: rig.Scene) -> None:
    """The pool holds KV of new weights that its keyspace does not name: nothing is adopted.

    Then an engine's worker is killed; the next engine adopts its chunks and is closed with
    writes in flight; a third schedules asynchronously; a fourth has another connector too.
    """
    scene.weights.put(scene.weights.old)
    places = [str(scene.pool), str(scene.weights.directory)]
    log = rig.BUILD / "logs" / "notebook.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.llm_child", *places],
            cwd=rig.BUILD.parent,
            env={**rig.spec().environment(), "VLLM_LOGGING_LEVEL": "WARNING"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + log.read_text()[-4000:]
    (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
    killed, after, inside, combined = json.loads(line.removeprefix("RESULT "))
    assert killed["adopted"] == 0, "KV of other weights would be adopted"
    for run in (killed, after, inside, combined):
        assert run["tokens"] == [scene.old] * 2
        assert run["hits"] > 0
    assert killed["died"] == "EngineDeadError"
    assert after["pending"] > 0 and after["closing_s"] < 60, "closed with writes in flight"
    for run in (after, inside, combined):
        assert run["adopted"] > 0, "each took over the directory of the previous one"
    assert after["from_pool"] > 0 and inside["from_pool"] > 0 and combined["from_pool"] > 0
    assert inside["batches"] == 2, "steps are scheduled ahead"
    other, ours = combined["beside"]
    assert other["tokens"] == ours["tokens"] == scene.old
    assert other["hits"] > 0 and other["ours"] == 0, (
        "after a reset only the other connector has hits"
    )
    assert ours["hits"] > 0 and ours["ours"] > 0, (
        "our connector stored the chunks that the other one had loaded"
    )
