# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache: config.json in its forms, examples by hand, and vLLM's own numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fabric.rig.packages import locked
from tests.unit.sizing import families
from tests.unit.sizing.families import FAMILIES, NOT_SIZED
from tests.upstream.releases import ReleaseUnavailableError, cache_place, fetch, opened
from vllm_nvmeof_offload.commands.size.deployment import Deployment
from vllm_nvmeof_offload.commands.size.kv import KvSizes
from vllm_nvmeof_offload.commands.size.model import (
    LayerCache,
    LayerKind,
    ModelShape,
    RecurrentState,
    Weights,
    parse_model,
    preset,
    read_model,
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
    per_layer = 8 * 256 * 2 * sizes.chunk_tokens
    payloads = [sizes.groups(stage)[0].payload_bytes for stage in range(4)]
    assert [payload // per_layer for payload in payloads] == [2, 3, 3, 2]
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


def test_ranks_share_the_tokens_of_a_latent() -> None:
    """DeepSeek-V3 with --tp 8 --dcp 8: a block of 64 tokens on each rank is one of 512."""
    whole = KvSizes(preset("DeepSeek-V3"), Deployment(tensor_parallel=8))
    sizes = KvSizes(preset("DeepSeek-V3"), Deployment(tensor_parallel=8, decode_context_parallel=8))
    assert sizes.block_tokens == sizes.unit_tokens == 8 * 64
    assert sizes.block_bytes() == whole.block_bytes()
    assert sizes.token_bytes() == 70_272 == 8 * sizes.rank_token_bytes()
    assert sizes.copies() == 1
    assert sizes.session_rank_bytes(16 << 10) == whole.session_rank_bytes(16 << 10) // 8
    assert sizes.loaded_bytes(16 << 10) == whole.loaded_bytes(16 << 10) / 8


def test_ranks_share_the_tokens_of_a_head_that_they_all_hold() -> None:
    """Qwen2.5 1.5B has 2 KV heads: four of eight ranks hold the same one."""
    model = preset("Qwen2.5-1.5B-Instruct")
    for dcp, copies in ((2, 2), (4, 1)):
        sizes = KvSizes(model, Deployment(tensor_parallel=8, decode_context_parallel=dcp))
        assert sizes.rank_token_bytes() == 28 * 256 * 2 // dcp
        assert sizes.copies() == copies
    with pytest.raises(ConfigError, match="each of 2 heads is on 4 of the 8 ranks"):
        KvSizes(model, Deployment(tensor_parallel=8, decode_context_parallel=8))


def test_a_state_is_whole_on_every_rank_that_shares_tokens() -> None:
    caches = (
        LayerCache(LayerKind.FULL, 1, 2, 128, 128),
        LayerCache(LayerKind.STATE, 1, state=RecurrentState(64, 0, 32, 2, 2, 4)),
    )
    model = ModelShape("a model", caches, ((0, 0), (1, 1)), 2, Weights(None, "unknown"), 2)
    whole = KvSizes(model, Deployment(tensor_parallel=8))
    sizes = KvSizes(model, Deployment(tensor_parallel=8, decode_context_parallel=4))
    assert sizes.state_bytes() == whole.state_bytes()
    full, state = sizes.plan.groups
    assert full.block_tokens == 4 * state.block_tokens
    assert sizes.blocks_per_chunk == 1
    assert sizes.unit_tokens == full.block_tokens


def test_prefill_context_parallelism_copies_what_decode_does_not_share() -> None:
    model = preset("DeepSeek-V3")
    copied = Deployment(tensor_parallel=2, prefill_context_parallel=4)
    assert (copied.ranks, copied.gpus, KvSizes(model, copied).copies()) == (8, 8, 8)
    for dcp, copies in ((4, 2), (8, 1)):
        shared = Deployment(
            tensor_parallel=2, prefill_context_parallel=4, decode_context_parallel=dcp
        )
        assert (shared.ranks, KvSizes(model, shared).copies()) == (8, copies)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "gpt-oss-120b",
            {"tp": 8, "dcp": 2},
            "--dcp=2: vLLM does not support this option for layers with sliding",
        ),
        (
            "gpt-oss-120b",
            {"pcp": 2},
            "--pcp=2: vLLM does not support this option for layers with sliding window",
        ),
        ("Qwen3-Next-80B-A3B-Instruct", {"pcp": 2}, "--pcp=2: .* with recurrent state; leave it"),
        ("DeepSeek-V3", {"tp": 4, "dcp": 3}, "--dcp=3: give a divisor of --tp 4"),
        ("DeepSeek-V3", {"tp": 2, "pcp": 4, "dcp": 2}, "with --tp 2 --pcp 4, give 1 or 4 or 8"),
        ("Llama-3.1-8B-Instruct", {"tp": 8, "dcp": 2}, "each of 8 heads is on 1 of the 8 ranks"),
    ],
)
def test_context_parallelism_that_vllm_refuses(
    name: str, given: dict[str, int], message: str
) -> None:
    names = {
        "tp": "tensor_parallel",
        "pcp": "prefill_context_parallel",
        "dcp": "decode_context_parallel",
    }
    with pytest.raises(ConfigError, match=message):
        KvSizes(preset(name), Deployment(**{names[key]: size for key, size in given.items()}))


