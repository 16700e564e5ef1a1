# SPDX-License-Identifier: Apache-2.0
"""Model families: numbers of one real configuration each, and vLLM's specifications of them.

`config` has the keys of the model's config.json that decide its KV cache. `layers` has, for each
decoder layer, the keyword arguments of vLLM's specification classes, written down from vLLM's model
files and not computed by the code under test. `source`: where the numbers are from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
Config = dict[str, Any]

_TRANSFORMERS = "defaults of the configuration class in transformers 5.19, which names this model"
_HUB = "config.json of the model on huggingface.co"
_QUOTED = "config.json of the model, as tests of several public repositories quote it alike"


@dataclass(frozen=True)
class Family:
    """block_tokens: of a block before vLLM adapts it to states. parallel: sizes of tensor
    parallelism that the test plans. not_sized: words of the error with which our own plan refuses
    the configuration; the server takes vLLM's plan, and may serve the model."""

    model: str
    source: str
    config: Config
    layers: list[list[Spec]]
    block_tokens: int = 16
    parallel: tuple[int, ...] = (1, 4)
    not_sized: str = ""


def full(heads: int, size: int, value: int | None = None) -> Spec:
    return {
        "class": "FullAttentionSpec",
        "num_kv_heads": heads,
        "head_size": size,
        "head_size_v": value or size,
        "dtype": "bfloat16",
    }


def window(tokens: int, heads: int, size: int, value: int | None = None) -> Spec:
    return full(heads, size, value) | {"class": "SlidingWindowSpec", "sliding_window": tokens}


def local(tokens: int, heads: int, size: int) -> Spec:
    return full(heads, size) | {
        "class": "ChunkedLocalAttentionSpec",
        "attention_chunk_size": tokens,
    }


def latent(width: int = 576, dtype: str = "bfloat16", **more: Any) -> Spec:
    return {
        "class": "MLAAttentionSpec",
        "num_kv_heads": 1,
        "head_size": width,
        "dtype": dtype,
        **more,
    }


def keys(width: int = 132, dtype: str = "uint8", **more: Any) -> Spec:
    return latent(width, dtype, cache_role="indexer", **more)


def ring(tokens: int, width: int, heads: int = 1, **more: Any) -> Spec:
    """The last tokens' rows, one block per request."""
    return full(heads, width) | {
        "class": "CircularBufferSpec",
        "head_size_v": 0,
        "block_size": tokens,
        **more,
    }


def state(calculator: str, arguments: Config, *dtypes: str) -> Spec:
    """A state whose shapes vLLM's own calculator gives."""
    return {
        "class": "MambaSpec",
        "calculator": calculator,
        "arguments": arguments,
        "dtypes": dtypes,
    }


def every(count: int, period: int, others: Spec, one: Spec, at: int) -> list[list[Spec]]:
    """`count` layers, of which those with index ≡ at (mod period) are `one`."""
    return [[one if layer % period == at else others] for layer in range(count)]


LLAMA_3 = Family(
    "meta-llama/Llama-3.1-8B-Instruct",
    _HUB,
    {
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096,
    },
    [[full(8, 128)]] * 32,
)  # fmt: skip

# -- windows and local chunks ---------------------------------------------------------------------

