# SPDX-License-Identifier: Apache-2.0
"""The recurrent state of Mamba and linear-attention layers: fixed per sequence, no KV per token.

Shapes as in the families' papers and reference code: a convolution's last inputs, and a matrix
for each head. Elements are of the model's dtype unless the file says that the recurrent part is
kept in another.
"""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.commands.size.dtypes import dtype_bytes
from vllm_nvmeof_offload.commands.size.model import RecurrentState

__all__ = ["recurrent_state"]


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