def test_a_model_of_which_no_size_is_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="sizes of its KV cache and states are unknown"):
        KvSizes(shape(LayerCache(LayerKind.STATE, 4)), Deployment())


# The models of vLLM 0.33's recipes that the server accepts, by the KV caches of their layers.
#
# Each recipe belongs to one family. A family is planned as a model of `families.py` that has the
# same kinds of layers, which `test_planner.py` compares with vLLM's planner and the server's
# rules, or it has a reason (`why`). The table in docs/compatibility.md has one row per family,
# with the number of its recipes.


ROOT = Path(__file__).resolve().parents[3]
ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("recipes.json").read_text())[
    "families"
]
RELEASE = "0.33.0"
RECIPES, ACCEPTED = 188, 186
#: These families' models only recognise text in pictures or speech, or give vectors.
RECOGNISERS = ("OCR", "ASR", "Transcribe", "whisper", "Voxtral", "jina")


def section() -> str:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    return text.split("## Model families")[1].split("\n## ")[0]


def table() -> dict[str, list[str]]:
    """Cells by family of the table in the documentation."""
    lines = [line.strip("| ").split(" | ") for line in section().splitlines() if "|" in line]
    return {cells[0]: cells for cells in lines[2:]}


def accepted(row: dict[str, Any]) -> bool:
    """Does the server accept the family's caches?"""
    if name := row["planned_as"]:
        # `test_planner.py` compares this refusal with the server's, and knows of no other.
        family = FAMILIES.get(name)
        return family is None or (
            KvSizes(parse_model(family.config, family.model), Deployment()).works
        )
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from vllm_nvmeof_offload.vllm_adapter.groups import kinds_of

    specs = (object.__new__(getattr(interface, name)) for name in row["specifications"])
    return all(None not in kinds_of(SimpleNamespace(kv_cache_spec=spec)) for spec in specs)


def test_every_recipe_of_the_release_has_one_family() -> None:
    try:
        with locked(cache_place()):
            sdist = fetch(RELEASE)
    except ReleaseUnavailableError as error:
        pytest.skip(f"vLLM {RELEASE} cannot be had: {error}")
    with opened(sdist.path) as archive:
        names = archive.getnames()
    recipes = [
        found[1]
        for name in names
        if (found := re.search(r"^[^/]+/recipes/models/(.+)\.yaml$", name))
    ]
    assert sorted(model for row in ROWS for model in row["models"]) == sorted(recipes)
    assert len(set(recipes)) == RECIPES


def test_every_family_is_planned_or_has_a_reason() -> None:
    for row in ROWS:
        assert bool(row["planned_as"]) != bool(row.get("why")), row["family"]
    assert {row["planned_as"] for row in ROWS} - {None} <= {*FAMILIES, *NOT_SIZED}


def test_at_least_95_percent_are_accepted() -> None:
    kept = [model for row in ROWS if accepted(row) for model in row["models"]]
    assert len(kept) == ACCEPTED >= 0.95 * RECIPES
    every = [model for row in ROWS for model in row["models"]]
    chat = [model for model in every if not any(word in model for word in RECOGNISERS)]
    assert set(chat) <= set(kept)
    assert f"{ACCEPTED} of {RECIPES} are accepted" in " ".join(section().split())


def test_the_documentation_has_a_row_per_family() -> None:
    cells = table()
    for row in ROWS:
        family = row["family"]
        assert cells[family][-1] == str(len(row["models"])), family
        verdict = cells[family][1]
        assert verdict.startswith(("yes", "experimental", "no")), family
        assert verdict.startswith("no") != accepted(row), family
    assert sum(int(row[-1]) for row in cells.values()) == RECIPES


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
