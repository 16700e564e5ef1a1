# SPDX-License-Identifier: Apache-2.0
"""Supported models and options: the same tokens from both tiers and after a restart. Each test
combines another block size, hash algorithm or kind of layer, to limit engine starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.shapes.lives import CPU, FOUND, POOL, Kind
from tests.e2e.shapes.models import IMAGE_TOKEN, make_adapter
from tests.e2e.shapes.rig import (
    Outcome,
    Plan,
    Request,
    Zygote,
    only_cpu_engine,
    play_back,
    prompts,
    same,
)
from vllm_nvmeof_offload.units import KIB

ASKED = [Request(prompt) for prompt in prompts(3, 150, 200)]

_TEXT = prompts(5, 200)[0]
#: One prompt around two images.
TWO_IMAGES = [Request([*_TEXT[:70], IMAGE_TOKEN, *_TEXT[70:]], image=seed) for seed in (1, 2)]


def whole_chunks(asked: list[Request], chunk_tokens: int) -> int:
    """Tokens in the prompts' whole chunks: the most that can be loaded."""
    return sum(len(request.prompt) // chunk_tokens * chunk_tokens for request in asked)


def check_all_loaded(lives: tuple[Outcome, Outcome], expected_tokens: int) -> None:
    first, second = lives
    assert first.grown(0, CPU) == first.grown(0, POOL) == 0
    assert first.grown(1, CPU) == expected_tokens
    assert second.grown(0, POOL) == expected_tokens


def test_prefix_caching_off(zygote: Zygote, tmp_path: Path) -> None:
    """vLLM hashes blocks for the connector: the GPU has no hit, the connector finds all chunks."""
    plan = Plan("llama", [ASKED], {"enable_prefix_caching": False}, tmp_path)
    lives = play_back(zygote, plan, "no-prefix-caching")
    check_all_loaded(lives, whole_chunks(ASKED, 64))
    assert lives[0].grown(1, "prefix_cache_hits") == 0


def test_adapters_do_not_share(zygote: Zygote, tmp_path: Path) -> None:
    """One prompt without an adapter and with two; blocks of 64 tokens.

    An adapter's name and path may refer to other files after a restart: nothing is adopted.
    """
    prompt = ASKED[0].prompt
    adapters = [str(make_adapter(tmp_path / name, seed)) for seed, name in enumerate("ab")]
    asked = [Request(prompt)]
    asked += [Request(prompt, lora=(path, i + 1, path)) for i, path in enumerate(adapters)]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "block_size": 64}
    plan = Plan("llama", [asked], options, tmp_path / "pool")
    first, second = play_back(zygote, plan, "adapters")
    answers = first.answers[0]
    assert not any(same([a], [b]) for a, b in zip(answers, answers[1:] + answers[:1], strict=True))
    # Otherwise the first request's KV would have served the others.
    assert first.grown(0, CPU) == 0
    assert first.grown(1, CPU) == whole_chunks(asked, 128)
    assert second.grown(0, POOL) == 0
    assert "NOTHING IS ADOPTED: adapters are known by name and path" in second.log


