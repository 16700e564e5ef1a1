# SPDX-License-Identifier: Apache-2.0
"""Mutants of rule 17: one copy where ranks hold equal KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_nvmeof_offload.groups import Group
from vllm_nvmeof_offload.manager import handshake
from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.protocol import RankHello

from .mutants import Patch, mutant, native

native(
    "a_holders_failure_is_masked",
    "a_reader_passes_the_fill_word",
    "a_shared_stream_slot_returns_at_the_first_reader",
    "unequal_ranks_are_believed",
)


@mutant
def unequal_ranks_keep_their_pool() -> list[Patch]:
    """What they shared is dropped in memory only, so the next start adopts it."""
    real = ManagerCore.reset

    def reset(core: ManagerCore, *, same_weights: bool = False) -> bool:
        if not same_weights:
            return real(core)
        core._tiers.reset()
        core._holds.reset()
        core.reload.reset()
        return True

    return [(ManagerCore, "reset", reset)]


@mutant
def intersection_over_all_ranks() -> list[Patch]:
    """A single copy is on no other rank of its set, so that none is adopted."""
    real = handshake._adopted

    def adopted(hellos: Sequence[RankHello], set_sizes: Mapping[Group, int]) -> Any:
        return real(hellos, dict.fromkeys(set_sizes, 1))

    return [(handshake, "_adopted", adopted)]
