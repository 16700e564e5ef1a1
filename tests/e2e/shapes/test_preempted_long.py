# SPDX-License-Identifier: Apache-2.0
"""Long requests are preempted in decode: they compute little again beside what they load.

What a request computes behind its last boundary is in that share, because the requests are long.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.shapes.lives import Kind
from tests.e2e.shapes.rig import Request, Zygote, only_cpu_engine, prompts
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
