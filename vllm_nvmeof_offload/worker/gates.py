# SPDX-License-Identifier: Apache-2.0
"""Cache slots as the worker sees them: what they hold, and whose turn it is (rule 1).

Operations on one slot run in the order in which they were given. A fill (a store's copy, a
read into the slot) excludes everything else; reads of the slot (a load's copy, a write to the
pool) share it. A read names the identity it expects: on a slot that holds anything else it is
STALE and touches nothing, for a CRC alone would sign wrong bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_nvmeof_offload.protocol import SlotIdentity

__all__ = ["Grant", "SlotGates"]

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
