# SPDX-License-Identifier: Apache-2.0
"""The caches of a model's layers and the size of its weights, from a config.json or preset.

A *cache* is a layer's memory of a sequence under one of vLLM's KV cache specifications; a layer may
have several (such as attention plus a state, an indexer's keys, or a compressor's rows). Recurrent
state (Mamba, linear attention) has a fixed size per sequence: a convolution's last inputs and a
matrix per head, as in the papers and code for each family. Weights are estimated by counting
matrices, without norms and biases (less than a thousandth) and without vision towers, which matter
in small multimodal models.
"""

from __future__ import annotations

import difflib
import enum
import functools
import json
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.commands.size.deployment import read_option
from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import human_bytes, parse_bytes

Config = dict[str, Any]

_INDEX = "model.safetensors.index.json"
_FILE_BYTES_MAX = 64 << 20
#: config.json keys for layer data that this module cannot size, with a name for each.
_NOT_SIZED = {
    "block_configs": "heads that differ from layer to layer",
    "indexer_compress_ratio": "compressed index keys",
    "ple_conv_kernel_size": "states of several shapes",
    "sconv_kernel_size": "windows of convolutions",
    "sparse_config": "summaries of sparse attention",
    "layer_group_size": "linear attention in groups of layers",
}
_STATE_KEYS = ("mamba_", "ssm_", "linear_num_", "linear_attn_", "conv_L_")
#: The bytes of a quantized parameter. In mxfp4, 32 values of 4 bits share one 8-bit scale.
_QUANTIZED_BYTES = {"fp8": 1, "mxfp4": (4 + 8 / 32) / 8}
#: The bytes of one element, by the dtype names that models and vLLM use.
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1),
}


def dtype_bytes(name: object) -> int | None:
    return DTYPES.get(str(name).removeprefix("torch.").lower())


