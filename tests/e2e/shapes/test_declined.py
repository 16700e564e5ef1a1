# SPDX-License-Identifier: Apache-2.0
"""Admission declines the pool for models with several KV cache groups: what the CPU tier has up to
a boundary is loaded, the rest is computed, and the answers are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.shapes.lives import CPU, FOUND, POOL, Kind
from tests.e2e.shapes.rig import Request, Zygote, only_cpu_engine, prompts
from vllm_nvmeof_offload.units import KIB

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