GPT_OSS = Family(
    "openai/gpt-oss-120b",
    _HUB,
    {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    every(36, 2, window(128, 8, 64), full(8, 64), at=1),
)  # fmt: skip
GEMMA_3 = Family(
    "google/gemma-3-27b-it",
    _HUB,
    {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376, "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    every(62, 6, window(1024, 16, 128), full(16, 128), at=5),
)  # fmt: skip
GEMMA_4 = Family(
    "google/gemma-4-31B-it",
    _QUOTED,
    {
        "model_type": "gemma4_text", "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256,
        "global_head_dim": 512, "hidden_size": 5376, "sliding_window": 1024,
        "attention_k_eq_v": True, "num_kv_shared_layers": 0,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    },
    every(60, 6, window(1024, 16, 256), full(4, 512), at=5),
)  # fmt: skip
LLAMA_4 = Family(
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    _TRANSFORMERS,
    {
        "model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 5120,
        "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 12,
    },
    every(48, 4, local(8192, 8, 128), full(8, 128), at=3),
)  # fmt: skip
MIMO = Family(
    "XiaomiMiMo/MiMo-V2-Flash",
    f"{_TRANSFORMERS}; heads of the windows from public readers of its config.json",
    {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "hidden_size": 4096,
        "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "sliding_window_size": 128, "attention_chunk_size": 128,
        "hybrid_layer_pattern": [0 if i == 0 or i % 6 == 5 else 1 for i in range(48)],
    },
    [[full(4, 192, 128) if i == 0 or i % 6 == 5 else window(128, 8, 192, 128)] for i in range(48)],
)  # fmt: skip
STEP = Family(
    "stepfun-ai/Step-3.5-Flash",
    f"{_QUOTED}, and a mirror of its configuration class (the pattern of layers)",
    {
        "model_type": "step3p5", "num_hidden_layers": 45, "num_attention_heads": 64,
        "num_attention_groups": 8, "head_dim": 128, "hidden_size": 4096, "sliding_window": 512,
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8,
                                    "head_dim": 128},
        # Those of the drafter's three layers follow.
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    },
    every(45, 4, window(512, 8, 128), full(8, 128), at=0),
)  # fmt: skip
MUSE_GLIMMER = Family(
    "meta-models/Muse-Glimmer-30B",
    _TRANSFORMERS,
    {
        "model_type": "muse_glimmer_text", "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 6656, "sliding_window": 2048,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 13,
    },
    every(52, 4, window(2048, 2, 128), full(2, 128), at=3),
)  # fmt: skip
MISTRAL = Family(
    "mistralai/Mistral-7B-v0.1",
    _HUB,
    {
        "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096,
    },
    [[window(4096, 8, 128)]] * 32,
)  # fmt: skip

# -- states ---------------------------------------------------------------------------------------

_GATED_DELTA = {
    "num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128,
    "conv_kernel_size": 4,
}  # fmt: skip
_GATED_KEYS = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN3_NEXT = Family(
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    _HUB,
    {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "full_attention_interval": 4, **_GATED_KEYS,
    },
    every(48, 4, state("gated_delta_net", _GATED_DELTA, "bfloat16", "bfloat16"), full(2, 256), 3),
)  # fmt: skip
QWEN3_5 = Family(
    "Qwen/Qwen3.5-35B-A3B",
    f"{_TRANSFORMERS}; 32-bit states as vLLM's own remarks on this family say",
    {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "mamba_ssm_dtype": "float32", **_GATED_KEYS,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    },
    every(40, 4, state("gated_delta_net", _GATED_DELTA, "bfloat16", "float32"), full(2, 256), 3),
)  # fmt: skip
_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NEMOTRON_LAYER = {
    "M": [
        state(
            "mamba2",
            {
                "intermediate_size": 4096, "n_groups": 8, "num_heads": 64, "head_dim": 64,
                "state_size": 128, "conv_kernel": 4,
            },
            "bfloat16",
            "float32",
        )
    ],
    "*": [full(2, 128)],
    "E": [],
}  # fmt: skip
NEMOTRON_H = Family(
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    _QUOTED,
    {
        "model_type": "nemotron_h", "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 2688, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32", "hybrid_override_pattern": _NEMOTRON,
    },
    [_NEMOTRON_LAYER[letter] for letter in _NEMOTRON],
)  # fmt: skip
GRANITE_4 = Family(
    "ibm-granite/granite-4.0-h-small",
    # Heads and states follow from the hidden size by the family's own check: expand × hidden size =
    # heads × size of a head.
    f"{_QUOTED} (layers, heads); the order of its layers is that of its siblings of 40 layers",
    {
        "model_type": "granitemoehybrid", "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": 64,
        "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
        "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    },
    every(
        40,
        10,
        state(
            "mamba2",
            {
                "intermediate_size": 8192, "n_groups": 1, "num_heads": 128, "head_dim": 64,
                "state_size": 128, "conv_kernel": 4,
            },
            "bfloat16",
            "bfloat16",
        ),
        full(8, 128),
        at=5,
    ),
)  # fmt: skip
JAMBA = Family(
    "ai21labs/Jamba-v0.1",
    _TRANSFORMERS,
    {
        "model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "attn_layer_period": 8,
        "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    every(
        32,
        8,
        state(
            "mamba1",
            {"intermediate_size": 8192, "state_size": 16, "conv_kernel": 4},
            "bfloat16",
            "bfloat16",
        ),
        full(8, 128),
        at=4,
    ),
)  # fmt: skip
_LFM2_FULL = (2, 5, 8, 10, 12, 14)
LFM2 = Family(
    "LiquidAI/LFM2-1.2B",
    _QUOTED,
    {
        "model_type": "lfm2", "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 2048, "conv_L_cache": 3,
        "layer_types": ["full_attention" if i in _LFM2_FULL else "conv" for i in range(16)],
    },
    [
        [
            full(8, 64)
            if i in _LFM2_FULL
            else state("short_conv", {"intermediate_size": 2048, "conv_kernel": 3}, "bfloat16")
        ]
        for i in range(16)
    ],
)  # fmt: skip
_KIMI_FULL = (4, 8, 12, 16, 20, 24, 27)
KIMI_LINEAR = Family(
    "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    _QUOTED,
    {
        "model_type": "kimi_linear", "num_hidden_layers": 27, "num_attention_heads": 32,
        "num_key_value_heads": 32, "hidden_size": 2304, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "linear_attn_config": {
            "kda_layers": [i for i in range(1, 28) if i not in _KIMI_FULL],
            "full_attn_layers": list(_KIMI_FULL), "num_heads": 32, "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    [
        [
            latent()
            if i + 1 in _KIMI_FULL
            else state(
                "kda",
                {"num_heads": 32, "head_dim": 128, "conv_kernel_size": 4},
                "bfloat16",
                "float32",
            )
        ]
        for i in range(27)
    ],
    block_tokens=64,
)  # fmt: skip

# -- latent attention and sparse indexers ---------------------------------------------------------

_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64}
DEEPSEEK_V3 = Family(
    "deepseek-ai/DeepSeek-V3",
    _HUB,
    {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, **_LATENT},
    [[latent()]] * 61,
    block_tokens=64,
)
DEEPSEEK_V3_2 = Family(
    "deepseek-ai/DeepSeek-V3.2",
    _TRANSFORMERS,
    {
        "model_type": "deepseek_v32", "num_hidden_layers": 61, "hidden_size": 7168, **_LATENT,
        "index_head_dim": 128,
    },
    [[keys(), latent()]] * 61,
    block_tokens=64,
)  # fmt: skip
GLM_5 = Family(
    "zai-org/GLM-5",
    _TRANSFORMERS,
    {
        "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "hidden_size": 6144, **_LATENT,
        "index_head_dim": 128, "indexer_types": ["full"] * 78,
    },
    [[keys(), latent()]] * 78,
    block_tokens=64,
)  # fmt: skip
GLM_5_3_FLASH = Family(
    "zai-org/GLM-5.3-Flash",
    f"{_TRANSFORMERS}; tokens per pooled key as public readers of its config.json require; forms "
    "of the caches from vLLM 0.33's model",
    {
        "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text", "num_hidden_layers": 45, "hidden_size": 4096,
            "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512,
            "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256,
            "index_head_dim": 128, "index_kpool": 4, "linear_head_dim": 128,
            "linear_num_heads": 64, "linear_conv_kernel_dim": 4,
            "layer_types": [
                "indexed_attention" if layer % 4 == 3 else "linear_attention"
                for layer in range(45)
            ],
        },
    },
    [
        [
            keys(tokens_per_state=4),
            ring(4, 128, heads=2),
            latent(512),
        ]
        if layer % 4 == 3
        else [
            state(
                "kda",
                {"num_heads": 64, "head_dim": 128, "conv_kernel_size": 4},
                "bfloat16",
                "float32",
            )
        ]
        for layer in range(45)
    ],
    block_tokens=256,
)  # fmt: skip
MINIMAX_M3 = Family(
    "MiniMaxAI/MiniMax-M3",
    "defaults of vLLM 0.33's configuration class, which mirror the checkpoint",
    {
        "model_type": "minimax_m3_text", "num_hidden_layers": 60, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 6144,
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128,
            "sparse_attention_freq": [0] * 3 + [1] * 57,
        },
    },
    [[full(4, 128)]] * 3 + [[keys(128, "bfloat16"), full(4, 128)]] * 57,
    block_tokens=128,
)  # fmt: skip


