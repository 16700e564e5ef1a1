# SPDX-License-Identifier: Apache-2.0
"""Stores a chunk only after it has been offered often enough. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

#: Keys are forgotten this many at a time, because finding the front of a dictionary is slow.
_FORGET_BATCH = 1024


class StoreThreshold:
    """Counts sightings, so that a chunk is stored on its n-th sighting, as with vLLM's own
    `store_threshold`.

    A sighting is one offer for storage (`prepare_store`), which vLLM makes once per request for
    each of its chunks, whether it computed the chunk or found it in GPU memory. Look-ups do not
    count, nor do a request's repeated offers, and a reset forgets nothing. At most `keys_max` +
    1023 keys are counted; the least recently seen are forgotten. Threshold 1 needs no table.
    """

    def __init__(self, threshold: int, keys_max: int) -> None:
        assert threshold >= 1
        self._threshold = threshold
        self._keys_max = keys_max
        # The least recently seen is first. The garbage collector does not track bytes and ints.
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def see(
        self, keys: Sequence[bytes], again: Collection[bytes] = ()
    ) -> npt.NDArray[np.uint8] | None:
        """Count an offer of each of `keys`. Return, by key, whether it is due; None if all are.

        `again` contains keys that the request has offered before.
        """
        if self._threshold == 1:
            return None
        counts = self._counts
        for key in keys:
            counts[key] = min(counts.pop(key, 0) + (key not in again), self._threshold)
        due = np.fromiter((counts[key] >= self._threshold for key in keys), np.uint8, len(keys))
        if len(counts) >= self._keys_max + _FORGET_BATCH:
            for key in list(islice(counts, len(counts) - self._keys_max)):
                del counts[key]
        return due