def test_drafts_that_are_rejected_are_not_stored(zygote: Zygote, tmp_path: Path) -> None:
    """N-gram speculation, CBOR hashes, blocks of 128 tokens: chunks hold answers as well."""
    asked = [Request(prompt, tokens=48) for prompt in prompts(3, 100, 230)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    options = {
        "speculative_config": {**ngram, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "prefix_caching_hash_algo": "sha256_cbor",
        "block_size": 128,
    }
    plan = Plan("looping", [asked], options, tmp_path, {"blocks_per_chunk": 1})
    reference = zygote.reference(plan, "ngram")
    stored = zygote.run(plan, "ngram-first")
    assert same(stored.answers[0], reference)
    drafted = stored.grown(0, "spec_decode_num_draft_tokens")
    assert 0 < stored.grown(0, "spec_decode_num_accepted_tokens") < drafted
    # Continue the prompts with the answers, which are in the chunks that are loaded.
    more = [
        Request(request.prompt + answer.tokens + [7, 8, 9])
        for request, answer in zip(asked, reference, strict=True)
    ]
    expected = whole_chunks(more, 128)
    assert expected > whole_chunks(asked, 128)
    asked_on = replace(plan, rounds=[more, more])
    loaded = zygote.run(asked_on, "ngram-second")
    reference = zygote.reference(replace(plan, rounds=[more]), "ngram-more")
    assert same(loaded.answers[0], reference)
    assert same(loaded.answers[1], reference)
    assert loaded.grown(0, POOL) == expected
    assert loaded.grown(1, CPU) + loaded.grown(1, POOL) == expected


def test_different_images_share_no_chunk(zygote: Zygote, tmp_path: Path) -> None:
    """The same tokens around two images: only the chunk before the image is shared."""
    plan = Plan("llava", [TWO_IMAGES], target=tmp_path)
    first, second = play_back(zygote, plan, "images")
    assert not same(first.answers[0][:1], first.answers[0][1:])
    # 216 tokens with the image: three chunks, of which the first is already in GPU memory.
    assert first.grown(0, CPU) == 0
    assert first.grown(1, CPU) == second.grown(0, POOL) == 5 * 64


def test_images_without_a_hash(zygote: Zygote, tmp_path: Path) -> None:
    """With both of vLLM's caches off images are only numbered: chunks after one are not found."""
    options = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    first, second = play_back(
        zygote, Plan("llava", [TWO_IMAGES], options, tmp_path), "image-numbers"
    )
    assert first.grown(1, CPU) == 2 * 64  # only the chunk before the image, of both prompts
    assert first.grown(1, POOL) == second.grown(0, POOL) == 0
    assert "NOTHING IS ADOPTED: multimodal items have no content hash" in second.log


def test_local_layers_that_keep_all_tokens(zygote: Zygote, tmp_path: Path) -> None:
    """Without vLLM's hybrid KV cache manager a Gemma-like model has one group."""
    options = {"disable_hybrid_kv_cache_manager": True}
    lives = play_back(zygote, Plan("gemma", [ASKED], options, tmp_path), "gemma")
    check_all_loaded(lives, whole_chunks(ASKED, 64))


def test_fp8_cache(zygote: Zygote, tmp_path: Path) -> None:
    """vLLM's CPU engine supports FP8 only with AVX-512; its error names that."""
    options = {"kv_cache_dtype": "fp8", "block_size": 64}
    plan = Plan("llama", [ASKED], options, tmp_path, {"blocks_per_chunk": 1})
    error = zygote.run(replace(plan, rounds=[]), "fp8-probe").error
    if error:
        assert "FP8 KV cache on CPU requires x86 with AVX-512" in error
        return
    check_all_loaded(play_back(zygote, plan, "fp8"), whole_chunks(ASKED, 64))


@pytest.mark.soak
def test_a_drafting_model(zygote: Zygote, tmp_path: Path) -> None:
    """The drafter's layers are in the same chunks; the answer does not depend on its drafts."""
    asked = [Request(request.prompt, tokens=40) for request in ASKED]
    drafter = {"method": "draft_model", "model": "llama", "num_speculative_tokens": 2}
    plan = Plan("looping", [asked], {"speculative_config": drafter}, tmp_path)
    lives = play_back(zygote, plan, "drafter")
    assert lives[0].grown(0, "spec_decode_num_draft_tokens") > 0
    check_all_loaded(lives, whole_chunks(asked, 64))


PACKED = "Using BLHNC KV cache layout"


@only_cpu_engine
def test_packed_blocks_are_loaded(zygote: Zygote, tmp_path: Path) -> None:
    """With the CPU's copies; the answers equal those of an engine with one tensor per layer."""
    plan = Plan("llama", [ASKED], {"enable_prefix_caching": False}, tmp_path, packed=True)
    lives = play_back(zygote, plan, "packed")
    check_all_loaded(lives, whole_chunks(ASKED, 64))
    for life in lives:
        assert PACKED in life.log
        assert "copies by host memcpy" in life.log


@only_cpu_engine
def test_the_engine_of_a_gpu_serves_over_a_stub(zygote: Zygote, tmp_path: Path) -> None:
    """Worker, registration, fences, tickets and wake-ups are as on a GPU; only CUDA is a stub."""
    plan = Plan(
        "llama",
        [ASKED],
        {"enable_prefix_caching": False},
        tmp_path / "pool",
        {"copy_backend": "auto"},
        {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        packed=True,
        stub_gpu=True,
    )
    lives = play_back(zygote, plan, "stub-gpu")
    check_all_loaded(lives, whole_chunks(ASKED, 64))
    for life in lives:
        assert PACKED in life.log
        assert "copies by auto on stub" in life.log
        assert "a STUB stands in for the GPU" in life.log
    # vLLM's own metrics count the moved bytes; stored and loaded bytes are equal.
    stored = lives[0].grown(0, "kv_offload_store_bytes")
    assert stored == lives[0].grown(1, "kv_offload_load_bytes") > 0


#: vLLM's CPU engine runs pipelines only if it warms its models up, which it does to compile them:
#: with `enforce_eager` its first request fails (`assert self.intermediate_tensors is not None`). So
#: the models are compiled, by the backend that changes nothing. It has no effect without a mode:
#: vLLM replaces its default mode for a CPU by another one, and the backend by Inductor.
STAGES = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
    "num_gpu_blocks_override": 160,
}
STAGED = [Request(prompt) for prompt in prompts(3, 150, 200)]
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
    plan = Plan(kind.name, [STAGED], STAGES, tmp_path, extra, run_s_max=600.0)
    reference = zygote.reference(plan, f"pipeline-{kind.name}")
    first = zygote.run(replace(plan, rounds=[STAGED, STAGED]), f"pipeline-{kind.name}-first")
    second = zygote.run(plan, f"pipeline-{kind.name}-second")
    for outcome in (first, second):
        assert not outcome.error, outcome.error
        for answers in outcome.answers:
            assert kind.same(answers, reference, in_pieces=True)
            assert same(answers, first.answers[0])
        assert outcome.grown(0, "nvmeof_failed_chunks") == 0
    # With windows or states the last token is always computed.
    findable = sum(kind.whole(len(r.prompt) + (kind.name == "llama")) for r in STAGED)
    assert first.grown(0, FOUND) == 0
    assert first.grown(1, FOUND) == second.grown(0, FOUND) == findable
    assert first.grown(1, CPU) > 0
    assert second.grown(0, POOL) > 0
