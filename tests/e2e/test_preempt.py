# SPDX-License-Identifier: Apache-2.0
"""Many requests that are preempted often: the same tokens, and computed chunks are reloaded.

With asynchronous scheduling, which vLLM's CPU engine does not have, vLLM knows a chunk's last token
one step later, and stores the chunk then. A request that is preempted in between loses that chunk.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from vllm_nvmeof_bench.servers.client import Answer, Metrics
from vllm_nvmeof_bench.servers.engine import has_cpu_engine
from vllm_nvmeof_bench.servers.model import random_tokens
from vllm_nvmeof_bench.servers.server import ServerSpec

from tests.e2e import servers as rig
from tests.small_disk import tmpfs
from vllm_nvmeof_offload.units import GIB

COUNT, PROMPT_TOKENS, ANSWER_TOKENS = 12, 75, 190
#: Room for four complete requests; a third of all chunks fits into the CPU tier.
GPU_BLOCKS, MODEL_LEN = 37, 512
STAGING_SLOTS = 24
#: The counters that tell why computed chunks are not loaded.
REASONS = (
    *("recomputed_tokens", "loads_cut", "failed_chunks", "verdict_changes"),
    *("unstored_chunks", "unwritten_chunks", "evictions", "prefetches_ended"),
)
#: Rounds in which enough preemptions must have happened.
ROUNDS_MAX, PREEMPTIONS_MIN = 4, 20


@dataclass(frozen=True)
class Outcome:
    """Answers per round, and the metrics before and after. ahead: scheduled asynchronously."""

    ahead: bool
    expected: list[list[Answer]]
    got: list[list[Answer]]
    before: Metrics
    after: Metrics

    def grown(self, name: str, **labels: str) -> float:
        return self.after.value(name, **labels) - self.before.value(name, **labels)

    def ours(self, name: str, **labels: str) -> float:
        return self.grown(f"vllm:nvmeof_{name}_total", **labels)


def _crowd(number: int) -> list[list[int]]:
    """Different prompts per round, so that no round finds chunks of an earlier one."""
    rng = np.random.default_rng([7, number])
    return [random_tokens(rng, PROMPT_TOKENS + 3 * i, rig.SHAPE) for i in range(COUNT)]


def _spec(target: Path | None, *arguments: str, **extra: object) -> ServerSpec:
    spec = rig.spec(target, **extra)
    if spec.offload is not None:
        size_gib = STAGING_SLOTS * rig.SLOT_BYTES / GIB
        spec = replace(spec, offload=replace(spec.offload, size_gib=size_gib))
    return replace(spec, max_model_len=MODEL_LEN, gpu_blocks=GPU_BLOCKS, extra_args=arguments)


def _rounds(spec: ServerSpec, name: str) -> tuple[list[list[Answer]], Metrics, Metrics]:
    answers: list[list[Answer]] = []
    with rig.start(spec, name) as server:
        rig.ask(server, [[3, 4, 5]], 1)
        before = rig.metrics(server)
        for number in range(ROUNDS_MAX):
            answers.append(rig.ask_at_once(server, _crowd(number), ANSWER_TOKENS))
            if rig.grown(server, before, "vllm:num_preemptions_total") >= PREEMPTIONS_MIN:
                break
        assert server.running
        rig.ask(server, [[3, 4, 5]], 1)  # metrics are sent with steps
        return answers, before, rig.metrics(server)


def _expected(rounds: int) -> list[list[Answer]]:
    """The answers of a server without offloading that never has to preempt."""
    roomy = replace(_spec(None), gpu_blocks=COUNT * 10)
    with rig.start(roomy, "preempt-reference") as server:
        answers = [rig.ask_at_once(server, _crowd(n), ANSWER_TOKENS) for n in range(rounds)]
        assert rig.metrics(server).value("vllm:num_preemptions_total") == 0
    return answers


@pytest.fixture(
    scope="module",
    params=[
        "fcfs",
        pytest.param("priority", marks=pytest.mark.soak),
        pytest.param(
            "fcfs, ahead",
            marks=pytest.mark.skipif(
                has_cpu_engine(), reason="vLLM's CPU engine does not schedule ahead"
            ),
        ),
    ],
)
def outcome(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    place = tmp_path_factory.mktemp("preempt")
    with ExitStack() as mounts:
        # The CPU tier holds a third of all chunks: chunks that a stalling disk refuses are lost.
        with suppress(pytest.skip.Exception):  # if mounting is not permitted, use that disk
            mounts.enter_context(tmpfs(place, 1 * GIB))
        policy, _, ahead = request.param.partition(", ")
        scheduling = "--async-scheduling" if ahead else "--no-async-scheduling"
        spec = _spec(place / "pool", "--scheduling-policy", policy, scheduling)
        got, before, after = _rounds(spec, f"preempt-{policy}{ahead}")
    return Outcome(bool(ahead), _expected(len(got)), got, before, after)


def test_many_were_preempted(outcome: Outcome) -> None:
    assert outcome.grown("vllm:num_preemptions_total") >= PREEMPTIONS_MIN


def test_tokens_are_the_same(outcome: Outcome) -> None:
    for got, expected in zip(outcome.got, outcome.expected, strict=True):
        assert rig.same(got, expected)


def test_few_tokens_are_computed_twice(outcome: Outcome) -> None:
    """Among the computed tokens in full chunks that were no longer in GPU memory."""
    gone = outcome.ours("resumed_chunk_tokens")  # found, or recomputed
    assert gone > 1000
    reasons = {name: outcome.ours(name) for name in REASONS}
    allowed = 0.05 * gone
    if outcome.ahead:
        allowed += outcome.grown("vllm:num_preemptions_total") * rig.CHUNK_TOKENS
    # As a text: pytest cuts a dict.
    recomputed = outcome.ours("resumed_chunk_tokens", source="recomputed")
    assert recomputed <= allowed, str(reasons)
    assert outcome.ours("failed_chunks") == 0


def test_vllms_own_metrics_agree(outcome: Outcome) -> None:
    """Tokens that vLLM's steps computed, less the necessary ones, were computed twice."""
    needed = 0
    for number, answers in enumerate(outcome.got):
        for prompt, answer in zip(_crowd(number), answers, strict=True):
            needed += len(prompt) + len(answer.tokens) - 1  # the last token is not fed back
    twice = outcome.ours("step_tokens") - needed
    counted = outcome.ours("resumed_tokens", source="recomputed")
    # vLLM computes a resumed request's last token again even if all its KV is loaded, and the
    # steps that it had scheduled ahead for a victim are not all computed.
    resumes = outcome.grown("vllm:num_preemptions_total")
    assert abs(twice - counted) <= 4 * resumes + 2
