# SPDX-License-Identifier: Apache-2.0
"""LRU against a dictionary that is plainly right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.manager.policy import LruPolicy

_KEYS = st.integers(0, 6).map(lambda n: bytes([n]))
_NAMES = st.sampled_from(["admit", "admit old", "withdraw", "touch", "victim"])


def _oldest(model: dict[bytes, int]) -> bytes | None:
    return min(model, key=lambda key: model[key]) if model else None


@given(st.lists(st.tuples(_NAMES, _KEYS), max_size=300))
def test_the_least_recently_used_goes_first(calls: list[tuple[str, bytes]]) -> None:
    policy, model = LruPolicy(), {}
    last_used: dict[bytes, int] = {}
    for now, (name, key) in enumerate(calls):
        if name == "victim":
            assert policy.victim() == _oldest(model)
            model.pop(_oldest(model), None)
        elif name == "withdraw":
            policy.withdraw(key)
            model.pop(key, None)
        elif name == "touch":
            policy.touch(key, now)
            if key in model:
                model[key] = last_used[key] = now
        else:  # pinned and let go again, with or without having been used
            used = last_used.get(key, now) if name == "admit old" else now
            last_used[key] = model[key] = used
            policy.admit(key, used)
        assert len(policy) == len(model)
        assert all(key in policy for key in model)
    while model:
        assert policy.victim() == _oldest(model)
        del model[_oldest(model)]
    assert policy.victim() is None
