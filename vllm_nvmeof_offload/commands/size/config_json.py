# SPDX-License-Identifier: Apache-2.0
"""A model's config.json, read into what its layers keep.

Which kind each of a model's layers is, from the spellings that config.json files use.

The recurrent state of Mamba and linear-attention layers: fixed per sequence, no KV per token.

Shapes as in the families' papers and reference code: a convolution's last inputs, and a matrix
for each head. Elements are of the model's dtype unless the file says that the recurrent part is
kept in another.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.commands.size.model import (
    LayerGroup,
    LayerKind,
    ModelShape,
    RecurrentState,
    Weights,
    dtype_bytes,
)
from vllm_nvmeof_offload.commands.size.weights import bytes_per_parameter, estimate_parameters
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import human_bytes

__all__ = [
    "layer_kinds",
    "parse_model",
    "read_model",
    "recurrent_state",
    "window_tokens",
]


#: Spellings of `layer_types` and `layers_block_type` → what such a layer keeps.
_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "sliding_attention": "window",
    "sliding_window": "window",
    "chunked_attention": "window",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "state",
    "recurrent": "state",
    "mlp": "none",
    "moe": "none",
}
_PATTERN_LETTERS = {"M": "state", "*": "full", "-": "none", "E": "none"}
#: Families in which every n-th layer is a full one, where config.json leaves it to the code.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_LINEAR_EVERY = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
_RECURRENT_ALONE = {"mamba", "mamba2", "falcon_mamba"}


def layer_kinds(config: dict[str, Any], layers: int) -> list[str]:
    """One of full, window, state, none for each layer (two entries for a layer that is both).

    Raises:
        ConfigError: a layer type that this version does not know.
    """
    kinds = _by_name(config) or _by_rule(config, layers)
    if kinds is None:
        full = layers
        if window_tokens(config) is not None:
            full = min(layers, _first_window_layer(config))
        kinds = ["full"] * full + ["window"] * (layers - full)
    # The last layers of some models look into the cache of an earlier one.
    return kinds[: len(kinds) - int(config.get("num_kv_shared_layers") or 0)]


def window_tokens(config: dict[str, Any]) -> int | None:
    """Tokens that a windowed layer looks back on; None where there is no window in use."""
    if config.get("use_sliding_window") is False:
        return None
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    return int(window) if window else None


def _by_name(config: dict[str, Any]) -> list[str] | None:
    for key in ("layer_types", "layers_block_type"):
        names = config.get(key)
        if not isinstance(names, list):
            continue
        unknown = [name for name in names if name not in _TYPES]
        if unknown:
            raise ConfigError(key, unknown[0], f"not sized; known are {', '.join(_TYPES)}")
        # Some files list windows beside a window of null: then there is none.
        has_window = window_tokens(config) is not None
        return [
            "full" if _TYPES[name] == "window" and not has_window else _TYPES[name]
            for name in names
        ]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = [letter for letter in pattern if letter not in _PATTERN_LETTERS]
        if unknown:
            raise ConfigError("hybrid_override_pattern", pattern, f"{unknown[0]!r} is not known")
        return [_PATTERN_LETTERS[letter] for letter in pattern]
    return None


def _by_rule(config: dict[str, Any], layers: int) -> list[str] | None:
    """Kinds that follow from a period; None: no such rule."""
    family = str(config.get("model_type", ""))
    if family in _RECURRENT_ALONE:
        return ["state"] * layers
    if family == "falcon_h1":  # attention and Mamba side by side in every layer
        return ["full"] * layers + ["state"] * layers
    if isinstance(config.get("attn_layer_indices"), list):
        full = set(config["attn_layer_indices"])
        return ["full" if layer in full else "state" for layer in range(layers)]
    if config.get("attn_layer_period"):
        period, offset = int(config["attn_layer_period"]), int(config.get("attn_layer_offset") or 0)
        return ["full" if i % period == offset else "state" for i in range(layers)]
    linear = config.get("full_attention_interval") or _LINEAR_EVERY.get(family)
    if linear:
        return ["state" if (i + 1) % int(linear) else "full" for i in range(layers)]
    if config.get("attention_chunk_size"):  # Llama 4: a layer without RoPE sees everything
        rope = config.get("no_rope_layers") or []
        every = int(config.get("no_rope_layer_interval") or 4)
        marks = rope if len(rope) >= layers else [(i + 1) % every for i in range(layers)]
        return ["window" if mark else "full" for mark in marks[:layers]]
    if window_tokens(config) is None:
        return None
    full_every = config.get("sliding_window_pattern") or _FULL_EVERY.get(family)
    if isinstance(full_every, int) and full_every > 1:
        return ["window" if (i + 1) % full_every else "full" for i in range(layers)]
    return None


def _first_window_layer(config: dict[str, Any]) -> int:
    """Qwen2's `max_window_layers` counts the layers below the windowed ones; else all have it."""
    if config.get("use_sliding_window") and config.get("max_window_layers") is not None:
        return int(config["max_window_layers"])
    return 0


