# SPDX-License-Identifier: Apache-2.0
"""Refuses, by the kinds of its layers, a model whose KV this version does not offload rightly.

Decided from the KV cache that vLLM has laid out, in the scheduler and in every worker alike,
before anything is served: a model's own configuration does not tell what vLLM makes of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_nvmeof_offload.errors import ConfigError

__all__ = ["refuse_model"]

#: By exact type: what derives from full attention to drop blocks while a request runs leaves
#: chunks that are not whole.
_WHOLE = (FullAttentionSpec, MLAAttentionSpec)
_LOCAL = (SlidingWindowSpec, ChunkedLocalAttentionSpec)


def refuse_model(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise unless the model's KV is one group of layers that keep every token.

    Raises:
        ConfigError: naming the model, its kinds of layers, and what to do.
    """
    name = vllm_config.model_config.model
    groups = kv_cache_config.kv_cache_groups
    layers = [spec for group in groups for spec in _layer_specs(group)]
    if len(groups) != 1 or not all(type(spec) in _WHOLE for spec in layers):
        counted = Counter(type(spec).__name__ for spec in layers)
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(counted.items()))
        raise ConfigError(
            "model",
            name,
            f"has {len(groups)} KV cache {'group' if len(groups) == 1 else 'groups'} "
            f"({kinds or 'no KV'}); this version offloads one group of full attention: "
            f"{_remedy(layers)}",
        )
    if _ignores_loaded_kv(vllm_config):
        raise ConfigError(
            "model",
            name,
            "has multi-head latent attention (MLAAttentionSpec), for which vLLM's CPU engine "
            "ignores loaded KV where the processor has no AMX: serve it without offloading, or on "
            "a processor with AMX",
        )


def _layer_specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec] * len(group.layer_names)


def _remedy(layers: list[Any]) -> str:
    kinds = {type(spec) for spec in layers}
    if kinds == {SlidingWindowSpec}:
        window = min(spec.sliding_window for spec in layers)
        return f"add --disable-sliding-window (the context then ends at {window} tokens)"
    others = kinds - {FullAttentionSpec}
    if others and others != kinds and others <= set(_LOCAL):
        return (
            "add --disable-hybrid-kv-cache-manager (every layer then keeps the KV of all tokens, "
            "which takes more GPU memory)"
        )
    return "serve this model without offloading"


def _ignores_loaded_kv(vllm_config: Any) -> bool:
    """Whether vLLM computes a prompt's rest without looking at what comes before it.

    Its CPU kernel for latent attention does, and vLLM therefore turns off both what would need
    it, but takes a connector's tokens all the same (0.32).
    """
    return bool(
        current_platform.is_cpu()
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
        and not vllm_config.cache_config.enable_prefix_caching
    )
