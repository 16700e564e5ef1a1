# SPDX-License-Identifier: Apache-2.0
"""Mutants of the reload of waiting requests: holds, fetches, cancellation, budgets, and the count
of tokens that a preempted request had computed."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.manager import hold_and_prefetch
from vllm_nvmeof_offload.manager.hold_and_prefetch import Holds, ReloadScheduler
from vllm_nvmeof_offload.manager.requests import ResumeCounter

from .mutants import Patch, mutant, native

native(
    "held_chunk_is_not_pinned",
    "cancelled_fetch_still_counts_for_its_entry",
    "cancelled_fetch_frees_its_slot_at_once",
    "a_dropped_intent_leaves",
    "holds_outlive_their_requests",
    "fetch_that_a_load_waits_for_is_cancelled",
    "doomed_chunk_stays_held",
    "cancelled_prefetches_are_not_counted",
)


@mutant
def reset_keeps_the_holds() -> list[Patch]:
    class Keeps(Holds):
        def reset(self) -> None:
            pass

    return [(hold_and_prefetch, "Holds", Keeps)]


@mutant
def budgets_are_ignored() -> list[Patch]:
    real = ReloadScheduler.__init__

    def init(self: Any, config: Any, capacity: Any, *more: Any) -> None:
        real(self, config, capacity, *more)
        self._limits = dict.fromkeys(self._limits, capacity.cache_slots)

    return [(ReloadScheduler, "__init__", init)]


@mutant
def rejected_drafts_count_as_computed() -> list[Patch]:
    def computed(self: Any, request_id: str) -> int:
        seen = self._preempted.get(request_id)
        return seen.tokens if seen is not None else 0

    return [(ResumeCounter, "computed", computed)]
