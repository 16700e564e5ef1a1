# SPDX-License-Identifier: Apache-2.0
"""Cache slots as the worker sees them: what they hold, and whose turn it is (rule 1).

Operations on one slot run in the order in which they were given. A fill (a store's copy, a
read into the slot) excludes everything else; reads of the slot (a load's copy, a write to the
pool) share it. A read names the identity it expects: on a slot that holds anything else it is
STALE and touches nothing, for a CRC alone would sign wrong bytes.

The stream slots: a bounded number through which loads of any size pass. Pure.

Each target may hold its share of them and no more: a target that hangs, or several at once,
cannot take those of the others. Within a target jobs share fairly. What the kernel holds past
its deadline may never come back: who could get nothing else is not left waiting.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.worker.fair_queue import FairQueue
from vllm_nvmeof_offload.worker.tasks import Task

__all__ = [
    "Grant",
    "SlotGates",
    "StreamSlots",
]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Grant(Generic[T]):
    """It is this task's turn; `stale`: the slot does not hold what the task expects."""

    task: T
    stale: bool


@dataclass(slots=True)
class _Gate(Generic[T]):
    held: SlotIdentity | None = None
    filling: SlotIdentity | None = None
    abandoned: bool = False  # the fill has failed, and its buffer is not released yet
    readers: int = 0
    #: Who fills the slot now, then who waits to fill it, in order.
    fillers: list[T] = field(default_factory=list)
    queue: deque[tuple[T, SlotIdentity, bool]] = field(default_factory=deque)


class SlotGates(Generic[T]):
    """One gate a cache slot. Grants come back from each call, in order, to be acted upon."""

    def __init__(self) -> None:
        self._gates: dict[int, _Gate[T]] = {}

    def ask(self, slot: int, task: T, identity: SlotIdentity, *, fill: bool) -> list[Grant[T]]:
        """Queue `task` at the slot. A stale grant holds nothing and is not given back."""
        gate = self._gates.setdefault(slot, _Gate())
        gate.queue.append((task, identity, fill))
        if fill:
            gate.fillers.append(task)
        return self._turn(gate)

    def fillers(self, slot: int) -> tuple[T, ...]:
        """Who fills the slot now or will, in order, before whoever asks next."""
        gate = self._gates.get(slot)
        return tuple(gate.fillers) if gate is not None else ()

    def withdraw(self, slot: int, task: T) -> tuple[bool, list[Grant[T]]]:
        """Take a task out of the queue; False if it is not waiting there (any more)."""
        gate = self._gates[slot]
        kept = deque(item for item in gate.queue if item[0] is not task)
        if len(kept) == len(gate.queue):
            return False, []
        gate.queue = kept
        gate.fillers = [filler for filler in gate.fillers if filler is not task]
        return True, self._turn(gate)

    def awaited(self, slot: int) -> bool:
        """Does anyone wait to read what is being filled in?"""
        gate = self._gates[slot]
        return any(not fill and identity == gate.filling for _, identity, fill in gate.queue)

    def filled(self, slot: int, *, ok: bool) -> list[Grant[T]]:
        """The fill is over and the buffer released; a failed one leaves the slot empty."""
        gate = self._gates[slot]
        assert gate.filling is not None
        gate.held = gate.filling if ok and not gate.abandoned else None
        gate.filling, gate.abandoned = None, False
        gate.fillers.pop(0)
        return self._turn(gate)

    def abandon(self, slot: int) -> list[Grant[T]]:
        """The fill has failed and its buffer is with the kernel, perhaps for ever.

        Its readers learn at once that they will find nothing; `filled` still has to follow.
        """
        gate = self._gates[slot]
        assert gate.filling is not None
        gate.abandoned = True
        return self._turn(gate)

    def filled_and_read(self, slot: int) -> list[Grant[T]]:
        """The fill is over and its task goes on as a reader."""
        self._gates[slot].readers += 1
        return self.filled(slot, ok=True)

    def read(self, slot: int) -> list[Grant[T]]:
        """One reader is done and its buffer released."""
        gate = self._gates[slot]
        assert gate.readers > 0
        gate.readers -= 1
        return self._turn(gate)

    def idle(self) -> bool:
        return not any(g.queue or g.readers or g.filling for g in self._gates.values())

    def _turn(self, gate: _Gate[T]) -> list[Grant[T]]:
        grants: list[Grant[T]] = []
        while gate.queue and (gate.filling is None or gate.abandoned):
            task, identity, fill = gate.queue[0]
            if gate.filling is not None and fill:
                break
            if fill:
                if gate.readers:
                    break
                gate.held, gate.filling = None, identity
                gate.queue.popleft()
                grants.append(Grant(task, stale=False))
            else:
                stale = gate.held != identity
                gate.readers += not stale
                gate.queue.popleft()
                grants.append(Grant(task, stale=stale))
        return grants


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
