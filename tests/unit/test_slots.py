# SPDX-License-Identifier: Apache-2.0
"""The slot allocator as a state machine: nothing is handed out twice, nothing is lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_nvmeof_offload.manager.slots import SlotPool


class SlotMachine(RuleBasedStateMachine):
    """owned: slots with an entry. users: operations by slot. orphans: no entry, but users."""

    @initialize(
        capacity=st.integers(0, 9), lanes=st.integers(1, 3), numbered=st.sets(st.integers(0, 8))
    )
    def start(self, capacity: int, lanes: int, numbered: set[int]) -> None:
        self.pool = SlotPool(capacity, lanes)
        self.capacity = capacity
        self.owned: set[int] = set()
        self.users: Counter[int] = Counter()
        self.orphans: set[int] = set()
        self.retired: set[int] = set()
        self.owned = {slot for slot in numbered if slot < capacity}
        self.pool.take_numbered(np.array(sorted(self.owned), np.int64))

    def _busy(self) -> set[int]:
        return self.owned | self.orphans | self.retired

    @rule(lane=st.integers(0, 2))
    def take(self, lane: int) -> None:
        lanes = self.pool.lanes
        lane %= lanes
        free = [s for s in range(self.capacity) if s not in self._busy() and s % lanes == lane]
        assert self.pool.free_in(lane) == len(free)
        slot = self.pool.take(lane)
        if slot is None:
            assert not free
        else:
            assert slot in free
            self.owned.add(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        self.pool.use(slot)
        self.users[slot] += 1

    @precondition(lambda self: +self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.users)))
        self.pool.release(slot)
        self.users[slot] -= 1
        if not self.users[slot]:
            self.orphans.discard(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), retire=st.booleans())
    def orphan(self, data: st.DataObject, retire: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        self.pool.orphan(slot, retire)
        self.owned.remove(slot)
        if retire:
            self.retired.add(slot)
        elif self.users[slot]:
            self.orphans.add(slot)

    @rule()
    def orphan_unused(self) -> None:
        self.pool.orphan_unused()
        self.owned = {slot for slot in self.owned if self.users[slot]}

    @invariant()
    def counts_agree(self) -> None:
        pool = self.pool
        assert pool.taken == len(self._busy())
        assert pool.free == self.capacity - pool.taken
        assert (pool.orphans, pool.retired) == (len(self.orphans), len(self.retired))
        assert all(pool.in_use(slot) == bool(self.users[slot]) for slot in range(self.capacity))


SlotMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestSlotMachine = SlotMachine.TestCase


def test_a_lane_allocates_only_its_slots() -> None:
    pool = SlotPool(8, lanes=3)
    assert [pool.take(2) for _ in range(3)] == [2, 5, None]
    assert [pool.take(0) for _ in range(4)] == [0, 3, 6, None]


def test_misuse_is_an_assertion() -> None:
    pool = SlotPool(1)
    with pytest.raises(AssertionError):
        pool.use(0)
    slot = pool.take()
    assert slot == 0
    pool.use(slot)
    pool.orphan(slot)
    with pytest.raises(AssertionError):
        pool.orphan(slot)
    with pytest.raises(AssertionError, match="before any"):
        pool.take_numbered(np.array([0]))
    with pytest.raises(AssertionError, match="twice"):
        SlotPool(3).take_numbered(np.array([1, 1]))
