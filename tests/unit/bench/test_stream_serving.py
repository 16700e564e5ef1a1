# SPDX-License-Identifier: Apache-2.0
"""The requests of `bench stream` and the comparison of answers; no server runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from vllm_nvmeof_bench.servers.client import Answer
from vllm_nvmeof_bench.servers.server import split_extra
from vllm_nvmeof_bench.stream import (
    ADMISSION,
    PARTS,
    PREFETCH,
    SHAPE,
    Agreement,
    ReturnPlan,
    Settings,
    steps,
)

from vllm_nvmeof_offload.config import parse_config
from vllm_nvmeof_offload.units import GIB

PLAN = ADMISSION


def answer(*tokens: int) -> Answer:
    return Answer(sent=0.0, tokens=list(tokens))


def test_answers_agree_as_far_as_both_reach() -> None:
    agreement = Agreement()
    agreement.add("a", answer(1, 2))
    assert agreement.facts() == {"compared": 0, "different": 0}
    agreement.add("a", answer(1, 2, 3))
    agreement.add("b", answer(1))
    agreement.add("a", answer(1, 3))
    assert agreement.facts() == {"compared": 2, "different": 1}


def test_prompts_are_the_same_for_a_seed_and_differ_from_each_other() -> None:
    prompts = PLAN.prompts(3)
    assert prompts == PLAN.prompts(3) != PLAN.prompts(4)
    assert len({tuple(prompt[:128]) for prompt in prompts}) == PLAN.count
    assert {len(prompt) for prompt in prompts} == {PLAN.prompt_tokens}


@pytest.mark.parametrize(
    ("plan", "arm"),
    [(PLAN, "always"), (replace(PLAN, answer_tokens=64), "auto"), (PREFETCH, "off")],
)
def test_a_server_gets_valid_keys_and_sizes_that_fit(
    tmp_path: Path, plan: ReturnPlan, arm: str
) -> None:
    spec = plan.server(tmp_path / "models", tmp_path, arm)
    assert spec.offload is not None
    assert spec.offload.size_gib is not None
    settings = parse_config(*split_extra(spec.offload.extra))
    prompt_bytes = plan.prompt_tokens * SHAPE.kv_bytes_per_token
    assert settings.pool_bytes is not None
    assert settings.pool_bytes > plan.count * prompt_bytes > spec.offload.size_gib * GIB
    needed = plan.prompt_tokens + plan.answer_tokens
    assert needed <= spec.gpu_tokens < 2 * plan.prompt_tokens
    assert spec.max_model_len > needed
    assert PLAN.server(tmp_path / "models", tmp_path, "never").offload is None


def test_every_part_knows_how_much_it_measures() -> None:
    settings = Settings(rounds=2)
    parts = [Settings(parts=(part,), rounds=2) for part in PARTS]
    assert steps(settings) == sum(map(steps, parts))
    assert list(map(steps, parts[1:])) == [4, 2 * (1 + 2 * 4)]
    assert Settings(rounds=9).server_rounds == 3
