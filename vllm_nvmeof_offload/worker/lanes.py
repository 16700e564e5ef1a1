# SPDX-License-Identifier: Apache-2.0
"""One target's lane to the I/O engine: what waits for it, in which line, and how much may go.

Each target has bounds of its own, so that a slow one cannot take what the others need. Reads
that a load waits for share by job; all else goes first come, first served. Fetches hold at
most half of the places of reads, so that a load always finds some.
"""

from __future__ import annotations

import enum

from vllm_nvmeof_offload.protocol import IoClass
from vllm_nvmeof_offload.worker.fair_queue import FairQueue
from vllm_nvmeof_offload.worker.tasks import Job, Task

__all__ = ["Lane", "Line"]


class Line(enum.Enum):
    """Where a task waits. Reads are given in the order in which they go."""

    DEMAND = "demand"
    URGENT = "urgent"
    PREFETCH = "prefetch"
    WRITE = "write"

    @staticmethod
    def of(task: Task) -> Line:
        if task.io_class is IoClass.WRITE_BEHIND:
            return Line.WRITE
        if task.io_class is IoClass.READ_DEMAND:
            return Line.DEMAND
        return Line.URGENT if task.urgent else Line.PREFETCH


_FETCHES = (Line.URGENT, Line.PREFETCH)
_READS = (Line.DEMAND, *_FETCHES)


class Lane:
    """Tasks towards one target. A task holds a place from the hand-over to its outcome."""

    def __init__(self, reads_max: int, writes_max: int) -> None:
        self._reads_max = reads_max
        self._writes_max = writes_max
        self._fetches_max = max(1, reads_max // 2)
        self._queues = {line: FairQueue[Task](_in_one_line) for line in Line}
        self._queues[Line.DEMAND] = FairQueue[Task](_by_job)
        #: is_write → since when the engine has taken nothing while something waited here.
        self._stalled_since_s: dict[bool, float | None] = {False: None, True: None}

    def queue(self, line: Line) -> FairQueue[Task]:
        return self._queues[line]

    def has_room(self, line: Line) -> bool:
        """May one more of this line be with the engine?"""
        if line is Line.WRITE:
            return self._queues[line].held < self._writes_max
        if line in _FETCHES and self._held(_FETCHES) >= self._fetches_max:
            return False
        return self._held(_READS) < self._reads_max

    @property
    def waiting(self) -> bool:
        return any(self._queues.values())

    def moves(self, *, is_write: bool) -> None:
        """The engine has taken something of this kind."""
        self._stalled_since_s[is_write] = None

    def take_stalled(self, now_s: float, patience_s: float, *, is_write: bool) -> list[Task]:
        """Take out what waits if the engine has taken nothing of this kind for long.

        Until it takes something, what comes next is offered once and is stalled as well: a
        load much larger than what may wait here at a time would fail bit by bit otherwise.
        """
        queues = [self._queues[line] for line in ((Line.WRITE,) if is_write else _READS)]
        since_s = self._stalled_since_s[is_write]
        if not any(queues):
            self._stalled_since_s[is_write] = None
        elif since_s is None:
            self._stalled_since_s[is_write] = now_s
        elif now_s - since_s >= patience_s:
            return [task for queue in queues for task in queue.take_all()]
        return []

    def _held(self, lines: tuple[Line, ...]) -> int:
        return sum(self._queues[line].held for line in lines)


def _by_job(task: Task) -> Job:
    return task.charged_to


def _in_one_line(task: Task) -> None:
    """All tasks count as one job's: first come, first served."""
