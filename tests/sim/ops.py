# SPDX-License-Identifier: Apache-2.0
"""Operations under way, as seen between the manager and the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import CANCELLED, STALE, Outcome
from vllm_nvmeof_offload.protocol import SlotIdentity


@dataclass
class SentOp:
    """An op seen from outside: the chunks it names and how many ranks have reported."""

    kind: str
    issued_s: float
    identities: tuple[SlotIdentity, ...] = ()
    cache: dict[int, SlotIdentity] = field(default_factory=dict)
    pool: dict[int, SlotIdentity] = field(default_factory=dict)
    outcomes: int = 0
    releases: int = 0
    failures: dict[int, Outcome] = field(default_factory=dict)

    def blames(self, index: int, outcome: Outcome, in_pool: set[int]) -> bool:
        """Whether a rank's failure proves that the chunk is bad, so that it may be removed.

        in_pool: generations that were only in the pool, or being read from it. An op that did
        not read the pool has proved nothing about those generations.
        """
        if self.kind == "store":
            return True
        if self.kind not in ("load", "fetch") or outcome == CANCELLED:
            return False
        identity = self.identities[index]
        waited = identity.generation in in_pool and identity not in self.pool.values()
        return outcome != STALE or not waited
