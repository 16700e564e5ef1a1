# SPDX-License-Identifier: Apache-2.0
"""Plans KV cache groups with the imported vLLM's own planner: cases on stdin, plans on stdout.

What our server makes of each plan (refusal, blocks per chunk, groups) is printed beside it. A case
has the keyword arguments of each layer's specifications, a layout and parallel sizes. vLLM's
configuration objects need a model and a device: stand-ins have what is read of them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.kv_cache_layout import KVCacheLayout

Case = dict[str, Any]
_MEMORY_BYTES = 64 << 30


def planner() -> Any:
    """The module with the planner: one of its own since 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning

        return kv_cache_planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils

        return kv_cache_utils


def planned(groups: list[Any], layout: str, blocks: int) -> Any:
    """The configuration that vLLM makes for these groups, of so many blocks."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        num_gpu_blocks_override=blocks,
        prefix_cache_retention_interval=0,
    )
    attention = SimpleNamespace(hisparse_config=None)
    config = SimpleNamespace(cache_config=cache, attention_config=attention)
    return planner().get_kv_cache_config_from_groups(config, groups, 1 << 20)


def views_of(made: Any, layout: str, memory: torch.Tensor) -> dict[str, Any]:
    """vLLM's own view of each layer of this configuration in memory."""
    views: dict[str, Any] = {}
    specs = {n: one for group in made.kv_cache_groups for n, one in specs_of(group).items()}
    for placed in made.kv_cache_tensors:
        spec = specs[placed.layers[0]]
        found = interface.create_kv_cache_views(
            memory, spec, made.num_blocks, KVCacheLayout[layout], placed
        )
        views |= dict(zip(placed.layers, found, strict=True))
    return views


def specs_of(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    if isinstance(spec, interface.UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def settings(case: Case) -> Any:
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[case["layout"]],
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=0,
        mamba_cache_mode="align",
        cache_dtype="auto",
        enable_prefix_caching=True,
        block_size=case["block_tokens"],
        mamba_block_size=None,
        mamba_page_size_padded=None,
    )
    model = SimpleNamespace(
        use_mla=any(
            row["class"] == "MLAAttentionSpec" for layer in case["layers"] for row in layer
        ),
        dtype=torch.bfloat16,
        hf_config=SimpleNamespace(model_type=""),
        max_model_len=case["context"],
        architecture="",
        model="a model",
    )
    parallel = SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=len(case["stage_ends"]),
        enable_elastic_ep=False,
    )
    return SimpleNamespace(
        cache_config=cache,
        model_config=model,
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, enable_chunked_prefill=True
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=parallel,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        speculative_config=None,
        max_in_flight_tokens=0,
        num_speculative_tokens=0,
    )


def state_shapes(row: Case, tp: int) -> tuple[tuple[int, ...], ...]:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    # Each function has its own name for the tensor parallel size, and takes it first or by name.
    function = getattr(MambaStateShapeCalculator, f"{row['calculator']}_state_shape")
    names = function.__code__.co_varnames
    size = next(name for name in ("tp_world_size", "tp_size") if name in names)
    found: tuple[tuple[int, ...], ...] = function(**{size: tp}, **row["arguments"])
    return found


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def state_of(row: Case, case: Case, vllm_config: Any) -> Any:
    cache = vllm_config.cache_config
    return interface.MambaSpec(
        shapes=state_shapes(row, case["tp"]),
        dtypes=tuple(dtype_of(name) for name in row["dtypes"]),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode="align",
    )


def spec_of(row: Case, case: Case, vllm_config: Any) -> Any:
    if row["class"] == "MambaSpec":
        return state_of(row, case, vllm_config)
    given = {name: value for name, value in row.items() if name != "class"}
    given.setdefault("block_size", vllm_config.cache_config.block_size)
    given["dtype"] = dtype_of(given["dtype"])
    if row["class"] != "CircularBufferSpec":  # every rank has whole rings
        given["num_kv_heads"] = max(1, given["num_kv_heads"] // case["tp"])
    if "cache_role" in given:
        given["cache_role"] = interface.SparseCacheRole(given["cache_role"])
    return getattr(interface, row["class"])(**given)


def align_states(case: Case, vllm_config: Any) -> None:
    """Let vLLM's platform adapt blocks to states, as it does before layers make specifications."""
    rows = [row for layer in case["layers"] for row in layer]
    states = [row for row in rows if row["class"] == "MambaSpec"]
    if not states:
        return
    from vllm.model_executor import models
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    others = ("MambaSpec", "CircularBufferSpec")
    attention = next(
        row for row in rows if row["class"] not in others and row.get("cache_role") != "indexer"
    )
    model = vllm_config.model_config
    model.get_num_kv_heads = lambda parallel: max(1, attention["num_kv_heads"] // case["tp"])
    model.get_head_size = lambda: attention["head_size"]
    kernels = SimpleNamespace(
        get_supported_kernel_block_sizes=lambda: [MultipleOf(16)],
        customize_spec=lambda spec: spec,
    )
    served = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: state_shapes(states[0], case["tp"]),
        get_mamba_state_dtype_from_config=lambda _: tuple(map(dtype_of, states[0]["dtypes"])),
    )

    class Aligned(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, vllm_config: Any) -> list[Any]:
            return [kernels]

    registry = models.ModelRegistry
    kept = registry.resolve_model_cls
    registry.resolve_model_cls = lambda *given, **named: (served, "")
    with contextlib.ExitStack() as undone:
        undone.callback(setattr, registry, "resolve_model_cls", kept)
        for module, name, stand_in in (
            ("vllm.config.vllm", "set_current_vllm_config", lambda _: contextlib.nullcontext()),
            (
                "vllm.model_executor.layers.mamba.abstract",
                "get_layers_from_vllm_config",
                lambda *_: {},
            ),
        ):
            place = importlib.import_module(module)
            if not hasattr(place, name):
                continue
            undone.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, stand_in)
        Aligned._align_hybrid_block_size(vllm_config, kernels)


