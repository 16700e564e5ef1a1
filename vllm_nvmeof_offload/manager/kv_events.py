# SPDX-License-Identifier: Apache-2.0
"""The chunks that entered and left each tier, in order: the source of KV events. Pure.

A chunk is *in* the CPU tier once its copy is complete on every rank, and in the pool once its write
is complete. It leaves a tier when eviction, a failure or a reset removes it. Tiers are recorded
separately: a chunk that is evicted from pinned memory may still be in the pool. A router that
applies the changes in order reconstructs the index exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_nvmeof_offload.manager.ledger import Source
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.protocol import split_keys

#: Keys per step: an eighth of those that wait, within these bounds. Splitting and pickling 32,768
#: keys takes 8 ms (AMD EPYC), and a start with ten million chunks is reported within 310 steps.
_TAKE_MIN, _TAKE_MAX = 4096, 32_768
_TAKE_SHARE = 8


@dataclass(slots=True)
class Change:
    """The keys that entered or left a tier."""

    tier: Source
    removed: bool
    keys: list[bytes] = field(default_factory=list)


class KvEventLog:
    """The changes not reported yet, oldest first. The length is the number of keys.

    Each tier logs the keys that enter and leave it. A reset drops unreported arrivals, because it
    also removes those keys.
    """

    def __init__(self, tiers: Tiers, key_bytes: int) -> None:
        self._tiers = tiers
        self._key_bytes = key_bytes

    def __len__(self) -> int:
        return self._tiers.moved_bytes // self._key_bytes

    def take(self) -> list[Change]:
        """Return the oldest changes, as many as one step should carry."""
        left = min(max(_TAKE_MIN, len(self) // _TAKE_SHARE), _TAKE_MAX)
        return [
            Change(
                Source.CPU if tier == 1 else Source.POOL,
                removed,
                split_keys(keys, self._key_bytes),
            )
            for tier, removed, keys in self._tiers.take_moves(left * self._key_bytes)
        ]
