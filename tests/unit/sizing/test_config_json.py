# SPDX-License-Identifier: Apache-2.0
"""config.json in the forms that many families use."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vllm_nvmeof_offload.commands.size.model import LayerKind, Weights, parse_model, read_model
from vllm_nvmeof_offload.errors import ConfigError

PLAIN: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
MAMBA2 = {
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_n_groups": 2, "mamba_expand": 8,
}  # fmt: skip
SPARSE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
GATED_DELTA = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def kinds(**more: Any) -> dict[str, int]:
    return {c.kind.name: c.layers for c in parse_model({**PLAIN, **more}, "a model").caches}


@pytest.mark.parametrize(
    ("more", "kv_heads", "width"),
    [
        ({}, 16, 64),
        ({"num_key_value_heads": 4}, 4, 64),
        ({"num_key_value_heads": 4, "head_dim": 128}, 4, 128),
        ({"num_key_value_heads": None}, 16, 64),
        ({"multi_query": True}, 1, 64),
        ({"multi_query_group_num": 2}, 2, 64),
    ],
)
def test_head_counts_are_read(more: dict[str, Any], kv_heads: int, width: int) -> None:
    (cache,) = parse_model({**PLAIN, **more}, "a model").caches
    assert (cache.kv_heads, cache.key_width, cache.value_width) == (kv_heads, width, width)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"sliding_window": 4096}, {"WINDOW": 12}),
        ({"sliding_window": None}, {"FULL": 12}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"FULL": 12}),
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 9},
            {"FULL": 9, "WINDOW": 3},
        ),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, {"FULL": 2, "WINDOW": 10}),
        ({"sliding_window": 512, "model_type": "gemma2"}, {"FULL": 6, "WINDOW": 6}),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 6},
            {"FULL": 6, "WINDOW": 6},
        ),
        ({"layer_types": ["sliding_attention", "full_attention"] * 6}, {"FULL": 12}),
        ({"attention_chunk_size": 8192}, {"FULL": 3, "LOCAL": 9}),
        ({"sliding_window": 512, "num_kv_shared_layers": 4}, {"WINDOW": 8}),
        ({**GATED_DELTA, "full_attention_interval": 4}, {"FULL": 3, "STATE": 9}),
        ({**MAMBA2, "attn_layer_indices": [3, 9]}, {"FULL": 2, "STATE": 10}),
        (
            {"mamba_d_state": 16, "attn_layer_period": 8, "attn_layer_offset": 4},
            {"FULL": 1, "STATE": 11},
        ),
        ({**MAMBA2, "hybrid_override_pattern": "M-M*E-"}, {"FULL": 1, "STATE": 2}),
        ({**MAMBA2, "model_type": "falcon_h1"}, {"FULL": 12, "STATE": 12}),
        ({"model_type": "mamba2", **MAMBA2}, {"STATE": 12}),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"LATENT": 12}),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
            {"LATENT": 12, "INDEXER": 12},
        ),
        ({**SPARSE, "index_topk_freq": 4}, {"LATENT": 12, "INDEXER": 4}),
        ({**SPARSE, "index_topk_pattern": "FSSS" * 3}, {"LATENT": 12, "INDEXER": 3}),
        ({**SPARSE, "indexer_types": ["full", "shared"] * 6}, {"LATENT": 12, "INDEXER": 6}),
        ({"conv_L_cache": 3, "full_attn_idxs": [2, 5]}, {"FULL": 2, "STATE": 10}),
        (
            {**MAMBA2, "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
            {"FULL": 1, "STATE": 1},
        ),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention"] * 12 + ["full_attention"]},
            {"WINDOW": 12},  # the last one is a drafter's
        ),
    ],
)
def test_kinds_of_layers_are_read(more: dict[str, Any], expected: dict[str, int]) -> None:
    assert kinds(**more) == expected


def test_an_indexer_has_a_byte_per_element_and_a_scale() -> None:
    more = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    caches = parse_model({**PLAIN, **more}, "a model").caches
    indexer = next(c for c in caches if c.kind is LayerKind.INDEXER)
    assert indexer.entry_bytes(8, 2) == 128 + 4


@pytest.mark.parametrize("tp", [1, 4])
def test_states_are_vllms(tp: int) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
    shapes = utils.MambaStateShapeCalculator
    mamba2 = (8192, 2, 128, 64, 128, 4)
    mamba1 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 8}
    gated = shapes.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4)
    for more, parts in (
        ({**MAMBA2, "attn_layer_indices": [3]}, shapes.mamba2_state_shape(tp, *mamba2)),
        ({**GATED_DELTA, "full_attention_interval": 4}, gated),
        (mamba1, shapes.mamba1_state_shape(tp, 2048, 16, 4)),
    ):
        caches = parse_model({**PLAIN, **more}, "a model").caches
        state = next(c.state for c in caches if c.kind is LayerKind.STATE)
        elements = sum(math.prod(part) for part in parts)
        assert state is not None
        assert state.rank_bytes(tp) == 2 * elements, more


def test_the_state_may_have_a_dtype_of_its_own() -> None:
    more = {**MAMBA2, "attn_layer_indices": [3], "mamba_ssm_cache_dtype": "float32"}
    caches = parse_model({**PLAIN, **more}, "a model").caches
    state = next(c.state for c in caches if c.kind is LayerKind.STATE)
    assert state is not None
    assert (state.conv_bytes, state.recurrent_bytes) == (2, 4)


def test_nested_and_directory_and_index(tmp_path: Path) -> None:
    config = {"text_config": {**PLAIN, "torch_dtype": "float16"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_model(tmp_path)
    assert read.layers == 12
    assert read.name == tmp_path.name
    assert read.weights.source.startswith("estimated")
    index = {"metadata": {"total_size": 123_456}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model(tmp_path / "config.json").weights.total_bytes == 123_456
    assert read_model(tmp_path, Weights(99, "given")).weights.total_bytes == 99


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers=None: missing in config.json"),
        (
            {"use_sparse_attention": True},
            "sparse_attention_freq=None: use_sparse_attention needs a list",
        ),
        ({"num_hidden_layers": "12"}, "num_hidden_layers='12': in config.json: give a whole"),
        ({"layer_types": ["telepathy"] * 12}, "layer_types='telepathy': unknown; known are"),
        (
            {"hybrid_override_pattern": "M?"},
            "hybrid_override_pattern='?': unknown; known are M, *, -, E",
        ),
        (
            {"block_configs": [{}]},
            "cannot compute the size of heads that differ from layer",
        ),
        (
            {"compress_ratios": [8] * 12, "head_dim": 512, "sliding_window": 128},
            "compress_ratios=8: unknown; known are 0, 4, 128",
        ),
        ({"is_encoder_decoder": True}, "only decoders are sized"),
        ({"mamba_step": 2}, "mamba_step=2: this version cannot tell which layers have recurrent"),
        (
            {"layer_group_size": 8},
            "cannot compute the size of linear attention in groups",
        ),
        (
            {**SPARSE, "sliding_window": 8, "layer_types": ["sliding_attention"] * 11 + ["full"]},
            "layer_types='full': unknown",
        ),
        (
            {
                **SPARSE,
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] * 11 + ["full_attention"],
            },
            "latent windows have an unknown size",
        ),
        ({"hybrid_override_pattern": "-" * 12}, "no layer has a cache"),
    ],
)
def test_a_model_that_cannot_be_sized_is_refused_by_name(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_model({**PLAIN, **more}, "a model")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read (No such file"), ("{", "not JSON"), ("[1]", "not a JSON object")],
)
def test_unreadable_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_model(file)
    assert message in str(refused.value)
    assert "config.json" in str(refused.value)
