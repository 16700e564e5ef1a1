# SPDX-License-Identifier: Apache-2.0
"""The peers of one rank: the lanes and sessions through which peers read for this rank, and the
server through which this rank reads for peers.

The native machine decides which chunks a peer reads; the sessions carry the requests and the
chunks. Nothing waits for a peer, and all peers are optional. Without NIXL and RDMA, peers send
chunks in messages. Without the messaging libraries no peer is used, and this is logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import PORT_MAX, OffloadConfig
from vllm_nvmeof_offload.copy.base import CopyEngine, Direction
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import CANCELLED, ConfigError, EngineError, code_of
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Machine, PythonLanes
from vllm_nvmeof_offload.peers.base import (
    NO_PEER,
    Common,
    PeerEnd,
    PeerRead,
    PeerState,
    ServePort,
    SlotMemory,
)
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import OURS, PEER_CHUNKS_MIN, SlotIdentity, owner_of
from vllm_nvmeof_offload.staging import Staging

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native._tiers import LaneOp
    from vllm_nvmeof_offload.peers.clients import PeerClients
    from vllm_nvmeof_offload.peers.server import PeerServer


class PeerPort(Protocol):
    """The sessions with peers. Only the pipeline's thread calls these methods, and none blocks."""

    def submit(self, lane: int, reads: Sequence[PeerRead]) -> None:
        """Request `reads` from the lane's peer, at most as many as its credits allow."""

    def cancel(self, tokens: Sequence[int]) -> None:
        """Cancel these reads. `poll` still reports the end of each."""

    def poll(self) -> list[PeerEnd]:
        """Return the reads that ended since the last call."""

    def state(self, lane: int) -> PeerState:
        """Return the last known state of the lane's peer."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers' lanes. `slot_place` returns the place that the header of one of our slots must
    name. `landing` copies within staging. Loads of fewer than `chunks_min` chunks use no peer."""

    port: PeerPort
    lanes: int
    slot_place: Callable[[int], SlotPlace]
    landing: CopyEngine
    chunks_min: int = PEER_CHUNKS_MIN


class Peering:
    """The peer lanes of one machine. All calls come from the pipeline's thread."""

    def __init__(
        self,
        peers: Peers,
        foreign_place: Callable[[int], SlotPlace | None],
        counters: Counts,
    ) -> None:
        """`foreign_place` returns a slot's place in another engine's region, or None if its files
        are not open here. `counters` are the pipeline's."""
        self._peers, self._port = peers, peers.port
        self._foreign_place = foreign_place
        self._counters = counters
        self._rests = [False] * peers.lanes
        self._landing: dict[int, int] = {}  # the machine's number of each copy, by ticket
        self._known = [NO_PEER] * peers.lanes
        self._ends: dict[int, PeerEnd] = {}  # ends that the machine has not taken, by token
        self._unwanted: list[int] = []
        #: The lanes that the machine drives. A peer's state determines how much it accepts.
        self.lanes = PythonLanes(
            room=lambda: (0, 0), submit=self._submit, cancel=self._cancel, poll=self._take_ends
        )

    def take_in(self, machine: Machine) -> None:
        """Pass the peers' current states and the completed copies to the machine."""
        for ticket, _ in self._peers.landing.poll():
            machine.landed(self._landing.pop(ticket))
        for end in self._port.poll():  # first, so that states show lost peers as lost
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
            self._counters["peer_events", "rest"] += 1
            logger.info(
                "peer%d is paused: it slowed loads, its reads failed, or its connection was lost "
                "repeatedly",
                lane,
            )
        self._rests[lane] = rests
        return rests

    def hand_over(self, machine: Machine) -> None:
        """Start copies into cache slots, and cancel reads that no load needs any more."""
        if (landing := machine.take_landings()) is not None:
            number, rows = landing
            ticket = self._peers.landing.submit(Direction.LOAD, rows, None)
            self._landing[ticket] = number
        if self._unwanted:
            self._port.cancel(self._unwanted)
            self._unwanted = []

    # -- called by the machine's lanes

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


