# SPDX-License-Identifier: Apache-2.0
"""Tasks of many jobs that wait for few places, shared fairly. Pure.

Of the jobs with a task waiting, the one that holds the fewest places goes first; of those, the
one whose first task has waited longest. Within a job the order given is kept. Nothing here
looks at more than the first task of a job, so that a job of ten thousand tasks costs what ten
thousand jobs of one task do.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T", bound=Hashable)

#: The heap may hold so many outdated entries beside as many as there are jobs.
_OUTDATED_MAX = 64


@dataclass(slots=True)
class _Line(Generic[T]):
    """One job: what waits, in order, with its place in time, and how many places it holds."""

    waiting: OrderedDict[T, int] = field(default_factory=OrderedDict)
    held: int = 0
    #: The number of its valid entry in the heap. That entry may promise too much (too few
    #: places held, an earlier first task), never too little.
    entry: int = 0


class FairQueue(Generic[T]):
    """See the module's docstring. `job_of`: must not change while a task waits or has a place."""

    def __init__(self, job_of: Callable[[T], Hashable]) -> None:
        #: Places that all jobs hold together.
        self.held = 0
        self._job_of = job_of
        self._lines: dict[Hashable, _Line[T]] = {}
        self._heap: list[tuple[int, int, int, Hashable]] = []  # held, sequence, entry, job
        self._count = 0
        self._sequence = 0
        self._entries = 0

    def __len__(self) -> int:
        return self._count

    def push(self, task: T, *, front: bool = False) -> None:
        """Let a task wait behind its job's others; `front`: as if it had waited longest of all."""
        job = self._job_of(task)
        line = self._lines.setdefault(job, _Line())
        assert task not in line.waiting
        first = not line.waiting
        self._sequence += 1
        self._count += 1
        line.waiting[task] = -self._sequence if front else self._sequence
        if front:
            line.waiting.move_to_end(task, last=False)
        if first or front:
            self._enter(job, line)

    def remove(self, task: T) -> bool:
        """Take a waiting task out; False if it does not wait here."""
        job = self._job_of(task)
        line = self._lines.get(job)
        if line is None or task not in line.waiting:
            return False
        del line.waiting[task]
        self._count -= 1
        self._forget_if_empty(job, line)
        return True

    def peek(self) -> T | None:
        """The task whose turn it is."""
        while self._heap:
            held, sequence, entry, job = self._heap[0]
            line = self._lines.get(job)
            valid = line is not None and line.entry == entry and line.waiting
            if line is not None and valid:
                task, waits_since = next(iter(line.waiting.items()))
                if (line.held, waits_since) == (held, sequence):
                    return task
            heapq.heappop(self._heap)
            if line is not None and valid:
                self._enter(job, line)
        return None

    def take(self) -> T | None:
        """Give the task whose turn it is a place."""
        task = self.peek()
        if task is None:
            return None
        job = self._job_of(task)
        line = self._lines[job]
        del line.waiting[task]
        self._count -= 1
        line.held += 1
        self.held += 1
        return task

    def give_back(self, task: T) -> None:
        """A task that was taken has left its place."""
        job = self._job_of(task)
        line = self._lines[job]
        assert line.held > 0
        line.held -= 1
        self.held -= 1
        if line.waiting:
            self._enter(job, line)
        self._forget_if_empty(job, line)

    def take_all(self) -> list[T]:
        """Take everything that waits, the longest waiting first; no places are given."""
        waiting = [item for line in self._lines.values() for item in line.waiting.items()]
        self._lines = {job: line for job, line in self._lines.items() if line.held}
        for line in self._lines.values():
            line.waiting.clear()
        self._heap.clear()
        self._count = 0
        return [task for task, _ in sorted(waiting, key=lambda item: item[1])]

    def _enter(self, job: Hashable, line: _Line[T]) -> None:
        """Tell the heap where the job stands now; what it was told before does not count."""
        self._entries += 1
        line.entry = self._entries
        first = next(iter(line.waiting.values()))
        heapq.heappush(self._heap, (line.held, first, line.entry, job))
        if len(self._heap) > 2 * len(self._lines) + _OUTDATED_MAX:
            valid = {line.entry for line in self._lines.values()}
            self._heap = [item for item in self._heap if item[2] in valid]
            heapq.heapify(self._heap)

    def _forget_if_empty(self, job: Hashable, line: _Line[T]) -> None:
        if not line.waiting and not line.held:
            del self._lines[job]
