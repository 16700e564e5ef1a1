# SPDX-License-Identifier: Apache-2.0
"""A reset that a rank was told of is offered to its engine in time, whatever hangs there."""

from __future__ import annotations

from .base import Clock, Violation

#: Beyond the writes' deadline: at a turn of the pipeline's thread after it, none is waited for.
_SLACK_S = 0.5


class ResetRule:
    """One rank's resets that its engine was not given yet."""

    def __init__(self, clock: Clock, write_deadline_s: float) -> None:
        self._clock = clock
        self._limit_s = write_deadline_s + _SLACK_S
        self._owed = 0
        self._since_s = 0.0

    def asked(self) -> None:
        """The pipeline is told to reset."""
        if not self._owed:
            self._since_s = self._clock()
        self._owed += 1

    def offered(self, *, accepted: bool) -> None:
        """The engine is offered a reset; a failed one is offered once more."""
        self._owed = max(0, self._owed - accepted)
        self._since_s = self._clock()

    def check(self, *, resetting: bool) -> None:
        """After the pipeline has moved. resetting: a reset is with the engine, others wait."""
        now_s = self._clock()
        if resetting:
            self._since_s = now_s
        elif self._owed and now_s - self._since_s > self._limit_s:
            waited_s = now_s - self._since_s
            raise Violation("reset", f"not begun after {waited_s:.1f} s: it waits for what hangs")