def _v4(width: int = 584, align: int = 576, **more: Any) -> Spec:
    """The packed entries of DeepSeek V4's main cache."""
    return latent(
        512,
        "uint8",
        state_content_bytes=width,
        alignment=align,
        model_version="deepseek_v4",
        cache_dtype_str="fp8_ds_mla",
        **more,
    )


def _v4_window(block: int, width: int = 584, align: int = 576, **more: Any) -> Spec:
    return _v4(width, align) | {
        "class": "SlidingWindowMLASpec",
        "sliding_window": 128,
        "block_size": block,
        **more,
    }


def _rows(width: int, tokens: int, block: int) -> Spec:
    """A compressor's 32-bit rows."""
    return latent(width, "float32", alignment=576) | {
        "class": "SlidingWindowMLASpec",
        "sliding_window": tokens,
        "block_size": block,
    }


_V4_LAYER = {
    0: [_v4_window(64)],
    4: [
        latent(132, "uint8", tokens_per_state=4, alignment=576),
        _rows(512, 8, 4),
        _v4_window(64),
        _v4(tokens_per_state=4),
        _rows(2048, 8, 4),
    ],
    128: [_v4_window(64), _v4(tokens_per_state=128), _rows(1024, 128, 8)],
}
_V4_RATIOS = [0, 0, *([4, 128] * 21)[:41]]
DEEPSEEK_V4 = Family(
    "deepseek-ai/DeepSeek-V4-Flash",
    _QUOTED,
    {
        "model_type": "deepseek_v4", "num_hidden_layers": 43, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "hidden_size": 4096, "index_head_dim": 128,
        "qk_rope_head_dim": 64, "sliding_window": 128,
        "compress_ratios": [*_V4_RATIOS, 0],  # the last one is the drafter's
    },
    [_V4_LAYER[ratio] for ratio in _V4_RATIOS],
    block_tokens=256,
)  # fmt: skip
_V41_WINDOW = _v4_window(32, 528, 512, bounded_replay=True, block_stride_alignment=528)
_V41_RING = ring(8, 1024, dtype="float32")


