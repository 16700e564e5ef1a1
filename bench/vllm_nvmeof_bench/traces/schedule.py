# SPDX-License-Identifier: Apache-2.0
"""Who asks what when, on a virtual clock: users that come one after the other, think, and wait.

A session with a `start_s` begins at that time, whoever is busy. The others are taken by users in
an order drawn from the seed; a user who is through with one takes the next.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_nvmeof_bench.traces.model import Request, Session, Step, Trace

__all__ = ["Pace", "in_order", "thinking_s", "virtual"]


@dataclass(frozen=True)
class Pace:
    """users: how many there are at most. ramp_s: from one user's arrival to the next one's.
    time_scale: of think times and arrivals; 0: nobody waits. think_s_max: after scaling."""

    users: int = 16
    ramp_s: float = 5.0
    time_scale: float = 1.0
    think_s_max: float = 60.0
    seed: int = 1


def in_order(trace: Trace, seed: int) -> list[Session]:
    """The sessions in the order in which they are begun."""
    timed = [one for one in trace.sessions if one.start_s is not None]
    free = [one for one in trace.sessions if one.start_s is None]
    random.Random(seed).shuffle(free)
    return sorted(timed, key=lambda one: one.start_s or 0.0) + free


def thinking_s(request: Request, pace: Pace) -> float:
    return min(request.think_s * pace.time_scale, pace.think_s_max)


def virtual(trace: Trace, pace: Pace) -> Iterator[tuple[float, Request]]:
    """(when, request) in the order of time; an answer takes as long as it took when recorded."""
    return _VirtualUsers(trace, pace).run()


class _Cursor:
    """Where a session is. children: sub-agents that it waits for. ready: what it asks next."""

    def __init__(self, steps: Iterator[Step], parent: _Cursor | None) -> None:
        self.steps = steps
        self.parent = parent
        self.children = 0
        self.ready: Request | None = None


class _VirtualUsers:
    def __init__(self, trace: Trace, pace: Pace) -> None:
        self._pace = pace
        self._numbers = itertools.count()  # what happens at the same time happens in this order
        self._heap: list[tuple[float, int, _Cursor]] = []
        order = in_order(trace, pace.seed)
        free = [one for one in order if one.start_s is None]
        for session in order[: len(order) - len(free)]:
            self._begin(session, (session.start_s or 0.0) * pace.time_scale)
        for number, session in enumerate(free[: pace.users]):
            self._begin(session, number * pace.ramp_s)
        self._waiting = iter(free[pace.users :])

    def run(self) -> Iterator[tuple[float, Request]]:
        while self._heap:
            now_s, _, cursor = heapq.heappop(self._heap)
            if cursor.ready is not None:
                yield now_s, cursor.ready
                now_s += cursor.ready.service_s
            cursor.ready = None
            self._go_on(cursor, now_s)

    def _go_on(self, cursor: _Cursor, now_s: float) -> None:
        step = next(cursor.steps, None)
        if isinstance(step, Request):
            cursor.ready = step
            self._push(now_s + thinking_s(step, self._pace), cursor)
        elif step is not None:
            cursor.children = len(step)
            for child in step:
                self._begin(child, now_s, cursor)
        elif cursor.parent is not None:
            cursor.parent.children -= 1
            if not cursor.parent.children:
                self._push(now_s, cursor.parent)
        else:
            session = next(self._waiting, None)
            if session is not None:
                self._begin(session, now_s)

    def _begin(self, session: Session, at_s: float, parent: _Cursor | None = None) -> None:
        self._push(at_s, _Cursor(iter(session.steps), parent))

    def _push(self, at_s: float, cursor: _Cursor) -> None:
        heapq.heappush(self._heap, (at_s, next(self._numbers), cursor))
