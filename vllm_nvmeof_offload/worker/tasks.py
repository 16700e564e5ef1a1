# SPDX-License-Identifier: Apache-2.0
"""Jobs (one command each), tasks (one chunk each), and the queue in which tasks wait. Pure."""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors
from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.staging import StagingMap

_NO_PIECES: Descriptors = np.empty((0, 3), np.uint64)


class Step(enum.Enum):
    """The part of its way that a task has reached."""

    GATE = "gate"  # waits for its turn at its cache slot
    STREAM = "stream"  # waits for a stream slot
    IO = "io"  # queued for, or in, the I/O engine
    COPY = "copy"  # queued for, or in, the copy engine
    ZOMBIE = "zombie"  # decided; the kernel still has its buffer
    DONE = "done"


@dataclass(slots=True, eq=False)
class Job:
    """One command."""

    op: int
    kind: OpKind
    tasks: list[Task] = field(default_factory=list)
    fence: object = None
    started_s: float = 0.0
    tasks_left: int = 0
    #: Cache slots of this job that the kernel still has.
    unreleased: int = 0
    cancelled: bool = False
    failures: list[tuple[int, Outcome]] = field(default_factory=list)
    copied_bytes: int = 0
    #: Fetch only: when its read ended, if the engine knows.
    ended_s: float | None = None


@dataclass(slots=True, eq=False)
class Task:
    """One chunk of a job.

    cache_slot None: through a stream slot. pool_slot None: no I/O; otherwise it is on `target`.
    pieces: uint64[n, 3] of (KV cache address, offset in the slot's payload, bytes).
    """

    job: Job
    index: int
    identity: SlotIdentity
    cache_slot: int | None
    pool_slot: int | None
    urgency: Urgency
    target: int = 0
    pieces: Descriptors = field(default_factory=lambda: _NO_PIECES)
    step: Step = Step.GATE
    stream_slot: int | None = None
    hung: bool = False  # the kernel holds its stream slot past the deadline
    #: The gate of `cache_slot` counts this task as its filler, as a reader, or not at all.
    fills: bool = False
    reads: bool = False
    io_token: int | None = None
    io_retries_left: int = 1
    #: Fetch only: the load that waits for it and on whose share of the reads it therefore goes.
    promoted_for: Job | None = None
    #: Reset only: may what is written from now on be adopted at a later start?
    adoptable: bool = True

    @property
    def charged_to(self) -> Job:
        """The job on whose share of the reads this task goes."""
        return self.job if self.promoted_for is None else self.promoted_for

    def address(self, staging: StagingMap) -> int:
        """Address of the task's slot in staging."""
        if self.stream_slot is not None:
            return staging.stream_address(self.stream_slot)
        assert self.cache_slot is not None
        return staging.cache_address(self.cache_slot)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A store or load that no DMA works on any more. failures: chunk index → outcome."""

    op: int
    failures: tuple[tuple[int, Outcome], ...]
    copied_bytes: int
    seconds: float


#: The heap may hold this many outdated entries, and one more per job.
_OUTDATED_MAX = 64


@dataclass(slots=True)
class _JobQueue:
    """One job: its waiting tasks with their sequence numbers, and the places it holds."""

    waiting: OrderedDict[Task, int] = field(default_factory=OrderedDict)
    held: int = 0


class FairQueue:
    """Shares a limited number of places fairly between jobs with many waiting tasks.

    The job that holds the fewest places goes first; among equals, the job whose first task has
    waited longest. Within a job the order is kept. Only the first task of each job is looked at,
    so that one job of ten thousand tasks costs as much as ten thousand jobs of one task.

    job_of: must not change while a task waits or has a place.
    """

    def __init__(self, job_of: Callable[[Task], Hashable]) -> None:
        #: Places that all jobs hold together.
        self.held = 0
        self._job_of = job_of
        self._jobs: dict[Hashable, _JobQueue] = {}
        #: (held, first sequence number, job). Each job that waits has an entry of its present
        #: position; other entries are outdated.
        self._heap: list[tuple[int, int, Hashable]] = []
        self._count = 0
        self._sequence = 0

    def __len__(self) -> int:
        return self._count

    def push(self, task: Task, *, front: bool = False) -> None:
        """Queue a task behind its job's others. `front`: as if it had waited longest of all."""
        job = self._job_of(task)
        queue = self._jobs.setdefault(job, _JobQueue())
        assert task not in queue.waiting
        self._sequence += 1
        self._count += 1
        queue.waiting[task] = -self._sequence if front else self._sequence
        if front:
            queue.waiting.move_to_end(task, last=False)
        if front or len(queue.waiting) == 1:
            self._moved(job, queue)

    def remove(self, task: Task) -> bool:
        """Take a waiting task out; False if it does not wait here."""
        job = self._job_of(task)
        queue = self._jobs.get(job)
        if queue is None or task not in queue.waiting:
            return False
        del queue.waiting[task]
        self._count -= 1
        self._moved(job, queue)
        return True

    def peek(self) -> Task | None:
        """Return the task that is next."""
        while self._heap:
            held, sequence, job = self._heap[0]
            queue = self._jobs.get(job)
            if queue is not None and queue.waiting:
                task, waits_since = next(iter(queue.waiting.items()))
                if (queue.held, waits_since) == (held, sequence):
                    return task
            heapq.heappop(self._heap)
        return None

    def take(self) -> Task | None:
        """Give the next task a place."""
        task = self.peek()
        if task is None:
            return None
        job = self._job_of(task)
        queue = self._jobs[job]
        del queue.waiting[task]
        self._count -= 1
        queue.held += 1
        self.held += 1
        self._moved(job, queue)
        return task

    def give_back(self, task: Task) -> None:
        """Free the place of a task that was taken."""
        job = self._job_of(task)
        queue = self._jobs[job]
        assert queue.held > 0
        queue.held -= 1
        self.held -= 1
        self._moved(job, queue)

    def take_all(self) -> list[Task]:
        """Take out everything that waits, the longest waiting first; no places are given."""
        waiting = [item for queue in self._jobs.values() for item in queue.waiting.items()]
        self._jobs = {job: queue for job, queue in self._jobs.items() if queue.held}
        for queue in self._jobs.values():
            queue.waiting.clear()
        self._heap.clear()
        self._count = 0
        return [task for task, _ in sorted(waiting, key=lambda item: item[1])]

    def _moved(self, job: Hashable, queue: _JobQueue) -> None:
        """Enter the job's present position into the heap; forget a job that needs none."""
        if queue.waiting:
            heapq.heappush(self._heap, (queue.held, next(iter(queue.waiting.values())), job))
        elif not queue.held:
            del self._jobs[job]
        if len(self._heap) > 2 * len(self._jobs) + _OUTDATED_MAX:
            self._heap = [
                (one.held, next(iter(one.waiting.values())), job)
                for job, one in self._jobs.items()
                if one.waiting
            ]
            heapq.heapify(self._heap)