class LayerKind(enum.Enum):
    """The kind of a cache, which determines how the cache grows with the sequence."""

    FULL = "full attention"
    LATENT = "latent attention (MLA)"
    INDEXER = "sparse-attention indexer"
    WINDOW = "sliding window"
    LOCAL = "attention in chunks"
    STATE = "recurrent state"
    RING = "ring buffer"

    @property
    def keeps_every_token(self) -> bool:
        return self in (LayerKind.FULL, LayerKind.LATENT, LayerKind.INDEXER)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of one layer for one sequence of any length.

    The convolution keeps its last `conv_tokens` inputs of value_width + 2 × key_width × groups
    elements of `conv_bytes`. The matrix has value_width × key_width elements of `recurrent_bytes`.
    If `copied` and the groups cannot be divided evenly among ranks, each rank has one group.
    """

    value_width: int
    groups: int
    key_width: int
    conv_tokens: int
    conv_bytes: int
    recurrent_bytes: int
    copied: bool = False

    def rank_bytes(self, tensor_parallel: int) -> int:
        copied = self.copied and self.groups % tensor_parallel
        groups = tensor_parallel if copied else self.groups
        width = (self.value_width + 2 * groups * self.key_width) // tensor_parallel
        elements = self.value_width * self.key_width // tensor_parallel
        return width * self.conv_tokens * self.conv_bytes + elements * self.recurrent_bytes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache that each of `layers` layers keeps under one KV cache specification.

    `key_width` and `value_width` are elements per entry and KV head; a latent has one head and no
    values. `reach_tokens` is the length of a WINDOW or of a LOCAL's attention chunk.
    `element_bytes` replaces the size of the KV cache's dtype, and `block_tokens` replaces
    --block-tokens. `tokens_per_entry` is above 1 if tokens are compressed. Pages are padded to a
    multiple of `align_bytes`. `fp8_entry_bytes` is the size of a packed entry of an 8-bit KV cache.
    `state` is set for a STATE of known size. `stored` is False if vLLM recomputes the cache.
    """

    kind: LayerKind
    layers: int = 1
    kv_heads: int = 1
    key_width: int = 0
    value_width: int = 0
    reach_tokens: int | None = None
    element_bytes: int | None = None
    state: RecurrentState | None = None
    tokens_per_entry: int = 1
    block_tokens: int | None = None
    align_bytes: int = 1
    fp8_entry_bytes: int | None = None
    stored: bool = True

    def entry_bytes(self, tensor_parallel: int, kv_bytes: int) -> int:
        if self.kind is LayerKind.STATE:
            return 0
        if self.fp8_entry_bytes is not None and kv_bytes == 1:
            return self.fp8_entry_bytes
        # With more ranks than KV heads, each rank has one head. A cache without values is whole on
        # every rank.
        heads = max(1, self.kv_heads // tensor_parallel) if self.value_width else 1
        return heads * (self.key_width + self.value_width) * (self.element_bytes or kv_bytes)

    def block_bytes(self, block_tokens: int, tensor_parallel: int, kv_bytes: int) -> int:
        if self.kind is LayerKind.STATE:
            return self.state.rank_bytes(tensor_parallel) if self.state else 0
        return block_tokens // self.tokens_per_entry * self.entry_bytes(tensor_parallel, kv_bytes)


@dataclass(frozen=True, slots=True)
class Weights:
    """The total size of the weights over all ranks (None if unknown), and the number's source."""

    total_bytes: int | None
    source: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The facts about a model that determine the size of its KV cache and weights.

    `layers` is the number of decoder layers. `order` lists (decoder layer, position in `caches`) of
    each cache of each layer, in vLLM's order of registration.
    """

    name: str
    caches: tuple[LayerCache, ...]
    order: tuple[tuple[int, int], ...]
    layers: int
    weights: Weights
    element_bytes: int
    block_tokens: int = 16
    context_tokens_max: int | None = None
    notes: tuple[str, ...] = ()

    def kv_element_bytes(self, name: str) -> int:
        """Return the bytes of a KV cache element of dtype `name`; "auto" is the model's dtype."""
        found = self.element_bytes if name == "auto" else dtype_bytes(name)
        if found is None:
            raise ConfigError("--kv-dtype", name, f"give auto or one of {', '.join(DTYPES)}")
        return found


#: Layer names in a config.json's lists → names of the layer's caches in `_CACHES`.
_TYPES: dict[object, str] = {
    **dict.fromkeys(("full_attention", "attention", "global", "indexed_attention"), "full"),
    **dict.fromkeys(("minimax_m3_sparse", "deepseek_sparse_attention"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding_window"), "window"),
    "chunked_attention": "local",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent"), "state"),
    **dict.fromkeys(("mlp", "moe"), ""),
}
#: Keys that list all layers, and the names that each key uses.
_LISTS: dict[str, dict[object, str]] = {
    "layer_types": _TYPES,
    "layers_block_type": _TYPES,
    "hybrid_layer_pattern": {0: "full", 1: "window"},
    "hybrid_override_pattern": {"M": "state", "*": "full", "-": "", "E": ""},
}
#: Families in which all layers are alike; each layer of Falcon-H1 has both attention and Mamba.
_ALIKE = dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "state") | {"falcon_h1": "full state"}
#: Families with full attention in every n-th layer, but no key for n in config.json.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_LINEAR_EVERY = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
#: The caches of a DeepSeek V4 layer, by tokens per compressed entry: a window, entries, and a
#: compressor's rows. In V4.1 a few layers keep compressed KV, which the layers above read too.
_V4_LAYERS = {
    **dict.fromkeys((0, 1), "v4_window"),
    4: "v4_keys v4_index_rows v4_window v4_entries v4_rows",
    128: "v4_window v4_entries v4_rows_128",
}
_V41_SOURCE = "v41_keys v41_window v41_entries"
_V41_LAYERS = ("v41_window", _V41_SOURCE, f"{_V41_SOURCE} v41_ring")

# Expressions over config.json for `_number`, whose errors name a key from the last alternative.
_LAYERS = "num_hidden_layers|n_layer|num_layers|num_hidden_layers"
_KV_HEADS = (
    "num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|num_attention_groups|"
    "n_head|num_attention_heads"
)
_WIDTH = (
    "head_dim|n_embd/n_head|n_embd/num_attention_heads|hidden_size/n_head|"
    "hidden_size/num_attention_heads"
)
_WINDOW = "sliding_window|sliding_window_size"
_LATENT = "kv_lora_rank+qk_rope_head_dim|kv_lora_rank"
_EXPANDED = "mamba_expand*hidden_size|2*hidden_size"
#: An index key has one byte per element and a 4-byte scale per 128 elements.
_KEYS = "key_width=index_head_dim+index_head_dim/128*4 element_bytes=1"
#: DeepSeek's packed entries of values and scales, and a compressor's 32-bit keys and scores.
_V4 = "key_width=584 element_bytes=1 align_bytes=576"
_V41 = "key_width=528 element_bytes=1 align_bytes=512"
_ROWS = "WINDOW element_bytes=4 align_bytes=576"
#: The kind of each cache, then the fields of its `LayerCache`, each with an expression.
_CACHES = {
    "full": f"FULL kv_heads=num_global_key_value_heads|{_KV_HEADS} "
    f"key_width=global_head_dim|{_WIDTH} value_width=global_head_dim|v_head_dim|{_WIDTH}",
    "window": f"WINDOW kv_heads=swa_num_key_value_heads|{_KV_HEADS} "
    f"key_width=swa_head_dim|{_WIDTH} value_width=swa_v_head_dim|v_head_dim|{_WIDTH} "
    f"reach_tokens={_WINDOW}",
    "local": f"LOCAL kv_heads={_KV_HEADS} key_width={_WIDTH} value_width=v_head_dim|{_WIDTH} "
    "reach_tokens=attention_chunk_size",
    "latent": f"LATENT key_width={_LATENT}",
    # With an 8-bit KV cache, DeepSeek V3.2 and later pack the values and scales of an entry.
    "sparse_latent": f"LATENT key_width={_LATENT} fp8_entry_bytes=656",
    # vLLM caches the heads that MiniCPM3 expands from its latent.
    "minicpm3": "FULL kv_heads=num_attention_heads key_width=qk_nope_head_dim+qk_rope_head_dim "
    "value_width=qk_nope_head_dim+qk_rope_head_dim",
    "state": "STATE",
    "keys": f"INDEXER {_KEYS}",
    "minimax_keys": "INDEXER key_width=sparse_index_dim|index_head_dim element_bytes=2",
    # GLM-5.3-Flash: one key for several tokens, and the raw keys and scores of tokens without one.
    "pooled_keys": f"INDEXER {_KEYS} tokens_per_entry=index_kpool",
    "pooled_ring": "RING key_width=2*index_head_dim element_bytes=2 block_tokens=index_kpool "
    "stored=0",
    "v4_window": f"WINDOW {_V4} reach_tokens=sliding_window block_tokens=64",
    "v4_entries": f"LATENT {_V4} tokens_per_entry=ratio",
    "v4_keys": f"INDEXER {_V4} {_KEYS} tokens_per_entry=ratio",
    # Entries of 4 tokens overlap the previous entry.
    "v4_rows": f"{_ROWS} key_width=4*head_dim reach_tokens=8 block_tokens=4",
    "v4_index_rows": f"{_ROWS} key_width=4*index_head_dim reach_tokens=8 block_tokens=4",
    "v4_rows_128": f"{_ROWS} key_width=2*head_dim reach_tokens=128 block_tokens=8",
    # vLLM recomputes these windows.
    "v41_window": f"WINDOW {_V41} reach_tokens=sliding_window block_tokens=32 stored=0",
    "v41_entries": f"LATENT {_V41} tokens_per_entry=ratio",
    "v41_keys": f"INDEXER {_V41} {_KEYS} tokens_per_entry=ratio",
    "v41_ring": "RING key_width=2*head_dim element_bytes=4 block_tokens=8 stored=0",
}
#: Recurrent states, by a key in the family's config.json or by the end of its `model_type`:
#: expressions for value width, key groups, key width and convolution kernel, and `copied` as in
#: `RecurrentState`.
_STATES = {
    # Kimi Delta Attention: queries, keys and values pass through the convolution.
    "linear_head_dim": "linear_num_heads*linear_head_dim linear_num_heads linear_head_dim "
    "linear_short_conv_kernel_size|linear_conv_kernel_dim|4",
    # LFM2's short convolution, without a matrix.
    "conv_L_cache": "conv_dim|hidden_size 0 0 conv_L_cache",
    # Gated DeltaNet (Qwen3-Next): keys, queries and values pass through the convolution.
    "linear_num_value_heads": "linear_num_value_heads*linear_value_head_dim "
    "linear_num_key_heads linear_key_head_dim linear_conv_kernel_dim",
    # Mamba-2: the inner channels and, for each group, B and C pass through the convolution.
    "mamba_n_heads": f"mamba_n_heads*mamba_d_head|{_EXPANDED} mamba_n_groups|1 mamba_d_state "
    "mamba_d_conv|4 copied",
    "mamba_num_heads": "mamba_num_heads*mamba_head_dim n_groups|1 ssm_state_size conv_kernel|4 "
    "copied",
    # Mamba: one state vector per inner channel.
    "mamba_d_state": f"{_EXPANDED} 0 mamba_d_state mamba_d_conv|4",
    "mamba": f"intermediate_size|{_EXPANDED} 0 state_size|16 conv_kernel|4",
}


def preset_names() -> list[str]:
    return sorted(_presets())


def choose_model(path: Path | None, name: str | None, weights_text: str | None) -> ModelShape:
    """Return the model of --model or --preset. Raises ConfigError unless exactly one is given."""
    weights = None
    if weights_text is not None:
        total = read_option("--weights-bytes", weights_text, parse_bytes)
        weights = Weights(total, "given by --weights-bytes")
    if path is not None and name is None:
        return read_model(path, weights)
    if path is None and name is not None:
        return preset(name, weights)
    remedy = f"give one of --model and --preset; presets are {', '.join(preset_names())}"
    raise ConfigError("--model", path and str(path), remedy)


def preset(name: str, weights: Weights | None = None) -> ModelShape:
    """Return the preset with this full or short name. ConfigError suggests similar names."""
    names = {key: one for one in _presets() for key in (one.lower().split("/")[-1], one.lower())}
    if full := names.get(name.lower()):
        return parse_model(_presets()[full], full, weights)
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    hint = ", ".join([names[one] for one in near] or preset_names())
    raise ConfigError("--preset", name, f"unknown; did you mean {hint}? Otherwise give --model")


@functools.cache
def _presets() -> dict[str, Config]:
    text = resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["models"])


def read_model(path: Path, weights: Weights | None = None) -> ModelShape:
    """Return the model described by `path`, which is a config.json or its directory.

    If `weights` is None, the weights' size is read from the directory's index or estimated. Raises
    ConfigError for an unreadable file or a model that cannot be sized.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read(file)
    index = file.parent / _INDEX
    if weights is None and index.is_file():
        total = (_read(index).get("metadata") or {}).get("total_size")
        if isinstance(total, int):
            weights = Weights(total, f"read from {_INDEX}")
    name = str(config.get("_name_or_path") or file.parent.name or file.name)
    return parse_model(config, name, weights)


def _read(file: Path) -> Config:
    try:
        if file.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError("--model", str(file), "too large for a config.json")
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = f"cannot be read ({error.strerror}); give a config.json or its directory"
        raise ConfigError("--model", str(file), remedy) from None
    except ValueError as error:
        raise ConfigError("--model", str(file), f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--model", str(file), "not a JSON object, { … }")
    return value


def parse_model(config: Config, name: str, weights: Weights | None = None) -> ModelShape:
    """Return the model of a config.json. Raises ConfigError for a missing or unusable key."""
    text = _text(config)
    for key, what in _NOT_SIZED.items():
        if text.get(key):
            raise ConfigError(key, "…", f"this version cannot compute the size of {what}")
    if text.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder", True, "only decoders are sized")
    # Some files list the layers without giving their number.
    listed = text.get("layers_block_type")
    layers = len(listed) if listed else _number(text, _LAYERS)
    dtype = _first(text, "torch_dtype", "dtype") or _first(config, "torch_dtype", "dtype")
    element_bytes = dtype_bytes(dtype or "bfloat16") or 2
    made = functools.cache(functools.partial(_cache, text, element_bytes))
    positions: dict[LayerCache, int] = {}
    order = tuple(
        (layer, positions.setdefault(made(name, ratio), len(positions)))
        for layer, (names, ratio) in enumerate(_layers(text, layers))
        for name in names.split()
    )
    counts = Counter(position for _, position in order)
    caches = tuple(replace(one, layers=counts[at]) for one, at in positions.items())
    limit = text.get("max_position_embeddings")
    return ModelShape(
        name,
        caches,
        order,
        layers,
        weights=weights or _estimate({**config, **text}, text, caches, element_bytes),
        element_bytes=element_bytes,
        block_tokens=_block_tokens(text, caches),
        context_tokens_max=limit if isinstance(limit, int) and limit > 0 else None,
        notes=() if dtype else ("config.json names no dtype: bfloat16 is assumed",),
    )


def _block_tokens(text: Config, caches: tuple[LayerCache, ...]) -> int:
    """Return the default number of tokens per block for the caches' kernels on an NVIDIA GPU.
    Raises ConfigError if config.json mentions caches that were not found in the layers."""
    kinds = {cache.kind for cache in caches}
    if not caches:
        number = text.get("num_hidden_layers")
        raise ConfigError("num_hidden_layers", number, "no layer has a cache")
    found = [key for key in text if key.startswith(_STATE_KEYS) and text[key]]
    if found and LayerKind.STATE not in kinds:
        what = "this version cannot tell which layers have recurrent states"
        raise ConfigError(found[0], text[found[0]], what)
    if {LayerKind.LATENT, LayerKind.WINDOW} <= kinds and not any(c.align_bytes > 1 for c in caches):
        raise ConfigError("layer_types", "sliding_attention", "latent windows have an unknown size")
    if any(one.tokens_per_entry > 1 for one in caches):
        return 256
    return 64 if LayerKind.LATENT in kinds else 128 if LayerKind.INDEXER in kinds else 16


def _text(config: Config) -> Config:
    """Return the language model's config, which multimodal models nest in config.json. Flatten the
    parts that Kimi Linear and MiniMax nest, and set Falcon's single KV head."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = config.get(key)
        if isinstance(part, dict):
            outer = {k: v for k, v in config.items() if k == "quantization_config"}
            return _text({**outer, **part})
    linear, sparse = config.get("linear_attn_config"), config.get("sparse_attention_config")
    named = {f"linear_{key}": value for key, value in (linear or {}).items()}
    flat = {**config, **named, **(sparse or {})}
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        flat["num_key_value_heads"] = 1
    return flat


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key)), None)


