# SPDX-License-Identifier: Apache-2.0
"""The order of operations on each cache slot (rule 1), and the stream slots. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.worker.tasks import FairQueue, Task


@dataclass(frozen=True, slots=True)
class Grant:
    """This task may use its slot; `stale`: the slot does not hold what the task expects."""

    task: Task
    stale: bool


@dataclass(slots=True)
class _Gate:
    held: SlotIdentity | None = None
    filling: SlotIdentity | None = None
    abandoned: bool = False  # the fill has failed, and its buffer is not released yet
    readers: int = 0
    #: The task that fills the slot now, then the tasks that wait to fill it, in order.
    fillers: list[Task] = field(default_factory=list)
    queue: deque[tuple[Task, SlotIdentity, bool]] = field(default_factory=deque)


class SlotGates:
    """One gate per cache slot. Operations on one slot run in the order in which they were given.

    A fill (a store's copy, a read into the slot) excludes everything else; reads of the slot (a
    load's copy, a write to the pool) share it. A read names the identity it expects: on a slot
    that holds anything else it is STALE and touches nothing, because a CRC made from such a slot
    would sign wrong bytes. Every call returns the grants that follow from it, in order.
    """

    def __init__(self) -> None:
        self._gates: dict[int, _Gate] = {}

    def ask(self, slot: int, task: Task, identity: SlotIdentity, *, fill: bool) -> list[Grant]:
        """Queue `task` at the slot. A stale grant holds nothing and is not given back."""
        gate = self._gates.setdefault(slot, _Gate())
        gate.queue.append((task, identity, fill))
        if fill:
            gate.fillers.append(task)
        return self._grant(gate)

    def fillers(self, slot: int) -> tuple[Task, ...]:
        """Tasks that fill the slot now or will before the next that asks, in order."""
        gate = self._gates.get(slot)
        return tuple(gate.fillers) if gate is not None else ()

    def withdraw(self, slot: int, task: Task) -> tuple[bool, list[Grant]]:
        """Take a task out of the queue; False if it is not waiting there (any more)."""
        gate = self._gates[slot]
        kept = deque(item for item in gate.queue if item[0] is not task)
        if len(kept) == len(gate.queue):
            return False, []
        gate.queue = kept
        gate.fillers = [filler for filler in gate.fillers if filler is not task]
        return True, self._grant(gate)

    def awaited(self, slot: int) -> bool:
        """Return whether a task waits to read what is being filled in."""
        gate = self._gates[slot]
        return any(not fill and identity == gate.filling for _, identity, fill in gate.queue)

    def filled(self, slot: int, *, ok: bool) -> list[Grant]:
        """End the fill, whose buffer is released; a failed one leaves the slot empty."""
        gate = self._gates[slot]
        assert gate.filling is not None
        gate.held = gate.filling if ok and not gate.abandoned else None
        gate.filling, gate.abandoned = None, False
        gate.fillers.pop(0)
        return self._grant(gate)

    def abandon(self, slot: int) -> list[Grant]:
        """Give up a failed fill whose buffer the kernel holds, perhaps for ever.

        Its readers become stale at once; `filled` still has to follow.
        """
        gate = self._gates[slot]
        assert gate.filling is not None
        gate.abandoned = True
        return self._grant(gate)

    def filled_and_read(self, slot: int) -> list[Grant]:
        """End the fill; its task goes on as a reader."""
        self._gates[slot].readers += 1
        return self.filled(slot, ok=True)

    def read(self, slot: int) -> list[Grant]:
        """End one read, whose buffer is released."""
        gate = self._gates[slot]
        assert gate.readers > 0
        gate.readers -= 1
        return self._grant(gate)

    def idle(self) -> bool:
        return not any(g.queue or g.readers or g.filling for g in self._gates.values())

    def _grant(self, gate: _Gate) -> list[Grant]:
        grants: list[Grant] = []
        while gate.queue and (gate.filling is None or gate.abandoned):
            task, identity, fill = gate.queue[0]
            if fill and (gate.filling is not None or gate.readers):
                break
            gate.queue.popleft()
            stale = not fill and gate.held != identity
            if fill:
                gate.held, gate.filling = None, identity
            else:
                gate.readers += not stale
            grants.append(Grant(task, stale))
        return grants


class StreamSlots:
    """A bounded number of slots through which loads of any size pass. Sets `Task.stream_slot`.

    Each target may hold at most its share of the slots, so that targets that hang cannot take
    those of the others. Within a target jobs share fairly.
    """

    def __init__(self, slots: int, target_count: int) -> None:
        self._slots = slots
        self._share = max(1, slots // target_count)
        self._free = deque(range(slots))
        self._queues = [FairQueue(lambda task: task.job) for _ in range(target_count)]
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
        """Take out a task that waits."""
        waited = self._queues[task.target].remove(task)
        assert waited

    def hand_out(self) -> list[Task]:
        """Give out free slots, one per target at a time; return the tasks that got one."""
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
        """Free the task's slot, which no engine has any more."""
        assert task.stream_slot is not None
        self._free.append(task.stream_slot)
        task.stream_slot = None
        self._queues[task.target].give_back(task)
        self._hung[task.target] -= task.hung
        task.hung = False

    def mark_hung(self, task: Task) -> None:
        """Note that the kernel holds the task's slot past its deadline, perhaps for ever."""
        assert task.stream_slot is not None
        task.hung = True
        self._hung[task.target] += 1

    def take_unservable(self) -> list[Task]:
        """Take out the tasks that could only get slots that the kernel may never return."""
        everything = sum(self._hung) == self._slots
        return [
            task
            for queue, hung in zip(self._queues, self._hung, strict=True)
            if queue and (everything or hung == self._share)
            for task in queue.take_all()
        ]

    def idle(self) -> bool:
        return len(self._free) == self._slots and not any(self._queues)
