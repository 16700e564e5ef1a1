# SPDX-License-Identifier: Apache-2.0
"""What a turn of a conversation leaves behind of windows and states, and what the next turn finds
of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.shapes.rig import Outcome, Plan, Request, Zygote, prompts, same

FOUND = "external_prefix_cache_hits"
#: Of chunks with two blocks of a window, or one with a state.
CHUNK_TOKENS = {"gemma": 64, "mistral": 64, "lfm2": 32}
#: Kind → tokens of the first prompt and of its answer, which is longer than the kind's windows.
TALKS = {"gemma": (210, 150), "mistral": (560, 150), "lfm2": (700, 700)}


def _talk(zygote: Zygote, kind: str, pool: Path, **extra: object) -> tuple[Outcome, int]:
    """A prompt, and the next turn after its answer; and how many tokens that has before its own."""
    prompt_tokens, answer_tokens = TALKS[kind]
    (prompt,) = prompts(8, prompt_tokens)
    first = Request(prompt, answer_tokens)
    options = {"num_gpu_blocks_override": 400}
    if kind == "lfm2":
        options["max_model_len"] = 2048
        extra["blocks_per_chunk"] = 1  # of states
    plan = Plan(kind, [[first]], options, pool, extra)
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
    assert got.grown(1, FOUND) == tokens // CHUNK_TOKENS[kind] * CHUNK_TOKENS[kind]
    assert got.grown(1, "nvmeof_boundary_limited_tokens") == 0
    # Decode has left windows or states behind; the rest was written.
    superseded = got.grown(0, "nvmeof_superseded_chunks")
    assert superseded > 0
    stored, written = (got.grown(0, f"nvmeof_{how}_chunks") for how in ("stored", "written"))
    assert written + superseded == stored


@pytest.mark.parametrize("kind", ["gemma", "lfm2"])
def test_by_vllms_own_rule_it_finds_the_prompt_only(
    zygote: Zygote, tmp_path: Path, kind: str
) -> None:
    """The negative control."""
    got, tokens = _talk(zygote, kind, tmp_path, boundary_tokens=0)
    per_chunk = CHUNK_TOKENS[kind]
    found = TALKS[kind][0] // per_chunk * per_chunk
    assert got.grown(1, FOUND) == found
    limited = got.grown(1, "nvmeof_boundary_limited_tokens")
    assert limited == tokens // per_chunk * per_chunk - found
    assert got.grown(0, "nvmeof_superseded_chunks") == 0
