# SPDX-License-Identifier: Apache-2.0
"""A rank offers a reset to its engine in time, even while other operations hang."""

from __future__ import annotations

from .base import Clock, Violation

#: Added to the writes' deadline. A turn of the pipeline's thread after it waits for no write.
_SLACK_S = 0.5


class ResetRule:
    """One rank's resets that were not offered to the engine yet."""

    def __init__(self, clock: Clock, write_deadline_s: float) -> None:
        self._clock = clock
        self._limit_s = write_deadline_s + _SLACK_S
        self._owed = 0
        self._since_s = 0.0

    def asked(self) -> None:
        """The pipeline received a reset."""
        if not self._owed:
            self._since_s = self._clock()
        self._owed += 1

    def offered(self) -> None:
        """The engine got a reset; a failed reset is offered again."""
        self._owed = max(0, self._owed - 1)
        self._since_s = self._clock()

    def check(self, *, resetting: bool) -> None:
        """Check after a turn of the pipeline. resetting: the engine has a reset, others wait."""
        now_s = self._clock()
        if resetting:
            self._since_s = now_s
        elif self._owed and now_s - self._since_s > self._limit_s:
            waited_s = now_s - self._since_s
            raise Violation(
                "reset", f"not started after {waited_s:.1f} s: hung operations block it"
            )
