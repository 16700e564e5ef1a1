# SPDX-License-Identifier: Apache-2.0
"""Conversion of vLLM's KV cache groups to ours: the kind of each group, the memory of its layers,
and the properties that determine its chunks' bytes.

Only groups that vLLM offloads are included, in the order of its offloading configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from vllm_nvmeof_offload.config import GroupBlocks
from vllm_nvmeof_offload.copy.geometry import CacheGeometry, CacheTensor
from vllm_nvmeof_offload.groups import SET_SIZE_MAX, Group, GroupKind, RankGroup
from vllm_nvmeof_offload.manager.boundary import SPARSE, automatic, kept_every, unit_tokens

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_sliding_window_size_in_chunks,
    )
except ImportError:  # until vLLM 0.32
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        get_sliding_window_size_in_chunks,
    )

#: Kinds by exact type, because a subclass may drop blocks differently while a request runs.
_KINDS: dict[type, GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.FULL,
    SlidingWindowSpec: GroupKind.WINDOW,
    SlidingWindowMLASpec: GroupKind.WINDOW,
    ChunkedLocalAttentionSpec: GroupKind.LOCAL,
    MambaSpec: GroupKind.STATE,
}
#: The attribute of a spec that gives its reach in tokens, by kind.
_SPAN_TOKENS = {GroupKind.WINDOW: "sliding_window", GroupKind.LOCAL: "attention_chunk_size"}


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """The KV cache on this rank: vLLM's `KVCacheConfig` and a view of each layer's blocks."""

    config: Any
    views: Mapping[str, Any]

    @property
    def device(self) -> str:
        return str(next(iter(self.views.values())).device)

    def tensors(self, group_id: int) -> list[CacheTensor]:
        """Return the group's pages, in the order of their addresses in a block, without padding.

        All groups share the same memory, and the stride per block is that of the widest group, so a
        group's size in bytes cannot be derived from the stride or the block size.
        """
        specs = specs_of(self.config.kv_cache_groups[group_id])
        found = []
        for placed in self.config.kv_cache_tensors:
            for layer in (name for name in placed.layers if name in specs):
                view = self.views[layer]
                page_bytes = _page_bytes(specs[layer])
                assert page_bytes <= placed.block_stride, f"{layer}: pages overlap"
                found.append(
                    CacheTensor(
                        view.data_ptr(), placed.block_stride, page_bytes, self.config.num_blocks
                    )
                )
        return found


def specs_of(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def offloaded(kv_cache_config: Any) -> list[Any]:
    """Return the KV cache groups that vLLM offloads. The blocks of other groups cannot be found by
    hash."""
    groups = kv_cache_config.kv_cache_groups
    return [groups[group_id] for group_id in get_offloading_group_ids(kv_cache_config)]


def kinds_of(group: Any) -> set[GroupKind | None]:
    return {_KINDS.get(type(spec)) for spec in iter_layer_specs(group.kv_cache_spec)}


def _kind_and_spec(group: Any) -> tuple[GroupKind, Any]:
    """Return the group's kind, and the spec of its first layer."""
    (kind,) = kinds_of(group)
    assert kind is not None, "refuse_unsupported refuses other kinds"
    return kind, next(iter(iter_layer_specs(group.kv_cache_spec)))


def resumes_at_any_block(kv_cache_config: Any) -> bool:
    """Return whether vLLM can resume a request at any of its blocks after a failed load.

    It can if the model's only KV cache group keeps all tokens. Groups that are not offloaded count
    too, because vLLM drops their blocks before the end of a hit.
    """
    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and kinds_of(groups[0]) == {GroupKind.FULL}


def blocks_of(kv_cache_config: Any, decode_context_parallel: int) -> list[GroupBlocks]:
    found = []
    for group in offloaded(kv_cache_config):
        kind, spec = _kind_and_spec(group)
        tokens = resolve_dcp_kv_block_size(group.kv_cache_spec, decode_context_parallel)
        name = _SPAN_TOKENS.get(kind)
        found.append(GroupBlocks(kind, tokens, getattr(spec, name) if name else None))
    return found


def groups_of(config: Any, kv_cache_config: Any) -> tuple[Group, ...]:
    """Return the groups that vLLM offloads, by position. `config` is vLLM's `OffloadingConfig`."""
    groups = []
    for one in config.groups:
        kind, spec = _kind_and_spec(kv_cache_config.kv_cache_groups[one.group_id])
        blocks_per_chunk = config.cache.blocks_per_chunk
        tokens_per_chunk = one.tokens_per_block * blocks_per_chunk
        reach_chunks = get_sliding_window_size_in_chunks(spec, tokens_per_chunk)
        groups.append(
            Group(
                one.group_id,
                kind,
                tokens_per_chunk,
                blocks_per_chunk,
                reach_chunks,
                _reach_tokens(kind, spec),
            )
        )
    return tuple(groups)


