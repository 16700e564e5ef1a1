# SPDX-License-Identifier: Apache-2.0
"""Eviction: which evictable slot goes first. One policy object per tier, pure bookkeeping.

A policy holds *evictable* slots only: the manager withdraws a slot while anything pins it and
admits it again afterwards. Being pinned is not being used: when a slot was last used stands in
an array of the manager's, so that a write or its late release does not make a chunk look
recent, and does not turn the order of a prefix's chunks round.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["EvictionPolicy", "LruPolicy", "MakePolicy"]


class EvictionPolicy(Protocol):
    """Order in which evictable slots are given up.

    Made with `used`: by slot, when it was last used. The manager keeps it and a policy reads
    it; it grows with every use of any slot, and a withdrawn slot may come back with any value.
    Made several times: with no slots before the sizes are known, and anew after each reset.
    """

    def admit(self, slot: int) -> None:
        """`slot` has become evictable."""

    def withdraw(self, slot: int) -> None:
        """`slot` is not evictable any more; unknown slots are ignored."""

    def touch(self, slot: int) -> None:
        """`used[slot]` has grown; unknown slots are ignored."""

    def peek(self) -> int | None:
        """The slot that `victim` would return."""

    def victim(self) -> int | None:
        """Remove and return the slot to evict next; None if there is none."""

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...


_SHELF_BITS = 12
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


#: Makes a policy from the array of each slot's last use.
MakePolicy = Callable[[Sequence[int]], EvictionPolicy]


class LruPolicy:
    """Least recently used first; 13 bytes a slot, no objects, no work on a touch.

    A slot has one record, filed by when it was last used, on a shelf for 4096 uses each. A use
    moves nothing: the record is then only the earliest time at which the slot could be due, and
    is filed anew if it comes up. The oldest shelf is sorted, as a heap, when its turn comes.
    """

    def __init__(self, used: Sequence[int]) -> None:
        self._used = used
        self._inside = bytearray(len(used))
        self._filed = array("Q", bytes(8 * len(used)))  # by slot: its record's time + 1; 0: none
        self._shelves: dict[int, array[int]] = {}
        self._numbers: list[int] = []  # of shelves, a heap
        self._open: list[int] = []  # the oldest records, a heap of (time, slot) as one number
        self._opened = -1  # the last shelf that was opened
        self._count = 0

    def admit(self, slot: int) -> None:
        if not self._inside[slot]:
            self._inside[slot] = 1
            self._count += 1
        used, filed = self._used[slot], self._filed[slot]
        if not filed or used < filed - 1:
            self._file(slot, used)

    def withdraw(self, slot: int) -> None:
        # Its record is thrown away when it comes up, or serves again.
        self._count -= self._inside[slot]
        self._inside[slot] = 0

    def touch(self, slot: int) -> None:
        """Nothing to do: see the class's docstring."""

    def peek(self) -> int | None:
        while True:
            while self._open:
                used, slot = self._open[0] >> _SLOT_BITS, self._open[0] & _SLOT_MASK
                current = self._filed[slot] == used + 1
                if current and self._inside[slot] and self._used[slot] == used:
                    return slot
                heapq.heappop(self._open)
                if current:
                    self._filed[slot] = 0
                    if self._inside[slot]:
                        self._file(slot, self._used[slot])
            if not self._numbers:
                return None
            self._open_shelf(heapq.heappop(self._numbers))

    def victim(self) -> int | None:
        slot = self.peek()
        if slot is not None:
            heapq.heappop(self._open)
            self._filed[slot] = 0
            self.withdraw(slot)
        return slot

    @property
    def records(self) -> int:
        """How many slots and former slots it keeps a place for; at most about one a slot."""
        return len(self._open) + sum(map(len, self._shelves.values()))

    def __contains__(self, slot: int) -> bool:
        return bool(self._inside[slot])

    def __len__(self) -> int:
        return self._count

    def _file(self, slot: int, used: int) -> None:
        self._filed[slot] = used + 1
        number = used >> _SHELF_BITS
        if number <= self._opened:
            heapq.heappush(self._open, used << _SLOT_BITS | slot)
            return
        shelf = self._shelves.get(number)
        if shelf is None:
            shelf = self._shelves[number] = array("I")
            heapq.heappush(self._numbers, number)
        shelf.append(slot)

    def _open_shelf(self, number: int) -> None:
        filed = self._filed
        for slot in self._shelves.pop(number):
            time = filed[slot] - 1
            if time >> _SHELF_BITS == number:  # else: filed earlier since, or gone
                self._open.append(time << _SLOT_BITS | slot)
        heapq.heapify(self._open)
        self._opened = number
