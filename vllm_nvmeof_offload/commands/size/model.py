# SPDX-License-Identifier: Apache-2.0
"""A model's config.json, or a preset with its keys, read into its layers' caches and weights' size.

A *cache* is what one layer keeps of a sequence under one KV cache specification of vLLM; a layer
may keep several (attention beside a state, keys of an indexer, a compressor's rows). Recurrent
state (Mamba, linear attention) is fixed per sequence: a convolution's last inputs, and a matrix
for each head, as in the families' papers and code. Weights are estimated by counting matrices;
norms and biases are left out (below a thousandth), and so are vision towers, which matters for
small multimodal models.
"""

from __future__ import annotations

import difflib
import enum
import functools
import json
from collections import Counter
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_nvmeof_offload.errors import ConfigError
from vllm_nvmeof_offload.units import human_bytes, parse_bytes

Config = dict[str, Any]

_INDEX = "model.safetensors.index.json"
_FILE_BYTES_MAX = 64 << 20
_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "num_attention_groups",
)
#: Keys of models whose layers keep something that is not sized here.
_NOT_SIZED = {
    "block_configs": "heads that differ from layer to layer",
    "index_kpool": "pooled index keys",
    "indexer_compress_ratio": "compressed index keys",
    "ple_conv_kernel_size": "states of several shapes",
    "sconv_kernel_size": "windows of convolutions",
    "layer_group_size": "linear attention in groups of layers",
}
#: How the keys of states begin.
_STATE_KEYS = ("mamba_", "ssm_", "linear_num_", "linear_attn_", "conv_L_")
#: Spellings of `layer_types` and `layers_block_type` → what such a layer keeps.
_TYPES = {
    **dict.fromkeys(("full_attention", "attention", "global", "indexed_attention"), "full"),
    **dict.fromkeys(("minimax_m3_sparse", "deepseek_sparse_attention"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding_window"), "window"),
    "chunked_attention": "local",
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent"), "state"),
    **dict.fromkeys(("mlp", "moe"), "none"),
}
_PATTERN_LETTERS = {"M": "state", "*": "full", "-": "none", "E": "none"}
#: Families in which every n-th layer is a full one, where config.json leaves it to the code.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_LINEAR_EVERY = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
_RECURRENT_ONLY = {"mamba", "mamba2", "falcon_mamba"}
#: A 4-bit value and its share of one 8-bit scale for each 32 of them.
_MXFP4_BYTES = (4 + 8 / 32) / 8
#: Tokens in a block, as the kernels of these caches want it by default on an NVIDIA GPU.
_BLOCK_TOKENS, _LATENT_BLOCK_TOKENS, _SPARSE_BLOCK_TOKENS = 16, 64, 128
_COMPRESSED_BLOCK_TOKENS = 256
#: DeepSeek V3.2 and later: bytes of one packed entry with an 8-bit KV cache: values and scales.
_SPARSE_ENTRY_BYTES, _V4_ENTRY_BYTES, _V41_ENTRY_BYTES = 656, 584, 528
#: Their pages are padded to a multiple of this.
_V4_ALIGN_BYTES, _V41_ALIGN_BYTES = 576, 512
#: V4's windows and compressors have blocks of their own: tokens by compression ratio.
_V4_WINDOW_BLOCK_TOKENS, _V41_WINDOW_BLOCK_TOKENS, _V41_RING_TOKENS = 64, 32, 8
_COMPRESSOR_BLOCK_TOKENS = {4: 4, 128: 8}


#: Bytes of one element, by the names that models and vLLM use.
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1),
}


def dtype_bytes(name: object) -> int | None:
    """Bytes of one element of dtype `name`; None for a name that is not known."""
    return DTYPES.get(str(name).removeprefix("torch.").lower())


