# SPDX-License-Identifier: Apache-2.0
"""Preemption, and a pool that is declined: long requests compute little again beside what they
load; rejected drafts are not counted; what the CPU tier has up to a boundary is loaded. The
answers are the same. What a request computes behind its last boundary is in its share of computed
tokens, because the requests are long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.shapes.lives import CPU, FOUND, POOL, Kind
from tests.e2e.shapes.rig import Plan, Request, Zygote, only_cpu_engine, prompts
from vllm_nvmeof_offload.units import KIB

RECOMPUTED_MAX = 0.05
BLOCK_TOKENS = 32
#: Long answers, so that what a preempted request held is given to others before it returns.
ANSWER_TOKENS = 900
CROWD = [Request(prompt, ANSWER_TOKENS) for prompt in prompts(7, *range(700, 1000, 37))]
#: Names, and GPU blocks that have room for all prompts, and not for the answers as well.
BLOCKS = {"gemma": 380, "llama4": 310, "lfm2": 310}


@only_cpu_engine
@pytest.mark.parametrize("name", BLOCKS)
def test_a_long_request_that_was_preempted_computes_little_again(
    zygote: Zygote, tmp_path: Path, name: str
) -> None:
    kind = Kind(
        *(name, BLOCK_TOKENS, 16 * KIB, BLOCKS[name], 2000),
        options={"max_model_len": 2048, "max_num_batched_tokens": 512},
        blocks_per_chunk=1,
        noise=0.5 if name == "lfm2" else 0.0,
    )
    plan = replace(kind.plan(tmp_path), rounds=[CROWD], at_once=[0])
    roomy = replace(plan, options={**plan.options, "num_gpu_blocks_override": 900})
    plain = zygote.run(roomy.plain(), f"long-{name}-plain")
    crowded = {"num_gpu_blocks_override": kind.crowd_blocks, **kind.staging(2000)}
    got = zygote.run(replace(plan, options={**plan.options, **crowded}), f"long-{name}")
    for outcome in (plain, got):
        assert not outcome.error, outcome.error
    assert kind.same(got.answers[0], plain.answers[0], in_pieces=True)
    assert plain.grown(0, "num_preemptions") == 0
    preemptions = got.grown(0, "num_preemptions")
    loaded = got.grown(0, "nvmeof_resumed_tokens:loaded")
    computed = got.grown(0, "nvmeof_resumed_tokens:recomputed")
    print(f"{name}: {preemptions:.0f} preemptions, {loaded:.0f} loaded, {computed:.0f} computed")
    assert preemptions > 0
    # On average half a boundary per preemption cannot be loaded: less than what is allowed.
    allowed = RECOMPUTED_MAX * (loaded + computed)
    assert allowed > BLOCK_TOKENS * preemptions
    assert computed <= allowed


DRAFTING, DRAFTED_TOKENS = 36, 220
GPU_BLOCKS, BLOCKS_PER_REQUEST_MAX = 60, 16
PREEMPTIONS_MIN = 30
#: The test takes half a minute on an idle machine.
RUN_S_MAX = 600.0
#: Many drafted tokens per step, of which most are rejected.
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 12,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def test_preempted_requests_with_drafts_answer_the_same(zygote: Zygote, tmp_path: Path) -> None:
    """Chunks have two blocks: half a chunk may be in GPU memory when its request is resumed."""
    lengths = [40 + 37 * i % 200 for i in range(DRAFTING)]
    asked = [Request(prompt, tokens=DRAFTED_TOKENS) for prompt in prompts(5, *lengths)]
    room = {"max_num_seqs": DRAFTING, "num_gpu_blocks_override": DRAFTING * BLOCKS_PER_REQUEST_MAX}
    plan = Plan("looping", [asked], room, tmp_path, at_once=[0], run_s_max=RUN_S_MAX)
    expected = zygote.run(plan.plain(), "preempted-drafts-plain")
    assert expected.grown(0, "num_preemptions") == 0
    assert min(answer.gap for answer in expected.answers[0]) > 1e-5, "choose another seed"

    crowd = {"max_num_seqs": 16, "num_gpu_blocks_override": GPU_BLOCKS}
    crowded = replace(plan, options={**crowd, "speculative_config": DRAFTS})
    got = zygote.run(crowded, "preempted-drafts")
    assert got.grown(0, "num_preemptions") >= PREEMPTIONS_MIN
    gone = "nvmeof_resumed_chunk_tokens:found", "nvmeof_resumed_chunk_tokens:recomputed"
    assert sum(got.grown(0, name) for name in gone) > 0
    drafted = got.grown(0, "spec_decode_num_draft_tokens")
    assert 0 < got.grown(0, "spec_decode_num_accepted_tokens") < drafted
    (answers,), (reference,) = got.answers, expected.answers
    assert [a.tokens for a in answers] == [a.tokens for a in reference]
    assert got.grown(0, "nvmeof_failed_chunks") == 0


#: Boundaries in every chunk, so that what eviction leaves of a prompt ends at one.
EVERY_CHUNK = {"boundary_tokens": 1}
#: The longer prompt is stored first; the other one evicts its last chunks from the CPU tier.
LONGER, OTHER = (Request(prompt) for prompt in prompts(11, 410, 230))
#: Kinds, and the slots of staging: too few for both prompts.
KINDS = {
    "gemma": (Kind("gemma", 64, 16 * KIB, 0, 90), 40),
    "lfm2": (Kind("lfm2", 32, 8 * KIB, 0, 90, blocks_per_chunk=1, noise=0.5), 24),
}


@only_cpu_engine
@pytest.mark.parametrize("name", KINDS)
def test_what_the_cpu_tier_has_is_loaded(zygote: Zygote, tmp_path: Path, name: str) -> None:
    kind, slots = KINDS[name]
    plan = kind.plan(tmp_path, **EVERY_CHUNK, admission="auto")
    plan = replace(plan, rounds=[[LONGER], [OTHER], [LONGER]], fast=True)
    plain = zygote.run(plan.plain(), f"declined-{name}-plain")
    got = zygote.run(
        replace(plan, options={**plan.options, **kind.staging(slots)}), f"declined-{name}"
    )
    for outcome in (plain, got):
        assert not outcome.error, outcome.error
    for answers, expected in zip(got.answers, plain.answers, strict=True):
        assert kind.same(answers, expected, in_pieces=True)
    loaded, declined = got.grown(2, CPU), got.grown(2, "nvmeof_recomputed_tokens:declined")
    print(f"{name}: {loaded:.0f} tokens loaded from the CPU tier, {declined:.0f} declined")
    assert got.grown(2, "nvmeof_admissions:partial") == 1
    assert got.grown(2, POOL) == 0
    assert 0 < loaded < kind.whole(len(LONGER.prompt))
    assert loaded + declined == kind.whole(len(LONGER.prompt))
    assert got.grown(2, FOUND) == loaded
