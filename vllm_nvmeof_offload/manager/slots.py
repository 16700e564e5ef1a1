# SPDX-License-Identifier: Apache-2.0
"""Numbered slots of one tier: free, taken, in use by operations, orphaned, retired.

A slot is *taken* from `take` until it is free again. Operations on it count as *users*. A
slot whose entry is gone is *orphaned*: it becomes free when its last user has let go, so
that no buffer is reused before every rank has released it (protocol, rules 1 and 7).

Slots lie in *lanes*, slot s in lane `s % lanes`: a pool's targets. `take` goes round the
lanes, so that what is written next to each other is spread over the targets.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["SlotPool"]


class SlotPool:
    """Allocator over slots 0 … capacity-1. Memory grows with what was ever taken."""

    def __init__(self, capacity: int = 0, lanes: int = 1) -> None:
        self.capacity = capacity
        self.lanes = lanes
        self._next = list(range(lanes))  # by lane: slots from here on were never taken
        self._free: list[list[int]] = [[] for _ in range(lanes)]
        self._turn = 0  # the lane that `take` asks first
        self._taken: set[int] = set()
        self._users: dict[int, int] = {}
        self._orphans: set[int] = set()
        self._retired: set[int] = set()

    @property
    def taken(self) -> int:
        return len(self._taken)

    @property
    def free(self) -> int:
        return self.capacity - len(self._taken)

    @property
    def orphans(self) -> int:
        return len(self._orphans)

    @property
    def retired(self) -> int:
        return len(self._retired)

    def lane(self, slot: int) -> int:
        return slot % self.lanes

    def lanes_in_turn(self, avoid: Collection[int] = ()) -> list[int]:
        """The lanes in the order in which `take` asks them, without those to avoid."""
        turns = range(self._turn, self._turn + self.lanes)
        return [turn % self.lanes for turn in turns if turn % self.lanes not in avoid]

    def take(self, avoid: Collection[int] = ()) -> int | None:
        """Take a free slot in no lane of `avoid`; None if there is none."""
        for lane in self.lanes_in_turn(avoid):
            slot = self._take_in(lane)
            if slot is not None:
                self._turn = (lane + 1) % self.lanes
                self._taken.add(slot)
                return slot
        return None

    def _take_in(self, lane: int) -> int | None:
        if self._free[lane]:
            return self._free[lane].pop()
        while self._next[lane] in self._taken:  # taken by number, at adoption
            self._next[lane] += self.lanes
        slot = self._next[lane]
        if slot >= self.capacity:
            return None
        self._next[lane] += self.lanes
        return slot

    def take_numbered(self, slot: int) -> bool:
        """Take this very slot, at adoption, before any `take`; False if it is taken."""
        assert not any(self._free), "slots are adopted before any is allocated"
        if slot in self._taken or not 0 <= slot < self.capacity:
            return False
        self._taken.add(slot)
        return True

    def use(self, slot: int) -> None:
        """One more operation works on this slot."""
        assert slot in self._taken, f"slot {slot} is used but not taken"
        self._users[slot] = self._users.get(slot, 0) + 1

    def unuse(self, slot: int) -> None:
        """One operation less; frees an orphan at its last user."""
        left = self._users[slot] - 1
        assert left >= 0
        if left:
            self._users[slot] = left
            return
        del self._users[slot]
        if slot in self._orphans:
            self._orphans.discard(slot)
            self._put_back(slot)

    def in_use(self, slot: int) -> bool:
        return slot in self._users

    def orphan(self, slot: int, retire: bool = False) -> None:
        """The slot's entry is gone: free it now, or at its last user.

        retire: never hand it out again (the medium refuses it); the capacity shrinks by one.
        """
        assert slot in self._taken and slot not in self._orphans
        if retire:
            self._retired.add(slot)
        elif slot in self._users:
            self._orphans.add(slot)
        else:
            self._put_back(slot)

    def _put_back(self, slot: int) -> None:
        self._taken.remove(slot)
        self._free[self.lane(slot)].append(slot)
