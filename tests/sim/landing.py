# SPDX-License-Identifier: Apache-2.0
"""Simulated copies within staging: of what peers have brought, into cache slots."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from vllm_nvmeof_offload.copy.base import Descriptors, Direction, Payloads
from vllm_nvmeof_offload.errors import OK, Outcome

from .base import STAGING_BASE, Clock, Knobs, Violation
from .memory import Memory
from .sets import APART


@dataclass(eq=False)
class _Ticket:
    number: int
    moves: list[tuple[int, int]]  # staging slots: to, from
    done_s: float

    def __str__(self) -> str:
        return f"landing {self.number} of {self.moves}"


class SimLanding:
    """CopyEngine over the slots of one rank's `Memory`."""

    makes_checksums = False

    def __init__(self, memory: Memory, knobs: Knobs, clock: Clock, seed: float) -> None:
        self.asleep = False
        self._memory, self._knobs, self._clock = memory, knobs, clock
        self._rng = random.Random(f"landing of {seed}")
        self._tickets: list[_Ticket] = []
        self._next = 1
        self.counts: Counter[str] = Counter()

    def record_fence(self) -> object:
        return None

    def has_passed(self, fence: object) -> bool:
        return True

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        assert direction is Direction.LOAD
        assert fence is None
        assert payloads is None
        moves = [(self._slot_of(to), self._slot_of(at)) for to, at, _ in pieces.tolist()]
        for to, at in moves:
            if to >= self._knobs.cache_slots or at < self._knobs.cache_slots:
                raise Violation("16", f"a peer's chunk goes from slot {at} to slot {to}")
        done_s = self._clock() + self._knobs.copy_s * self._rng.uniform(0.0, 2.0)
        ticket = _Ticket(self._next, moves, done_s)
        self._next += 1
        self.counts["landings"] += len(moves)
        reads = [("slot", at) for _, at in moves]
        writes = [(cell, to) for to, _ in moves for cell in ("head", "slot")]
        self._memory.watches.begin(ticket, reads, writes)
        self._tickets.append(ticket)
        return ticket.number

    def poll(self) -> list[tuple[int, Outcome]]:
        ended = [one for one in self._tickets if one.done_s <= self._clock()]
        for ticket in ended:
            self._tickets.remove(ticket)
            for to, at in ticket.moves:
                self._memory.slots[to][:] = self._memory.slots[at]
            self._memory.watches.end(ticket)
        return [(ticket.number, OK) for ticket in ended]

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def _slot_of(self, address: int) -> int:
        return (address - STAGING_BASE) % APART // self._knobs.slot_bytes
