# SPDX-License-Identifier: Apache-2.0
"""Mutants of the reload of waiting requests: holds, fetches, cancellation, budgets, and the count
of tokens that a preempted request had computed."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.manager.hold_and_prefetch import Holds, ReloadScheduler
from vllm_nvmeof_offload.manager.requests import ResumeCounter
from vllm_nvmeof_offload.manager.slots import SlotPool

from .mutants import Patch, mutant


@mutant
def held_chunk_is_not_pinned() -> list[Patch]:
    real_keep, real_release = Holds._keep, Holds._release

    def keep(self: Any, held: Any) -> None:
        real_keep(self, held)
        self._tiers.cache.release(held.slot)
        self._tiers.settle(held.entry)

    def release(self: Any, held: Any, how: str) -> None:
        if self._tiers.cache.in_use(held.slot) or held.entry.cache_slot == held.slot:
            self._tiers.cache.use(held.slot)
            real_release(self, held, how)

    return [(Holds, "_keep", keep), (Holds, "_release", release)]


@mutant
def holds_outlive_their_requests() -> list[Patch]:
    return [(Holds, "drop", lambda self, key: None)]


@mutant
def reset_keeps_the_holds() -> list[Patch]:
    return [(Holds, "reset", lambda self: None)]


@mutant
def doomed_chunk_stays_held() -> list[Patch]:
    return [(Holds, "gone", lambda self, entry: None)]


@mutant
def budgets_are_ignored() -> list[Patch]:
    real = ReloadScheduler.__init__

    def init(self: Any, config: Any, capacity: Any, *more: Any) -> None:
        real(self, config, capacity, *more)
        self._limits = dict.fromkeys(self._limits, capacity.cache_slots)

    return [(ReloadScheduler, "__init__", init)]


@mutant
def cancelled_fetch_still_counts_for_its_entry() -> list[Patch]:
    real = Holds._cancel

    def cancel(self: Any, held: Any, op: Any) -> None:
        real(self, held, op)
        held.op.detached = False

    return [(Holds, "_cancel", cancel)]


@mutant
def cancelled_fetch_frees_its_slot_at_once() -> list[Patch]:
    real = Holds._release

    def release(self: Any, held: Any, how: str) -> None:
        real(self, held, how)
        if how == "cancelled" and self._tiers.cache.in_use(held.slot):
            self._tiers.cache.users.pop(held.slot)
            self._tiers.cache.orphans -= 1
            self._tiers.cache._free_again(held.slot)
            held.op = None

    real_release_slot = SlotPool.release

    def release_slot(self: Any, slot: int) -> None:
        if self.in_use(slot):
            real_release_slot(self, slot)

    return [(Holds, "_release", release), (SlotPool, "release", release_slot)]


@mutant
def cancelled_prefetches_are_not_counted() -> list[Patch]:
    real = Holds._release

    def release(self: Any, held: Any, how: str) -> None:
        held.fetched = held.fetched and how != "cancelled"
        real(self, held, how)

    return [(Holds, "_release", release)]


@mutant
def rejected_drafts_count_as_computed() -> list[Patch]:
    def computed(self: Any, request_id: str) -> int:
        seen = self._preempted.get(request_id)
        return seen.tokens if seen is not None else 0

    return [(ResumeCounter, "computed", computed)]