def _number(config: Config, expression: str) -> int:
    """Evaluate an expression such as `a+b*2|c`: its first alternative whose keys are all present.

    Raises ConfigError if a value is not a whole number above 0, or every alternative lacks a key.
    """
    key = ""
    for part in expression.split("|"):
        done = product = 0
        for sign, key in re.findall(r"(^|[+*/])(\w+)", part):
            value = int(key) if key.isdigit() else config.get(key) or None
            if value is None:
                break
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(key, value, "in config.json: give a whole number above 0")
            if sign in ("*", "/"):
                product = product * value if sign == "*" else product // value
            else:
                done, product = done + product, value
        else:
            return done + product
    raise ConfigError(key, config.get(key), "missing in config.json; is this a language model?")


def _cache(text: Config, element_bytes: int, name: str, ratio: int) -> LayerCache:
    if name == "full" and text.get("kv_lora_rank"):
        latent = "sparse_latent" if text.get("index_head_dim") else "latent"
        name = "minicpm3" if text.get("model_type") == "minicpm3" else latent
    if name == "window":  # Step's windowed layers have different heads
        text = {**text, **(text.get("attention_other_setting") or {})}
    kind, *expressions = _CACHES[name].split()
    fields: dict[str, Any] = dict(one.split("=") for one in expressions)
    for field, expression in fields.items():
        fields[field] = _number({**text, "ratio": ratio}, expression)
    if name == "state":
        fields["state"] = _recurrent_state(text, element_bytes)
    return LayerCache(LayerKind[kind], **fields)


