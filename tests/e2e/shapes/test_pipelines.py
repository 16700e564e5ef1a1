# SPDX-License-Identifier: Apache-2.0
"""Two stages of a pipeline, each a process with its own layers and its own part of every chunk.

vLLM's CPU engine runs pipelines only if it warms its models up, which it does to compile them:
with `enforce_eager` its first request fails (`assert self.intermediate_tensors is not None`). So
the models are compiled, by the backend that changes nothing. It has no effect without a mode:
vLLM replaces its default mode for a CPU by another one, and the backend by Inductor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.shapes.lives import CPU, FOUND, POOL, Kind
from tests.e2e.shapes.rig import Plan, Request, Zygote, only_cpu_engine, prompts, same
from vllm_nvmeof_offload.units import KIB

STAGES = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
    "num_gpu_blocks_override": 160,
}
ASKED = [Request(prompt) for prompt in prompts(3, 150, 200)]
#: The first stage of Gemma has no layer with full attention, and none of one group of windows.
KINDS = [
    Kind("llama", 64, 32 * KIB, 0, 100),
    Kind("gemma", 64, 32 * KIB, 0, 100),
    Kind("lfm2_twice", 32, 32 * KIB, 0, 100, blocks_per_chunk=1, noise=0.5),
]


@only_cpu_engine
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stages_store_and_load_the_same_chunks(zygote: Zygote, tmp_path: Path, kind: Kind) -> None:
    extra = {"blocks_per_chunk": kind.blocks_per_chunk, "boundary_tokens": 1}
    plan = Plan(kind.name, [ASKED], STAGES, tmp_path, extra, run_s_max=600.0)
    reference = zygote.reference(plan, f"pipeline-{kind.name}")
    first = zygote.run(replace(plan, rounds=[ASKED, ASKED]), f"pipeline-{kind.name}-first")
    second = zygote.run(plan, f"pipeline-{kind.name}-second")
    for outcome in (first, second):
        assert not outcome.error, outcome.error
        for answers in outcome.answers:
            assert kind.same(answers, reference, in_pieces=True)
            assert same(answers, first.answers[0])
        assert outcome.grown(0, "nvmeof_failed_chunks") == 0
    # With windows or states the last token is always computed.
    findable = sum(kind.whole(len(r.prompt) + (kind.name == "llama")) for r in ASKED)
    assert first.grown(0, FOUND) == 0
    assert first.grown(1, FOUND) == second.grown(0, FOUND) == findable
    assert first.grown(1, CPU) > 0
    assert second.grown(0, POOL) > 0