def rank_groups_of(groups: Sequence[Group], kv_cache_config: Any) -> list[RankGroup]:
    """Return the groups with their block sizes, without padding, on the configuration's rank.

    The scheduler has one rank's configuration, with a single spec per group even where layers
    differ. Pages that do not fit the spec are counted with padding.
    """
    placed = {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    found = []
    for group in groups:
        specs = specs_of(kv_cache_config.kv_cache_groups[group.group_id])
        sizes = (_placed_bytes(spec, placed[name]) for name, spec in specs.items())
        found.append(RankGroup(group, sum(sizes)))
    return found


def set_sizes_of(config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Return, for each group that vLLM offloads, the number of consecutive ranks with equal bytes.

    `config` is vLLM's `OffloadingConfig`. Latent attention is equal on all tensor-parallel ranks,
    and with fewer KV heads than ranks, several ranks have the same head. The largest number is a
    multiple of all others, and at most `SET_SIZE_MAX`.
    """
    parallel = config.parallel
    sizes = []
    for one in config.groups:
        specs = iter_layer_specs(kv_cache_config.kv_cache_groups[one.group_id].kv_cache_spec)
        replicas = (_replicas(spec, parallel.tp_size, parallel.dcp_size) for spec in specs)
        size = math.gcd(parallel.tp_size, *replicas)
        sizes.append(size if size <= SET_SIZE_MAX else 1)
    return tuple(size if max(sizes) % size == 0 else 1 for size in sizes)


def _replicas(spec: Any, tensor_parallel: int, decode_context_parallel: int) -> int:
    if not isinstance(spec, AttentionSpec) or spec.max_tp_shards is None:
        return 1
    if spec.dcp_sharded and decode_context_parallel > 1:
        return 1
    return max(1, tensor_parallel // int(spec.max_tp_shards))


def geometry_of(config: Any, layers: LayerCaches, *, one_copy: bool = False) -> CacheGeometry:
    """Return the geometry on this rank of the groups that vLLM offloads. With `one_copy`, ranks
    with equal bytes of a group form a set; otherwise each rank is a set."""
    groups = groups_of(config, layers.config)
    set_sizes = set_sizes_of(config, layers.config) if one_copy else ()
    tensors = [(group, layers.tensors(group.group_id)) for group in groups]
    return CacheGeometry(tensors, set_sizes)


def facts_of(config: Any, kv_cache_config: Any) -> list[dict[str, Any]]:
    """Return, for each group, the facts that determine chunks' bytes, except model and layout.

    The facts must be the same on all ranks. With several pipeline stages, a rank knows only its own
    layers, so the facts omit the layers; the model and its division into stages determine them.
    """
    facts = []
    for one in config.groups:
        group = kv_cache_config.kv_cache_groups[one.group_id]
        known = {"tokens_per_block": one.tokens_per_block, **_kind_facts(*_kind_and_spec(group))}
        if config.parallel.pp_size == 1:
            known["layers"] = _layer_facts(group)
        facts.append(known)
    return facts


def _kind_facts(kind: GroupKind, spec: Any) -> dict[str, Any]:
    facts = {"kind": kind.name.lower()}
    for name in (_SPAN_TOKENS.get(kind), "mamba_cache_mode" if kind is GroupKind.STATE else None):
        if name is not None:
            facts[name] = getattr(spec, name)
    return facts


def _layer_facts(group: Any) -> list[tuple[list[str], dict[str, Any]]]:
    runs: list[tuple[list[str], dict[str, Any]]] = []
    for name, spec in specs_of(group).items():
        known: dict[str, Any] = {"page_bytes": _page_bytes(spec)}
        if isinstance(spec, MambaSpec):
            known["states"] = list(zip(spec.shapes, map(str, spec.dtypes), strict=True))
        if not runs or runs[-1][1] != known:
            runs.append(([], known))
        runs[-1][0].append(name)
    return runs


def _page_bytes(spec: Any) -> int:
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    return int(replace(spec, page_size_padded=None).page_size_bytes)


def _placed_bytes(spec: Any, stride: int) -> int:
    """Return the bytes of a layer's block: unpadded if `spec` fits pages `stride` apart, else
    `stride`."""
    padding = stride - spec.page_size_bytes
    return _page_bytes(spec) if 0 <= padding < spec.get_block_stride_alignment() else stride


def _reach_tokens(kind: GroupKind, spec: Any) -> int | None:
    if kind is GroupKind.WINDOW:
        return int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens)
    return int(spec.attention_chunk_size) if kind is GroupKind.LOCAL else None


def keep_boundaries(
    scheduler: Any,
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[Group],
    asked: int | Literal["auto"],
) -> int:
    """Make vLLM keep windows and states at a fixed interval and offer all of them to us.

    Return the tokens between two lasting boundaries, or 0 if vLLM keeps its default: it then keeps
    only the end of each prompt, and no part of an answer can be found. `manager/stores.py` selects
    from the offered chunks. `scheduler` is vLLM's offloading scheduler, whose KV cache manager must
    not exist yet. `asked` is the configured `boundary_tokens`.
    """
    unit = unit_tokens(groups)
    # The chunks of all groups end at the same token only at common multiples of their lengths.
    scheduler.config = scheduler.config._replace(alignment_tokens=unit)
    if not any(group.kind in SPARSE for group in groups):
        return 0
    given = vllm_config.cache_config.prefix_cache_retention_interval
    if asked == 0 and not given:
        return 0
    parallel = vllm_config.parallel_config.decode_context_parallel_size
    blocks = [
        resolve_dcp_kv_block_size(one.kv_cache_spec, parallel)
        for one in kv_cache_config.kv_cache_groups
    ]
    unit = math.lcm(unit, *blocks)  # vLLM's interval must be a multiple of each block's tokens
    if given:
        every = math.lcm(unit, given)
    elif asked == "auto":
        every = automatic(rank_groups_of(groups, kv_cache_config), unit)
    else:
        every = -(-asked // unit) * unit
    if given == 0:
        interval = kept_every(groups, unit, every)
        kv_cache_config.prefix_cache_retention_interval = interval
        vllm_config.cache_config.prefix_cache_retention_interval = interval
    # With None, vLLM offers all windows, and the states that it keeps.
    scheduler.config = scheduler.config._replace(retention_interval=None)
    return every