def _layers(text: Config, layers: int) -> list[tuple[str, int]]:
    """Return the names of each layer's caches, in vLLM's order of registration (an indexer first),
    and the tokens per compressed entry."""
    ratios, rates, types = map(text.get, ("compress_ratios", "compress_rates", "layer_types"))
    if not isinstance(ratios, list) and isinstance(rates, dict) and isinstance(types, list):
        ratios = [rates.get(one, 0) for one in types]
    if ratios:  # followed by drafters' ratios
        return _compressed(list(map(int, ratios[:layers])), text.get("kv_source_layer_ids"))
    names = _listed(text) or _periodic(text, layers)
    # Some files also list a drafter's layers. In some models the last layers share earlier caches.
    names = names[: layers - _number(text, "num_kv_shared_layers|0")]
    keys, marks = _indexers(text, layers)
    for layer, mark in enumerate(marks[: len(names)]):
        if mark and names[layer].startswith("full"):
            names[layer] = f"{keys} {names[layer]}"
    return [(one, 1) for one in names]


def _compressed(ratios: list[int], sources: list[int] | None) -> list[tuple[str, int]]:
    """List each layer's caches in V4 or, with `sources`, V4.1. Ratio 0 means only a window."""
    found = []
    for layer, ratio in enumerate(ratios):
        if sources:
            names = _V41_LAYERS[(layer in sources) * (1 + (ratio > 1))]
        elif ratio in _V4_LAYERS:
            names = _V4_LAYERS[ratio]
        else:
            raise ConfigError("compress_ratios", ratio, "unknown; known are 0, 4, 128")
        found.append((names, max(1, ratio)))
    return found


