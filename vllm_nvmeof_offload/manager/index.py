# SPDX-License-Identifier: Apache-2.0
"""The index: entries, their states, and the one table of what may happen to them.

    ABSENT → STORING → CACHED → WRITING → BOTH → POOLED → FETCHING → BOTH …   DOOMED from any

ABSENT is no entry at all. Pins are orthogonal: they are the users that the slot allocators
count. An event that the table does not list for a state is a mistake of ours.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = ["TRANSITIONS", "Entry", "Event", "Index", "State"]


class State(enum.Enum):
    STORING = "storing"  # a copy into cache slot c is under way
    CACHED = "cached"  # c
    WRITING = "writing"  # c, and a write to pool slot p is under way
    BOTH = "both"  # c and p
    POOLED = "pooled"  # p
    FETCHING = "fetching"  # p, and a read into c is under way
    DOOMED = "doomed"  # failed or reset: misses at once, slots freed at the last release

    # Enum's own __hash__ is Python code, and states are hashed on every look-up.
    __hash__ = object.__hash__


class Event(enum.Enum):
    COPIED = "copied"
    COPY_FAILED = "copy_failed"
    WRITE_BEGIN = "write_begin"
    WRITTEN = "written"
    WRITE_FAILED = "write_failed"
    EVICT_CACHE = "evict_cache"
    EVICT_POOL = "evict_pool"
    FETCH_BEGIN = "fetch_begin"
    FETCHED = "fetched"
    FETCH_CANCELLED = "fetch_cancelled"
    DOOM = "doom"

    __hash__ = object.__hash__


_S, _E = State, Event

#: (state, event) → next state; None is ABSENT. What an operation reports about an entry that
#: was doomed meanwhile changes nothing any more.
TRANSITIONS: dict[tuple[State, Event], State | None] = {
    (_S.STORING, _E.COPIED): _S.CACHED,
    (_S.STORING, _E.COPY_FAILED): _S.DOOMED,
    (_S.CACHED, _E.WRITE_BEGIN): _S.WRITING,
    (_S.CACHED, _E.EVICT_CACHE): None,
    (_S.WRITING, _E.WRITTEN): _S.BOTH,
    (_S.WRITING, _E.WRITE_FAILED): _S.CACHED,
    (_S.BOTH, _E.EVICT_CACHE): _S.POOLED,
    (_S.BOTH, _E.EVICT_POOL): _S.CACHED,
    (_S.POOLED, _E.FETCH_BEGIN): _S.FETCHING,
    (_S.POOLED, _E.EVICT_POOL): None,
    (_S.FETCHING, _E.FETCHED): _S.BOTH,
    (_S.FETCHING, _E.FETCH_CANCELLED): _S.POOLED,
    **{(state, _E.DOOM): _S.DOOMED for state in State},
    **{
        (_S.DOOMED, event): _S.DOOMED
        for event in (
            _E.COPIED,
            _E.COPY_FAILED,
            _E.WRITTEN,
            _E.WRITE_FAILED,
            _E.FETCHED,
            _E.FETCH_CANCELLED,
        )
    },
}

_IN_CACHE = frozenset({_S.STORING, _S.CACHED, _S.WRITING, _S.BOTH, _S.FETCHING})


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk: `cache_slot` and `pool_slot` are set exactly as its state says.

    used: grows with every use of any entry; the larger, the more recent.
    """

    identity: SlotIdentity
    state: State
    cache_slot: int | None = None
    pool_slot: int | None = None
    used: int = 0

    @property
    def in_cache(self) -> bool:
        """May a load name the cache slot as its source? (It may have to wait there.)"""
        return self.state in _IN_CACHE

    def on(self, event: Event) -> State | None:
        """Apply `event`; returns the new state, None for ABSENT."""
        step = (self.state, event)
        assert step in TRANSITIONS, f"{event.name} on {self.state.name}"
        new = TRANSITIONS[step]
        if new is not None:
            self.state = new
        return new


class Index:
    """key → entry. Doomed entries are not in it: their keys miss at once."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        assert entry.identity.key not in self._entries
        self._entries[entry.identity.key] = entry

    def drop(self, entry: Entry) -> None:
        """Remove `entry` if the index still holds this very one (rule 8)."""
        key = entry.identity.key
        if self._entries.get(key) is entry:
            del self._entries[key]

    def clear(self) -> list[Entry]:
        entries = list(self._entries.values())
        self._entries.clear()
        return entries
