# SPDX-License-Identifier: Apache-2.0
"""The index: entries, their states, and the one table of their transitions.

    ABSENT → STORING → CACHED → WRITING → BOTH → POOLED → FETCHING → BOTH …   DOOMED from any

ABSENT is no entry at all. Pins are orthogonal: the slot allocators count a slot's users. An
event that the table does not list for a state is a programming error.

An entry on which no operation works *rests*: it is one dictionary item and a few array cells,
because a million of them must cost little memory and nothing at a garbage collection. While an
operation works on it, it is *awake*: an object.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.protocol import SlotIdentity


class Source(enum.Enum):
    """The tier in which a look-up found a chunk."""

    CPU = "cpu"
    POOL = "pool"


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
_OUTCOMES = (_E.COPIED, _E.COPY_FAILED, _E.WRITTEN, _E.WRITE_FAILED, _E.FETCHED, _E.FETCH_CANCELLED)

#: (state, event) → next state; None is ABSENT. A report about an entry that was doomed meanwhile
#: changes nothing.
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
    **{(_S.DOOMED, event): _S.DOOMED for event in _OUTCOMES},
}
#: States in which an entry on which no operation works rests.
MAY_REST = frozenset({_S.CACHED, _S.BOTH, _S.POOLED})


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk: `cache_slot` and `pool_slot` are set exactly as its state says."""

    identity: SlotIdentity
    state: State
    cache_slot: int | None = None
    pool_slot: int | None = None

    @property
    def in_cache(self) -> bool:
        """Whether a load may name the cache slot as its source. (It may have to wait there.)"""
        return self.state is not _S.POOLED and self.state is not _S.DOOMED

    def on(self, event: Event) -> State | None:
        """Apply `event`; returns the new state, None for ABSENT."""
        step = (self.state, event)
        assert step in TRANSITIONS, f"{event.name} on {self.state.name}"
        new = TRANSITIONS[step]
        self.state = new or self.state
        return new


class Index:
    """key → entry, for at most `cache_slots + pool_slots` entries. Doomed entries are not in it:
    their keys miss at once.

    `awake`, `cached` and `pooled` are public for look-ups only.
    """

    def __init__(self, cache_slots: int, pool_slots: int) -> None:
        #: Entries on which an operation works.
        self.awake: dict[bytes, Entry] = {}
        #: Resting entries: key → cache slot, and key → pool slot of those only in the pool.
        #: Bytes and ints: the garbage collector does not track them.
        self.cached: dict[bytes, int] = {}
        self.pooled: dict[bytes, int] = {}
        # Object arrays: unlike a list, the garbage collector does not walk them.
        self._cache_keys = np.empty(cache_slots, object)
        self._pool_keys = np.empty(pool_slots, object)
        # For resting entries; by pool slot only for those only in the pool.
        self._cache_generations = array("Q", bytes(8 * cache_slots))
        self._pool_generations = array("Q", bytes(8 * pool_slots))
        self._pool_slot_of = array("q", bytes(8 * cache_slots))  # -1: only in the cache

    def __len__(self) -> int:
        return len(self.awake) + len(self.cached) + len(self.pooled)

    def __contains__(self, key: bytes) -> bool:
        return key in self.cached or key in self.pooled or key in self.awake

    def __iter__(self) -> Iterator[Entry]:
        """All entries, for inspection: copies of those at rest."""
        yield from list(self.awake.values())
        for key, slot in list(self.cached.items()):
            yield self._from_cache(key, slot)
        for key, slot in list(self.pooled.items()):
            yield self._from_pool(key, slot)

    def slots(self, key: bytes) -> tuple[int | None, int | None]:
        """(cache slot, pool slot) of `key`; None where it has none."""
        cache_slot = self.cached.get(key)
        if cache_slot is not None:
            pool_slot = self._pool_slot_of[cache_slot]
            return cache_slot, pool_slot if pool_slot >= 0 else None
        entry = self.awake.get(key)
        return (entry.cache_slot, entry.pool_slot) if entry else (None, self.pooled.get(key))

    def find(self, key: bytes) -> Entry | None:
        """Wake the entry of `key`, until `rest`."""
        entry = self.awake.get(key)
        if entry is None:
            if key in self.cached:
                entry = self._from_cache(key, self.cached.pop(key))
            elif key in self.pooled:
                entry = self._from_pool(key, self.pooled.pop(key))
            else:
                return None
            self.awake[key] = entry
        return entry

    def holds(self, entry: Entry) -> bool:
        """Whether this very entry is in the index, and awake."""
        return self.awake.get(entry.identity.key) is entry

    def rest(self, entry: Entry) -> None:
        """No operation works on `entry` any more: the caller must not use the object again."""
        assert self.holds(entry) and entry.state in MAY_REST
        key, generation = entry.identity.key, entry.identity.generation
        del self.awake[key]
        if entry.cache_slot is not None:
            self._cache_generations[entry.cache_slot] = generation
            pool_slot = entry.pool_slot
            self._pool_slot_of[entry.cache_slot] = -1 if pool_slot is None else pool_slot
            self.cached[key] = entry.cache_slot
        else:
            assert entry.pool_slot is not None
            self._pool_generations[entry.pool_slot] = generation
            self.pooled[key] = entry.pool_slot

    def add(self, entry: Entry) -> None:
        assert entry.identity.key not in self
        self.awake[entry.identity.key] = entry
        self.note_slots(entry)

    def adopt(
        self,
        pool_slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint64],
        keys: Sequence[bytes],
    ) -> None:
        """Fill an empty index with chunks that are in the pool; slots and keys are distinct."""
        assert not len(self)
        self._pool_keys[pool_slots] = np.fromiter(keys, object, len(keys))
        np.frombuffer(self._pool_generations, np.uint64)[pool_slots] = generations
        self.pooled.update(zip(keys, pool_slots.tolist(), strict=True))
        assert len(self.pooled) == len(keys)

    def drop(self, entry: Entry) -> None:
        """Remove `entry` if the index still holds this very one (rule 8)."""
        if self.holds(entry):
            del self.awake[entry.identity.key]

    def clear(self) -> None:
        """Remove everything; nothing is awake."""
        assert not self.awake
        self.cached.clear()
        self.pooled.clear()
        self._cache_keys[:] = None
        self._pool_keys[:] = None

    def note_slots(self, entry: Entry) -> None:
        """`entry` was given the slots that it has."""
        if entry.cache_slot is not None:
            self._cache_keys[entry.cache_slot] = entry.identity.key
        if entry.pool_slot is not None:
            self._pool_keys[entry.pool_slot] = entry.identity.key

    def in_cache_slot(self, slot: int) -> Entry:
        """Wake the entry whose chunk is in this cache slot."""
        entry = self.find(self._cache_keys[slot])
        assert entry is not None and entry.cache_slot == slot
        return entry

    def in_pool_slot(self, slot: int) -> Entry:
        """Wake the entry whose chunk is in this pool slot."""
        entry = self.find(self._pool_keys[slot])
        assert entry is not None and entry.pool_slot == slot
        return entry

    def _from_cache(self, key: bytes, slot: int) -> Entry:
        identity = SlotIdentity(key, self._cache_generations[slot])
        pool_slot = self._pool_slot_of[slot]
        if pool_slot < 0:
            return Entry(identity, State.CACHED, slot)
        return Entry(identity, State.BOTH, slot, pool_slot)

    def _from_pool(self, key: bytes, slot: int) -> Entry:
        return Entry(SlotIdentity(key, self._pool_generations[slot]), State.POOLED, None, slot)