def _indexers(text: Config, layers: int) -> tuple[str, list[bool]]:
    types, topk_types = text.get("layer_types"), text.get("indexer_types")
    if text.get("use_sparse_attention"):
        sparse = text.get("sparse_attention_freq")
        if not isinstance(sparse, list):
            raise ConfigError("sparse_attention_freq", sparse, "use_sparse_attention needs a list")
        return "minimax_keys", [bool(one) for one in sparse]
    if isinstance(types, list) and "minimax_m3_sparse" in types:
        return "minimax_keys", [one == "minimax_m3_sparse" for one in types]
    if not text.get("index_head_dim"):
        return "", []
    if text.get("index_kpool"):
        return "pooled_keys pooled_ring", [True] * layers
    if isinstance(topk_types, list):
        return "keys", [one == "full" for one in topk_types]
    if pattern := text.get("index_topk_pattern"):
        return "keys", [letter != "S" for letter in pattern]
    every, skipped = _number(text, "index_topk_freq|1"), text.get("index_skip_topk_offset", 2) - 1
    return "keys", [max(layer - skipped, 0) % every == 0 for layer in range(layers)]


def _window_tokens(config: Config) -> int:
    return 0 if config.get("use_sliding_window") is False else _number(config, f"{_WINDOW}|0")


