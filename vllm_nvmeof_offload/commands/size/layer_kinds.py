# SPDX-License-Identifier: Apache-2.0
"""Which kind each of a model's layers is, from the spellings that config.json files use."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.errors import ConfigError

__all__ = ["layer_kinds", "window_tokens"]

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
