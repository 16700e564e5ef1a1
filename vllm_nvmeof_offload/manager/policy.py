# SPDX-License-Identifier: Apache-2.0
"""Eviction: which evictable key goes first. One policy object per tier, pure bookkeeping.

A policy holds *evictable* keys only: the manager withdraws a key while anything pins it and
admits it again afterwards. Being pinned is not being used: when a key was last used is told
with it, so that a write or its late release does not make a chunk look recent, and does not
turn the order of a prefix's chunks round.
"""

from __future__ import annotations

import heapq
from typing import Protocol

__all__ = ["EvictionPolicy", "LruPolicy"]


class EvictionPolicy(Protocol):
    """Order in which evictable keys are given up. `used` grows with every use of any key."""

    def admit(self, key: bytes, used: int) -> None:
        """`key` has become evictable; it was last used at `used`."""

    def withdraw(self, key: bytes) -> None:
        """`key` is not evictable any more; unknown keys are ignored."""

    def touch(self, key: bytes, used: int) -> None:
        """`key` was used now; unknown keys are ignored."""

    def victim(self) -> bytes | None:
        """Remove and return the key to evict next; None if there is none."""

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...


class LruPolicy:
    """Least recently used first: a heap whose outdated items are skipped when they come up."""

    def __init__(self) -> None:
        self._used: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []

    def admit(self, key: bytes, used: int) -> None:
        self._used[key] = used
        heapq.heappush(self._heap, (used, key))
        if len(self._heap) > 2 * len(self._used) + 64:
            self._heap = [(when, known) for known, when in self._used.items()]
            heapq.heapify(self._heap)

    def withdraw(self, key: bytes) -> None:
        self._used.pop(key, None)

    def touch(self, key: bytes, used: int) -> None:
        if key in self._used:
            self.admit(key, used)

    def victim(self) -> bytes | None:
        while self._heap:
            used, key = heapq.heappop(self._heap)
            if self._used.get(key) == used:
                del self._used[key]
                return key
        return None

    def __contains__(self, key: object) -> bool:
        return key in self._used

    def __len__(self) -> int:
        return len(self._used)
