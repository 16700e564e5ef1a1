# SPDX-License-Identifier: Apache-2.0
"""Checks that refuse unsupported settings, platforms, parallel shapes and models.

`precheck` runs before vLLM loads the model. Models are checked later, in the scheduler and in every
worker, because vLLM's layout of the KV cache cannot be derived from a model's configuration.

vLLM runs the replicas of a dense model as independent engines, which know their own index but not
the number of replicas. `precheck` writes the number into our configuration (`replicas`), which
every engine and worker receives.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import (
    WEIGHTS_SEEN,
    Replica,
    check_fits,
    chunk_blocks,
    parse_config,
    set_replicas,
)
from vllm_nvmeof_offload.errors import ConfigError, install_extra, raise_all
from vllm_nvmeof_offload.manager.eviction import choose_policy
from vllm_nvmeof_offload.targets.configured import check_here
from vllm_nvmeof_offload.units import format_bytes, slot_stride_bytes
from vllm_nvmeof_offload.vllm_adapter import vllm_release
from vllm_nvmeof_offload.vllm_adapter.deployment import note_weights
from vllm_nvmeof_offload.vllm_adapter.groups import kinds_of, offloaded, specs_of


def precheck(vllm_config: Any, extra: dict[str, Any], staging_key: str) -> None:
    """Check `extra` against the machine and the model; write replicas and weight stamps into it.
    `staging_key` is the flag, key or variable that set the staging size, for error messages."""
    is_first = WEIGHTS_SEEN not in extra
    parallel = vllm_config.parallel_config
    refuse_parallel(parallel)
    set_replicas(extra, int(parallel.data_parallel_size))
    config = parse_config(extra)
    vllm_release.refuse_unknown(config.allow_unknown_vllm)
    note_weights(vllm_config, extra)
    refuse_platform(current_platform)
    choose_policy(config.eviction_policy)
    if not is_first:  # vLLM repeats the call in an engine that already uses the memory and the pool
        return
    nodes = count_nodes(parallel)
    found = check_here(config, create=True, node_count=nodes, staging_key=staging_key)
    slot_bytes = slot_bytes_estimate(vllm_config, config)
    if slot_bytes is not None:
        with found.collecting():
            ranks = parallel.world_size
            check_fits(config, slot_bytes, ranks, config.replicas, found.held_bytes)
    raise_all(found.errors)
    for problem in found.warnings:
        logger.warning("nvmeof: %s", problem)
    if config.tuning.fault_injection:
        logger.warning(
            "FAULT INJECTION is on: I/O fails and answers may be wrong; see %s",
            config.tuning.fault_injection,
        )
    if config.replicas > 1:
        logger.info(
            "nvmeof: %d data-parallel replicas share %s of pinned memory and the pool, each with "
            "its own engine directory",
            config.replicas,
            format_bytes(config.staging_bytes),
        )


def slot_bytes_estimate(vllm_config: Any, config: Any) -> int | None:
    """Return the bytes of one rank's slot, estimated from the model's shape; None if unknown.

    Each worker checks again with the true size of its KV cache. An estimate may therefore be
    missing but must not be too large: there is none for models that may have several KV cache
    groups, or for cache types of unknown width.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    try:
        if model is None or _may_have_groups(model) or not cache.block_size:
            return None
        if cache.cache_dtype == "auto":
            value_bytes = model.dtype.itemsize
        elif str(cache.cache_dtype).startswith("fp8"):
            value_bytes = 1
        else:
            return None
        values = model.get_head_size()
        if not model.use_mla:
            values *= 2 * model.get_num_kv_heads(parallel)
        layers = model.get_num_layers(parallel)
    except Exception as error:  # noqa: BLE001 - vLLM's internals; the workers' check remains
        logger.debug("no estimate of the slot size: %s", error)
        return None
    block_bytes = values * value_bytes * layers * cache.block_size
    blocks = chunk_blocks(config, block_bytes, cache.block_size, parallel.pipeline_parallel_size)
    return slot_stride_bytes(block_bytes * blocks)


def _may_have_groups(model: Any) -> bool:
    """Return whether a model may have layers that do not keep all tokens."""
    config = model.hf_text_config
    kinds = getattr(config, "layer_types", None) or ()
    some = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return bool(model.is_hybrid or len(set(kinds)) > 1 or any(some))