def recurrent_state(config: dict[str, Any], model_bytes: int) -> RecurrentState | None:
    """State of one layer, or None for a family whose state this version cannot size.

    model_bytes: of one element of the model's dtype.
    """
    named = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")
    recurrent_bytes = (dtype_bytes(named) if named else None) or model_bytes
    if "linear_num_value_heads" in config:
        return _gated_delta(config, model_bytes, recurrent_bytes)
    if "mamba_n_heads" in config or "mamba_num_heads" in config:
        return _mamba2(config, model_bytes, recurrent_bytes)
    if "mamba_d_state" in config or str(config.get("model_type")).endswith("mamba"):
        return _mamba1(config, model_bytes, recurrent_bytes)
    return None


def _gated_delta(config: dict[str, Any], conv: int, recurrent: int) -> RecurrentState:
    """Gated DeltaNet (Qwen3-Next): keys, queries and values pass the convolution."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    return RecurrentState(
        conv_width=2 * key_heads * key_dim + value_heads * value_dim,
        conv_tokens=config["linear_conv_kernel_dim"] - 1,
        recurrent_elements=value_heads * value_dim * key_dim,
        conv_bytes=conv,
        recurrent_bytes=recurrent,
    )


def _mamba2(config: dict[str, Any], conv: int, recurrent: int) -> RecurrentState:
    """Mamba-2: inner width and, for each group, B and C pass the convolution."""
    heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    head_dim = config.get("mamba_d_head") or config.get("mamba_head_dim")
    state = config.get("mamba_d_state") or config["ssm_state_size"]
    groups = config.get("mamba_n_groups") or config.get("n_groups") or 1
    kernel = config.get("mamba_d_conv") or config.get("conv_kernel") or 4
    if isinstance(head_dim, int):
        inner = heads * head_dim
    else:
        inner = config.get("mamba_expand", 2) * config["hidden_size"]
    return RecurrentState(
        conv_width=inner + 2 * groups * state,
        conv_tokens=kernel - 1,
        recurrent_elements=inner * state,
        conv_bytes=conv,
        recurrent_bytes=recurrent,
        groups=groups,
        group_width=2 * state,
    )


def _mamba1(config: dict[str, Any], conv: int, recurrent: int) -> RecurrentState:
    """Mamba: one state vector for each of the inner channels."""
    inner = config.get("intermediate_size") if "state_size" in config else None
    inner = inner or config.get("mamba_expand", 2) * config["hidden_size"]
    state = config.get("mamba_d_state") or config.get("state_size", 16)
    kernel = config.get("mamba_d_conv") or config.get("conv_kernel", 4)
    return RecurrentState(
        conv_width=inner,
        conv_tokens=kernel - 1,
        recurrent_elements=inner * state,
        conv_bytes=conv,
        recurrent_bytes=recurrent,
    )


_INDEX = "model.safetensors.index.json"
_FILE_BYTES_MAX = 64 << 20
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
#: Keys of models whose layers keep something else than what is sized here.
_NOT_SIZED = {
    "compress_ratios": "compressed KV states",
    "swa_num_key_value_heads": "windowed layers with other heads",
    "global_head_dim": "full layers with other heads",
    "linear_attn_config": "Kimi's linear attention",
    "block_configs": "heads that differ from layer to layer",
}


def read_model(path: Path, weights_bytes: int | None = None) -> ModelShape:
    """The model in `path`: a config.json, or the directory that holds it.

    A directory's index of weights says what they weigh, unless `weights_bytes` does.

    Raises:
        ConfigError: no such file, not JSON, or a model that cannot be sized.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read(file)
    index = file.parent / _INDEX
    weights = None
    if weights_bytes is None and index.is_file():
        total = (_read(index).get("metadata") or {}).get("total_size")
        if isinstance(total, int):
            weights = Weights(total, f"read from {_INDEX}")
    named = file.parent.name or file.name
    return parse_model(config, str(config.get("_name_or_path") or named), weights_bytes, weights)


