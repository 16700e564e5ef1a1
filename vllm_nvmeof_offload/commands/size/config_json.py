# SPDX-License-Identifier: Apache-2.0
"""A model's config.json, read into what its layers keep."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.commands.size.dtypes import dtype_bytes
from vllm_nvmeof_offload.commands.size.human import human_bytes
from vllm_nvmeof_offload.commands.size.layer_kinds import layer_kinds, window_tokens
from vllm_nvmeof_offload.commands.size.model import LayerGroup, LayerKind, ModelShape, Weights
from vllm_nvmeof_offload.commands.size.state import recurrent_state
from vllm_nvmeof_offload.commands.size.weights import bytes_per_parameter, estimate_parameters
from vllm_nvmeof_offload.errors import ConfigError

__all__ = ["parse_model", "read_model"]

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
