# SPDX-License-Identifier: Apache-2.0
"""The entry table: every state with every event, and the index's identity rule."""

from __future__ import annotations

import itertools

import pytest

from vllm_nvmeof_offload.manager.index import TRANSITIONS, Entry, Event, Index, State
from vllm_nvmeof_offload.protocol import SlotIdentity

_ALLOWED = {
    State.STORING: {Event.COPIED, Event.COPY_FAILED},
    State.CACHED: {Event.WRITE_BEGIN, Event.EVICT_CACHE},
    State.WRITING: {Event.WRITTEN, Event.WRITE_FAILED},
    State.BOTH: {Event.EVICT_CACHE, Event.EVICT_POOL},
    State.POOLED: {Event.FETCH_BEGIN, Event.EVICT_POOL},
    State.FETCHING: {Event.FETCHED, Event.FETCH_CANCELLED},
    State.DOOMED: {
        Event.COPIED,
        Event.COPY_FAILED,
        Event.WRITTEN,
        Event.WRITE_FAILED,
        Event.FETCHED,
        Event.FETCH_CANCELLED,
    },
}


def _entry(state: State, generation: int = 1) -> Entry:
    return Entry(SlotIdentity(b"key", generation), state)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_state_with_every_event(state: State, event: Event) -> None:
    entry = _entry(state)
    if event is Event.DOOM:
        assert entry.on(event) is State.DOOMED
    elif event in _ALLOWED[state]:
        assert entry.on(event) is TRANSITIONS[state, event]
        assert entry.state is (TRANSITIONS[state, event] or state)
        if state is State.DOOMED:
            assert entry.state is State.DOOMED
    else:
        with pytest.raises(AssertionError, match=event.name):
            entry.on(event)
        assert entry.state is state


def test_a_store_in_flight_is_in_the_cache() -> None:
    in_cache = {state for state in State if _entry(state).in_cache}
    assert in_cache == {State.STORING, State.CACHED, State.WRITING, State.BOTH, State.FETCHING}


def test_drop_spares_a_newer_entry_of_the_same_key() -> None:
    index = Index(1, 1)
    old, new = _entry(State.CACHED, 1), _entry(State.CACHED, 2)
    index.add(old)
    index.drop(old)
    index.add(new)
    index.drop(old)
    assert index.find(b"key") is new
    index.drop(new)
    assert index.find(b"key") is None
    assert not len(index)
