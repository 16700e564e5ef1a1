# SPDX-License-Identifier: Apache-2.0
"""What a turn of a conversation leaves behind of windows, and what the next turn finds of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.shapes.rig import Outcome, Plan, Request, Zygote, prompts, same

FOUND = "external_prefix_cache_hits"
#: Of chunks with two blocks.
CHUNK_TOKENS = 64
#: Kind → tokens of the first prompt and of its answer, which is longer than the kind's windows.
TALKS = {"gemma": (210, 150), "mistral": (560, 150)}


def _talk(zygote: Zygote, kind: str, pool: Path, **extra: object) -> tuple[Outcome, int]:
    """A prompt, and the next turn after its answer; and how many tokens that has before its own."""
    prompt_tokens, answer_tokens = TALKS[kind]
    (prompt,) = prompts(8, prompt_tokens)
    first = Request(prompt, answer_tokens)
    plan = Plan(kind, [[first]], {"num_gpu_blocks_override": 400}, pool, extra)
    answer = zygote.run(plan.plain(), f"boundaries-{kind}-answer").answers[0][0]
    turn = Request([*prompt, *answer.tokens, 7, 8, 9])
    plan = replace(plan, rounds=[[first], [turn]])
    reference = zygote.run(plan.plain(), f"boundaries-{kind}-plain")
    got = zygote.run(plan, f"boundaries-{kind}")
    assert not got.error, got.error
    for answers, expected in zip(got.answers, reference.answers, strict=True):
        assert same(answers, expected)
    # The last token was sampled, and its KV never computed.
    return got, len(turn.prompt) - 4


@pytest.mark.parametrize("kind", TALKS)
def test_the_next_turn_finds_the_prompt_and_the_answer(
    zygote: Zygote, tmp_path: Path, kind: str
) -> None:
    got, tokens = _talk(zygote, kind, tmp_path)
    assert got.grown(1, FOUND) == tokens // CHUNK_TOKENS * CHUNK_TOKENS
    # Decode has left windows behind; the rest was written.
    superseded = got.grown(0, "nvmeof_superseded_chunks")
    assert superseded > 0
    stored, written = (got.grown(0, f"nvmeof_{how}_chunks") for how in ("stored", "written"))
    assert written + superseded == stored


def test_by_vllms_own_rule_it_finds_the_prompt_only(zygote: Zygote, tmp_path: Path) -> None:
    """The negative control."""
    got, _ = _talk(zygote, "gemma", tmp_path, boundary_tokens=0)
    assert got.grown(1, FOUND) == TALKS["gemma"][0] // CHUNK_TOKENS * CHUNK_TOKENS
    assert got.grown(0, "nvmeof_superseded_chunks") == 0
