# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is done for requests that wait: holds, fetches, their cancellation, budgets,
and of what is known of those that were preempted."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.manager.ledger import Op
from vllm_nvmeof_offload.manager.prefetch import ReloadScheduler, Shelf
from vllm_nvmeof_offload.manager.requests import ResumeCounter
from vllm_nvmeof_offload.manager.tiers import SlotPool

from .mutants import Patch, mutant


@mutant
def held_is_not_pinned() -> list[Patch]:
    real_keep, real_let_go = Shelf._keep, Shelf._let_go

    def keep(self: Any, held: Any) -> None:
        real_keep(self, held)
        self._tiers.cache.unuse(held.slot)

    def let_go(self: Any, held: Any, how: str) -> None:
        if self._tiers.cache.in_use(held.slot) or held.entry.cache_slot == held.slot:
            self._tiers.cache.use(held.slot)
            real_let_go(self, held, how)

    return [(Shelf, "_keep", keep), (Shelf, "_let_go", let_go)]


@mutant
def holds_outlive_their_requests() -> list[Patch]:
    return [(Shelf, "drop", lambda self, key: None)]


@mutant
def reset_keeps_the_holds() -> list[Patch]:
    return [(Shelf, "reset", lambda self: None)]


@mutant
def doomed_stays_held() -> list[Patch]:
    return [(Shelf, "gone", lambda self, entry: None)]


@mutant
def budgets_are_ignored() -> list[Patch]:
    real = ReloadScheduler.attach

    def attach(self: Any, cache_slots: int, slot_bytes: int) -> None:
        real(self, cache_slots, slot_bytes)
        self._limits = dict.fromkeys(self._limits, cache_slots)

    return [(ReloadScheduler, "attach", attach)]


@mutant
def cancelled_fetch_still_counts_for_its_entry() -> list[Patch]:
    real = Shelf._cancel

    def cancel(self: Any, entry: Any, op: Op) -> None:
        real(self, entry, op)
        op.detached = False

    return [(Shelf, "_cancel", cancel)]


@mutant
def cancelled_fetch_frees_its_slot_at_once() -> list[Patch]:
    real = Shelf._let_go

    def let_go(self: Any, held: Any, how: str) -> None:
        real(self, held, how)
        if how == "cancelled" and self._tiers.cache.in_use(held.slot):
            self._tiers.cache._users.pop(held.slot)
            self._tiers.cache.orphans -= 1
            self._tiers.cache._put_back(held.slot)
            held.op = None

    real_unuse = SlotPool.unuse

    def unuse(self: Any, slot: int) -> None:
        if self.in_use(slot):
            real_unuse(self, slot)

    return [(Shelf, "_let_go", let_go), (SlotPool, "unuse", unuse)]


@mutant
def cancelled_prefetches_are_not_counted() -> list[Patch]:
    real = Shelf._let_go

    def let_go(self: Any, held: Any, how: str) -> None:
        held.fetched = held.fetched and how != "cancelled"
        real(self, held, how)

    return [(Shelf, "_let_go", let_go)]


@mutant
def rejected_drafts_count_as_computed() -> list[Patch]:
    def computed(self: Any, request_id: str) -> int:
        seen = self._preempted.get(request_id)
        return seen.tokens if seen is not None else 0

    return [(ResumeCounter, "computed", computed)]
