# SPDX-License-Identifier: Apache-2.0
"""With random seeds of block hashes the pool is not adopted; the start line names the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.shapes.rig import Plan, Request, Zygote, play_back, prompts, same

CPU, POOL = "nvmeof_loaded_tokens:cpu", "nvmeof_loaded_tokens:pool"
ASKED = [Request(prompt) for prompt in prompts(3, 150, 200)]
WHOLE_TOKENS = 128 + 192
NOT_ADOPTED = (
    "NOTHING IS ADOPTED: xxhash block hashes are seeded at random unless PYTHONHASHSEED is set"
)


def test_a_random_seed_is_not_adopted_and_a_given_one_is(zygote: Zygote, tmp_path: Path) -> None:
    plan = Plan("llama", [ASKED], {"prefix_caching_hash_algo": "xxhash"}, tmp_path)
    first, second = play_back(zygote, plan, "random-seed")
    assert first.grown(1, CPU) == WHOLE_TOKENS, "chunks are found within one process"
    for outcome in (first, second):
        assert NOT_ADOPTED in outcome.log
    assert second.grown(0, CPU) == second.grown(0, POOL) == 0

    seeded = replace(plan, env={"PYTHONHASHSEED": "7"})
    stored = zygote.run(seeded, "seed-stored")
    found = zygote.run(seeded, "seed-found")
    for outcome in (stored, found):
        assert "NOTHING IS ADOPTED" not in outcome.log
        assert same(outcome.answers[0], first.answers[0])
    assert stored.grown(0, POOL) == 0
    assert found.grown(0, POOL) == WHOLE_TOKENS
