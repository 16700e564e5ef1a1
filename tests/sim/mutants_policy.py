# SPDX-License-Identifier: Apache-2.0
"""Mutants of the operator's policies: store threshold, demotion, no writes at all."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.manager.index import Entry
from vllm_nvmeof_offload.manager.store_threshold import StoreThreshold
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.manager.writes import WriteBehind

from .mutants import Patch, mutant


@mutant
def store_threshold_is_ignored() -> list[Patch]:
    return [(StoreThreshold, "reached", lambda self, key: True)]


@mutant
def lookups_are_not_counted() -> list[Patch]:
    return [(StoreThreshold, "see", lambda self, keys: None)]


@mutant
def policy_off_is_ignored() -> list[Patch]:
    def want(self: Any, entry: Entry) -> None:
        self._tiers.want(entry.cache_slot)

    return [(WriteBehind, "want", want)]


@mutant
def demotion_never_begins() -> list[Patch]:
    return [(WriteBehind, "_due", lambda self: not self._tiers.demotes)]


@mutant
def demotion_begins_at_once() -> list[Patch]:
    return [(WriteBehind, "_due", lambda self: True)]


@mutant
def unwritten_is_evicted_before_clean() -> list[Patch]:
    real = Tiers.take_cache_slot

    def take(self: Any, *, spare_unwritten: bool = False) -> int | None:
        if self.cache.free or not self.demotes or not len(self.waiting):
            return real(self, spare_unwritten=spare_unwritten)
        clean, self.clean = self.clean, self.waiting
        try:
            return real(self)
        finally:
            self.clean = clean

    return [(Tiers, "take_cache_slot", take)]


@mutant
def read_evicts_the_unwritten() -> list[Patch]:
    real = Tiers.take_cache_slot

    def take(self: Any, *, spare_unwritten: bool = False) -> int | None:
        return real(self)

    return [(Tiers, "take_cache_slot", take)]
