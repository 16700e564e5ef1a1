# SPDX-License-Identifier: Apache-2.0
"""A simulated copy engine: tickets start after their fence and finish late, in any order."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.units import HEADER_BYTES

from .base import BLOCK_BYTES, GPU_BASE, STAGING_BASE, Clock, Knobs, Violation
from .memory import Memory

Piece = tuple[int, int, int]  # GPU block, staging slot, block within the slot


@dataclass(eq=False)
class _Ticket:
    number: int
    direction: Direction
    pieces: list[Piece]
    start_s: float
    done_s: float
    outcome: Outcome
    executed: bool = False

    def __str__(self) -> str:
        return f"{self.direction.value} ticket {self.number}"


class SimCopy:
    """CopyEngine over `Memory`."""

    def __init__(self, memory: Memory, knobs: Knobs, clock: Clock, rng: random.Random) -> None:
        self._memory = memory
        self._knobs = knobs
        self._clock = clock
        self._rng = rng
        self._slot_bytes = HEADER_BYTES + knobs.blocks_per_chunk * BLOCK_BYTES
        self._tickets: list[_Ticket] = []
        self._next = 1
        self.stream_end_s = 0.0  # the model's stream is busy until this time

    def record_fence(self) -> object:
        return self.stream_end_s

    def submit(
        self, direction: Direction, pieces: Descriptors, fence: object, payloads: object = None
    ) -> int:
        assert isinstance(fence, float), "a job without a fence"
        start_s = max(self._clock(), fence)
        done_s = start_s + self._knobs.copy_s * self._rng.uniform(0.1, 2.0)
        failed = self._rng.random() < self._knobs.copy_fails
        ticket = _Ticket(
            self._next,
            direction,
            [self._decode(*map(int, row)) for row in pieces.tolist()],
            start_s,
            done_s,
            io_error(errno.EFAULT) if failed else OK,
        )
        self._next += 1
        blocks = [("gpu", block) for block, _, _ in ticket.pieces]
        slots = [("slot", slot) for _, slot, _ in ticket.pieces]
        if direction is Direction.STORE:
            self._memory.watches.begin(ticket, blocks, slots)
        else:
            self._memory.watches.begin(ticket, slots, blocks)
        self._tickets.append(ticket)
        return ticket.number

    def poll(self) -> list[tuple[int, Outcome]]:
        self.advance()
        seen = [t for t in self._tickets if t.executed and self._rng.random() < 0.8]
        self._rng.shuffle(seen)
        for ticket in seen:
            self._tickets.remove(ticket)
            self._memory.watches.end(ticket)
        return [(t.number, t.outcome) for t in seen]

    def close(self) -> None:
        """Do nothing: the simulated engine has nothing to free."""

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    def advance(self) -> None:
        """Execute the tickets that are due."""
        for ticket in self._tickets:
            if not ticket.executed and ticket.done_s <= self._clock():
                ticket.executed = True
                self._execute(ticket)

    def _execute(self, ticket: _Ticket) -> None:
        memory = self._memory
        cut = len(ticket.pieces) if ticket.outcome.ok else self._rng.randrange(len(ticket.pieces))
        for block, slot, position in ticket.pieces[:cut]:
            if ticket.direction is Direction.STORE:
                if ticket.start_s < memory.written_at_s[block]:
                    raise Violation("3", f"{ticket} read block {block} before it was computed")
                memory.slots[slot][position] = memory.gpu[block]
            else:
                if ticket.start_s < memory.read_until_s[block]:
                    raise Violation("3", f"{ticket} overwrote block {block} still being read")
                memory.gpu[block] = memory.slots[slot][position]

    def _decode(self, address: int, staging: int, size: int) -> Piece:
        assert size == BLOCK_BYTES
        block, rest = divmod(address - GPU_BASE, BLOCK_BYTES)
        slot, offset = divmod(staging - STAGING_BASE, self._slot_bytes)
        position, rest2 = divmod(offset - HEADER_BYTES, BLOCK_BYTES)
        assert not rest and not rest2 and 0 <= position < self._knobs.blocks_per_chunk
        return block, slot, position