def parse_model(
    config: dict[str, Any],
    name: str,
    weights_bytes: int | None = None,
    weights: Weights | None = None,
) -> ModelShape:
    """The model that `config`, the contents of a config.json, describes.

    Raises:
        ConfigError: naming the key that is missing or cannot be sized.
    """
    text = _text_part(config)
    _refuse_unknown(text)
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    named = text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype")
    named = named or config.get("dtype")
    element_bytes = dtype_bytes(named or "bfloat16") or 2
    groups = _groups(text, layers, element_bytes)
    if weights is None:
        weights = _weights(config, text, groups, element_bytes, weights_bytes)
    notes = () if named else ("config.json names no dtype: taken as bfloat16",)
    longest = text.get("max_position_embeddings")
    limit = longest if isinstance(longest, int) and longest > 0 else None
    return ModelShape(name, groups, weights, element_bytes, limit, notes)


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError("--model", str(file), "too large for a config.json")
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = f"cannot be read ({error.strerror}); give a config.json or its directory"
        raise ConfigError("--model", str(file), remedy) from None
    except ValueError as error:
        raise ConfigError("--model", str(file), f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--model", str(file), "is not an object, { … }")
    return value


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part: multimodal files nest it."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = config.get(key)
        if isinstance(part, dict):
            outer = {k: v for k, v in config.items() if k in ("quantization_config",)}
            return _text_part({**outer, **part})
    return config


def _refuse_unknown(config: dict[str, Any]) -> None:
    for key, what in _NOT_SIZED.items():
        if config.get(key):
            raise ConfigError(key, "…", f"this version does not size {what}")
    if config.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder", True, "only decoders are sized")


def _number(config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ConfigError(key, value, "in config.json: give a whole number above 0")
    raise ConfigError(keys[0], None, "missing in config.json; is it a language model's?")


def _groups(text: dict[str, Any], layers: int, element_bytes: int) -> tuple[LayerGroup, ...]:
    counted = Counter(layer_kinds(text, layers))
    groups = []
    if counted["full"]:
        groups += _full_groups(text, counted["full"])
    if counted["window"]:
        heads, key, value = _heads(text)
        window = window_tokens(text)
        groups.append(
            LayerGroup(LayerKind.WINDOW, counted["window"], heads, key, value, window_tokens=window)
        )
    if counted["state"]:
        state = recurrent_state(text, element_bytes)
        groups.append(LayerGroup(LayerKind.STATE, counted["state"], state=state))
    return tuple(groups)


def _full_groups(text: dict[str, Any], layers: int) -> list[LayerGroup]:
    # MiniCPM3 has a latent too, but vLLM caches the heads that it expands to.
    if not text.get("kv_lora_rank") or text.get("model_type") == "minicpm3":
        heads, key, value = _heads(text)
        return [LayerGroup(LayerKind.FULL, layers, heads, key, value)]
    width = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
    groups = [LayerGroup(LayerKind.LATENT, layers, key_width=width)]
    if text.get("index_head_dim"):
        # One byte an element, and a 4-byte scale for each 128 of them.
        index = _number(text, "index_head_dim")
        index += index // 128 * 4
        groups.append(LayerGroup(LayerKind.INDEXER, layers, key_width=index, element_bytes=1))
    return groups


def _heads(text: dict[str, Any]) -> tuple[int, int, int]:
    """(KV heads, elements of a key, elements of a value)."""
    heads = _number(text, "num_attention_heads", "n_head")
    kv_heads = next((_number(text, key) for key in _KV_HEADS if text.get(key)), heads)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        kv_heads = 1
    if text.get("model_type") == "minicpm3":
        width = _number(text, "qk_nope_head_dim") + _number(text, "qk_rope_head_dim")
        return heads, width, width
    key = text.get("head_dim")
    if not isinstance(key, int) or key <= 0:
        key = _number(text, "hidden_size", "n_embd") // heads
    value = text.get("v_head_dim")
    return kv_heads, key, value if isinstance(value, int) and value > 0 else key


def _weights(
    config: dict[str, Any],
    text: dict[str, Any],
    groups: tuple[LayerGroup, ...],
    element_bytes: int,
    given: int | None,
) -> Weights:
    if given is not None:
        return Weights(given, "given by --weights-bytes")
    parameters = estimate_parameters(text, groups)
    if parameters is None:
        return Weights(None, "config.json does not say enough; give --weights-bytes")
    each, why = bytes_per_parameter({**config, **text}, element_bytes)
    total = round(parameters * each)
    billions = parameters / 1e9
    return Weights(
        total, f"estimated: {billions:.2f} billion parameters, {why} ({human_bytes(total)})"
    )
