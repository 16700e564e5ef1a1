# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache: examples by hand, and vLLM's own numbers where it can be imported."""

from __future__ import annotations

import pytest

from tests.unit.sizing import families
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import (
    LayerCache,
    LayerKind,
    ModelShape,
    Weights,
    parse_model,
    preset,
)
from vllm_nvmeof_offload.commands.size.plan import stages_of
from vllm_nvmeof_offload.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def shape(cache: LayerCache) -> ModelShape:
    order = tuple((layer, 0) for layer in range(cache.layers))
    return ModelShape("a model", (cache,), order, cache.layers, Weights(None, "unknown"), 2)


def test_grouped_queries_by_hand() -> None:
    """Llama 3.1 70B: 80 layers × 8 heads × (128 + 128) × 2 bytes = 320 KiB per token."""
    sizes = KvSizes(preset("Llama-3.1-70B-Instruct"), Deployment(tensor_parallel=4))
    assert sizes.token_bytes() == 320 * KIB
    assert sizes.rank_token_bytes() == 80 * KIB
    assert sizes.block_bytes() == 1280 * KIB
    assert sizes.copies() == 1
    assert sizes.session_rank_bytes(128 * KIB) == 10 * GIB
    assert sizes.chunk_tokens == 16
    # 8192 chunks of 1280 KiB, each with a header page of 4 KiB, on 4 ranks.
    assert sizes.loaded_bytes(128 * KIB) == 4 * 8192 * 1284 * KIB
    assert sizes.pooled_bytes(128 * KIB) == 4 * 8192 * (1284 * KIB + 64)


def test_more_ranks_than_heads_hold_copies() -> None:
    """Qwen2.5 1.5B has 2 KV heads: on 8 ranks each is stored 4 times."""
    sizes = KvSizes(preset("Qwen2.5-1.5B-Instruct"), Deployment(tensor_parallel=8))
    assert sizes.token_bytes() == 28 * 2 * 256 * 2
    assert sizes.rank_token_bytes() == 28 * 1 * 256 * 2
    assert sizes.copies() == 4


def test_a_latent_is_whole_on_every_rank() -> None:
    """DeepSeek-V3: 61 layers × (512 + 64) × 2 bytes = 70,272 bytes per token on each rank."""
    sizes = KvSizes(preset("DeepSeek-V3"), Deployment(tensor_parallel=8))
    assert sizes.block_tokens == 64  # as its kernels want
    assert sizes.token_bytes() == sizes.rank_token_bytes() == 70_272
    assert sizes.copies() == 8
    assert sizes.loaded_bytes(16 << 10) >= 8 * (16 << 10) * 70_272


def test_fp8_halves_the_bytes() -> None:
    for name in ("Qwen3-8B", "DeepSeek-V3"):
        model = preset(name)
        half, whole = (
            KvSizes(model, Deployment(kv_element_bytes=1)),
            KvSizes(model, Deployment(kv_element_bytes=2)),
        )
        assert 2 * half.token_bytes() == whole.token_bytes()


def test_a_window_caps_what_its_layers_keep() -> None:
    """Gemma 3 27B: 10 of 62 layers keep everything, 52 in 6 groups the last 1024 tokens."""
    model = preset("gemma-3-27b-it")
    assert {one.kind: one.layers for one in model.caches} == {
        LayerKind.FULL: 10,
        LayerKind.WINDOW: 52,
    }
    sizes = KvSizes(model, Deployment())
    page = 16 * 16 * 256 * 2
    assert sizes.token_bytes() == 10 * 16 * 256 * 2
    # Groups of 9, 9, 9, 9, 8, 8 and 10 layers take blocks of 10 pages. A window of 1024 tokens
    # reaches into 65 blocks of 16.
    assert sizes.session_rank_bytes(32 * KIB) == 10 * page * (2048 + 6 * 65)
    assert sizes.session_rank_bytes(512) == 10 * page * 7 * 32
    slots = sizes.session_slots(32 * KIB)
    windows = [(64, layers * page) for layers in (9, 9, 9, 9, 8, 8)]
    assert [(one.count, one.payload_bytes) for one in slots] == [*windows, (2048, 10 * page)]
    assert {one.stride_bytes for one in slots} == {10 * page + 4 * KIB}
    assert sizes.boundary_bytes() == 64 * 52 * page
    # Reads are as long as what a group has.
    read = (2048 * 10 + 64 * 52) * page + (2048 + 6 * 64) * 4 * KIB
    assert sizes.loaded_bytes(32 * KIB) == read


