# SPDX-License-Identifier: Apache-2.0
"""Conversations and many preempted requests: hits, and the tokens of a server without offloading.

The offloading server is configured in vLLM's stock spelling, which the plugin upgrades; the other
modules use the flag. Prompts end inside a chunk, and chunks hold several blocks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.demo.report import LOGPROB_TOLERANCE, Comparison, compare
from vllm_nvmeof_bench.demo.workload import (
    CrowdPlan,
    Plan,
    Runs,
    Session,
    Turn,
    offload_spec,
    server_spec,
)
from vllm_nvmeof_bench.servers.client import Metrics
from vllm_nvmeof_bench.servers.model import make_model
from vllm_nvmeof_bench.servers.server import BLOCK_TOKENS, OffloadSpec

from tests.e2e import servers as rig
from vllm_nvmeof_offload.units import GIB

PLAN = Plan(
    seed=5,
    main=2,
    others=2,
    prompt_tokens=1003,
    question_tokens=37,
    answer_tokens=16,
    gpu_tokens=1312,
    cpu_tier_conversations=2.4,
    crowd=CrowdPlan(seed=5, count=6, prompt_tokens=200, answer_tokens=80, answer_step=8),
)
#: Which request vLLM preempts depends on timing; a single victim may still find all its blocks in
#: GPU memory, and then there is nothing to reload.
_ATTEMPTS_MAX = 3
CHUNK_TOKENS = 2 * BLOCK_TOKENS
CHUNK_BYTES = CHUNK_TOKENS * rig.SHAPE.kv_bytes_per_token


@dataclass(frozen=True)
class Outcome:
    """The results of a server without offloading and one with it, and the latter's counters."""

    expected: Session
    got: Session
    metrics: Metrics
    log: str

    def turns(self, case: str) -> list[Turn]:
        return [t for t in self.got.turns if t.case == case]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    plain = server_spec(PLAN, make_model(rig.BUILD / "models", rig.SHAPE))
    with rig.start(plain, "tokens-plain") as server:
        expected = asyncio.run(Runs(PLAN, rig.SHAPE).baseline(server))
    for _ in range(_ATTEMPTS_MAX):
        runs = Runs(PLAN, rig.SHAPE)  # conversations grow, so each attempt starts new ones
        offload = _stock_spelling(tmp_path_factory.mktemp("tokens"))
        with rig.start(replace(plain, offload=offload), "tokens-offloading") as server:
            got = asyncio.run(runs.offloaded(server))
            assert server.running
            outcome = Outcome(expected, got, rig.metrics(server), server.log())
        if got.reloaded_tokens:
            break
    return outcome


def _stock_spelling(target: Path) -> OffloadSpec:
    sized = offload_spec(PLAN, rig.SHAPE, target, CHUNK_BYTES)
    assert sized.size_gib is not None
    extra = {
        **sized.extra,
        "spec_name": "NVMeoFOffloadingSpec",
        "staging_bytes": int(sized.size_gib * GIB),
        # What returns is loaded, however slow the disk is.
        "admission": "always",
        "read_deadline_ms": 20_000,
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return OffloadSpec(None, extra, transfer)


def _compared(outcome: Outcome) -> Comparison:
    return compare(outcome.expected.answers(), outcome.got.answers())


def test_the_comparison_means_something(outcome: Outcome) -> None:
    """Greedy output varies, and no choice is so close that rounding could change it."""
    seen = _compared(outcome)
    assert seen.distinct_ratio_min > 0.8
    assert seen.gap_min > LOGPROB_TOLERANCE / 2, "choose another seed"
    assert seen.answers == 10 + PLAN.crowd.count


def test_tokens_and_log_probabilities_are_the_same(outcome: Outcome) -> None:
    seen = _compared(outcome)
    assert seen.differences == ()
    assert seen.logprob_difference_max <= LOGPROB_TOLERANCE


def test_first_turns_are_cold_and_all_others_return(outcome: Outcome) -> None:
    assert [t.number for t in outcome.turns("cold")] == [1] * 4
    assert len(outcome.turns("cpu_tier") + outcome.turns("pool")) == 6
    assert len(outcome.turns("cpu_tier")) >= 2
    assert len(outcome.turns("pool")) >= 2


def test_returns_find_every_whole_chunk(outcome: Outcome) -> None:
    """All earlier turns are stored, answers included, up to the last whole chunk."""
    for turn in outcome.turns("cpu_tier") + outcome.turns("pool"):
        # A GPU cache hit may end inside a chunk, which is then loaded whole.
        loaded = turn.cpu_tokens + turn.pool_tokens
        assert 0 <= loaded - turn.external_hit_tokens < CHUNK_TOKENS
        # The last generated token was never fed back, so it has no KV.
        earlier = turn.prompt_tokens - PLAN.question_tokens - 1
        found = turn.gpu_hit_tokens + turn.external_hit_tokens
        assert found >= earlier // CHUNK_TOKENS * CHUNK_TOKENS


def test_preempted_requests_are_reloaded(outcome: Outcome) -> None:
    assert outcome.got.crowd.preemptions > 0
    assert outcome.got.reloaded_tokens > 0


def test_the_counters_match_the_answers(outcome: Outcome) -> None:
    metrics = outcome.metrics
    assert metrics.value("vllm:nvmeof_failed_chunks_total") == 0
    assert metrics.value("vllm:nvmeof_target_written_bytes_total") > 4 * PLAN.prompt_tokens * (
        rig.SHAPE.kv_bytes_per_token // 2
    )
    assert metrics.value("vllm:nvmeof_evictions_total", tier="cpu") > 0
    assert "NVMeoFOffloadingConnector" in outcome.log
