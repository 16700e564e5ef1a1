# SPDX-License-Identifier: Apache-2.0
"""Which parallel shapes are served, and which of several data-parallel replicas an engine is.

vLLM runs the replicas of a dense model as independent engines: each is told its index, but no
longer how many there are. So the check before model load writes their number into our
configuration (`replicas`), which travels to every engine and worker.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from vllm_nvmeof_offload.config_replica import Replica
from vllm_nvmeof_offload.errors import ConfigError

__all__ = ["count_nodes", "note_replicas", "refuse_parallel", "replica_of"]

_SHAPES = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
#: What vLLM appends to the id of a replica's engine.
_REPLICA_SUFFIX = re.compile(r"_dp\d+$")


def refuse_parallel(parallel: Any) -> None:
    """Refuse by name the shapes whose ranks hold other parts of the KV cache than we assume.

    Raises:
        ConfigError: naming the option.
    """
    for option in _SHAPES:
        size = getattr(parallel, option)
        if size > 1:
            raise ConfigError(option, size, "this version supports 1; use --tensor-parallel-size")


def note_replicas(vllm_config: Any, extra: MutableMapping[str, Any]) -> None:
    """Note in `extra` how many engines share the configured sizes, where vLLM says so.

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
    """Return over how many machines ranks and replicas are spread."""
    local = int(getattr(parallel, "data_parallel_size_local", 1) or 1)
    spread = int(parallel.data_parallel_size) // local
    return max(1, int(getattr(parallel, "nnodes", 1)), spread)


def replica_of(vllm_config: Any, declared: int) -> Replica:
    """Return which of `declared` replicas this engine is.

    Raises:
        ConfigError: it is one of several, and nobody has said of how many.
    """
    parallel = vllm_config.parallel_config
    engine_id = str(vllm_config.kv_transfer_config.engine_id or "")
    index: int = parallel.data_parallel_index
    told = _REPLICA_SUFFIX.search(engine_id) is not None
    if (told or index or parallel.data_parallel_size > 1) and declared == 1:
        # Each would take the whole pool and all staging.
        raise ConfigError(
            "data_parallel_size",
            max(2, index + 1, parallel.data_parallel_size),
            "our plugin has not run, which divides sizes among the replicas (is VLLM_PLUGINS "
            'set? add "nvmeof" to it); or give their number as "replicas" in '
            "kv_connector_extra_config",
        )
    if parallel.data_parallel_size > 1:
        _refuse_experts(vllm_config.model_config, parallel.data_parallel_size)
    if index >= declared:
        raise ConfigError("replicas", declared, f"this is replica {index}, counted from 0")
    return Replica(index, declared, _REPLICA_SUFFIX.sub("", engine_id))
