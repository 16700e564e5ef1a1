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

from vllm_nvmeof_offload.groups import Group
from vllm_nvmeof_offload.manager.boundary import SPARSE, automatic, kept_every, unit_tokens
from vllm_nvmeof_offload.vllm_adapter.groups import rank_groups_of


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
    unit = math.lcm(unit, *blocks)  # what vLLM demands of its interval too
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
    # Which windows are stored is not vLLM's choice; of states it offers those that it keeps.
    scheduler.config = scheduler.config._replace(retention_interval=None)
    return every
