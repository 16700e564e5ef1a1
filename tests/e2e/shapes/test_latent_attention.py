# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (a DeepSeek-like model), in blocks of 16 tokens.

vLLM has two kinds of CPU kernels for this attention. With AMX such a model works like any other.
Without AMX vLLM computes a prefill without reading the KV before it: tokens would be silently
wrong with any connector. The connector refuses that; with the refusal lifted, the last two tests
show that the refusal is needed, and that the loaded bytes are right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.e2e.shapes.rig import Plan, Request, Zygote, only_cpu_engine, prompts, same

pytestmark = only_cpu_engine
HAS_AMX = torch.cpu._is_amx_tile_supported()
CPU, POOL = "nvmeof_loaded_tokens:cpu", "nvmeof_loaded_tokens:pool"
CHUNK_TOKENS = 32
ASKED = [Request(prompt) for prompt in prompts(6, 5 * CHUNK_TOKENS - 9)]
OPTIONS = {"block_size": 16, "num_gpu_blocks_override": 120}


@pytest.mark.skipif(HAS_AMX, reason="this processor has AMX")
def test_it_is_refused_without_amx(zygote: Zygote, tmp_path: Path) -> None:
    plan = Plan("deepseek", [ASKED], OPTIONS, tmp_path)
    error = zygote.run(replace(plan, rounds=[]), "mla-refused").error
    assert error.startswith("ConfigError: model=")
    assert "deepseek" in error
    assert "MLAAttentionSpec" in error
    assert "ignores loaded KV if the processor has no AMX" in error
    assert "serve it without offloading" in error


@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_it_is_right_with_amx(zygote: Zygote, tmp_path: Path) -> None:
    """The AMX kernels take only bfloat16 and blocks of 32 tokens, and they round the rest of a
    prompt otherwise than the whole prompt. Loaded KV must give the answers of KV in GPU memory."""
    options = {"dtype": "bfloat16", "block_size": 32, "num_gpu_blocks_override": 60}
    plan = Plan("deepseek", [ASKED], options, tmp_path, {"blocks_per_chunk": 1})
    reference = zygote.reference(plan, "mla-amx")
    first = zygote.run(replace(plan, rounds=[ASKED + ASKED, ASKED]), "mla-amx-first")
    second = zygote.run(plan, "mla-amx-second")
    assert not first.error, first.error
    computed, from_gpu = first.answers[0]
    assert same([computed], reference)
    assert same(first.answers[1], [from_gpu])
    assert same(second.answers[0], [from_gpu])
    assert first.grown(0, CPU) == 0
    assert first.grown(1, CPU) == second.grown(0, POOL) == 4 * CHUNK_TOKENS


def test_the_refusal_is_needed(zygote: Zygote, tmp_path: Path) -> None:
    """With the refusal lifted vLLM ignores loaded KV. If this test fails, vLLM no longer does."""
    options = {**OPTIONS, "attention_backend": "CPU_MLA"}
    plan = Plan("deepseek", [ASKED], options, tmp_path, lift_mla=True)
    reference = zygote.reference(plan, "mla")
    lifted = zygote.run(replace(plan, rounds=[ASKED, ASKED]), "mla-lifted")
    cold, loaded = lifted.answers
    assert same(cold, reference)
    assert lifted.grown(1, CPU) == 4 * CHUNK_TOKENS
    assert not same(loaded, reference), "the refusal can be removed"


def test_the_bytes_are_right(zygote: Zygote, tmp_path: Path) -> None:
    """A single new token is not a prefill: vLLM reads its loaded KV, and the answer is the same.

    The reference had the same KV by computing it: the prompt's whole chunks, then a token that
    it chose itself.
    """
    options = {**OPTIONS, "attention_backend": "CPU_MLA"}
    whole = [Request(prompt) for prompt in prompts(6, 4 * CHUNK_TOKENS, 5 * CHUNK_TOKENS)]
    plan = Plan("deepseek", [whole], options, tmp_path, lift_mla=True)
    reference = zygote.reference(plan, "mla-whole")
    one_left = [
        Request(request.prompt + answer.tokens[:1], tokens=len(answer.tokens) - 1)
        for request, answer in zip(whole, reference, strict=True)
    ]
    first = zygote.run(replace(plan, rounds=[whole, one_left]), "mla-first")
    second = zygote.run(replace(plan, rounds=[one_left]), "mla-second")
    rest = [replace(a, tokens=a.tokens[1:], logprobs=a.logprobs[1:]) for a in reference]
    assert same(first.answers[0], reference)
    assert first.grown(1, CPU) == second.grown(0, POOL) == 9 * CHUNK_TOKENS
    assert same(first.answers[1], rest)
    assert same(second.answers[0], rest)