def true_bytes(spec: Any) -> int:
    return int(spec.real_page_size_bytes)


def reach(spec: Any) -> int | None:
    """Tokens of a window or an attention chunk."""
    found: int | None = getattr(spec, "sliding_window", None)
    return found or getattr(spec, "attention_chunk_size", None)


def plan(case: Case) -> Case:
    """Groups as vLLM forms them, or the error that it raises."""
    vllm_config = settings(case)
    vllm_config.cache_config.mamba_block_size = case["block_tokens"]
    align_states(case, vllm_config)
    specs, stage_of, number = {}, {}, 0
    for layer, rows in enumerate(case["layers"]):
        for row in rows:
            name = str(number)
            specs[name] = spec_of(row, case, vllm_config)
            stage_of[name] = next(s for s, last in enumerate(case["stage_ends"]) if layer < last)
            number += 1
    module = planner()
    try:
        groups = module.get_kv_cache_groups(vllm_config, dict(specs))
        stages = []
        for stage in range(len(case["stage_ends"])):
            own = {name: spec for name, spec in specs.items() if stage_of[name] == stage}
            projected = module._project_kv_cache_groups_to_worker(groups, own)
            made = module.get_kv_cache_config_from_groups(vllm_config, projected, _MEMORY_BYTES)
            stages.append(made)
    except (NotImplementedError, ValueError) as error:
        return {"refused": str(error)}
    described, blocks = [], 0
    for group in groups:
        each = specs_of(group)
        first = next(iter(each.values()))
        described.append(
            {
                "caches": sorted(map(int, each)),
                "block_tokens": first.block_size,
                "page_bytes": sum(spec.page_size_bytes for spec in each.values()),
                "true_bytes": sum(map(true_bytes, each.values())),
                "stored": bool(group.kv_cache_spec.prefix_cacheable),
                "reach_tokens": reach(first),
            }
        )
        blocks += -(-first.max_memory_usage_bytes(vllm_config) // first.page_size_bytes)
    return {
        "groups": described,
        "stride_bytes": [made.kv_cache_tensors[0].size // made.num_blocks for made in stages],
        "blocks": blocks,
        "server": served(vllm_config, stages),
    }


def served(vllm_config: Any, stages: list[Any]) -> Case:
    """What our server makes of the plan."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    from vllm_nvmeof_offload.errors import ConfigError
    from vllm_nvmeof_offload.manager.boundary import automatic, unit_tokens
    from vllm_nvmeof_offload.vllm_adapter import configure, supported
    from vllm_nvmeof_offload.vllm_adapter.groups import groups_of, offloaded, rank_groups_of

    refusal = None
    try:
        supported.refuse_unsupported(vllm_config, stages[0])
    except ConfigError as error:
        refusal = str(error)
    widest = max(stages, key=lambda made: made.kv_cache_tensors[0].size // made.num_blocks)
    configure.choose_blocks_per_chunk(vllm_config, widest)
    blocks = vllm_config.kv_transfer_config.kv_connector_extra_config["blocks_per_chunk"]
    kept = [
        SimpleNamespace(group_id=number, tokens_per_block=first_block_tokens(group))
        for number, group in enumerate(widest.kv_cache_groups)
        if group in offloaded(widest)
    ]
    config = SimpleNamespace(groups=kept, cache=SimpleNamespace(blocks_per_chunk=blocks))
    groups = groups_of(config, widest)
    known = generate_scheduler_kv_cache_config([widest])
    unit = math.lcm(*map(first_block_tokens, known.kv_cache_groups), unit_tokens(groups))
    return {
        "refused": refusal is not None,
        "blocks_per_chunk": blocks,
        "groups": [
            [one.group_id, one.kind.name, one.tokens_per_chunk, one.reach_chunks] for one in groups
        ],
        "boundary_tokens": automatic(rank_groups_of(groups, known), unit),
    }


def first_block_tokens(group: Any) -> int:
    return int(next(iter(interface.iter_layer_specs(group.kv_cache_spec))).block_size)


if __name__ == "__main__":
    print("PLANS " + json.dumps([plan(case) for case in json.load(sys.stdin)]))