def _v41_layer(layer: int) -> list[Spec]:
    """The layers that keep compressed entries of every token do so for those up to the next one."""
    if layer not in _V41_SOURCES:
        return [_V41_WINDOW]
    ratio = _V41_RATIOS[layer]
    keys = latent(132, "uint8", tokens_per_state=ratio, alignment=512)
    entries = _v4(528, 512, tokens_per_state=ratio)
    return [keys, _V41_WINDOW, entries, *([_V41_RING] if ratio > 1 else [])]


_V41_SOURCES = [2, 8, 14, 20]
_V41_RATIOS = [*[0] * 2, *[2] * 18, *[1] * 20]
DEEPSEEK_V4_1 = Family(
    "deepseek-ai/DeepSeek-V4.1-Flash",
    f"{_QUOTED}; forms of the caches from vLLM 0.33's model and its tests",
    {
        "model_type": "deepseek_v41",
        "text_config": {
            "model_type": "deepseek_v41_text", "num_hidden_layers": 40, "num_attention_heads": 64,
            "num_key_value_heads": 1, "head_dim": 512, "hidden_size": 5120, "qk_rope_head_dim": 64,
            "index_head_dim": 128, "sliding_window": 128,
            "compress_ratios": [*_V41_RATIOS, *[0] * 3],  # the last three are the drafter's
            "kv_source_layer_ids": _V41_SOURCES,
            "index_source_layer_ids": [*_V41_SOURCES, 24, 28, 32, 36],
        },
    },
    [_v41_layer(layer) for layer in range(40)],
    block_tokens=256,
)  # fmt: skip

