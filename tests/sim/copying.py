# SPDX-License-Identifier: Apache-2.0
"""A simulated copy engine: tickets start after their fence and finish late, in any order."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from vllm_nvmeof_offload.copy.base import Descriptors, Direction, Payloads
from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.units import HEADER_BYTES

from .base import BLOCK_BYTES, GPU_BASE, STAGING_BASE, Clock, Knobs, Memory, Violation, crc_of
from .shapes import APART

COPY_ERRNO = errno.EFAULT


def with_checks(knobs: Knobs, seed: int, checks: bool) -> Knobs:
    """`knobs` with copies of loads that check payloads, if `checks`."""
    if not checks:
        return knobs
    rng = random.Random(f"checks of {seed}")
    return replace(
        knobs,
        copies_check=True,
        full_checks=rng.choice((0.0, 0.2, 0.5)),
        read_corrupts=rng.choice((0.0, 0.1, 0.3)) if knobs.profile != "calm" else 0.0,
        flushed_loads=rng.choice((0.0, 0.02, 0.1)),
        land_share=rng.choice((knobs.land_share, 1.0)),
        defer_shared_loads=knobs.defer_shared_loads and rng.random() < 0.5,
    )


#: GPU block, member and staging slot; and by page: the page's number in each.
Piece = tuple[int, tuple[int, int], list[tuple[int, int]]]


@dataclass(eq=False)
class _Ticket:
    number: int
    direction: Direction
    pieces: list[Piece]
    start_s: float
    done_s: float
    outcome: Outcome
    executed: bool = False
    payloads: Payloads | None = None

    @property
    def checks(self) -> bool:
        """Whether it is a load that checks what it brings."""
        return self.direction is Direction.LOAD and self.payloads is not None

    def by_chunk(self) -> list[list[Piece]]:
        assert self.payloads is not None
        left = iter(self.pieces)
        return [list(islice(left, count)) for count in self.payloads.counts.tolist()]

    def __str__(self) -> str:
        return f"{self.direction.value} ticket {self.number}"


class SimCopy:
    """CopyEngine over `Memory`. memories: of the members of the rank's set, as far as they are
    there; its own is number `member`."""

    makes_checksums = True

    def __init__(
        self,
        memories: Sequence[Memory],
        member: int,
        knobs: Knobs,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._memories = memories
        self._memory = memories[member]
        self._knobs = knobs
        self._clock = clock
        self._rng = rng
        self._slot_bytes = HEADER_BYTES + knobs.blocks_per_chunk * BLOCK_BYTES
        self._tickets: list[_Ticket] = []
        self._next = 1
        self.stream_end_s = 0.0  # the model's stream is busy until this time
        self.counts: Counter[str] = Counter()
        #: GPU block → the fences of the jobs that have named it.
        self._fences: dict[int, set[float]] = {}
        #: With these fences, and with or without payloads, since `poll`.
        self._called: set[tuple[Direction, object, bool]] = set()

    def record_fence(self) -> float:
        return self.stream_end_s

    def has_passed(self, fence: object) -> bool:
        """It is seen late at times."""
        assert isinstance(fence, float)
        return fence <= self._clock() and self._rng.random() < 0.8

    def expect(self, blocks: set[int], fence: float) -> None:
        """A job that copies these blocks waits for this fence."""
        for block in blocks:
            self._fences.setdefault(block, set()).add(fence)

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        call = direction, fence, payloads is None
        if call in self._called:
            raise Violation("copies", f"a second call to {direction.value} after fence {fence}")
        self._called.add(call)
        assert fence is None or isinstance(fence, float)
        start_s = self._clock() if fence is None else max(self._clock(), fence)
        done_s = start_s + self._knobs.copy_s * self._rng.uniform(0.1, 2.0)
        failed = self._rng.random() < self._knobs.copy_fails
        if not len(pieces):
            # It ends behind every ticket of its direction.
            others = [t.done_s for t in self._tickets if t.direction is direction]
            done_s, failed = max([done_s, *others]), False
        ticket = _Ticket(
            self._next,
            direction,
            [self._decode(*map(int, row)) for row in pieces.tolist()],
            start_s,
            done_s,
            io_error(COPY_ERRNO) if failed else OK,
            payloads=payloads,
        )
        self._next += 1
        for block, _, _ in ticket.pieces:
            of_its_jobs = self._fences[block]
            if fence is not None and fence not in of_its_jobs:
                raise Violation("3", f"{ticket} waits for the fence of another job")
            if fence is None and min(of_its_jobs) > start_s:
                raise Violation("3", f"{ticket} does not wait for the fence of its job")
        self._watch(ticket)
        if ticket.checks:
            self._check_whole(ticket)
        self._tickets.append(ticket)
        return ticket.number

    def _check_whole(self, ticket: _Ticket) -> None:
        """Rule 6: what is checked by its copy is all of a payload."""
        assert ticket.payloads is not None
        for pieces, size in zip(ticket.by_chunk(), ticket.payloads.sizes.tolist(), strict=True):
            found = [position for _, _, pages in pieces for _, position in pages]
            if found != list(range(size // self._knobs.page_bytes)):
                raise Violation("6", f"{ticket} checks pages {found} of {size} bytes")

    def _watch(self, ticket: _Ticket) -> None:
        blocks = [("gpu", block) for block, _, _ in ticket.pieces]
        for member, memory in enumerate(self._memories):
            slots = [("slot", slot) for _, (of, slot), _ in ticket.pieces if of == member]
            mine = blocks if memory is self._memory else []
            if ticket.direction is Direction.LOAD:
                memory.watches.begin(ticket, slots, mine, checks=ticket.checks)
                self.counts["copies_from_a_member"] += bool(slots) and memory is not self._memory
            elif slots and memory is not self._memory:
                raise Violation("17", f"{ticket} stores into member {member}'s slots")
            else:
                memory.watches.begin(ticket, mine, slots)

    def poll(self) -> list[tuple[int, Outcome]]:
        self._called.clear()
        self.advance()
        seen = [t for t in self._tickets if t.executed and self._rng.random() < 0.8]
        self._rng.shuffle(seen)
        seen = [t for t in seen if t.pieces or self._is_last(t, seen)]
        for ticket in seen:
            self._tickets.remove(ticket)
            if ticket.checks and ticket.outcome.ok:
                self._judge(ticket)
            for memory in self._memories:
                memory.watches.end(ticket)
        return [(t.number, t.outcome) for t in seen]

    def _judge(self, ticket: _Ticket) -> None:
        """Count what was checked. What is damaged stays unproven until it is overwritten."""
        assert ticket.payloads is not None
        for at, crc in enumerate(ticket.payloads.crcs.tolist()):
            cell = "slot", self._slot_of(ticket.payloads, at)
            right = self._memory.watches.prove(cell, crc)
            self.counts["checked_by_copies" if right else "damage_found_by_copies"] += 1

    def _is_last(self, ticket: _Ticket, seen: Sequence[_Ticket]) -> bool:
        """Whether every ticket of its direction that was submitted before it has been seen."""
        before = (t for t in self._tickets if t.number < ticket.number)
        return all(t in seen for t in before if t.direction is ticket.direction)

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
        for block, (member, slot), pages in ticket.pieces[:cut]:
            staged = self._memories[member].slots[slot]
            store = ticket.direction is Direction.STORE
            if store and ticket.start_s < memory.written_at_s[block]:
                raise Violation("3", f"{ticket} read block {block} before it was computed")
            if not store and ticket.start_s < memory.read_until_s[block]:
                raise Violation("3", f"{ticket} overwrote block {block} still being read")
            for page, position in pages:
                if page >= memory.pages_of[block]:
                    raise Violation("4", f"{ticket} touches page {page} of block {block}")
                if store:
                    staged[position] = memory.gpu[block][page]
                else:
                    memory.gpu[block][page] = staged[position]
        if ticket.payloads is None or not ticket.outcome.ok:
            return
        if ticket.checks:
            self._sum_loaded(ticket)
        elif self._knobs.set_size > 1:
            self._sum(ticket.payloads)

    def _sum(self, payloads: Payloads) -> None:
        """Make the checksums of what was stored."""
        for at, size in enumerate(payloads.sizes.tolist()):
            slot = self._memory.slots[self._slot_of(payloads, at)]
            payloads.crcs[at] = crc_of(slot[: size // self._knobs.page_bytes])

    def _sum_loaded(self, ticket: _Ticket) -> None:
        """Make the checksums of what has arrived in GPU memory."""
        assert ticket.payloads is not None
        gpu = self._memory.gpu
        for at, pieces in enumerate(ticket.by_chunk()):
            arrived = [gpu[block][page] for block, _, pages in pieces for page, _ in pages]
            ticket.payloads.crcs[at] = crc_of(arrived)

    def _slot_of(self, payloads: Payloads, at: int) -> int:
        return (int(payloads.addresses[at]) - STAGING_BASE) % APART // self._slot_bytes

    def _decode(self, address: int, staging: int, size: int) -> Piece:
        page_bytes = self._knobs.page_bytes
        block, at = divmod(address - GPU_BASE, BLOCK_BYTES)
        member, inside = divmod(staging - STAGING_BASE, APART)
        slot, offset = divmod(inside, self._slot_bytes)
        page, rest = divmod(at, page_bytes)
        position, rest2 = divmod(offset - HEADER_BYTES, page_bytes)
        count, rest3 = divmod(size, page_bytes)
        assert not rest and not rest2 and not rest3
        if page + count > self._knobs.pages_per_block:
            raise Violation("4", f"{size} bytes of block {block} reach into the next one")
        assert position >= 0 and position + count <= self._knobs.slot_pages
        return block, (member, slot), [(page + n, position + n) for n in range(count)]


@dataclass(eq=False)
class _Landing:
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
        self._tickets: list[_Landing] = []
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
        ticket = _Landing(self._next, moves, done_s)
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
