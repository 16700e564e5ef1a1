# SPDX-License-Identifier: Apache-2.0
"""Sleep, pause and resets over HTTP: the tiers stay valid exactly as long as the weights do.

Weights and KV cache leave their memory in a stand-in for the GPU's worker (`sleeping_worker`). All
tests use one server in turn, which has the old weights before and after each, and a second one on
the same directory. The expected tokens are those that the model's own code computes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from vllm_nvmeof_bench.servers.client import Client, Metrics
from vllm_nvmeof_bench.servers.server import Server, ServerSpec

from tests.e2e import servers as rig

LOADED = "vllm:nvmeof_loaded_tokens_total"
RESETS = "vllm:nvmeof_resets_total"
WORKER = ("--worker-cls", "tests.e2e.sleeping_worker.SleepingWorker")
#: More than the CPU tier holds.
PROMPTS = 4


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> rig.Scene:
    directory = tmp_path_factory.mktemp("sleep")
    weights = rig.Weights.make(directory / "model")
    prompts = rig.prompts()[:PROMPTS]
    answers = [
        rig.expected_of(model, prompts, rig.ANSWER_TOKENS) for model in (weights.old, weights.new)
    ]
    assert all(old != new for old, new in zip(*answers, strict=True))
    faults = rig.Faults(directory / "faults.json")
    return rig.Scene(directory / "pool", weights, faults, prompts, *answers)


def spec_of(scene: rig.Scene) -> ServerSpec:
    made = rig.spec_of(scene.pool, scene.weights.directory, share="host")
    places = [str(rig.BUILD.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**made.env, "PYTHONPATH": os.pathsep.join(places)}
    return replace(made, env=environment, extra_args=WORKER)


@pytest.fixture(scope="module")
def server(scene: rig.Scene) -> Iterator[Server]:
    with rig.start(spec_of(scene), "sleep") as server:
        yield server


@pytest.fixture
def stored(server: Server, scene: rig.Scene) -> Metrics:
    """The old weights' chunks are in the tiers; the metrics then."""
    (scene.weights.directory / rig.TRAINED).unlink(missing_ok=True)
    reload(server, scene.weights.old)
    assert rig.stored(server, scene.prompts) == scene.old
    rig.forget_gpu(server)
    return rig.metrics(server)


def reload(server: Server, model: object, **more: str) -> None:
    rig.call_workers(server, "reload_weights", weights_path=str(model), **more)


def train(scene: rig.Scene) -> None:
    """Let the trainer bring the new weights at each wake-up."""
    (scene.weights.directory / rig.TRAINED).write_text(str(scene.weights.new))


