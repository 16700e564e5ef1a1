# SPDX-License-Identifier: Apache-2.0
"""The slot's size that is estimated before the model is loaded: never too large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.vllm_adapter.supported import slot_bytes_estimate


def _estimate(is_hybrid: bool = False, **text_config: Any) -> int | None:
    """Of four layers with two heads of 64 values, in blocks of 16 tokens and 2 bytes per value."""
    model = SimpleNamespace(
        is_hybrid=is_hybrid,
        dtype=SimpleNamespace(itemsize=2),
        use_mla=False,
        hf_text_config=SimpleNamespace(**text_config),
        get_head_size=lambda: 64,
        get_num_kv_heads=lambda parallel: 2,
        get_num_layers=lambda parallel: 4,
    )
    config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(block_size=16, cache_dtype="auto"),
        parallel_config=None,
    )
    return slot_bytes_estimate(config, OffloadConfig(blocks_per_chunk=2))


def test_one_group_of_full_attention_has_an_estimate() -> None:
    block_bytes = 2 * 2 * 64 * 2 * 4 * 16
    assert _estimate() == HEADER_BYTES + 2 * block_bytes
    assert _estimate(sliding_window=None, layer_types=["full_attention"] * 4) is not None


@pytest.mark.parametrize(
    "text_config",
    [
        {"sliding_window": 512},
        {"attention_chunk_size": 8192},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"is_hybrid": True},
    ],
)
def test_a_model_that_may_have_several_groups_has_none(text_config: dict[str, Any]) -> None:
    assert _estimate(**text_config) is None
