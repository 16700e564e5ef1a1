# SPDX-License-Identifier: Apache-2.0
"""Checks a configuration against machine and model before vLLM loads the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from vllm_nvmeof_offload.config import (
    check_fits,
    check_memory,
    check_targets,
    judge_access,
    parse_config,
)
from vllm_nvmeof_offload.copy.geometry import chunk_blocks
from vllm_nvmeof_offload.manager.eviction import choose_policy
from vllm_nvmeof_offload.names import LOGGER_NAME
from vllm_nvmeof_offload.pool.ownership import bytes_of_pools
from vllm_nvmeof_offload.units import format_bytes, slot_stride_bytes
from vllm_nvmeof_offload.vllm_adapter.deployment import note_weights
from vllm_nvmeof_offload.vllm_adapter.supported import (
    count_nodes,
    note_replicas,
    refuse_parallel,
    refuse_platform,
)

logger = logging.getLogger(LOGGER_NAME)


def precheck(vllm_config: Any, extra: dict[str, Any], staging_key: str) -> None:
    """Check `extra` against machine and model; write replicas and weight stamps into it.

    staging_key: the flag, key or variable that set the staging size.

    Raises:
        ConfigError: naming key, value and remedy.
    """
    parallel = vllm_config.parallel_config
    refuse_parallel(parallel)
    note_replicas(vllm_config, extra)
    config = parse_config(extra)
    note_weights(vllm_config, config.weights_seen, extra)
    refuse_platform(config, current_platform)
    choose_policy(config.eviction_policy)
    check_memory(config, count_nodes(parallel), staging_key)
    for target in check_targets(config):
        problem, remedy = judge_access(target.path)
        if problem:
            logger.warning("nvmeof: target %s %s; %s", target.path, problem, remedy)
    if config.fault_injection:
        logger.warning(
            "FAULT INJECTION is on: I/O fails and answers may be wrong on purpose, as %s says",
            config.fault_injection,
        )
    slot_bytes = slot_bytes_estimate(vllm_config, config)
    if slot_bytes is not None:
        default = config.pool_bytes is None
        held = bytes_of_pools([Path(target) for target in config.targets]) if default else 0
        check_fits(config, slot_bytes, parallel.world_size, config.replicas, held)
    if config.replicas > 1:
        logger.info(
            "nvmeof: %d data-parallel replicas share %s of pinned memory and the pool, each with "
            "an engine directory of its own",
            config.replicas,
            format_bytes(config.staging_bytes),
        )


def slot_bytes_estimate(vllm_config: Any, config: Any) -> int | None:
    """Bytes of one rank's slot, estimated from the model's shape; None: unknown.

    Each worker checks again with the true size once it has its KV cache. An estimate may therefore
    be missing, but must not be too large: models with more than one kind of layer, and cache types
    of unknown width, have none.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    try:
        if model is None or model.is_hybrid or not cache.block_size:
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
    blocks = chunk_blocks(config, block_bytes, cache.block_size)
    return slot_stride_bytes(block_bytes * blocks)