_WITHOUT = "serve this model without offloading"


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    refuse_parallel(vllm_config.parallel_config)
    name = vllm_config.model_config.model
    if kv_cache_config.hisparse_host_num_blocks is not None:
        remedy = "this version does not offload HiSparse; leave it out, or serve without offloading"
        raise ConfigError("hisparse_config", "set", remedy)
    layout = kv_cache_config.kv_cache_layout
    if layout is not None and not KVCacheLayout[layout].is_block_compact:
        remedy = "spreads the bytes of a block over its layer; leave it out, or give LBHNC or BLHNC"
        raise ConfigError("VLLM_KV_CACHE_LAYOUT", layout, remedy)
    every = kv_cache_config.kv_cache_groups
    specs = [spec for group in every for spec in specs_of(group).values()]
    if any(getattr(spec, "non_causal", False) for spec in specs):
        reason = (
            "attends to later tokens of a prompt (prefix LM), so equal prefixes have unequal KV"
        )
        raise ConfigError("model", name, f"{reason}: {_WITHOUT}")
    groups = offloaded(kv_cache_config)
    for group in groups:
        kinds = kinds_of(group)
        if None in kinds or len(kinds) > 1:
            counted = Counter(type(spec).__name__ for spec in specs_of(group).values())
            layers = ", ".join(f"{count} x {kind}" for kind, count in sorted(counted.items()))
            reason = f"has a KV cache group that this version does not know ({layers})"
            raise ConfigError("model", name, f"{reason}: {_WITHOUT}")
    if not groups:
        raise ConfigError("model", name, f"has no KV that vLLM can offload: {_WITHOUT}")
    _judge_states(vllm_config, groups)
    if _ignores_loaded_kv(vllm_config):
        raise ConfigError(
            "model",
            name,
            "has multi-head latent attention (MLAAttentionSpec), for which vLLM's CPU engine "
            "ignores loaded KV if the processor has no AMX: serve it without offloading, or on "
            "a processor with AMX",
        )


def _judge_states(vllm_config: Any, groups: list[Any]) -> None:
    """Without prefix caching, warn about a model that has only state layers, and refuse a mixed
    one.

    vLLM then keeps only one state, at the end of a request. Its block spans the whole context, so
    nothing is offloaded. If the model also has attention layers, vLLM's offloading would fail an
    assertion, because it requires all groups to have the same hash block size.
    """
    specs = [spec for group in groups for spec in specs_of(group).values()]
    if all(getattr(spec, "mamba_cache_mode", "align") == "align" for spec in specs):
        return
    if any(not hasattr(spec, "mamba_cache_mode") for spec in specs):
        raise ConfigError(
            "enable_prefix_caching",
            vllm_config.cache_config.enable_prefix_caching,
            "the states of this model can be offloaded only with prefix caching; add "
            "--enable-prefix-caching",
        )
    logger.warning(
        "nvmeof: %s: nothing will be offloaded, because without prefix caching a block of states "
        "covers the whole context; add --enable-prefix-caching",
        vllm_config.model_config.model,
    )


def _ignores_loaded_kv(vllm_config: Any) -> bool:
    """Return whether vLLM computes the rest of a prompt without reading the KV that precedes it.

    The CPU kernel for latent attention does. vLLM 0.32 therefore disables chunked prefill and
    prefix caching, but still accepts a connector's tokens.
    """
    return bool(
        current_platform.is_cpu()
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
        and not vllm_config.cache_config.enable_prefix_caching
    )


def refuse_platform(platform: Any) -> None:
    if platform.is_cpu():
        return
    if not platform.is_cuda():
        raise ConfigError(
            "--kv-offloading-backend",
            "nvmeof",
            f"vLLM runs on {platform.device_type!r} here; this version serves NVIDIA GPUs and "
            "vLLM's CPU engine: serve without offloading",
        )
    find = importlib.util.find_spec  # raises an error for a module of a missing package
    if find("cuda") is None or find("cuda.bindings") is None:
        remedy = f"copies to a GPU need cuda-bindings: {install_extra('cuda')}"
        raise ConfigError("--kv-offloading-backend", "nvmeof", remedy)


#: The suffix that vLLM appends to a replica's engine id.
_REPLICA_SUFFIX = re.compile(r"_dp\d+$")


def refuse_parallel(parallel: Any) -> None:
    if parallel.enable_elastic_ep:
        remedy = "this package supports only a fixed number of replicas; remove the option"
        raise ConfigError("enable_elastic_ep", True, remedy)


def count_nodes(parallel: Any) -> int:
    local = int(getattr(parallel, "data_parallel_size_local", 1) or 1)
    spread = int(parallel.data_parallel_size) // local
    return max(1, int(getattr(parallel, "nnodes", 1)), spread)


def replica_of(vllm_config: Any, declared: int) -> Replica:
    parallel = vllm_config.parallel_config
    engine_id = str(vllm_config.kv_transfer_config.engine_id or "")
    index: int = parallel.data_parallel_index
    suffixed = _REPLICA_SUFFIX.search(engine_id) is not None
    if (suffixed or index or parallel.data_parallel_size > 1) and declared == 1:
        # Each replica would use the full pool and staging sizes.
        raise ConfigError(
            "data_parallel_size",
            max(2, index + 1, parallel.data_parallel_size),
            'our plugin did not run, so sizes are not divided among replicas; add "nvmeof" to '
            'VLLM_PLUGINS if that is set, or give the number as "replicas" in '
            "kv_connector_extra_config",
        )
    if index >= declared:
        raise ConfigError("replicas", declared, f"this is replica {index}, counted from 0")
    return Replica(index, declared, _REPLICA_SUFFIX.sub("", engine_id))
