# SPDX-License-Identifier: Apache-2.0
"""The stream slots: a bounded number through which loads of any size pass. Pure.

Each target may hold its share of them and no more: a target that hangs, or several at once,
cannot take those of the others. Within a target jobs share fairly. What the kernel holds past
its deadline may never come back: who could get nothing else is not left waiting.
"""

from __future__ import annotations

from collections import deque

from vllm_nvmeof_offload.worker.fair_queue import FairQueue
from vllm_nvmeof_offload.worker.tasks import Task

__all__ = ["StreamSlots"]


class StreamSlots:
    """Sets `Task.stream_slot`; a task that has one gives it back."""

    def __init__(self, slots: int, target_count: int) -> None:
        self._slots = slots
        self._share = max(1, slots // target_count)
        self._free = deque(range(slots))
        self._queues = [FairQueue[Task](lambda task: task.job) for _ in range(target_count)]
        self._hung = [0] * target_count
        self._next = 0  # the target that is asked first: with few slots, each in its turn

    @property
    def used(self) -> int:
        return self._slots - len(self._free)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues))

    def wait(self, task: Task) -> None:
        self._queues[task.target].push(task)

    def withdraw(self, task: Task) -> None:
        """The task does not wait any more."""
        waited = self._queues[task.target].remove(task)
        assert waited

    def hand_out(self) -> list[Task]:
        """Give out what is free, one a target at a time; returns who got one, in order."""
        served: list[Task] = []
        passed_over = 0
        while self._free and passed_over < len(self._queues):
            queue = self._queues[self._next]
            self._next = (self._next + 1) % len(self._queues)
            task = queue.take() if queue.held < self._share else None
            passed_over = passed_over + 1 if task is None else 0
            if task is not None:
                task.stream_slot = self._free.popleft()
                served.append(task)
        return served

    def give_back(self, task: Task) -> None:
        """No engine has the task's slot any more."""
        assert task.stream_slot is not None
        self._free.append(task.stream_slot)
        task.stream_slot = None
        self._queues[task.target].give_back(task)
        self._hung[task.target] -= task.hung
        task.hung = False

    def hangs(self, task: Task) -> None:
        """The kernel holds the task's slot past its deadline, perhaps for ever."""
        assert task.stream_slot is not None
        task.hung = True
        self._hung[task.target] += 1

    def take_hopeless(self) -> list[Task]:
        """Who waits for slots all of which the kernel may never give back."""
        everything = sum(self._hung) == self._slots
        return [
            task
            for queue, hung in zip(self._queues, self._hung, strict=True)
            if queue and (everything or hung == self._share)
            for task in queue.take_all()
        ]

    def idle(self) -> bool:
        return len(self._free) == self._slots and not any(self._queues)
