# SPDX-License-Identifier: Apache-2.0
"""Operations under way as whoever stands between manager and ranks sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_nvmeof_offload.errors import CANCELLED, STALE, Outcome
from vllm_nvmeof_offload.protocol import SlotIdentity


@dataclass
class SentOp:
    """An op as the outside sees it: what it names, and how many ranks have spoken."""

    kind: str
    issued_s: float
    identities: tuple[SlotIdentity, ...] = ()
    cache: dict[int, SlotIdentity] = field(default_factory=dict)
    pool: dict[int, SlotIdentity] = field(default_factory=dict)
    outcomes: int = 0
    releases: int = 0
    failures: dict[int, Outcome] = field(default_factory=dict)

    def blames(self, index: int, outcome: Outcome, in_pool: set[int]) -> bool:
        """Does a rank's failure say that the chunk is bad, so that it may go?

        in_pool: generations that were in the pool alone, or being read from there. An op that
        did not read the pool has proved nothing about those.
        """
        if self.kind == "store":
            return True
        if self.kind not in ("load", "fetch") or outcome == CANCELLED:
            return False
        identity = self.identities[index]
        waited = identity.generation in in_pool and identity not in self.pool.values()
        return outcome != STALE or not waited
