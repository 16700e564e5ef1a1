# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model's weights: estimated from its shape where nobody says.

The estimate counts matrices: embeddings, projections of attention, gated feed-forward networks,
experts. Norms and biases are left out (below a thousandth), and so are vision towers, which
matters for small multimodal models.
"""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.commands.size.model import LayerGroup, LayerKind

__all__ = ["bytes_per_parameter", "estimate_parameters"]

#: A 4-bit value and its share of one 8-bit scale for each 32 of them.
_MXFP4_BYTES = (4 + 8 / 32) / 8


def estimate_parameters(config: dict[str, Any], groups: tuple[LayerGroup, ...]) -> int | None:
    """Parameters of the language model; None where the file does not say enough."""
    hidden, vocab = config.get("hidden_size"), config.get("vocab_size")
    feed_forward = _feed_forward(config)
    if not hidden or not vocab or feed_forward is None:
        return None
    mixing = 0
    for group in groups:
        each = _mixer(config, group)
        if each is None:
            return None
        mixing += each * group.layers
    embeddings = vocab * hidden * (1 if _tied(config) else 2)
    return int(embeddings + mixing + feed_forward)


def bytes_per_parameter(config: dict[str, Any], model_bytes: int) -> tuple[float, str]:
    """Bytes of one stored parameter, and why."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantization, dict):
        return model_bytes, "its dtype"
    method = str(quantization.get("quant_method", "")).lower()
    if method == "fp8":
        return 1, "fp8 weights"
    if method == "mxfp4":
        return _MXFP4_BYTES, "mxfp4 weights"
    bits = quantization.get("bits") or quantization.get("w_bit")
    if isinstance(bits, int):
        return bits / 8, f"{bits}-bit weights"
    return model_bytes, f"its dtype, for the bits of {method or 'its quantization'} are not known"


def _tied(config: dict[str, Any]) -> bool:
    # Gemma leaves it out of the file, and ties.
    family = str(config.get("model_type", ""))
    return bool(config.get("tie_word_embeddings", family.startswith("gemma")))


def _mixer(config: dict[str, Any], group: LayerGroup) -> int | None:
    """Parameters of one layer's attention, or of what stands in its place."""
    hidden, heads = config["hidden_size"], config.get("num_attention_heads")
    if group.kind is LayerKind.STATE:
        return _recurrent(config, group)
    if group.kind is LayerKind.INDEXER:
        return 0
    if not heads:
        return None
    if group.kind is LayerKind.LATENT:
        nope, rope = config.get("qk_nope_head_dim", 128), config["qk_rope_head_dim"]
        value, rank = config.get("v_head_dim", 128), config["kv_lora_rank"]
        query_rank = config.get("q_lora_rank")
        query = heads * (nope + rope)
        queries = query_rank * (hidden + query) if query_rank else hidden * query
        return int(
            queries
            + hidden * (rank + rope)
            + rank * heads * (nope + value)
            + heads * value * hidden
        )
    keys_values = group.kv_heads * (group.key_width + group.value_width)
    # Qwen3-Next gates attention's output, which doubles the query projection.
    gate = 2 if "linear_num_value_heads" in config else 1
    return int(hidden * (heads * group.key_width * (1 + gate) + keys_values))


def _recurrent(config: dict[str, Any], group: LayerGroup) -> int | None:
    if group.state is None:
        return None
    hidden, state = config["hidden_size"], group.state
    if "linear_num_value_heads" in config:
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    else:
        inner = state.conv_width - state.groups * state.group_width
    # In: convolution's inputs and the gate; out: the inner width.
    return int(hidden * (state.conv_width + inner) + inner * hidden)


def _feed_forward(config: dict[str, Any]) -> int | None:
    """Parameters of all layers' feed-forward networks."""
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    if not layers or not hidden:
        return None
    inner = config.get("intermediate_size")
    experts = next(
        (
            config[k]
            for k in ("n_routed_experts", "num_experts", "num_local_experts")
            if k in config
        ),
        0,
    )
    if not experts:
        return int(layers * 3 * hidden * inner) if inner else None
    expert_inner = config.get("moe_intermediate_size") or inner
    if not expert_inner:
        return None
    shared = int(config.get("n_shared_experts") or 0) * expert_inner
    shared += int(config.get("shared_expert_intermediate_size") or 0)
    dense = min(layers, int(config.get("first_k_dense_replace") or 0))
    each = 3 * hidden * (experts * expert_inner + shared) + hidden * experts
    return int((layers - dense) * each + dense * 3 * hidden * (inner or 0))
