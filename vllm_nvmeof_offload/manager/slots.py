# SPDX-License-Identifier: Apache-2.0
"""Slots of one tier: free, used, evictable, and the users of each. Pure."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

_FREE, _TAKEN, _ORPHAN, _RETIRED = range(4)


class SlotPool:
    """Allocator over slots 0 … capacity-1: 1 byte per slot, and 8 per slot that is free again.

    A slot is *taken* from `take` until it is free again. Operations on it count as *users*. A
    slot whose entry is gone is *orphaned*: it becomes free when its last user has released it, so
    that no buffer is reused before every rank has released it (protocol, rules 1 and 7).

    Slot s is in *lane* `s % lanes`: a pool's target. The caller chooses the lane.
    """

    def __init__(self, capacity: int, lanes: int = 1) -> None:
        self.capacity = capacity
        self.lanes = lanes
        self.orphans = 0
        self.retired = 0
        self._state = bytearray(capacity)
        self._next = list(range(lanes))  # by lane: slots from here on were never taken
        self._again = [array("q") for _ in range(lanes)]  # by lane: taken once, and free again
        self._free = [len(range(lane, capacity, lanes)) for lane in range(lanes)]
        #: By slot in use: the number of operations that work on it.
        self.users: dict[int, int] = {}

    @property
    def taken(self) -> int:
        """Slots that are not free, orphaned and retired ones included."""
        return self.capacity - self.free

    @property
    def free(self) -> int:
        return sum(self._free)

    def free_in(self, lane: int) -> int:
        return self._free[lane]

    def lane(self, slot: int) -> int:
        return slot % self.lanes

    def take(self, lane: int = 0) -> int | None:
        """Take a free slot of this lane; None if there is none."""
        if not self._free[lane]:
            return None
        again = self._again[lane]
        if again:
            slot = again.pop()
        else:
            slot = self._next[lane]
            while self._state[slot] != _FREE:  # taken by number, at adoption
                slot += self.lanes
            self._next[lane] = slot + self.lanes
        self._state[slot] = _TAKEN
        self._free[lane] -= 1
        return slot

    def take_numbered(self, slots: npt.NDArray[np.int64]) -> None:
        """Take these very slots, distinct and in range, before any `take`: adoption."""
        state = np.frombuffer(self._state, np.uint8)
        assert not state.any(), "slots are adopted before any is allocated"
        state[slots] = _TAKEN
        assert int(np.count_nonzero(state)) == len(slots), "a slot twice"
        for lane, count in enumerate(np.bincount(slots % self.lanes, minlength=self.lanes)):
            self._free[lane] -= int(count)

    def use(self, slot: int) -> None:
        """One more operation works on this slot."""
        assert self._state[slot] == _TAKEN, f"slot {slot} is used but not taken"
        self.users[slot] = self.users.get(slot, 0) + 1

    def release(self, slot: int) -> None:
        """One operation less works on this slot; its last user frees an orphan."""
        left = self.users[slot] - 1
        assert left >= 0
        if left:
            self.users[slot] = left
            return
        del self.users[slot]
        if self._state[slot] == _ORPHAN:
            self.orphans -= 1
            self._free_again(slot)

    def in_use(self, slot: int) -> bool:
        return slot in self.users

    def orphan(self, slot: int, retire: bool = False) -> None:
        """The slot's entry is gone: free it now, or at its last user; retire: never (the medium
        refuses it), and the capacity shrinks by one."""
        assert self._state[slot] == _TAKEN
        if retire:
            self._state[slot] = _RETIRED
            self.retired += 1
        elif slot in self.users:
            self._state[slot] = _ORPHAN
            self.orphans += 1
        else:
            self._free_again(slot)

    def orphan_unused(self) -> None:
        """Free every slot that is taken and has no user: a reset."""
        state = np.frombuffer(self._state, np.uint8)
        unused = state == _TAKEN
        unused[list(self.users)] = False
        for lane in range(self.lanes):
            slots = np.flatnonzero(unused[lane :: self.lanes]) * self.lanes + lane
            self._free[lane] += len(slots)
            # Highest first: `take` pops from the end.
            self._again[lane].frombytes(slots[::-1].astype(np.int64).tobytes())
        state[unused] = _FREE

    def _free_again(self, slot: int) -> None:
        self._state[slot] = _FREE
        lane = self.lane(slot)
        self._free[lane] += 1
        self._again[lane].append(slot)
