# SPDX-License-Identifier: Apache-2.0
"""A router that applies every event has exactly the index's keys in each tier."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_nvmeof_offload.manager.core import ManagerCore, Source
from vllm_nvmeof_offload.manager.ledger import Entry, State

from .base import Violation

#: The tiers that a router may rely on in each state; an independent copy of the product's table.
_STAGED = {State.CACHED, State.WRITING, State.BOTH}
_PERSISTED = {State.BOTH, State.POOLED, State.FETCHING}


class EventRules:
    """One process's router, which starts empty."""

    def __init__(self, core: ManagerCore) -> None:
        self._core = core
        self._has: dict[Source, set[bytes]] = {tier: set() for tier in Source}

    def check(self, entries: Sequence[Entry]) -> None:
        """Check after every event; takes the changes as vLLM's scheduler does after every step."""
        while self._core.changed_keys:
            for change in self._core.take_changes():
                has = self._has[change.tier]
                for key in change.keys:
                    # A reset may report the removal of a key whose arrival was not reported.
                    if not change.removed and key in has:
                        raise Violation("events", f"{key!r} stored in {change.tier} twice")
                    (has.discard if change.removed else has.add)(key)
        for tier, states in ((Source.CPU, _STAGED), (Source.POOL, _PERSISTED)):
            held = {e.key for e in entries if e.state in states}
            if held != self._has[tier]:
                raise Violation("events", f"{tier}: {held ^ self._has[tier]} reported wrongly")
