# SPDX-License-Identifier: Apache-2.0
"""When a peer is greeted again, how long it has been silent, and how fast bytes come."""

from __future__ import annotations

import collections

_SOON_S = 0.2
_AGAIN_MAX_S = 2.0
_LOST_MAX, _LOST_WITHIN_S = 3, 10.0
_LONG_S, _LONG_MAX_S = 30.0, 600.0
#: A turn of a thread that listens takes less, unless it is kept from running.
_TURN_S = 0.05
#: Bytes that moved in less time than this say little.
_WINDOW_S = 0.02
_NEW_SHARE = 0.3
_RECENT_S = 5.0


class Rest:
    """A session that was lost is begun again soon; three times in ten seconds lost or stalled end
    in a long rest, which doubles each time. A peer that is not there is greeted every few seconds.
    """

    def __init__(self) -> None:
        self._until_s = 0.0
        self._lost_s: collections.deque[float] = collections.deque(maxlen=_LOST_MAX)
        self._again_s = _SOON_S
        self._long_s = _LONG_S

    def is_over(self, now_s: float) -> bool:
        return now_s >= self._until_s

    def begin(self, now_s: float, *, was_up: bool, was_stalled: bool = False) -> None:
        """was_up: there was a session, which was lost; else nobody answered, or it refused.

        was_stalled: since its peer stalled, which has been counted.
        """
        if not was_up:
            self._wait(now_s + self._again_s)
            self._again_s = min(2 * self._again_s, _AGAIN_MAX_S)
            return
        self._again_s = _SOON_S
        self._wait(now_s + _SOON_S)
        if not was_stalled and self.is_once_too_often(now_s):
            self.begin_long(now_s)

    def is_once_too_often(self, now_s: float) -> bool:
        """A session was lost, or its peer stalls: return whether that is so all the time."""
        self._lost_s.append(now_s)
        return len(self._lost_s) == _LOST_MAX and now_s - self._lost_s[0] <= _LOST_WITHIN_S

    def begin_long(self, now_s: float) -> None:
        if now_s - self._until_s > self._long_s:
            self._long_s = _LONG_S  # it was well for longer than it last rested
        self._wait(now_s + self._long_s)
        self._long_s = min(2 * self._long_s, _LONG_MAX_S)
        self._lost_s.clear()

    def _wait(self, until_s: float) -> None:
        self._until_s = max(self._until_s, until_s)


class Listening:
    """The clock by which others are silent: it stands still while the thread that listens is kept
    from running. A process that was stopped, or whose interpreter was busy elsewhere, cannot tell
    what others did meanwhile."""

    def __init__(self, now_s: float) -> None:
        self.now_s = self._turn_s = now_s

    def turn(self, now_s: float, sleep_s: float) -> None:
        """A turn is over in which the thread was to sleep for so long."""
        self.now_s += min(now_s - self._turn_s, sleep_s + _TURN_S)
        self._turn_s = now_s


class BusyRate:
    """How fast transfers bring bytes, over the time in which any is under way."""

    def __init__(self) -> None:
        self.bytes_per_s = self._moved_s = 0.0
        self._since_s: float | None = None
        self._bytes = 0
        self._seconds = 0.0

    def moves(self, now_s: float) -> None:
        """A transfer began at `now_s`."""
        if self._since_s is None:
            self._since_s = now_s

    def moved(self, size_bytes: int, now_s: float, *, more: bool) -> None:
        """A transfer has ended. more: others are under way."""
        assert self._since_s is not None
        self._moved_s = now_s
        self._bytes += size_bytes
        self._seconds += now_s - self._since_s
        self._since_s = now_s if more else None
        if self._seconds >= _WINDOW_S:
            rate = self._bytes / self._seconds
            old = self.bytes_per_s
            self.bytes_per_s = old + _NEW_SHARE * (rate - old) if old else rate
            self._bytes, self._seconds = 0, 0.0

    def recent(self, now_s: float) -> float:
        """Return the rate; 0: nothing has moved for long. Whoever was slow may be so no more, and
        nobody finds out who asks for nothing."""
        return self.bytes_per_s if now_s - self._moved_s <= _RECENT_S else 0.0

    def stop(self) -> None:
        """What was under way is given up."""
        self._since_s = None
