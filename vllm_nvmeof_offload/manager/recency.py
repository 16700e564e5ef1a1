# SPDX-License-Identifier: Apache-2.0
"""By slot of one tier: when its chunk counts as used last, which is what eviction goes by.

Plain LRU gives up in the same order whatever came back and what never did. Where the requests of
more conversations are interleaved than a tier holds, it then loses each just before its next
turn. So each request beyond the first one that used a chunk lets it count as used later, by a
share of the tier's size, a few times at most: what has come back is kept longer than what came
once, and goes all the same once its conversation is over. A prefix's head is used by every
request that uses its tail, so the head's count is never less, and the tail still goes first.

The CPU tier counts so; the pool behind it is plain LRU, and keeps what the CPU tier gave up for
what had come back: together they hold more that differs. Nor could the pool keep a prefix
from making room for its own continuation, as `Tiers.hold_back` does. One that is at most
twice as large as the CPU tier may give up the middle of a prefix that the CPU tier still has, and
keep the end, which nobody finds: some chunks in a thousand (`tests/unit/manager/test_recency.py`).
"""

from __future__ import annotations

from array import array

__all__ = ["CREDITED", "CREDITED_MAX", "CREDIT_SHARE", "Recency"]

#: The eviction policy that goes by it, as the configuration names it.
CREDITED = "credited_lru"
#: Uses that each such request is worth, in slots of the tier. A request touches each of its
#: chunks about three times.
CREDIT_SHARE = 2.0
#: Requests beyond the first that count.
CREDITED_MAX = 3


class Recency:
    """9 bytes a slot. credit_share 0: plain LRU."""

    def __init__(self, slots: int, credit_share: float = 0.0) -> None:
        #: What policies read. Of a slot that keeps its chunk it only ever grows.
        self.used = array("Q", bytes(8 * slots))
        self._requests = bytearray(slots)  # that used the chunk to their end
        self._credit = int(credit_share * slots)

    def use(self, slot: int, now: int, *, ended: bool = False) -> None:
        """The chunk in `slot` is used. ended: by a request that has ended, and counts."""
        requests = self._requests[slot]
        if ended and requests <= CREDITED_MAX:
            requests += 1
            self._requests[slot] = requests
        self.used[slot] = now + self._credit * (requests - 1) if requests else now

    def take_over(self, slot: int, other: Recency, other_slot: int) -> None:
        """`slot` gets the chunk that is in `other_slot` of another tier."""
        requests = other._requests[other_slot]
        beyond = max(0, requests - 1)
        self._requests[slot] = requests
        last = other.used[other_slot] - other._credit * beyond
        self.used[slot] = last + self._credit * beyond

    def forget(self, slot: int) -> None:
        """The chunk in `slot` is gone."""
        self._requests[slot] = 0

    def forget_all(self) -> None:
        self._requests = bytearray(len(self._requests))
