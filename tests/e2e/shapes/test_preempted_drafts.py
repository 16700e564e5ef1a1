# SPDX-License-Identifier: Apache-2.0
"""Many requests draft and are preempted: the same answers, and rejected drafts are not counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.e2e.shapes.rig import Plan, Request, Zygote, prompts

COUNT, ANSWER_TOKENS = 36, 220
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
    lengths = [40 + 37 * i % 200 for i in range(COUNT)]
    asked = [Request(prompt, tokens=ANSWER_TOKENS) for prompt in prompts(5, *lengths)]
    room = {"max_num_seqs": COUNT, "num_gpu_blocks_override": COUNT * BLOCKS_PER_REQUEST_MAX}
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
