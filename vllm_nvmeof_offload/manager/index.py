# SPDX-License-Identifier: Apache-2.0
"""What the native index says of its entries: their state, and the tier that a look-up found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Source(enum.Enum):
    """The tier in which a look-up found a chunk."""

    CPU = "cpu"
    POOL = "pool"
    SHARED = "shared"  # another engine's pool


class State(enum.IntEnum):
    """A state of an entry, as in native/transitions.def; ABSENT and DOOMED are no entry's."""

    STORING = 1
    CACHED = 2
    WRITING = 3
    BOTH = 4
    POOLED = 5
    FETCHING = 6
    BORROWING = 7


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, for inspection. cache: -1: no cache slot. place: -1: none in the pool."""

    state: State
    generation: int
    cache: int
    place: int
    key: bytes
