# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of many shapes, and adapters, from the classes of `transformers`.

`vllm_nvmeof_bench.servers.model` draws their weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm_nvmeof_bench.servers.model import ModelShape, make_model, write_hybrid

from tests.e2e import servers as rig

MODELS = rig.BUILD / "models"
SHAPE = ModelShape(layers=2, hidden=128, intermediate=256, heads=4, kv_heads=1)
#: A model whose answers repeat, for a drafter that copies from the context.
LOOPING = ModelShape(
    layers=2, hidden=128, intermediate=256, heads=4, kv_heads=1, query_gain=1.0, embed_std=1.0
)
#: `SHAPE` with other weights.
OTHER = replace(SHAPE, seed=SHAPE.seed + 2)
#: Kind → shape of the models that `demo/model.py` makes.
_PLAIN = {"llama": SHAPE, "other": OTHER, "looping": LOOPING}
#: Window of the Gemma-like model's local layers.
WINDOW_TOKENS = 64
#: Local chunk of the Llama-4-like model.
LOCAL_TOKENS = 128
#: Window of the Mistral-like model.
MISTRAL_WINDOW_TOKENS = 128
IMAGE_TOKEN = SHAPE.vocab
_SIZES: dict[str, Any] = {
    "vocab_size": SHAPE.vocab,
    "hidden_size": SHAPE.hidden,
    "intermediate_size": SHAPE.intermediate,
    "num_hidden_layers": 2,
    "num_attention_heads": SHAPE.heads,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def gemma() -> Any:
    """Local layers with a sliding window, and one with full attention."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=4,
    )


def gemma_uneven() -> Any:
    """Five local layers and two with full attention: groups of 2, 2, 1 and 2 layers."""
    from transformers import Gemma3TextConfig

    local, full = ["sliding_attention"], ["full_attention"]
    return Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 7},
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=3 * local + full + 2 * local + full,
        query_pre_attn_scalar=4,
    )


def gemma4() -> Any:
    """Full attention has larger heads than the local layers, so vLLM gives it smaller blocks."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        vocab_size_per_layer_input=SHAPE.vocab,
        hidden_size_per_layer_input=0,
    )


def gptoss() -> Any:
    """A layer with a sliding window and one with full attention; sinks and experts."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **_SIZES,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW_TOKENS,
    )


def llama4() -> Any:
    """Three layers with local chunks and one with full attention; experts."""
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        intermediate_size_mlp=SHAPE.intermediate,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        attention_chunk_size=LOCAL_TOKENS,
        tie_word_embeddings=False,
    )


def mistral() -> Any:
    """A sliding window in every layer: one group without full attention."""
    from transformers import MistralConfig

    return MistralConfig(
        **_SIZES, num_key_value_heads=1, head_dim=32, sliding_window=MISTRAL_WINDOW_TOKENS
    )


def lfm2(times: int = 1) -> Any:
    """A layer with the state of a short convolution, and one with full attention; `times` over."""
    from transformers import Lfm2Config

    return Lfm2Config(
        **{**_SIZES, "num_hidden_layers": 2 * times},
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"] * times,
        block_auto_adjust_ff_dim=False,
        block_dim=SHAPE.hidden,  # vLLM's own names
        conv_dim=SHAPE.hidden,
    )


def lfm2_twice() -> Any:
    """Both kinds of layers in each of two stages: vLLM wants attention in every one."""
    return lfm2(2)


def qwen3next() -> Any:
    """Three layers with the states of a gated delta net and one with full attention.

    vLLM's CPU kernels need linear heads of 128. Large attention heads make blocks of few tokens,
    because a block of tokens must be as large as a state.
    """
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        mlp_only_layers=[0, 1, 2],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=SHAPE.intermediate,
        shared_expert_intermediate_size=SHAPE.intermediate,
    )


def deepseek() -> Any:
    """Multi-head latent attention of the one size that vLLM's CPU kernel supports."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_SIZES,
        num_key_value_heads=SHAPE.heads,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=2,  # no layer of experts
        n_routed_experts=2,
        tie_word_embeddings=False,
    )


def mamba() -> Any:
    """Only state-space layers, so no KV at all."""
    from transformers import MambaConfig

    return MambaConfig(
        vocab_size=SHAPE.vocab, hidden_size=SHAPE.hidden, num_hidden_layers=2, state_size=16
    )


def llava() -> Any:
    """A Llama with a vision tower; an image takes 16 tokens."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=64,
    )
    text = LlamaConfig(
        **{**_SIZES, "vocab_size": SHAPE.vocab + 64}, num_key_value_heads=1, head_dim=32
    )
    return LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=16
    )


def make(kind: str) -> Path:
    """Make the model unless it exists; return its directory.

    kind: the name of a function above, or of `_PLAIN`.
    """
    if kind in _PLAIN:
        return make_model(MODELS, _PLAIN[kind])
    config_of: Callable[[], Any] = globals()[kind]
    config = config_of()
    text = json.dumps([config.to_dict(), Path(__file__).read_text()], sort_keys=True, default=str)
    directory = MODELS / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if (directory / "config.json").exists():
        return directory
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _write(config, partial)
    partial.rename(directory)
    return directory


def _write(config: Any, directory: Path) -> None:
    is_image_model = hasattr(config, "image_token_index")
    write_hybrid(config, directory, SHAPE, images=is_image_model)
    if is_image_model:
        _name_as_vllm_does(directory / "model.safetensors")
        _write_processor(directory)


def _name_as_vllm_does(file: Path) -> None:
    """Rename the vision tower's weights as in published checkpoints, which vLLM expects."""
    from safetensors.torch import load_file, save_file

    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1): value
        for name, value in load_file(file).items()
    }
    save_file(weights, str(file), metadata={"format": "pt"})


def _write_processor(directory: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_TOKEN
    side = {"height": 56, "width": 56}
    images = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=side)
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(directory)


def make_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter of the Llama; return its directory."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rank, head = 8, SHAPE.head_dim
    weights = {}
    for layer in range(SHAPE.layers):
        for name, rows in (("q_proj", SHAPE.heads * head), ("v_proj", SHAPE.kv_heads * head)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, dims in (("A", (rank, SHAPE.hidden)), ("B", (rows, rank))):
                drawn = rng.standard_normal(dims, dtype=np.float32) * np.float32(dims[1] ** -0.5)
                weights[f"{prefix}.lora_{part}.weight"] = drawn
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