def _listed(config: Config) -> list[str]:
    for key, spellings in _LISTS.items():
        names = config.get(key)
        if isinstance(names, list | str) and names:
            if unknown := [one for one in names if one not in spellings]:
                known = ", ".join(map(str, spellings))
                raise ConfigError(key, unknown[0], f"unknown; known are {known}")
            # Some files list windowed layers but set the window to null: the layers are full.
            reach = {"window": _window_tokens(config), "local": config.get("attention_chunk_size")}
            found = (spellings[one] for one in names)
            return [one if reach.get(one, True) else "full" for one in found]
    return []


def _periodic(config: Config, layers: int) -> list[str]:
    """Return each layer's cache names from a rule, such as full attention in every n-th layer."""
    every, others = range(layers), "state"
    family = str(config.get("model_type", ""))
    rope = config.get("no_rope_layers") or []
    full: Collection[int]
    if family in _ALIKE:
        full, others = (), _ALIKE[family]
    elif kda := config.get("linear_kda_layers"):  # counted from 1
        full = [layer for layer in every if layer + 1 not in kda]
    elif indices := _first(config, "attn_layer_indices", "full_attn_idxs"):
        full = indices
    elif period := _number(config, "attn_layer_period|0"):
        full = every[_number(config, "attn_layer_offset|0") :: period]
    elif period := _number(config, f"full_attention_interval|{_LINEAR_EVERY.get(family, 0)}"):
        full = every[period - 1 :: period]
    elif config.get("attention_chunk_size"):  # Llama 4: layers without RoPE have full attention
        others, period = "local", _number(config, "no_rope_layer_interval|4")
        full = every[period - 1 :: period]
        if len(rope) >= layers:
            full = [layer for layer in every if not rope[layer]]
    elif not _window_tokens(config):
        full = every
    else:
        pattern = config.get("sliding_window_pattern") or _FULL_EVERY.get(family)
        others, period = "window", pattern if isinstance(pattern, int) else 0
        # Qwen2's max_window_layers counts the layers below the windowed ones.
        below = "max_window_layers|0" if config.get("use_sliding_window") else "0"
        full = every[period - 1 :: period] if period > 1 else every[: _number(config, below)]
    return ["full" if layer in full else others for layer in every]