class PeerLinks:
    """The connections to peers. `clients` is None if no peer reads for us; `server` is None if we
    read for no peer. `landing` copies chunks from peers into cache slots."""

    def __init__(
        self, clients: PeerClients | None, server: PeerServer | None, landing: CopyEngine
    ) -> None:
        self.clients, self._server, self.landing = clients, server, landing
        #: Descriptors that are readable while a peer's read may have ended.
        self.fds: Sequence[int] = () if clients is None else (clients.fileno(),)
        self._taken = Counts()

    def set_tag(self, tag: bytes) -> None:
        """End all sessions with another share tag. Call this before a reset begins."""
        for one in (self.clients, self._server):
            if one is not None:
                one.set_tag(tag)

    def take_counts(self) -> Counts:
        """Return the counts since the last call, named as in `metrics.COUNTERS`."""
        counters = Counts()
        if self.clients is not None:
            counts = self.clients.counts
            counters["peer_bytes", "pulled"] += counts.pulled_bytes
            counters["peer_events", "session_lost"] += counts.lost
            counters["peer_events", "secret_refused"] += counts.other_secret
            for reason, failed in counts.failed.copy().items():
                counters["peer_pulls_failed", reason] += failed
        if self._server is not None:
            counters["peer_bytes", "served"] += self._server.counts.served_bytes
            counters["peer_events", "secret_refused"] += self._server.counts.other_secret
        grown = Counts()
        for series, count in counters.items():
            if count != self._taken[series]:
                grown[series] = count - self._taken[series]
        self._taken = counters
        return grown

    def close(self) -> bool:
        """End all sessions. Return True if no peer and no pull touches our memory any more."""
        ended = [one.close() for one in (self._server, self.clients) if one is not None]
        self.landing.close()
        return all(ended)


def open_links(
    settings: OffloadConfig,
    common: Common,
    tag: bytes,
    serve_port: ServePort | None,
    wake: Callable[[], None],
    staging: Staging,
) -> PeerLinks | None:
    """Start the threads for peers. Return None if there are no peers.

    `tag` is the current share tag of our chunks. `wake` is called after chunks from peers have been
    copied into their cache slots.

    Raises: ConfigError: this process cannot listen at `peer_listen`, or its messaging library does
    not support the share secret.
    """
    if not settings.peers and serve_port is None:
        return None
    rank, listen = common.rank, settings.peer_listen
    for one in settings.peers:
        _check_port(one, "peers", rank, f"rank {rank}")
    if listen:
        who = f"replica {common.replica}, rank {rank}" if common.replicas > 1 else f"rank {rank}"
        _check_port(listen, "peer_listen", common.port_offset, who)
    try:
        import zmq

        from vllm_nvmeof_offload.peers.clients import PeerClients
        from vllm_nvmeof_offload.peers.server import PeerServer, host_and_port
        from vllm_nvmeof_offload.peers.transport import why_no_pulls
    except ImportError as error:
        logger.warning("no peers: %s; install vllm-nvmeof-offload[peers]", error)
        return None
    if common.secret and not zmq.has("curve"):
        remedy = "a secret needs CURVE, which this libzmq lacks; install pyzmq from its wheel"
        raise ConfigError("share_secret_file", settings.share_secret_file, remedy)
    if why_not := why_no_pulls():
        logger.info("peers send chunks in messages: %s", why_not)
    clients, server, slots, by_nixl = None, None, staging.map, not why_not
    if serve_port is not None:
        memory = SlotMemory(slots.serve_address, slots.slot_bytes, slots.serve_slots)
        parts = common, tag, memory, _part(staging, memory), serve_port
        address = host_and_port(listen, common.port_offset)
        deadline_s = settings.read_deadline_ms / 1000
        try:
            server = PeerServer(address, *parts, by_nixl=by_nixl, read_deadline_s=deadline_s)
        except EngineError as error:
            remedy = f"{error}; name an address of this machine and a port that is free"
            raise ConfigError("peer_listen", listen, remedy) from None
        logger.info("serving peers at %s with %d slots", server.address, slots.serve_slots)
    if settings.peers:
        memory = SlotMemory(slots.stream_address(0), slots.slot_bytes, slots.stream_slots)
        addresses = [host_and_port(one, rank) for one in settings.peers]
        view = _part(staging, memory)
        clients = PeerClients(addresses, common, tag, memory, view, by_nixl=by_nixl)
    return PeerLinks(clients, server, HostCopyEngine(wake))


def _check_port(base: str, key: str, offset: int, who: str) -> None:
    """Check that this rank's port, which is `offset` above the one in `base`, is valid."""
    if int(base.rpartition(":")[2]) + offset > PORT_MAX:
        raise ConfigError(key, base, f"no port is left for {who}; use {PORT_MAX - offset} or lower")


def _part(staging: Staging, memory: SlotMemory) -> memoryview:
    start = memory.address - staging.map.base_address
    return staging.view[start : start + memory.slot_bytes * memory.slots]
