# SPDX-License-Identifier: Apache-2.0
"""The boundaries at which vLLM keeps windows and states, and offers them for storing.

By default vLLM keeps them only at the end of a prompt, so nothing of an answer is ever found again.
Here vLLM keeps a boundary in every so many tokens, and its offloading scheduler offers all windows
that are still in GPU memory; `manager/tails.py` chooses among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from vllm_nvmeof_offload.groups import Group, GroupKind
from vllm_nvmeof_offload.manager.boundary import unit_tokens

#: A boundary costs as many bytes as its windows and states; it may cost this share of the bytes of
#: what is stored of every token since the one before.
_COST_SHARE = 0.5
_BOUNDARY_TOKENS_MIN = 1024


def keep_boundaries(
    scheduler: Any,
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[Group],
    asked: int | Literal["auto"],
) -> int:
    """Configure vLLM; returns the tokens between two lasting boundaries, or 0: vLLM chooses what is
    stored.

    Comes before vLLM makes its KV cache manager. scheduler: vLLM's offloading scheduler. groups:
    the offloaded ones. asked: boundary_tokens as configured.
    """
    unit = unit_tokens(groups)
    # A chunk is whole only at a boundary that is a multiple of it in every group.
    scheduler.config = scheduler.config._replace(alignment_tokens=unit)
    specs = [one.kv_cache_spec for one in kv_cache_config.kv_cache_groups]
    if not any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in specs):
        return 0
    given = vllm_config.cache_config.prefix_cache_retention_interval
    if asked == 0 and not given:
        return 0
    parallel = vllm_config.parallel_config.decode_context_parallel_size
    blocks = [resolve_dcp_kv_block_size(spec, parallel) for spec in specs]
    unit = math.lcm(unit, *blocks)  # what vLLM demands of its interval too
    interval, every = automatic(groups, _chunk_bytes(groups, kv_cache_config), unit)
    if given:
        interval = every = math.lcm(unit, given)
    elif asked != "auto":
        interval = every = -(-asked // unit) * unit
    if given == 0:
        kv_cache_config.prefix_cache_retention_interval = interval
        vllm_config.cache_config.prefix_cache_retention_interval = interval
    # Which windows are stored is not vLLM's choice; of states it offers those that it keeps.
    scheduler.config = scheduler.config._replace(retention_interval=None)
    return every


def automatic(groups: Sequence[Group], chunk_bytes: Sequence[int], unit: int) -> tuple[int, int]:
    """Tokens between two boundaries that vLLM keeps, and between two that are stored to last.

    chunk_bytes: by group. unit: both are multiples of it. vLLM keeps states more often, where there
    are no windows: those of an answer are stored only until the next one.
    """
    boundary_bytes = dense_bytes = 0.0
    for group, size in zip(groups, chunk_bytes, strict=True):
        if group.kind in (GroupKind.WINDOW, GroupKind.STATE):
            boundary_bytes += size * (group.reach_chunks or 0)
        else:
            dense_bytes += size / group.tokens_per_chunk
    if dense_bytes:
        worth = boundary_bytes / (_COST_SHARE * dense_bytes)
    else:
        worth = max(g.tokens_per_chunk * (g.reach_chunks or 0) for g in groups) / _COST_SHARE
    interval = math.ceil(worth / unit) * unit
    every = math.ceil(_BOUNDARY_TOKENS_MIN / interval) * interval
    windows = any(group.kind is GroupKind.WINDOW for group in groups)
    return (every if windows else interval), every


def _chunk_bytes(groups: Sequence[Group], kv_cache_config: Any) -> list[int]:
    """By offloaded group, the bytes of one chunk in GPU memory."""
    sizes = []
    for group in groups:
        placed = kv_cache_config.kv_cache_groups[group.group_id]
        spec = placed.kv_cache_spec
        layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(placed.layer_names)
        blocks = 1 if group.kind is GroupKind.STATE else group.blocks_per_chunk
        sizes.append(spec.page_size_bytes * layers * blocks)
    return sizes
