# SPDX-License-Identifier: Apache-2.0
"""Loads that may take only so long: when each began in the workers, and which are overdue.

A load is handed to the workers with its step, and begins when that step's work is done; its
time runs from there, for until then computing could not have begun either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["LoadLimits"]

#: Steps that the engine schedules ahead; more means that outputs were missed.
_AHEAD_MAX = 8


class LoadLimits:
    """`scheduled` and `ended` come in turn, once for every engine step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planned: list[int] = []  # ops since the last step was scheduled
        self._ahead: deque[list[int]] = deque()  # ops by step that is under way
        self._limit_s: dict[int, float] = {}
        self._due_s: dict[int, float] = {}
        self._cut: set[int] = set()

    def planned(self, op: int, limit_s: float) -> None:
        """The next step brings this load to the workers."""
        self._planned.append(op)
        self._limit_s[op] = limit_s

    def scheduled(self) -> None:
        self._ahead.append(self._planned)
        self._planned = []
        if len(self._ahead) > _AHEAD_MAX:
            self._ahead.popleft()

    def ended(self) -> None:
        """The oldest step's output has come."""
        now_s = self._clock()
        for op in self._ahead.popleft() if self._ahead else ():
            if op in self._limit_s:
                self._due_s[op] = now_s + self._limit_s[op]

    def over(self, op: int) -> bool:
        """The load has its outcome; returns whether it was cut off."""
        self._forget(op)
        was_cut = op in self._cut
        self._cut.discard(op)
        return was_cut

    def take_overdue(self) -> list[int]:
        """Loads to cut off now; each is named once."""
        if not self._due_s:
            return []
        now_s = self._clock()
        overdue = [op for op, due_s in self._due_s.items() if now_s > due_s]
        for op in overdue:
            self._forget(op)
        self._cut.update(overdue)
        return overdue

    def _forget(self, op: int) -> None:
        self._limit_s.pop(op, None)
        self._due_s.pop(op, None)
