# SPDX-License-Identifier: Apache-2.0
"""Refuses what this version does not serve: models, platforms, parallel shapes.

Models are judged by the KV cache that vLLM has laid out, in the scheduler and in every worker,
because a model's own configuration does not show what vLLM makes of it. Platforms are judged before
the model loads; each worker checks again when it opens its GPU.

vLLM runs the replicas of a dense model as independent engines: each knows its index, but not how
many there are. The check before model load writes their number into our configuration
(`replicas`), which travels to every engine and worker.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_nvmeof_offload.config import OffloadConfig, Replica
from vllm_nvmeof_offload.errors import ConfigError

#: By exact type: a subclass of full attention may drop blocks while a request runs, which leaves
#: incomplete chunks.
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
    """Whether vLLM computes the rest of a prompt without reading the KV before it.

    Its CPU kernel for latent attention does. vLLM therefore turns off chunked prefill and prefix
    caching, but accepts a connector's tokens nevertheless (0.32).
    """
    return bool(
        current_platform.is_cpu()
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
        and not vllm_config.cache_config.enable_prefix_caching
    )


REMEDY = "pip install 'vllm-nvmeof-offload[cuda]'"


def refuse_platform(config: OffloadConfig, platform: Any) -> None:
    """platform: vLLM's `current_platform`.

    Raises:
        ConfigError: neither an NVIDIA GPU nor the CPU, or a GPU and a package is missing.
    """
    if platform.is_cpu():
        return
    if not platform.is_cuda():
        raise ConfigError(
            "--kv-offloading-backend",
            "nvmeof",
            f"vLLM runs on {platform.device_type!r} here; this version serves NVIDIA GPUs and "
            "vLLM's CPU engine: serve without offloading",
        )
    if not _is_there("cuda.bindings"):
        raise ConfigError(
            "copy_backend", config.copy_backend, f"copies to a GPU need cuda-bindings: {REMEDY}"
        )
    if config.copy_backend == "kernel" and not _is_there("cuda.core"):
        raise ConfigError(
            "copy_backend", "kernel", f'needs cuda-core: {REMEDY}, or say "dma" or "auto"'
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


_SHAPES = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
#: vLLM appends this to the id of a replica's engine.
_REPLICA_SUFFIX = re.compile(r"_dp\d+$")


def refuse_parallel(parallel: Any) -> None:
    """Refuse parallel shapes whose ranks hold other parts of the KV cache than we assume.

    Raises:
        ConfigError: naming the option.
    """
    for option in _SHAPES:
        size = getattr(parallel, option)
        if size > 1:
            raise ConfigError(option, size, "this version supports 1; use --tensor-parallel-size")


def note_replicas(vllm_config: Any, extra: MutableMapping[str, Any]) -> None:
    """Write into `extra` how many engines share the configured sizes, if vLLM knows it.

    Raises:
        ConfigError: `replicas` contradicts the option, or the model's replicas work in step.
    """
    size = vllm_config.parallel_config.data_parallel_size
    if size > 1:
        _refuse_experts(vllm_config.model_config, size)
        if extra.setdefault("replicas", size) != size:
            raise ConfigError(
                "replicas", extra["replicas"], f"data_parallel_size is {size}; leave this key out"
            )


def _refuse_experts(model: Any, size: int) -> None:
    if getattr(model, "is_moe", False):
        raise ConfigError(
            "data_parallel_size",
            size,
            "this version supports 1 for a model with experts, whose replicas compute in step; "
            "use --tensor-parallel-size, or independent servers",
        )


def count_nodes(parallel: Any) -> int:
    """Number of machines over which ranks and replicas are spread."""
    local = int(getattr(parallel, "data_parallel_size_local", 1) or 1)
    spread = int(parallel.data_parallel_size) // local
    return max(1, int(getattr(parallel, "nnodes", 1)), spread)


def replica_of(vllm_config: Any, declared: int) -> Replica:
    """The replica that this engine is, among `declared` ones.

    Raises:
        ConfigError: this engine is one of several, and their number is unknown.
    """
    parallel = vllm_config.parallel_config
    engine_id = str(vllm_config.kv_transfer_config.engine_id or "")
    index: int = parallel.data_parallel_index
    suffixed = _REPLICA_SUFFIX.search(engine_id) is not None
    if (suffixed or index or parallel.data_parallel_size > 1) and declared == 1:
        # Each would take the whole pool and all staging.
        raise ConfigError(
            "data_parallel_size",
            max(2, index + 1, parallel.data_parallel_size),
            "our plugin has not run, so that sizes are not divided among the replicas (is "
            'VLLM_PLUGINS set? add "nvmeof" to it); or give their number as "replicas" in '
            "kv_connector_extra_config",
        )
    if parallel.data_parallel_size > 1:
        _refuse_experts(vllm_config.model_config, parallel.data_parallel_size)
    if index >= declared:
        raise ConfigError("replicas", declared, f"this is replica {index}, counted from 0")
    return Replica(index, declared, _REPLICA_SUFFIX.sub("", engine_id))