class LayerKind(enum.Enum):
    """How a layer's memory grows with the sequence."""

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
    """State of one layer for one sequence, of any length, as numbers of elements.

    conv_width × conv_tokens of `conv_bytes` each, and recurrent_elements of `recurrent_bytes`.
    `group_width`: the part of conv_width that belongs to groups of heads; if there are more
    ranks than groups, each rank has a group of its own.
    """

    conv_width: int
    conv_tokens: int
    recurrent_elements: int
    conv_bytes: int
    recurrent_bytes: int
    groups: int = 0
    group_width: int = 0

    def rank_bytes(self, tensor_parallel: int) -> int:
        """Bytes on one of `tensor_parallel` ranks."""
        width = self.conv_width
        if self.groups and self.groups % tensor_parallel:
            width += (tensor_parallel - self.groups) * self.group_width
        conv = width // tensor_parallel * self.conv_tokens * self.conv_bytes
        return conv + self.recurrent_elements // tensor_parallel * self.recurrent_bytes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What each of `layers` layers keeps under one KV cache specification.

    key_width, value_width: elements per entry and KV head; a latent has one head and no value.
    reach_tokens: of a WINDOW the window, of a LOCAL the attention chunk. element_bytes: set if the
    cache does not follow the KV cache's dtype. tokens_per_entry: above 1 where tokens are
    compressed. block_tokens: set if its blocks do not follow --block-tokens. align_bytes: pages are
    padded to a multiple. fp8_entry_bytes: of one packed entry, where an 8-bit KV cache is packed.
    state: of a STATE, None if its size is unknown. stored: False if vLLM never finds it again by
    prefix, and recomputes it.
    """

    kind: LayerKind
    layers: int
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

    @property
    def split_by_heads(self) -> bool:
        """Does tensor parallelism split it? Keys without values are whole on every rank."""
        return self.value_width > 0

    def entry_bytes(self, tensor_parallel: int, kv_bytes: int) -> int:
        """Bytes of one entry in one layer on one rank; 0 for a STATE."""
        if self.kind is LayerKind.STATE:
            return 0
        if self.fp8_entry_bytes is not None and kv_bytes == 1:
            return self.fp8_entry_bytes
        # With more ranks than KV heads each rank has a copy of one head.
        heads = max(1, self.kv_heads // tensor_parallel) if self.split_by_heads else 1
        return heads * (self.key_width + self.value_width) * (self.element_bytes or kv_bytes)

    def block_bytes(self, block_tokens: int, tensor_parallel: int, kv_bytes: int) -> int:
        """Bytes that one block of `block_tokens` holds in one layer on one rank, unpadded."""
        if self.kind is LayerKind.STATE:
            return self.state.rank_bytes(tensor_parallel) if self.state else 0
        return block_tokens // self.tokens_per_entry * self.entry_bytes(tensor_parallel, kv_bytes)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of all weights, over all ranks; None: unknown. `source`: how the number is known."""

    total_bytes: int | None
    source: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model that decides the size of its KV cache and weights.

    layers: of the decoder. order: (decoder layer, position in `caches`) of every cache of a layer,
    in the order in which vLLM registers them.
    """

    name: str
    caches: tuple[LayerCache, ...]
    order: tuple[tuple[int, int], ...]
    layers: int
    weights: Weights
    element_bytes: int
    block_tokens: int = _BLOCK_TOKENS
    context_tokens_max: int | None = None
    notes: tuple[str, ...] = ()

    def kv_element_bytes(self, name: str) -> int:
        """Bytes of one element of a KV cache of dtype `name`, or of the model's for "auto"."""
        found = self.element_bytes if name == "auto" else dtype_bytes(name)
        if found is None:
            raise ConfigError("--kv-dtype", name, f"give auto or one of {', '.join(DTYPES)}")
        return found


def preset_names() -> list[str]:
    return sorted(_presets())


def choose_model(path: Path | None, name: str | None, weights_text: str | None) -> ModelShape:
    """The model of --model or --preset; ConfigError names an option that cannot be used."""
    weights = None
    if weights_text is not None:
        try:
            weights = Weights(parse_bytes(weights_text), "given by --weights-bytes")
        except ValueError as error:
            remedy = str(error).removeprefix(f"{weights_text!r} ")
            raise ConfigError("--weights-bytes", weights_text, remedy) from None
    if path is not None and name is None:
        return read_model(path, weights)
    if path is None and name is not None:
        return preset(name, weights)
    given = None if path is None else str(path)
    remedy = f"give one of --model and --preset; presets are {', '.join(preset_names())}"
    raise ConfigError("--model", given, remedy)