def test_recurrent_state_does_not_grow() -> None:
    """Qwen3-Next: 12 of 48 layers have KV, 36 a state.

    The state of a layer: 8192 channels × 3 tokens of convolution, 32 heads × 128 × 128. Blocks are
    as long as their keys and values need to be as large as a state: 544 tokens of 2 KiB.
    """
    sizes = KvSizes(preset("Qwen3-Next-80B-A3B-Instruct"), Deployment())
    assert sizes.token_bytes() == 12 * 2 * 512 * 2
    state = 36 * 2 * (8192 * 3 + 32 * 128 * 128)
    assert sizes.state_bytes() == sizes.boundary_bytes() == state
    assert sizes.blocks_per_chunk == 1
    assert sizes.chunk_tokens == sizes.unit_tokens == 544
    block = 544 * sizes.token_bytes()
    assert sizes.block_bytes() == block
    # Three groups of states hold two blocks each.
    assert sizes.session_rank_bytes(5440) == (10 + 3 * 2) * block
    grown = sizes.session_rank_bytes(10880) - sizes.session_rank_bytes(5440)
    assert grown == 5440 * sizes.token_bytes()
    slots = [(one.count, one.payload_bytes) for one in sizes.session_slots(5500)]
    assert slots == [*[(1, state // 3)] * 3, (10, block)]


def test_only_what_a_boundary_needs_is_counted_of_compressed_kv() -> None:
    """DeepSeek V4 Flash: 3.9 KB per token are kept; rows of compressors only at a boundary."""
    model = parse_model(families.DEEPSEEK_V4.config, "DeepSeek-V4-Flash")
    sizes = KvSizes(model, Deployment())
    assert sizes.token_bytes() == round(21 * (584 + 132) / 4 + 20 * 584 / 128)
    assert [(g.group.kind.name, g.group.reach_chunks) for g in sizes.groups()] == [
        ("WINDOW", 2),
        ("WINDOW", 2),
        ("FULL", None),
        ("WINDOW", 2),
        ("WINDOW", 16),
    ]
    per_token = sizes.groups()[2].payload_bytes / 256
    assert per_token == pytest.approx(sizes.token_bytes(), rel=0.001)


def test_a_pipeline_spreads_layers_as_vllm_does() -> None:
    model = shape(LayerCache(LayerKind.FULL, 10, 8, 128, 128))
    sizes = KvSizes(model, Deployment(pipeline_parallel=4))
    per_layer = 8 * 256 * 2
    assert [sizes.rank_token_bytes(stage) // per_layer for stage in range(4)] == [2, 3, 3, 2]
    assert sizes.fullest == 1
    assert sizes.copies() == 1
    indices = pytest.importorskip("vllm.distributed.utils").get_pp_indices
    for layers, stages in ((10, 4), (61, 8), (48, 3), (7, 7), (31, 2)):
        found = [range(*indices(layers, stage, stages)) for stage in range(stages)]
        assert list(stages_of(layers, stages)) == found


def test_only_whole_chunks_are_stored() -> None:
    sizes = KvSizes(preset("Llama-3.1-8B-Instruct"), Deployment(blocks_per_chunk=4))
    assert sizes.chunk_tokens == 64
    assert sizes.loaded_bytes(63) == 0
    assert sizes.loaded_bytes(127) == sizes.loaded_bytes(64) == 4 * 2 * MIB + 4 * KIB


def test_splits_that_vllm_refuses_are_refused() -> None:
    model = preset("Llama-3.1-8B-Instruct")
    with pytest.raises(ConfigError, match="--tp=3: vLLM cannot share 8 KV heads over it"):
        KvSizes(model, Deployment(tensor_parallel=3))
    with pytest.raises(ConfigError, match="--pp=33: the model has 32 layers"):
        KvSizes(model, Deployment(pipeline_parallel=33))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_pages_are_vllms(tp: int, block_tokens: int) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    torch = pytest.importorskip("torch")
    for name, kv_bytes, dtype in (
        ("Llama-3.1-8B-Instruct", 2, torch.bfloat16),
        ("Qwen2.5-7B-Instruct", 1, torch.float8_e4m3fn),
        ("DeepSeek-V2-Lite-Chat", 2, torch.float16),
    ):
        model = preset(name)
        cache = model.caches[0]
        sizes = KvSizes(
            model,
            Deployment(tensor_parallel=tp, kv_element_bytes=kv_bytes, block_tokens=block_tokens),
        )
        latent = cache.kind is LayerKind.LATENT
        kind = interface.MLAAttentionSpec if latent else interface.FullAttentionSpec
        heads = 1 if latent else max(1, cache.kv_heads // tp)
        spec = kind(
            block_size=block_tokens, num_kv_heads=heads, head_size=cache.key_width, dtype=dtype
        )
        assert sizes.page_bytes(cache) == spec.page_size_bytes


def test_windows_are_vllms() -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    torch = pytest.importorskip("torch")
    for window in (1, 16, 17, 128, 1024, 4096):
        cache = LayerCache(LayerKind.WINDOW, 1, 2, 64, 64, reach_tokens=window)
        spec = interface.SlidingWindowSpec(
            block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=window
        )
        sizes = KvSizes(shape(cache), Deployment())
        blocks = spec.max_admission_blocks_per_request(0, 128 * KIB)
        assert sizes.session_rank_bytes(128 * KIB) == blocks * spec.page_size_bytes
