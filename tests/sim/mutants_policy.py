# SPDX-License-Identifier: Apache-2.0
"""Mutants of the operator's policies: store threshold, demotion, no writes at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_nvmeof_offload.manager.stores import StoreThreshold

from .mutants import Patch, mutant, native


@mutant
def store_threshold_is_ignored() -> list[Patch]:
    return [(StoreThreshold, "see", lambda self, keys, again: None)]


@mutant
def lookups_are_not_counted() -> list[Patch]:
    def see(self: Any, keys: Any, _: Any = ()) -> Any:
        return None if self._threshold == 1 else np.zeros(len(keys), np.uint8)

    return [(StoreThreshold, "see", see)]


native(
    "policy_off_is_ignored",
    "demotion_never_begins",
    "demotion_begins_at_once",
    "unwritten_is_evicted_before_clean",
    "read_evicts_the_unwritten",
)