def preset(name: str, weights: Weights | None = None) -> ModelShape:
    """The preset called `name`, in full or by its last part; ConfigError names the nearest ones."""
    names = {full.lower().rpartition("/")[2]: full for full in _presets()}
    names |= {full.lower(): full for full in _presets()}
    full = names.get(name.lower())
    if full is None:
        near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
        hint = ", ".join([names[one] for one in near] or preset_names())
        raise ConfigError("--preset", name, f"not known; did you mean {hint}? Else give --model")
    return parse_model(_presets()[full], full, weights)


@functools.cache
def _presets() -> dict[str, Config]:
    text = resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    found: dict[str, Config] = json.loads(text)["models"]
    return found


def read_model(path: Path, weights: Weights | None = None) -> ModelShape:
    """The model in `path`: a config.json, or the directory that holds it.

    Weights that are not given are read from the directory's index, or estimated. ConfigError for
    a file that is missing or not JSON, or a model that cannot be sized.
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
        raise ConfigError("--model", str(file), f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--model", str(file), "is not an object, { … }")
    return value


def parse_model(config: Config, name: str, weights: Weights | None = None) -> ModelShape:
    """The model of a config.json; ConfigError names a key that is missing or cannot be sized."""
    text = _text_part(config)
    for key, what in _NOT_SIZED.items():
        if text.get(key):
            raise ConfigError(key, "…", f"this version does not size {what}")
    if text.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder", True, "only decoders are sized")
    blocks = text.get("layers_block_type")
    if isinstance(blocks, list) and blocks:
        layers = len(blocks)  # some files have no number beside it
    else:
        layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    dtype = _first(text, "torch_dtype", "dtype") or _first(config, "torch_dtype", "dtype")
    element_bytes = dtype_bytes(dtype or "bfloat16") or 2
    kept = _layer_caches(text, layers, element_bytes)
    caches, order = _counted(kept)
    _check_read(text, caches)
    if weights is None:
        weights = _estimate({**config, **text}, text, caches, element_bytes)
    limit = text.get("max_position_embeddings")
    return ModelShape(
        name,
        caches,
        order,
        layers,
        weights,
        element_bytes,
        _block_tokens(text, caches),
        limit if isinstance(limit, int) and limit > 0 else None,
        () if dtype else ("config.json names no dtype: taken as bfloat16",),
    )


def _check_read(text: Config, caches: tuple[LayerCache, ...]) -> None:
    """Refuse a model whose file speaks of caches that were not found in it."""
    kinds = {cache.kind for cache in caches}
    if not caches:
        raise ConfigError(
            "num_hidden_layers", text.get("num_hidden_layers"), "no layer has a cache"
        )
    if LayerKind.STATE not in kinds:
        found = [key for key in text if key.startswith(_STATE_KEYS) and text[key]]
        if found:
            what = "this version cannot tell which layers have recurrent states"
            raise ConfigError(found[0], text[found[0]], what)
    if {LayerKind.LATENT, LayerKind.WINDOW} <= kinds and not any(c.align_bytes > 1 for c in caches):
        raise ConfigError("layer_types", "sliding_attention", "windows of latents are not sized")


def _text_part(config: Config) -> Config:
    """The language model's part: multimodal files nest it."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = config.get(key)
        if isinstance(part, dict):
            outer = {k: v for k, v in config.items() if k == "quantization_config"}
            return _text_part({**outer, **part})
    return config


def _first(config: Config, *keys: str, default: Any = None) -> Any:
    """The first value of `keys` that is set and not 0 or empty."""
    return next((config[key] for key in keys if config.get(key)), default)