# -- caches that our own plan does not size -------------------------------------------------------


def _conv_window(heads: int, width: int) -> Spec:
    """The last inputs of Inkling's convolutions: a window of four tokens in blocks of four."""
    return window(4, heads, width) | {"head_size_v": 0, "block_size": 4}


INKLING = Family(
    "thinkingmachines/Inkling",
    f"{_TRANSFORMERS} (one full layer in six is assumed); forms from vLLM 0.33's model",
    {"model_type": "inkling", "num_hidden_layers": 66, "sconv_kernel_size": 4},
    [
        [full(8, 128), _conv_window(8, 2048)]
        if layer % 6 == 5
        else [window(512, 16, 128), _conv_window(16, 1024)]
        for layer in range(66)
    ],
    not_sized="cannot compute the size of windows of convolutions",
)
DOTS3_NOTE = Family(
    "dots-studio/dots3-note-prev",
    "kinds of layers from vLLM 0.33's model; widths of DeepSeek V3 and a window are assumed",
    {
        "model_type": "dots3_note", "num_hidden_layers": 32, "hidden_size": 4096,
        "sliding_window": 1024, **_LATENT,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    },
    every(
        32,
        4,
        latent() | {"class": "SlidingWindowMLASpec", "sliding_window": 1024},
        latent(),
        at=3,
    ),
    block_tokens=64,
    not_sized="latent windows have an unknown size",
)  # fmt: skip
QWEN3_8_FLASH_NEXT = Family(
    "Qwen/Qwen3.8-Flash-Next",
    f"{_TRANSFORMERS} as Qwen4-Exp; ratio and forms of the caches from vLLM 0.33's model and tests",
    {"model_type": "qwen4_exp_text", "num_hidden_layers": 40, "ple_conv_kernel_size": 4},
    [
        [
            full(2, 256),
            latent(128, tokens_per_state=4),
            ring(4, 128),
        ]
        if layer % 4 == 3
        else [
            state("gated_delta_net", _GATED_DELTA, "bfloat16", "float32"),
            *[state("short_conv", {"intermediate_size": 8192, "conv_kernel": 4}, "bfloat16")]
            * (layer == 0),
        ]
        for layer in range(40)
    ],
    parallel=(1,),
    not_sized="cannot compute the size of states of several shapes",
)
STEP_5 = Family(
    "stepfun-ai/Step-5-Preview",
    "defaults of vLLM 0.33's configuration class; layers and windows as in Step 3.5; forms of the "
    "caches from vLLM 0.33's model",
    {
        "model_type": "step5", "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_attention_groups": 8, "hidden_size": 5120, "sliding_window": 512,
        "sparse_config": {"enabled": True},
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    },
    [
        [
            full(8, 128),
            full(1, 256) | {"head_size_v": 0, "dtype": "uint8", "tokens_per_state": 8},
            ring(64, 2048, block_stride_alignment=1024),
        ]
        if layer % 4 == 0
        else [window(512, 8, 128)]
        for layer in range(48)
    ],
    block_tokens=64,
    parallel=(1,),
    not_sized="cannot compute the size of summaries of sparse attention",
)  # fmt: skip

_ALL = {name: one for name, one in globals().items() if isinstance(one, Family)}
FAMILIES = {name: one for name, one in _ALL.items() if not one.not_sized}
NOT_SIZED = {name: one for name, one in _ALL.items() if one.not_sized}
