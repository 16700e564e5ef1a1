# SPDX-License-Identifier: Apache-2.0
"""Links to the pool, which read in sequence, and whose reported queues peers know."""

from __future__ import annotations

import math

#: The length of the windows in which bytes are counted for the balance of links.
WINDOW_S = 2.0


class Lane:
    """A node's link. Reads are sequential, so a read's end is known when it is queued.

    A peer knows the queue that the lane last reported, at most `report_s` ago, and the reads that
    the peer has queued since then.
    """

    __slots__ = ("_beat", "_given_s", "_per_s", "_reported_s", "free_s", "lost", "rate", "windows")

    def __init__(self, rate: float, report_s: float) -> None:
        self.rate = rate
        self.free_s = 0.0
        #: The start and end of the period in which the link is lost.
        self.lost = (math.inf, math.inf)
        #: Bytes, by the window in which their read started.
        self.windows: list[float] = []
        self._per_s = 1 / report_s
        self._beat = -1
        self._reported_s = 0.0
        self._given_s: dict[int, float] = {}

    def queue_s(self, now_s: float) -> float:
        """Return the seconds until the lane has read its queue."""
        return max(0.0, self.free_s - now_s)

    def seen_s(self, now_s: float, peer: int) -> float:
        """Return the seconds until the lane has read its queue, as far as `peer` knows."""
        self._report(now_s)
        return max(0.0, self._reported_s - now_s) + self._given_s.get(peer, 0.0)

    def read(self, now_s: float, count: float, peer: int = -1) -> float:
        """Queue `count` bytes; return the time at which they are read."""
        self._report(now_s)
        start_s = self.free_s if self.free_s > now_s else now_s
        took_s = count / self.rate
        end_s = start_s + took_s
        if peer >= 0:
            self._given_s[peer] = self._given_s.get(peer, 0.0) + took_s
        if end_s > self.lost[0] and start_s < self.lost[1]:
            end_s += self.lost[1] - max(start_s, self.lost[0])
        self.free_s = end_s
        window = int(start_s / WINDOW_S)
        if window >= len(self.windows):
            self.windows += [0.0] * (window + 1 - len(self.windows))
        self.windows[window] += count
        return end_s

    def usable(self, now_s: float, noticed_s: float) -> bool:
        """Return whether the link seems usable: its loss is noticed only after `noticed_s`."""
        return not self.lost[0] + noticed_s <= now_s < self.lost[1]

    def _report(self, now_s: float) -> None:
        beat = int(now_s * self._per_s)
        if beat != self._beat:
            self._beat, self._reported_s = beat, self.free_s
            self._given_s.clear()


class SharedLane(Lane):
    """A link that loads share as in the product: the load with the fewest reads in flight gets the
    next place. Reads in flight are sequential. A read is a pair of its completion time and its
    load."""

    __slots__ = ("_chunk_bytes", "_in_flight", "_left", "_link_s", "_places")

    def __init__(self, rate: float, report_s: float, places: int, chunk_bytes: float) -> None:
        super().__init__(rate, report_s)
        self._places, self._chunk_bytes, self._link_s = places, chunk_bytes, 0.0
        #: The waiting bytes by load, in order of arrival, and the reads in flight by load.
        self._left: dict[int, float] = {}
        self._in_flight: dict[int, int] = {}

    def begin(self, now_s: float, load: int, count: float) -> list[tuple[float, int]]:
        """Queue a load; return the reads that get a place."""
        self.read(now_s, count)  # the end of the whole queue does not depend on the order
        self._left[load], self._in_flight[load] = count, 0
        return self._hand_over(now_s)

    def came(self, now_s: float, load: int) -> tuple[list[tuple[float, int]], bool]:
        """Complete a read; return the reads that get a place, and whether the load is complete."""
        self._places += 1
        self._in_flight[load] -= 1
        given = self._hand_over(now_s)
        ended = load not in self._left and not self._in_flight[load]
        if ended:
            del self._in_flight[load]
        return given, ended

    def _hand_over(self, now_s: float) -> list[tuple[float, int]]:
        given = []
        while self._places and self._left:
            load = min(self._left, key=self._in_flight.__getitem__)
            count = min(self._chunk_bytes, self._left[load])
            self._left[load] -= count
            if not self._left[load]:
                del self._left[load]
            self._in_flight[load] += 1
            self._places -= 1
            self._link_s = max(now_s, self._link_s) + count / self.rate
            given.append((self._link_s, load))
        return given


def balance(lanes: list[Lane], share: float = 0.6) -> list[float]:
    """Return the lanes' maximum / mean of bytes by window. Only the first `share` of the windows
    with reads counts, because too few agents remain in the last ones."""
    length = max((len(lane.windows) for lane in lanes), default=0)
    found = []
    for window in range(length):
        counts = [lane.windows[window] if window < len(lane.windows) else 0.0 for lane in lanes]
        if total := sum(counts):
            found.append(max(counts) * len(counts) / total)
    return found[: max(1, int(len(found) * share))]
