# SPDX-License-Identifier: Apache-2.0
"""The reads that peers make for us: between the native machine, which decides which chunks those
are, and the sessions with peers, which carry them there and back.

Whatever becomes of a session, the machine hears of each read at most one failure and one end. If it
never hears of a read, it stops waiting on its own and asks for the read to be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.copy.base import CopyEngine, Direction
from vllm_nvmeof_offload.errors import STALE, code_of
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Machine
from vllm_nvmeof_offload.peers.base import NO_PEER, PeerEnd, PeerRead, PeerState
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import OURS, PEER_CHUNKS_MIN, PeerReport, SlotIdentity, owner_of

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native._tiers import LaneOp

#: A peer's credits bound what it has; its reads are of equal size.
_BYTES_MAX = 1 << 62
_NOWHERE = code_of(STALE.kind)


class PeerPort(Protocol):
    """The sessions with peers. Only the pipeline's thread calls, and nothing here blocks."""

    def submit(self, lane: int, reads: Sequence[PeerRead]) -> None:
        """Ask this peer for chunks, at most as many as it gives credits."""

    def cancel(self, tokens: Sequence[int]) -> None:
        """Nobody waits for these any more. They end as all others do."""

    def poll(self) -> list[PeerEnd]:
        """Return what has ended since the last call."""

    def state(self, lane: int) -> PeerState:
        """Return what is known of this peer."""


@dataclass(frozen=True, slots=True)
class Peers:
    """slot_place: where a slot of ours lies, as its header says. landing: copies within staging.
    chunks_min: of a load that is split."""

    port: PeerPort
    lanes: int
    slot_place: Callable[[int], SlotPlace]
    landing: CopyEngine
    chunks_min: int = PEER_CHUNKS_MIN


class Peering:
    """The lanes of peers of one machine. All calls come from the pipeline's thread."""

    def __init__(
        self,
        machine: Machine,
        peers: Peers,
        targets: int,
        foreign_place: Callable[[int], SlotPlace | None],
        clock: Callable[[], float],
        counters: Counts,
    ) -> None:
        """foreign_place: of another owner's place; None: its files are not open here. counters: the
        pipeline's."""
        self._machine, self._peers, self._port = machine, peers, peers.port
        self._targets = targets  # their lanes come first
        self._foreign_place = foreign_place
        self._clock, self._counters = clock, counters
        self._rests = [False] * peers.lanes
        self._landing: dict[int, int] = {}  # ticket → the machine's number
        self._known = [NO_PEER] * peers.lanes
        self._reported = [NO_PEER] * peers.lanes

    def take_in(self) -> None:
        """Let the machine know what has ended, and what each peer can take now."""
        for ticket, _ in self._peers.landing.poll():
            self._machine.landed(self._landing.pop(ticket))
        ends = self._port.poll()
        if held := [token for token, _, released in ends if not released]:
            self._machine.failed_unreleased(held)
        self._end([(token, code_of(end.kind), end.errno) for token, end, done in ends if done])
        for lane, known in enumerate(self._known):
            state = NO_PEER if self._is_resting(lane) else self._port.state(lane)
            if state == known:
                continue
            self._known[lane] = state
            usable, reads_max, bytes_per_s, queued_bytes = state
            number = self._targets + lane
            self._machine.set_peer(number, usable, reads_max, _BYTES_MAX, bytes_per_s, queued_bytes)

    def _is_resting(self, lane: int) -> bool:
        rests = self._machine.peer_rests(self._targets + lane)
        if rests and not self._rests[lane]:
            self._counters["peer_rests"] += 1
            logger.info("peer%d has made the loads that it helped with slower, and rests", lane)
        self._rests[lane] = rests
        return rests

    def take_reports(self, rank: int) -> list[PeerReport]:
        """Return what has changed since the last call, for the manager of this rank."""
        if self._reported == self._known:
            return []
        reported, self._reported = self._reported, list(self._known)
        return [
            PeerReport(
                rank, lane, one.usable and one.credits > 0, one.bytes_per_s, one.queued_bytes
            )
            for lane, one in enumerate(self._known)
            if one != reported[lane]
        ]

    def hand_over(self) -> None:
        """Ask for what the machine has decided to ask for, and for no more than that."""
        machine = self._machine
        if (landing := machine.take_landings()) is not None:
            number, rows = landing
            ticket = self._peers.landing.submit(Direction.LOAD, rows, None)
            self._landing[ticket] = number
        for lane in range(self._peers.lanes):
            number = self._targets + lane
            unwanted = machine.take_overdue_peer(number) + machine.take_cancels_peer(number)
            if unwanted:
                self._port.cancel(unwanted)
            if offers := machine.offer_peer(number):
                self._submit(lane, offers)

    def _submit(self, lane: int, offers: list[tuple[float, LaneOp]]) -> None:
        now_s = self._clock()
        reads, nowhere = [], []
        for within_s, op in offers:
            place = self._slot_place(op.place)
            if place is None:
                nowhere.append(op.token)
                continue
            what = SlotIdentity(op.key, op.generation), place, op.stamp[1], now_s + within_s
            reads.append(PeerRead(op.token, op.address, op.payload_bytes, *what))
        if reads:
            self._port.submit(lane, reads)
        self._end([(token, _NOWHERE, 0) for token in nowhere])

    def _slot_place(self, place: int) -> SlotPlace | None:
        ours = owner_of(place) == OURS
        return self._peers.slot_place(place) if ours else self._foreign_place(place)

    def _end(self, ends: list[tuple[int, int, int]]) -> None:
        if ends:
            self._machine.ended([(*end, 0.0, -1) for end in ends])
