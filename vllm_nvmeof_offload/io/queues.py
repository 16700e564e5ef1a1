# SPDX-License-Identifier: Apache-2.0
"""Which operation starts next: the policy of the threads engine. Pure, not thread-safe.

Priority by class, first come first served within one. Writes never hold every thread, and
while any read waits or runs at most one write runs: a read beside 64 MiB of writes in flight
takes five times as long as beside one.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.io.base import IoKind, IoOp
from vllm_nvmeof_offload.protocol import IoClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_nvmeof_offload.io.transfer import SlotFiles
    from vllm_nvmeof_offload.pool.layout import Stamp

__all__ = ["Limits", "OpState", "Phase", "Queues"]


class Phase(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    #: Past its deadline while running: its outcome is out, its buffer is not.
    OVERDUE = "overdue"
    DONE = "done"


@dataclass(slots=True, eq=False)
class OpState:
    """One operation inside the engine.

    stamp: of a write; the pool's when it was submitted, or, if resets were pending then, when
    the last of those finished. So a reset voids exactly the writes submitted before it.
    files: the pool's when it was submitted; None for a reset.
    """

    op: IoOp
    sequence: int
    files: SlotFiles | None = None
    stamp: Stamp | None = None
    phase: Phase = Phase.QUEUED


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine. The `bytes_in_flight` count operations that run, not overdue ones
    (a path that hangs must not stop the others); at least one of a kind may always run.
    """

    threads: int
    slot_bytes: int
    read_bytes_in_flight_max: int
    write_bytes_in_flight_max: int
    queue_max: int


@dataclass(slots=True)
class Queues:
    """What waits and what runs. threads_working: those not lost in the kernel."""

    limits: Limits
    threads_working: int = 0
    waiting: dict[IoClass, OrderedDict[int, OpState]] = field(
        default_factory=lambda: {io_class: OrderedDict() for io_class in IoClass}
    )
    resets: OrderedDict[int, OpState] = field(default_factory=OrderedDict)
    reads_running: int = 0
    writes_running: int = 0
    #: Sequence numbers of resets that have not finished: later writes wait for them.
    barriers: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.resets) + sum(map(len, self.waiting.values()))

    def add(self, state: OpState) -> None:
        if state.op.kind is IoKind.RESET:
            self.barriers.append(state.sequence)
        self._queue_of(state)[state.op.token] = state

    def remove(self, state: OpState) -> None:
        """Take out an operation that has not started."""
        assert state.phase is Phase.QUEUED
        del self._queue_of(state)[state.op.token]
        self._lift_barrier(state)

    def all_waiting(self) -> Iterator[OpState]:
        for queue in (self.resets, *self.waiting.values()):
            yield from list(queue.values())

    def start_next(self) -> OpState | None:
        """Take the operation to start now, if there is one."""
        state = self._next()
        if state is not None:
            del self._queue_of(state)[state.op.token]
            state.phase = Phase.RUNNING
            self._count(state, 1)
        return state

    def overdue(self, state: OpState) -> None:
        """A running operation stops counting: it hangs."""
        assert state.phase is Phase.RUNNING
        state.phase = Phase.OVERDUE
        self._count(state, -1)

    def finish(self, state: OpState) -> None:
        """A started operation has ended."""
        if state.phase is Phase.RUNNING:
            self._count(state, -1)
        self._lift_barrier(state)
        state.phase = Phase.DONE

    def _queue_of(self, state: OpState) -> OrderedDict[int, OpState]:
        if state.op.kind is IoKind.RESET:
            return self.resets
        return self.waiting[state.op.io_class]

    def _lift_barrier(self, state: OpState) -> None:
        if state.op.kind is IoKind.RESET:
            self.barriers.remove(state.sequence)

    def _count(self, state: OpState, change: int) -> None:
        if state.op.kind is IoKind.READ_SLOT:
            self.reads_running += change
        elif state.op.kind is IoKind.WRITE_SLOT:
            self.writes_running += change

    def _next(self) -> OpState | None:
        reset = next(iter(self.resets.values()), None)
        if reset is not None and not self._waits_for_reset(reset):
            return reset
        reads_wait = False
        for io_class in IoClass:
            # Only the first one: nobody overtakes within a class.
            state = next(iter(self.waiting[io_class].values()), None)
            if state is None:
                continue
            if state.op.kind is IoKind.READ_SLOT:
                reads_wait = True
                if self._may_read():
                    return state
            elif self._may_write(state, reads_wait):
                return state
        return None

    def unmarked_writes(self) -> list[OpState]:
        """Waiting writes that lack a stamp, though every reset before them has finished."""
        return [
            state
            for queue in self.waiting.values()
            for state in queue.values()
            if state.op.kind is IoKind.WRITE_SLOT
            and state.stamp is None
            and not self._waits_for_reset(state)
        ]

    def _waits_for_reset(self, state: OpState) -> bool:
        return any(barrier < state.sequence for barrier in self.barriers)

    def _may_read(self) -> bool:
        size = self.limits.slot_bytes
        limit = self.limits.read_bytes_in_flight_max
        return self.reads_running == 0 or (self.reads_running + 1) * size <= limit

    def _may_write(self, state: OpState, reads_wait: bool) -> bool:
        if self._waits_for_reset(state) or self.writes_running >= self.threads_working - 1:
            return False
        if self.writes_running == 0:
            return True
        if reads_wait or self.reads_running:
            return False
        size = self.limits.slot_bytes
        return (self.writes_running + 1) * size <= self.limits.write_bytes_in_flight_max
