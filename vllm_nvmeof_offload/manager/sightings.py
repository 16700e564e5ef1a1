# SPDX-License-Identifier: Apache-2.0
"""How often each key was asked to be stored: a chunk is offloaded on its n-th sighting.

As vLLM's own `store_threshold`: a sighting is one offer for storage (`prepare_store`), which
vLLM makes once per request for each of its chunks, whether it computed the chunk or found it
in GPU memory; look-ups do not count, and a reset forgets nothing. The table is bounded, and
forgets what was seen least recently.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

__all__ = ["Sightings"]

#: Forgotten at a time: the front of a dictionary is slow to find again and again.
_FORGET_BATCH = 1024


class Sightings:
    """Counts of at most `keys_max` keys, and up to 1023 more. Threshold 1 keeps no table."""

    def __init__(self, threshold: int, keys_max: int) -> None:
        assert threshold >= 1
        self._threshold = threshold
        self._keys_max = keys_max
        # Least recently seen first. Bytes and ints: the garbage collector does not track it.
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def see(self, keys: Iterable[bytes]) -> None:
        """Each of `keys` was asked to be stored."""
        if self._threshold == 1:
            return
        counts = self._counts
        for key in keys:
            counts[key] = min(counts.pop(key, 0) + 1, self._threshold)
        if len(counts) >= self._keys_max + _FORGET_BATCH:
            for key in list(islice(counts, len(counts) - self._keys_max)):
                del counts[key]

    def enough(self, key: bytes) -> bool:
        """Whether `key` has been seen often enough to be stored."""
        return self._threshold == 1 or self._counts.get(key, 0) >= self._threshold
