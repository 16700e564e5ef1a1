# SPDX-License-Identifier: Apache-2.0
"""LRU against a dictionary that is plainly right."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.manager.eviction import LruPolicy

SLOTS = 7
_SLOTS = st.integers(0, SLOTS - 1)
_NAMES = st.sampled_from(["admit", "admit old", "withdraw", "use", "peek", "victim"])


def _oldest(model: set[int], used: array[int]) -> int | None:
    return min(model, key=lambda slot: used[slot]) if model else None


@given(calls=st.lists(st.tuples(_NAMES, _SLOTS, st.integers(1, 9)), max_size=300))
def test_the_least_recently_used_goes_first(calls: list[tuple[str, int, int]]) -> None:
    used = array("Q", range(SLOTS))
    policy, model = LruPolicy(used), set()
    now = 100
    for name, slot, step in calls:
        now += step
        if name == "victim":
            expected = _oldest(model, used)
            assert policy.victim() == expected
            model.discard(expected)  # type: ignore[arg-type]
        elif name == "peek":
            assert policy.peek() == _oldest(model, used)
        elif name == "withdraw":
            policy.withdraw(slot)
            model.discard(slot)
        elif name == "use":
            used[slot] = now
            policy.touch(slot)
        elif slot not in model:
            if name == "admit old":  # another chunk is in the slot now, of any age
                used[slot] = now % 12 * 8 + slot
            policy.admit(slot)
            model.add(slot)
        assert len(policy) == len(model)
        assert [slot in policy for slot in range(SLOTS)] == [slot in model for slot in range(SLOTS)]
    while model:
        expected = _oldest(model, used)
        assert policy.victim() == expected
        model.discard(expected)  # type: ignore[arg-type]
    assert policy.victim() is None