def _recurrent_state(config: Config, model_bytes: int) -> RecurrentState | None:
    """Return the state of one layer, or None for an unknown family. `model_bytes` is the size of an
    element, unless config.json names a dtype for the matrix."""
    family = str(config.get("model_type"))
    dtype = _first(config, "mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    for key, row in _STATES.items():
        if config.get(key) or family.endswith(key):
            values, groups, width, kernel = (_number(config, one) for one in row.split()[:4])
            # Kimi's matrix has 32-bit elements.
            own = 4 if key == "linear_head_dim" else dtype and dtype_bytes(dtype)
            kept = (kernel - 1, model_bytes, own or model_bytes, row.endswith("copied"))
            return RecurrentState(values, groups, width, *kept)
    return None


def _estimate(
    whole: Config, text: Config, caches: tuple[LayerCache, ...], element_bytes: int
) -> Weights:
    # Gemma ties its embeddings, although its files lack the key.
    tied = text.get("tie_word_embeddings", str(text.get("model_type")).startswith("gemma"))
    try:
        parameters = _number(text, "vocab_size*hidden_size") * (1 if tied else 2)
        parameters += sum(_mixer(text, cache) * cache.layers for cache in caches)
        parameters += _feed_forward(text)
    except ConfigError:
        return Weights(None, "config.json is not sufficient; give --weights-bytes")
    each, why = _bytes_per_parameter(whole, element_bytes)
    total = round(parameters * each)
    count = f"{parameters / 1e9:.2f} billion parameters"
    return Weights(total, f"estimated: {count}, {why} ({human_bytes(total)})")


def _bytes_per_parameter(config: Config, model_bytes: int) -> tuple[float, str]:
    quantization = _first(config, "quantization_config", "compression_config")
    if not isinstance(quantization, dict):
        return model_bytes, "its dtype"
    method = str(quantization.get("quant_method", "")).lower()
    bits, unknown = _first(quantization, "bits", "w_bit"), method or "its quantization"
    if method in _QUANTIZED_BYTES:
        return _QUANTIZED_BYTES[method], f"{method} weights"
    if isinstance(bits, int):
        return bits / 8, f"{bits}-bit weights"
    return model_bytes, f"its dtype, because the bits of {unknown} are not known"


def _mixer(config: Config, cache: LayerCache) -> int:
    read = functools.partial(_number, config)
    hidden, state = read("hidden_size"), cache.state
    if cache.kind is LayerKind.INDEXER:
        return 0
    if cache.align_bytes > 1 or (cache.kind is LayerKind.STATE and state is None):
        raise ConfigError("model_type", config.get("model_type"), "its parameters are unknown")
    if state is not None:
        # Input projections: the convolution's inputs and the gate. Output: the inner width.
        return hidden * (3 * state.value_width + 2 * state.groups * state.key_width)
    heads = read("num_attention_heads")
    if cache.kind is LayerKind.LATENT:
        nope, value = read("qk_nope_head_dim|128"), read("v_head_dim|128")
        rope, rank = read("qk_rope_head_dim"), read("kv_lora_rank")
        query, query_rank = heads * (nope + rope), read("q_lora_rank|0")
        queries = query_rank * (hidden + query) if query_rank else hidden * query
        latent = hidden * (rank + rope) + rank * heads * (nope + value)
        return queries + latent + heads * value * hidden
    keys_values = cache.kv_heads * (cache.key_width + cache.value_width)
    # Qwen3-Next gates the attention output, which doubles the query projection.
    gate = 2 if "linear_num_value_heads" in config else 1
    return hidden * (heads * cache.key_width * (1 + gate) + keys_values)


def _feed_forward(config: Config) -> int:
    read = functools.partial(_number, config)
    experts = read("n_routed_experts|num_experts|num_local_experts|0")
    if not experts:
        return read("num_hidden_layers*3*hidden_size*intermediate_size")
    layers, hidden = read("num_hidden_layers"), read("hidden_size")
    inner = read("moe_intermediate_size|intermediate_size")
    shared = read("n_shared_experts|0") * inner + read("shared_expert_intermediate_size|0")
    dense = min(layers, read("first_k_dense_replace|0"))
    each = 3 * hidden * (experts * inner + shared) + hidden * experts
    return (layers - dense) * each + dense * 3 * hidden * read("intermediate_size|0")
