# SPDX-License-Identifier: Apache-2.0
"""The windows and states that a turn of a conversation stores, and those that the next turn finds
of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.shapes.rig import Outcome, Plan, Request, Zygote, prompts, same

FOUND = "external_prefix_cache_hits"
#: Of chunks with two blocks of a window, or one with a state. qwen3next's block depends on the
#: processor, by the types in which vLLM computes states there: see `_chunk_tokens`.
CHUNK_TOKENS = {"gemma": 64, "mistral": 64, "lfm2": 32}
#: Kind → tokens of the first prompt and of its answer, which is longer than the kind's windows.
TALKS = {
    "gemma": (210, 150),
    "mistral": (560, 150),
    "lfm2": (700, 700),
    "qwen3next": (700, 700),
}
#: Kinds with states, whose chunks have one block.
STATES = ("lfm2", "qwen3next")
#: Kinds that compute in bfloat16 only. There a prompt computed in other pieces gives other tokens
#: near ties, so the reference is vLLM's own prefix cache with the same boundaries.
BY_CACHE = ("qwen3next",)


def _chunk_tokens(kind: str, got: Outcome) -> int:
    if kind in CHUNK_TOKENS:
        return CHUNK_TOKENS[kind]
    (tokens,) = re.findall(r"kv lcm block sizes (\d+)", got.log)
    return int(tokens)


def _talk(zygote: Zygote, kind: str, pool: Path, **extra: object) -> tuple[Outcome, int]:
    """A prompt, and the next turn after its answer; and how many tokens that has before its own."""
    prompt_tokens, answer_tokens = TALKS[kind]
    (prompt,) = prompts(8, prompt_tokens)
    first = Request(prompt, answer_tokens)
    options: dict[str, Any] = {"num_gpu_blocks_override": 400}
    if kind in STATES:
        options["max_model_len"] = 2048
        extra["blocks_per_chunk"] = 1
    if kind in BY_CACHE:
        options["dtype"] = "bfloat16"
    turn = Request([7, 8, 9], follows=(0, 0))
    plan = Plan(kind, [[first], [turn]], options, pool, extra)
    got = zygote.run(plan, f"boundaries-{kind}")
    plain = _without_offloading(plan, _chunk_tokens(kind, got))
    reference = zygote.run(plain, f"boundaries-{kind}-plain")
    for outcome in (reference, got):
        assert not outcome.error, outcome.error
    for answers, expected in zip(got.answers, reference.answers, strict=True):
        assert same(answers, expected)
    # The last token was sampled, and its KV never computed.
    tokens = prompt_tokens + answer_tokens - 1
    if kind in BY_CACHE and "boundary_tokens" not in extra:
        assert reference.grown(1, "prefix_cache_hits") == got.grown(1, FOUND)
    return got, tokens


def _without_offloading(plan: Plan, chunk_tokens: int) -> Plan:
    plain = plan.plain()
    if plan.model not in BY_CACHE:
        return plain
    cache = {
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": chunk_tokens,
    }
    return replace(plain, options={**plain.options, **cache}, keeps_cache=True)


@pytest.mark.parametrize("kind", TALKS)
def test_the_next_turn_finds_the_prompt_and_the_answer(
    zygote: Zygote, tmp_path: Path, kind: str
) -> None:
    got, tokens = _talk(zygote, kind, tmp_path)
    print(f"{kind}: {got.grown(1, FOUND):.0f} of {tokens} tokens found")
    per_chunk = _chunk_tokens(kind, got)
    assert got.grown(1, FOUND) == tokens // per_chunk * per_chunk
    assert got.grown(1, "nvmeof_recomputed_tokens:no_boundary") == 0
    # Decode has left windows or states behind; the rest was written.
    superseded = got.grown(0, "nvmeof_unwritten_chunks:superseded")
    assert superseded > 0
    stored, written = (got.grown(0, f"nvmeof_{how}_chunks") for how in ("stored", "written"))
    assert written + superseded == stored


@pytest.mark.parametrize("kind", ["gemma", "lfm2"])
def test_it_finds_the_answer_wherever_lasting_boundaries_are(
    zygote: Zygote, tmp_path: Path, kind: str
) -> None:
    """None of them is in the answer."""
    got, tokens = _talk(zygote, kind, tmp_path, boundary_tokens=4096)
    assert got.grown(1, FOUND) == tokens // CHUNK_TOKENS[kind] * CHUNK_TOKENS[kind]


@pytest.mark.parametrize("kind", ["gemma", "lfm2"])
def test_by_vllms_own_rule_it_finds_the_prompt_only(
    zygote: Zygote, tmp_path: Path, kind: str
) -> None:
    """The negative control."""
    got, tokens = _talk(zygote, kind, tmp_path, boundary_tokens=0)
    per_chunk = CHUNK_TOKENS[kind]
    found = TALKS[kind][0] // per_chunk * per_chunk
    assert got.grown(1, FOUND) == found
    limited = got.grown(1, "nvmeof_recomputed_tokens:no_boundary")
    assert limited == tokens // per_chunk * per_chunk - found
    assert got.grown(0, "nvmeof_unwritten_chunks:superseded") == 0


def test_a_prompt_is_found_up_to_a_multiple_of_prefix_match_unit(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Of 216 tokens 192 are whole chunks, and vLLM stores the tail up to 208. Later prompts go on
    behind it, so that they have a whole chunk there, which nobody has stored. Without a share group
    no other server could have it either."""
    (prompt,) = prompts(8, 216)
    turns = [Request([*prompt, *more]) for more in prompts(9, 60, 70)]
    options: dict[str, Any] = {"num_gpu_blocks_override": 400, "prefix_match_unit": 16}
    extra = {"blocks_per_chunk": 1, "admission": "auto", "share": "off"}
    # The answer is long enough to leave the prompt's end behind.
    plan = Plan("lfm2", [[Request(prompt, 150)], turns], options, tmp_path, extra)
    reference = zygote.run(plan.plain(), "partial-tail-plain")
    got = zygote.run(plan, "partial-tail")
    for outcome in (reference, got):
        assert not outcome.error, outcome.error
    for answers, expected in zip(got.answers, reference.answers, strict=True):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert got.grown(1, FOUND) == 2 * 208
    assert got.grown(1, "nvmeof_loaded_tokens:cpu") == 2 * 208