def _number(config: Config, *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise ConfigError(key, value, "in config.json: give a whole number above 0")
    raise ConfigError(keys[0], None, "missing in config.json; is it a language model's?")


def _counted(
    kept: list[list[LayerCache]],
) -> tuple[tuple[LayerCache, ...], tuple[tuple[int, int], ...]]:
    """Distinct caches with their numbers of layers, and (layer, position) of each in order."""
    positions: dict[LayerCache, int] = {}
    order = tuple(
        (layer, positions.setdefault(cache, len(positions)))
        for layer, caches in enumerate(kept)
        for cache in caches
    )
    counts = Counter(position for _, position in order)
    return tuple(replace(one, layers=counts[at]) for one, at in positions.items()), order


def _block_tokens(text: Config, caches: tuple[LayerCache, ...]) -> int:
    """Tokens in a block unless --block-tokens says otherwise."""
    if any(one.tokens_per_entry > 1 for one in caches):
        return _COMPRESSED_BLOCK_TOKENS
    if any(one.kind is LayerKind.LATENT for one in caches):
        return _LATENT_BLOCK_TOKENS
    return _SPARSE_BLOCK_TOKENS if _sparse_keys(text) else _BLOCK_TOKENS


def _layer_caches(text: Config, layers: int, element_bytes: int) -> list[list[LayerCache]]:
    """The caches of each layer, in the order in which vLLM registers them."""
    if ratios := _compress_ratios(text, layers):
        make = _v41_layer if text.get("kv_source_layer_ids") else _v4_layer
        return [make(text, layer, ratio) for layer, ratio in enumerate(ratios)]
    kinds, kept = _layer_kinds(text, layers), []
    made = {kind: _caches_of(kind, text, element_bytes) for kind in set(kinds)}
    with_indexer = _indexer_layers(text, layers)
    for layer, kind in enumerate(kinds):
        caches = list(made[kind])
        if layer in with_indexer and caches and caches[0].kind.keeps_every_token:
            caches.insert(0, with_indexer[layer])
        kept.append(caches)
    return kept


def _caches_of(kind: str, text: Config, element_bytes: int) -> list[LayerCache]:
    """The caches of a layer of `kind` (one of those that `_layer_kinds` names), without indexer."""
    if kind == "none":
        return []
    if kind == "both":
        return [*_caches_of("full", text, element_bytes), *_caches_of("state", text, element_bytes)]
    if kind == "state":
        return [LayerCache(LayerKind.STATE, 1, state=_recurrent_state(text, element_bytes))]
    if kind == "window":
        reach = _window_tokens(text)
        return [LayerCache(LayerKind.WINDOW, 1, *_heads(text, kind), reach_tokens=reach)]
    if kind == "local":
        reach = _number(text, "attention_chunk_size")
        return [LayerCache(LayerKind.LOCAL, 1, *_heads(text, kind), reach_tokens=reach)]
    # MiniCPM3 has a latent too, but vLLM caches the heads that it expands to.
    if text.get("kv_lora_rank") and text.get("model_type") != "minicpm3":
        width = _number(text, "kv_lora_rank") + int(text.get("qk_rope_head_dim") or 0)
        packed = _SPARSE_ENTRY_BYTES if text.get("index_head_dim") else None
        return [LayerCache(LayerKind.LATENT, 1, key_width=width, fp8_entry_bytes=packed)]
    return [LayerCache(LayerKind.FULL, 1, *_heads(text, kind))]


def _sparse_keys(text: Config) -> Config:
    """MiniMax's indexer: its width and which layers have it; empty if there is none."""
    sparse = text.get("sparse_attention_config")
    if isinstance(sparse, dict) and sparse.get("use_sparse_attention"):
        return {
            "width": _number(sparse, "sparse_index_dim"),
            "marks": list(sparse["sparse_attention_freq"]),
        }
    types = text.get("layer_types")
    if isinstance(types, list) and "minimax_m3_sparse" in types:
        marks = [one == "minimax_m3_sparse" for one in types]
        return {"width": _number(text, "index_head_dim"), "marks": marks}
    return {}


def _indexer_layers(text: Config, layers: int) -> dict[int, LayerCache]:
    """Layer → its indexer's keys. Where layers share an index, only some compute it."""
    if sparse := _sparse_keys(text):
        keys = LayerCache(LayerKind.INDEXER, 1, key_width=sparse["width"], element_bytes=2)
        return {layer: keys for layer, mark in enumerate(sparse["marks"][:layers]) if mark}
    if not text.get("index_head_dim"):
        return {}
    keys = LayerCache(LayerKind.INDEXER, 1, key_width=_index_entry_bytes(text), element_bytes=1)
    types, every = text.get("indexer_types"), int(text.get("index_topk_freq") or 1)
    skipped = int(text.get("index_skip_topk_offset", 2)) - 1
    if isinstance(types, list):
        marks = [one == "full" for one in types]
    elif pattern := text.get("index_topk_pattern"):
        marks = [letter != "S" for letter in pattern]
    else:
        marks = [max(layer - skipped, 0) % every == 0 for layer in range(layers)]
    return {layer: keys for layer, mark in enumerate(marks[:layers]) if mark}


def _index_entry_bytes(text: Config) -> int:
    """One byte per element of an index key, and a 4-byte scale for each 128 of them."""
    width = _number(text, "index_head_dim")
    return width + width // 128 * 4


def _compress_ratios(text: Config, layers: int) -> list[int]:
    """Tokens per compressed entry of each layer, 0 for a window alone; empty for other models."""
    ratios = text.get("compress_ratios")
    if isinstance(ratios, list):
        return [int(ratio) for ratio in ratios[:layers]]  # those of drafters follow
    rates, types = text.get("compress_rates"), text.get("layer_types")
    if isinstance(rates, dict) and isinstance(types, list):
        return [int(rates.get(one, 0)) for one in types[:layers]]
    return []


def _v4_layer(text: Config, layer: int, ratio: int) -> list[LayerCache]:
    """DeepSeek V4: a window, and where tokens are compressed their entries and a compressor's rows.

    A compressor keeps 32-bit keys and scores, of two overlapping groups where 4 tokens make one
    entry. Only those layers have an indexer.
    """
    width, window = _number(text, "head_dim"), _number(text, "sliding_window")
    packed = LayerCache(
        LayerKind.LATENT, 1, key_width=_V4_ENTRY_BYTES, element_bytes=1, align_bytes=_V4_ALIGN_BYTES
    )
    swa = replace(
        packed,
        kind=LayerKind.WINDOW,
        reach_tokens=window,
        block_tokens=_V4_WINDOW_BLOCK_TOKENS,
    )
    if ratio <= 1:
        return [swa]
    if ratio not in _COMPRESSOR_BLOCK_TOKENS:
        known = ", ".join(map(str, _COMPRESSOR_BLOCK_TOKENS))
        raise ConfigError("compress_ratios", ratio, f"not sized; known are 0, {known}")

    def rows(elements: int) -> LayerCache:
        overlap = 2 if ratio == 4 else 1
        return LayerCache(
            LayerKind.WINDOW,
            1,
            key_width=2 * overlap * elements,
            element_bytes=4,
            reach_tokens=overlap * ratio,
            block_tokens=_COMPRESSOR_BLOCK_TOKENS[ratio],
            align_bytes=_V4_ALIGN_BYTES,
        )

    main = [swa, replace(packed, tokens_per_entry=ratio), rows(width)]
    if ratio != 4:
        return main
    keys = replace(
        packed,
        kind=LayerKind.INDEXER,
        key_width=_index_entry_bytes(text),
        tokens_per_entry=ratio,
    )
    return [keys, rows(_number(text, "index_head_dim")), *main]


def _v41_layer(text: Config, layer: int, ratio: int) -> list[LayerCache]:
    """DeepSeek V4.1: every layer has a window, which vLLM recomputes; some keep compressed KV.

    The others read the entries and index keys of the nearest such layer below them.
    """
    packed = LayerCache(
        LayerKind.LATENT,
        1,
        key_width=_V41_ENTRY_BYTES,
        element_bytes=1,
        align_bytes=_V41_ALIGN_BYTES,
        tokens_per_entry=max(1, ratio),
    )
    swa = replace(
        packed,
        kind=LayerKind.WINDOW,
        reach_tokens=_number(text, "sliding_window"),
        block_tokens=_V41_WINDOW_BLOCK_TOKENS,
        tokens_per_entry=1,
        stored=False,
    )
    if layer not in text["kv_source_layer_ids"]:
        return [swa]
    keys = replace(packed, kind=LayerKind.INDEXER, key_width=_index_entry_bytes(text))
    ring = LayerCache(
        LayerKind.RING,
        1,
        key_width=2 * _number(text, "head_dim"),
        element_bytes=4,
        block_tokens=_V41_RING_TOKENS,
        stored=False,
    )
    return [keys, swa, packed, *([ring] if ratio > 1 else [])]


def _heads(text: Config, kind: str = "full") -> tuple[int, int, int]:
    """(KV heads, elements of a key, elements of a value) of a layer of `kind`."""
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
    value = value if isinstance(value, int) and value > 0 else key
    if kind == "full":  # Gemma 4's full layers
        kv_heads = _first(text, "num_global_key_value_heads", default=kv_heads)
        if wide := text.get("global_head_dim"):
            key = value = int(wide)
    elif kind == "window":  # MiMo's and Step's windowed layers
        other = text.get("attention_other_setting") or {}
        kv_heads = _first(text, "swa_num_key_value_heads", default=kv_heads)
        kv_heads = _first(other, "num_attention_groups", default=kv_heads)
        key = _first(text, "swa_head_dim", default=_first(other, "head_dim", default=key))
        value = _first(text, "swa_v_head_dim", default=_first(other, "head_dim", default=value))
    return kv_heads, key, value


def _layer_kinds(config: Config, layers: int) -> list[str]:
    """For each layer: full, window, local, state, none, or both (full attention beside a state)."""
    kinds = _kinds_by_name(config) or _kinds_by_period(config, layers)
    if kinds is None:
        full = layers
        if _window_tokens(config) is not None:
            full = 0
            # Qwen2's max_window_layers counts the layers below the windowed ones.
            if config.get("use_sliding_window") and config.get("max_window_layers") is not None:
                full = min(layers, int(config["max_window_layers"]))
        kinds = ["full"] * full + ["window"] * (layers - full)
    # Some files list the layers of a drafter too, and the last layers of some models use the cache
    # of an earlier one.
    return kinds[: layers - int(config.get("num_kv_shared_layers") or 0)]


def _window_tokens(config: Config) -> int | None:
    """The reach of a windowed layer in tokens; None where no window is in use."""
    if config.get("use_sliding_window") is False:
        return None
    window = _first(config, "sliding_window", "sliding_window_size")
    return int(window) if window else None


def _kinds_by_name(config: Config) -> list[str] | None:
    for key in ("layer_types", "layers_block_type"):
        names = config.get(key)
        if not isinstance(names, list):
            continue
        unknown = [name for name in names if name not in _TYPES]
        if unknown:
            raise ConfigError(key, unknown[0], f"not sized; known are {', '.join(_TYPES)}")
        # Some files list windows beside a window of null: then there is none.
        absent = set() if _window_tokens(config) is not None else {"window"}
        absent |= set() if config.get("attention_chunk_size") else {"local"}
        return ["full" if _TYPES[name] in absent else _TYPES[name] for name in names]
    marks = config.get("hybrid_layer_pattern")
    if isinstance(marks, list):
        return ["window" if mark else "full" for mark in marks]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = [letter for letter in pattern if letter not in _PATTERN_LETTERS]
        if unknown:
            raise ConfigError("hybrid_override_pattern", pattern, f"{unknown[0]!r} is not known")
        return [_PATTERN_LETTERS[letter] for letter in pattern]
    return None


def _kinds_by_period(config: Config, layers: int) -> list[str] | None:
    family = str(config.get("model_type", ""))
    if family in _RECURRENT_ONLY:
        return ["state"] * layers
    if family == "falcon_h1":  # attention and Mamba side by side in every layer
        return ["both"] * layers
    if isinstance(linear := config.get("linear_attn_config"), dict):  # counted from 1
        return ["state" if i + 1 in linear["kda_layers"] else "full" for i in range(layers)]
    full = _first(config, "attn_layer_indices", "full_attn_idxs")
    if isinstance(full, list):
        return ["full" if layer in full else "state" for layer in range(layers)]
    if config.get("attn_layer_period"):
        period, offset = int(config["attn_layer_period"]), int(config.get("attn_layer_offset") or 0)
        return ["full" if i % period == offset else "state" for i in range(layers)]
    every = config.get("full_attention_interval") or _LINEAR_EVERY.get(family)
    if every:
        return _full_every(int(every), "state", layers)
    if config.get("attention_chunk_size"):  # Llama 4: a layer without RoPE sees everything
        rope = config.get("no_rope_layers") or []
        every = int(config.get("no_rope_layer_interval") or 4)
        marks = rope if len(rope) >= layers else [(i + 1) % every for i in range(layers)]
        return ["local" if mark else "full" for mark in marks[:layers]]
    if _window_tokens(config) is None:
        return None
    full_every = config.get("sliding_window_pattern") or _FULL_EVERY.get(family)
    if isinstance(full_every, int) and full_every > 1:
        return _full_every(full_every, "window", layers)
    return None


def _full_every(period: int, others: str, layers: int) -> list[str]:
    return [others if (i + 1) % period else "full" for i in range(layers)]


def _recurrent_state(config: Config, model_bytes: int) -> RecurrentState | None:
    """State of one layer, or None for a family whose state this version cannot size.

    model_bytes: of one element, also of the recurrent part's unless the file names its dtype.
    """
    groups = group_width = 0
    expanded = int(config.get("mamba_expand", 2) * config.get("hidden_size", 0))
    if delta := _delta_heads(config):
        # Kimi Delta Attention: queries, keys and values pass the convolution; a 32-bit matrix.
        heads, head_dim, kernel = delta
        inner = heads * head_dim
        return RecurrentState(3 * inner, kernel - 1, inner * head_dim, model_bytes, 4)
    if "conv_L_cache" in config:  # LFM2's short convolution
        width = int(config.get("conv_dim") or config["hidden_size"])
        return RecurrentState(width, config["conv_L_cache"] - 1, 0, model_bytes, model_bytes)
    if "linear_num_value_heads" in config:
        # Gated DeltaNet (Qwen3-Next): keys, queries and values pass the convolution.
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        width, kernel = 2 * keys + values, config["linear_conv_kernel_dim"]
        elements = values * config["linear_key_head_dim"]
    elif "mamba_n_heads" in config or "mamba_num_heads" in config:
        # Mamba-2: the inner width and, for each group, B and C pass the convolution.
        head_dim = _first(config, "mamba_d_head", "mamba_head_dim")
        inner = expanded
        if isinstance(head_dim, int):
            inner = head_dim * _first(config, "mamba_n_heads", "mamba_num_heads")
        state = _first(config, "mamba_d_state", "ssm_state_size")
        groups, group_width = _first(config, "mamba_n_groups", "n_groups", default=1), 2 * state
        width = inner + groups * group_width
        kernel = _first(config, "mamba_d_conv", "conv_kernel", default=4)
        elements = inner * state
    elif "mamba_d_state" in config or str(config.get("model_type")).endswith("mamba"):
        # Mamba: one state vector for each of the inner channels.
        width = (config.get("intermediate_size") if "state_size" in config else None) or expanded
        kernel = _first(config, "mamba_d_conv", "conv_kernel", default=4)
        elements = width * _first(config, "mamba_d_state", "state_size", default=16)
    else:
        return None
    named = _first(config, "mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    recurrent_bytes = (dtype_bytes(named) if named else None) or model_bytes
    return RecurrentState(
        width, kernel - 1, elements, model_bytes, recurrent_bytes, groups, group_width
    )


def _delta_heads(config: Config) -> tuple[int, int, int] | None:
    """Kimi's linear attention: (heads, elements per head, convolution's kernel)."""
    given = config.get("linear_attn_config")
    if isinstance(given, dict):
        return given["num_heads"], given["head_dim"], given.get("short_conv_kernel_size", 4)
    if "linear_head_dim" in config and "linear_num_heads" in config:
        kernel = config.get("linear_conv_kernel_dim", 4)
        return config["linear_num_heads"], config["linear_head_dim"], kernel
    return None


def _estimate(
    whole: Config, text: Config, caches: tuple[LayerCache, ...], element_bytes: int
) -> Weights:
    try:
        parameters = _parameters(text, caches)
    except (KeyError, TypeError):  # a number that it needs is missing, or null
        return Weights(None, "config.json does not say enough; give --weights-bytes")
    each, why = _bytes_per_parameter(whole, element_bytes)
    total = round(parameters * each)
    return Weights(
        total, f"estimated: {parameters / 1e9:.2f} billion parameters, {why} ({human_bytes(total)})"
    )


def _parameters(config: Config, caches: tuple[LayerCache, ...]) -> int:
    """Parameters of the language model; KeyError or TypeError where the file lacks a number."""
    mixers = sum(_mixer(config, cache) * cache.layers for cache in caches)
    # Gemma leaves the key out of the file, and ties.
    tied = config.get("tie_word_embeddings", str(config.get("model_type")).startswith("gemma"))
    embeddings = config["vocab_size"] * config["hidden_size"] * (1 if tied else 2)
    return int(_feed_forward(config) + mixers + embeddings)


def _bytes_per_parameter(config: Config, model_bytes: int) -> tuple[float, str]:
    """Bytes of one stored parameter, and why."""
    quantization = _first(config, "quantization_config", "compression_config")
    if not isinstance(quantization, dict):
        return model_bytes, "its dtype"
    method = str(quantization.get("quant_method", "")).lower()
    if method == "fp8":
        return 1, "fp8 weights"
    if method == "mxfp4":
        return _MXFP4_BYTES, "mxfp4 weights"
    bits = _first(quantization, "bits", "w_bit")
    if isinstance(bits, int):
        return bits / 8, f"{bits}-bit weights"
    unknown = method or "its quantization"
    return model_bytes, f"its dtype, because the bits of {unknown} are not known"


def _mixer(config: Config, cache: LayerCache) -> int:
    """Parameters of one layer's attention or recurrent part."""
    hidden, state = config["hidden_size"], cache.state
    if cache.kind is LayerKind.INDEXER:
        return 0
    if cache.tokens_per_entry > 1 or cache.align_bytes > 1:
        raise KeyError("compressed KV")
    if cache.kind is LayerKind.STATE:
        if state is None:
            raise KeyError("state")
        if "linear_num_value_heads" in config:
            inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        elif delta := _delta_heads(config):
            inner = delta[0] * delta[1]
        else:
            inner = state.conv_width - state.groups * state.group_width
        # In: the convolution's inputs and the gate; out: the inner width.
        return int(hidden * (state.conv_width + inner) + inner * hidden)
    heads = config["num_attention_heads"]
    if cache.kind is LayerKind.LATENT:
        nope, rope = config.get("qk_nope_head_dim", 128), config["qk_rope_head_dim"]
        value, rank = config.get("v_head_dim", 128), config["kv_lora_rank"]
        query_rank = config.get("q_lora_rank")
        query = heads * (nope + rope)
        queries = query_rank * (hidden + query) if query_rank else hidden * query
        latent = hidden * (rank + rope) + rank * heads * (nope + value)
        return int(queries + latent + heads * value * hidden)
    keys_values = cache.kv_heads * (cache.key_width + cache.value_width)
    # Qwen3-Next gates attention's output, which doubles the query projection.
    gate = 2 if "linear_num_value_heads" in config else 1
    return int(hidden * (heads * cache.key_width * (1 + gate) + keys_values))


def _feed_forward(config: Config) -> int:
    """Parameters of all layers' feed-forward networks."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    inner: Any = config.get("intermediate_size")
    experts = _first(config, "n_routed_experts", "num_experts", "num_local_experts", default=0)
    if not experts:
        return int(layers * 3 * hidden * inner)
    expert_inner = config.get("moe_intermediate_size") or inner
    shared = int(config.get("n_shared_experts") or 0) * expert_inner
    shared += int(config.get("shared_expert_intermediate_size") or 0)
    dense = min(layers, int(config.get("first_k_dense_replace") or 0))
    each = 3 * hidden * (experts * expert_inner + shared) + hidden * experts
    return int((layers - dense) * each + dense * 3 * hidden * (inner or 0))
