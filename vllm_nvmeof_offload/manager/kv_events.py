# SPDX-License-Identifier: Apache-2.0
"""The chunks that came to each tier and left it, in order: the source of KV events. Pure.

A chunk is *in* the CPU tier from the moment its copy is complete on every rank, and in the pool
from the moment its write is; it leaves a tier when its place there is given up by eviction,
failure or reset. Tiers are recorded separately: a chunk that is evicted from pinned memory may
still be in the pool. A router that applies the changes in their order has exactly the index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_nvmeof_offload.manager.index import Index, Source, State

#: Keys per step, unless many more wait: after a start with a large pool, each step carries a part
#: of them, so that no step carries millions.
_TAKE_MAX = 4096
_TAKE_SHARE = 8

#: The tiers that hold a whole copy of an entry in this state; in any other state none does.
_TIERS: dict[State | None, tuple[Source, ...]] = {
    State.CACHED: (Source.CPU,),
    State.WRITING: (Source.CPU,),
    State.BOTH: (Source.CPU, Source.POOL),
    State.POOLED: (Source.POOL,),
    State.FETCHING: (Source.POOL,),
}


@dataclass(slots=True)
class Change:
    """These keys came to a tier, or left it."""

    tier: Source
    removed: bool
    keys: list[bytes] = field(default_factory=list)


class KvEventLog:
    """Changes that were not reported yet, oldest first. Its length is in keys."""

    def __init__(self) -> None:
        self._changes: deque[Change] = deque()

    def __len__(self) -> int:
        return sum(len(change.keys) for change in self._changes)

    def moved(self, key: bytes, before: State | None, after: State | None) -> None:
        """An entry went from one state to another."""
        had, has = _TIERS.get(before, ()), _TIERS.get(after, ())
        if had != has:
            for tier in Source:
                if (tier in had) != (tier in has):
                    self.add(tier, (key,), removed=tier in had)

    def add(self, tier: Source, keys: Iterable[bytes], *, removed: bool) -> None:
        """These keys left `tier` (removed), or came to it."""
        new = list(keys)
        if not new:
            return
        last = self._changes[-1] if self._changes else None
        if last is None or last.tier is not tier or last.removed is not removed:
            last = Change(tier, removed)
            self._changes.append(last)
        last.keys += new

    def all_leave(self, index: Index) -> None:
        """A reset is about to remove everything that rests in the index."""
        # Drop unreported arrivals, which these removals would cancel.
        self._changes = deque(change for change in self._changes if change.removed)
        in_both = (key for key in index.cached if index.slots(key)[1] is not None)
        self.add(Source.CPU, index.cached, removed=True)
        self.add(Source.POOL, in_both, removed=True)
        self.add(Source.POOL, index.pooled, removed=True)

    def take(self) -> list[Change]:
        """The oldest changes, as many as one step should carry."""
        left = max(_TAKE_MAX, len(self) // _TAKE_SHARE)
        taken: list[Change] = []
        while self._changes and left > 0:
            change = self._changes[0]
            taken.append(Change(change.tier, change.removed, change.keys[:left]))
            del change.keys[:left]
            if not change.keys:
                self._changes.popleft()
            left -= len(taken[-1].keys)
        return taken
