# SPDX-License-Identifier: Apache-2.0
"""The lanes of peers: between the native machine, which decides which chunks they read for us, and
the sessions with peers, which carry them there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.copy.base import CopyEngine, Direction
from vllm_nvmeof_offload.errors import CANCELLED, code_of
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Machine, PythonLanes
from vllm_nvmeof_offload.peers.base import NO_PEER, PeerEnd, PeerRead, PeerState
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import OURS, PEER_CHUNKS_MIN, SlotIdentity, owner_of

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native._tiers import LaneOp


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
        peers: Peers,
        foreign_place: Callable[[int], SlotPlace | None],
        counters: Counts,
    ) -> None:
        """foreign_place: of another owner's place; None: its files are not open here. counters: the
        pipeline's."""
        self._peers, self._port = peers, peers.port
        self._foreign_place = foreign_place
        self._counters = counters
        self._rests = [False] * peers.lanes
        self._landing: dict[int, int] = {}  # ticket → the machine's number
        self._known = [NO_PEER] * peers.lanes
        self._ends: dict[int, PeerEnd] = {}  # that the machine has not taken, by token
        self._unwanted: list[int] = []
        #: For the machine. A peer's room is that of its state.
        self.lanes = PythonLanes(
            room=lambda: (0, 0), submit=self._submit, cancel=self._cancel, poll=self._take_ends
        )

    def take_in(self, machine: Machine) -> None:
        """Let the machine know what each peer can take now, and what has landed."""
        for ticket, _ in self._peers.landing.poll():
            machine.landed(self._landing.pop(ticket))
        for end in self._port.poll():  # before the states: what is lost takes nothing any more
            self._ends[end.token] = end
        for lane, known in enumerate(self._known):
            state = self._port.state(lane)
            if self._is_resting(machine, lane):
                state = NO_PEER._replace(lost=state.lost)
            if state != known:
                self._known[lane] = state
                machine.set_peer(lane, *state)

    def _is_resting(self, machine: Machine, lane: int) -> bool:
        rests = machine.peer_rests(lane)
        if rests and not self._rests[lane]:
            self._counters["peer_rests"] += 1
            logger.info(
                "peer%d rests: it made loads slower, its reads brought nothing, or it was lost "
                "again and again",
                lane,
            )
        self._rests[lane] = rests
        return rests

    def hand_over(self, machine: Machine) -> None:
        """Begin to copy chunks into their cache slots, and cancel reads that no load waits for."""
        if (landing := machine.take_landings()) is not None:
            number, rows = landing
            ticket = self._peers.landing.submit(Direction.LOAD, rows, None)
            self._landing[ticket] = number
        if self._unwanted:
            self._port.cancel(self._unwanted)
            self._unwanted = []

    # -- as the machine's lanes

    def _submit(self, ops: list[LaneOp]) -> None:
        reads: dict[int, list[PeerRead]] = {}
        for op in ops:
            place = self._slot_place(op.place)
            if place is None:
                self._ends[op.token] = PeerEnd(op.token, CANCELLED, released=True)
                continue
            what = SlotIdentity(op.key, op.generation), place, op.stamp[1], op.until_s
            read = PeerRead(op.token, op.address, op.payload_bytes, *what)
            reads.setdefault(op.peer, []).append(read)
        for lane, some in reads.items():
            self._port.submit(lane, some)

    def _slot_place(self, place: int) -> SlotPlace | None:
        ours = owner_of(place) == OURS
        return self._peers.slot_place(place) if ours else self._foreign_place(place)

    def _cancel(self, token: int) -> bool:
        self._unwanted.append(token)
        return False

    def _take_ends(self) -> list[tuple[int, int, int, float, int, bool]]:
        ends, self._ends = self._ends, {}
        return [
            (token, code_of(one.kind), one.errno, 0.0, -1, released)
            for token, one, released in ends.values()
        ]