def everything_hits(server: Server, scene: rig.Scene, before: Metrics) -> None:
    assert rig.tokens_of(server, scene.prompts) == scene.old
    chunks = sum(len(prompt) // rig.CHUNK_TOKENS for prompt in scene.prompts)
    by_tier = [rig.grown(server, before, LOADED, source=tier) for tier in ("cpu", "pool")]
    # Two of the prompts find their first half in GPU memory, where the other two left it.
    assert sum(by_tier) >= 0.7 * chunks * rig.CHUNK_TOKENS
    assert by_tier[1] > 0
    assert rig.grown(server, before, RESETS) == 0


def nothing_hits(
    server: Server, scene: rig.Scene, before: Metrics, answers: list[list[int]]
) -> None:
    assert rig.tokens_of(server, scene.prompts) == answers
    assert rig.grown(server, before, LOADED, source="cpu") == 0
    assert rig.grown(server, before, LOADED, source="pool") == 0
    assert rig.returning(server, scene.prompts) == answers
    assert rig.grown(server, before, RESETS) > 0


def test_sleep_that_brings_the_weights_back_keeps_both_tiers(
    server: Server, scene: rig.Scene, stored: Metrics
) -> None:
    for _ in range(2):
        rig.post(server, "/sleep", level=1)
        rig.post(server, "/sleep", level=1)  # once more: asleep, nothing can be compared
        rig.post(server, "/wake_up")
    everything_hits(server, scene, stored)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_keeps_both_tiers(
    server: Server, scene: rig.Scene, stored: Metrics, mode: str
) -> None:
    rig.post(server, "/pause", mode=mode)
    rig.post(server, "/resume")
    everything_hits(server, scene, stored)


def test_discarded_weights_that_are_loaded_again_keep_both_tiers(
    server: Server, scene: rig.Scene, stored: Metrics
) -> None:
    rig.post(server, "/sleep", level=2)
    rig.post(server, "/wake_up", tags="weights")
    reload(server, scene.weights.old, weights_version="step-1")
    reload(server, scene.weights.old)  # nor does it matter that the name is gone again
    rig.post(server, "/wake_up", tags="kv_cache")
    everything_hits(server, scene, stored)


def test_a_name_that_stays_keeps_both_tiers(
    server: Server, scene: rig.Scene, stored: Metrics
) -> None:
    reload(server, scene.weights.old, weights_version="step-1")
    assert rig.stored(server, scene.prompts) == scene.old
    rig.forget_gpu(server)
    before = rig.metrics(server)
    rig.post(server, "/sleep", level=2)
    reload(server, scene.weights.old, weights_version="step-1")
    rig.post(server, "/wake_up")
    reload(server, scene.weights.old, weights_version="step-1")
    everything_hits(server, scene, before)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("awake", [True, False], ids=["wake-update", "update-wake"])
def test_new_weights_around_the_wake_up(
    server: Server, scene: rig.Scene, stored: Metrics, *, awake: bool, named: bool
) -> None:
    """The engine wakes before the update, or after it."""
    rig.post(server, "/sleep", level=2)
    rig.post(server, "/wake_up", tags="weights")
    if awake:
        rig.post(server, "/wake_up", tags="kv_cache")
    name = {"weights_version": f"step-{awake}-2"} if named else {}
    reload(server, scene.weights.new, **name)
    if not awake:
        rig.post(server, "/wake_up", tags="kv_cache")
    nothing_hits(server, scene, stored, scene.new)


def test_weights_without_a_load_after_level_2(
    server: Server, scene: rig.Scene, stored: Metrics
) -> None:
    """What they compute is not found by the weights that come later."""
    rig.post(server, "/sleep", level=2)
    rig.post(server, "/wake_up")
    assert rig.stored(server, scene.prompts) not in (scene.old, scene.new)
    reload(server, scene.weights.old)
    before = rig.metrics(server)
    assert rig.tokens_of(server, scene.prompts) == scene.old
    assert rig.grown(server, before, LOADED, source="cpu") == 0


@pytest.mark.parametrize("call", ["sleep", "pause"])
def test_a_trainer_that_bypasses_the_engine(
    server: Server, scene: rig.Scene, stored: Metrics, call: str
) -> None:
    """It is noticed, although no call and no reset reports it."""
    train(scene)
    if call == "sleep":
        rig.post(server, "/sleep", level=1)
        rig.post(server, "/wake_up")
    else:
        rig.post(server, "/pause")
        rig.post(server, "/sleep", level=2)
        rig.post(server, "/wake_up")
    nothing_hits(server, scene, stored, scene.new)


@pytest.mark.parametrize("asleep", [True, False], ids=["reset-wake", "wake-reset"])
def test_a_reset_that_is_asked_for_invalidates_the_tiers(
    server: Server, scene: rig.Scene, stored: Metrics, *, asleep: bool
) -> None:
    rig.post(server, "/sleep", level=1)
    if not asleep:
        rig.post(server, "/wake_up")
    rig.forget_all(server)
    if asleep:
        rig.post(server, "/wake_up")
    nothing_hits(server, scene, stored, scene.old)


def test_sleep_while_requests_run_and_are_kept(
    server: Server, scene: rig.Scene, stored: Metrics
) -> None:
    """They are computed again, from what was stored before; lost KV is not stored."""

    async def run() -> list[list[int]]:
        async with Client(server.url) as client:
            asked = [client.complete(p, 120) for p in scene.prompts]
            answers = asyncio.gather(*asked)
            await asyncio.to_thread(rig.wait_for_requests, server)
            await asyncio.to_thread(rig.post, server, "/sleep", level=1, mode="keep")
            assert not answers.done(), "the requests ended before"
            await asyncio.to_thread(rig.post, server, "/wake_up")
            return [answer.tokens for answer in await answers]

    expected = [answer.tokens for answer in rig.ask(server, scene.prompts, 120)]
    rig.settle(server)
    rig.forget_gpu(server)
    assert asyncio.run(run()) == expected
    rig.settle(server)
    assert rig.returning(server, scene.prompts) == scene.old


def test_a_second_server_keeps_the_old_weights(
    server: Server, scene: rig.Scene, stored: Metrics
) -> None:
    """It loads the first one's chunks while that one sleeps, and none of its new weights'."""
    reload(server, scene.weights.old, weights_version="step-1")
    assert rig.stored(server, scene.prompts) == scene.old
    with rig.start(spec_of(scene), "sleep-second") as second:
        reload(second, scene.weights.old, weights_version="step-1")
        rig.post(server, "/sleep", level=1)
        train(scene)
        rig.wait_for(second, "chunks", lambda m: m.value("vllm:nvmeof_shared_entries") > 0)
        before = rig.metrics(second)
        assert rig.tokens_of(second, scene.prompts) == scene.old
        assert rig.grown(second, before, LOADED, source="shared") > 0
        rig.post(server, "/wake_up")
        assert rig.stored(server, scene.prompts) == scene.new
        for _ in range(2):
            assert rig.returning(second, scene.prompts) == scene.old
        assert rig.returning(server, scene.prompts) == scene.new


def test_a_crash_between_the_update_and_its_name(
    server: Server, scene: rig.Scene, stored: Metrics
) -> None:
    """The next start has the old weights, and finds what they stored before sleep."""
    server.kill()
    with rig.start(spec_of(scene), "sleep-before") as one:
        assert rig.stored(one, scene.prompts) == scene.old
        rig.post(one, "/sleep", level=2)
        reload(one, scene.weights.new)
        rig.post(one, "/wake_up")
        os.kill(one.pid, signal.SIGKILL)
        one.kill()
    with rig.start(spec_of(scene), "sleep-after") as one:
        now = rig.wait_for(one, "figures", rig.has_figures)
        assert now.value("vllm:nvmeof_adoption_chunks_total", outcome="adopted") > 0
        assert rig.tokens_of(one, scene.prompts) == scene.old
        assert rig.grown(one, now, LOADED, source="pool") > 0
        rig.post(one, "/sleep", level=2)
        reload(one, scene.weights.new)
        rig.post(one, "/wake_up")
        assert rig.stored(one, scene.prompts) == scene.new  # decided: the old chunks are void
        os.kill(one.pid, signal.SIGKILL)
        one.kill()
    with rig.start(spec_of(scene), "sleep-last") as one:
        assert rig.tokens_of(one, scene.prompts) == scene.old
        now = rig.wait_for(one, "figures", rig.has_figures)
        assert now.value("vllm:nvmeof_adoption_chunks_total", outcome="adopted") == 0
