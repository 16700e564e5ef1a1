# SPDX-License-Identifier: Apache-2.0
"""The peers of one rank: the lanes and sessions through which peers read for this rank, and the
server through which this rank reads for peers.

The native machine decides which chunks a peer reads; the sessions carry the requests and the
chunks. Nothing waits for a peer, and all peers are optional. Without RDMA through NIXL, peers send
chunks in messages. Without the messaging libraries, no peer is used, and this is logged once.

The peer server's thread requests reads for peers, and the machine starts them after the reads that
local loads wait for. A peer can request anything, so a read is passed to the machine only if its
region is open here, it fits the region, and it is for our current weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import PORT_MAX, OffloadConfig
from vllm_nvmeof_offload.copy.base import CopyEngine, Direction
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    STALE,
    ConfigError,
    EngineError,
    Outcome,
    code_of,
    install_extra,
    outcome_of,
)
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Machine, PythonLanes
from vllm_nvmeof_offload.peers.base import (
    NO_PEER,
    Common,
    Levels,
    PeerEnd,
    PeerRead,
    Served,
    ServePort,
    SlotMemory,
)
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import (
    OURS,
    PEER_CHUNKS_MIN,
    ChunkBatch,
    SlotIdentity,
    owned_by,
    owner_of,
    place_of,
)
from vllm_nvmeof_offload.staging import Staging

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native._tiers import LaneOp
    from vllm_nvmeof_offload.peers.clients import PeerClients
    from vllm_nvmeof_offload.peers.server import PeerServer


#: A function that returns the owner and target of a region by uuid; None if it is not open.
FindRegion = Callable[[bytes], tuple[int, int] | None]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers' lanes. `port` has the sessions with peers. `slot_place` returns the place that the
    header of one of our slots must name. `landing` copies chunks from stream slots to cache slots.
    Loads of fewer than `chunks_min` chunks use no peer."""

    port: PeerClients
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
        for end in self._port.poll():  # before the states, which then include lost peers
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
        """Start copies into cache slots, and cancel reads that no load needs any longer."""
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


class OwnRegion(NamedTuple):
    """One of our regions: its target, and its number of slots."""

    target: int
    slots: int


class ServeQueue:
    """The queue between the peer server and the pipeline. The server uses it as a `ServePort`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` wakes the pipeline's thread."""
        self._wake = wake
        self._asked: deque[Sequence[PeerRead]] = deque()
        self._unwanted: deque[Sequence[int]] = deque()
        self._ended: deque[Sequence[Served]] = deque()
        self._levels = Levels(0, 0.0)
        self._waker = Waker()

    # -- the server's thread ----------------------------------------------------------

    def serve(self, reads: Sequence[PeerRead]) -> None:
        self._asked.append(reads)
        self._wake()

    def cancel(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._unwanted.append(tokens)
            self._wake()

    def poll(self) -> list[Served]:
        self._waker.clear()
        return _taken(self._ended)

    def levels(self) -> Levels:
        return self._levels

    def fileno(self) -> int:
        return self._waker.fd

    # -- the pipeline's thread --------------------------------------------------------

    def take(self) -> tuple[list[PeerRead], list[int]]:
        """Take the reads requested since the last call, and the tokens of cancelled ones."""
        unwanted = _taken(self._unwanted)  # first, or a read could follow its cancellation
        return _taken(self._asked), unwanted

    def put(self, ended: Sequence[Served], levels: Levels) -> None:
        self._levels = levels
        if ended:
            self._ended.append(ended)
            self._waker.wake()


def _taken(batches: deque[Sequence[_T]]) -> list[_T]:
    taken: list[_T] = []
    while batches:
        taken += batches.popleft()
    return taken


@dataclass(frozen=True, slots=True)
class Serve:
    """The service for peers: the peer server's `queue`, and our `own` regions by uuid."""

    queue: ServeQueue
    own: Mapping[bytes, OwnRegion]


class Serving:
    """One machine's reads for peers. All calls come from the pipeline's thread."""

    def __init__(
        self,
        machine: Machine,
        serve: Serve,
        memory: SlotMemory,
        group_bytes: Sequence[int],
        clock: Callable[[], float],
        find_region: FindRegion,
    ) -> None:
        """`memory` holds the serve slots. `find_region` finds other engines' regions."""
        self._machine, self._serve, self._memory, self._clock = machine, serve, memory, clock
        self._find_region = find_region
        #: The groups by chunk length. Any group with the right length is suitable.
        self._groups = {size: group for group, size in enumerate(group_bytes)}
        self._refused: list[Served] = []

    def take_in(self, tag: bytes) -> None:
        """Pass the requested reads to the machine. `tag` is the current share tag."""
        reads, unwanted = self._serve.queue.take()
        rows: dict[int, list[_Row]] = {}
        for read in reads:
            row = self._row_of(read, tag)
            if isinstance(row, _Row):  # a batch's keys must have equal lengths
                rows.setdefault(len(read.identity.key), []).append(row)
            else:
                self._refused.append(Served(read.token, row))
        for alike in rows.values():
            self._begin(alike)
        if unwanted:
            self._machine.end_serving(unwanted)

    def hand_over(self) -> None:
        """Report completed reads and the current load to the peer server."""
        ended = [
            Served(token, outcome_of(code, number))
            for token, code, number in self._machine.take_served()
        ]
        if self._refused:
            ended += self._refused
            self._refused = []
        self._serve.queue.put(ended, Levels(*self._machine.serve_levels()))

    def _row_of(self, read: PeerRead, tag: bytes) -> _Row | Outcome | None:
        """Return the row to read, STALE to refuse it, or None if its region is not open."""
        uuid, slot = read.place.region_uuid, read.place.slot
        group = self._groups.get(read.payload_bytes)
        own = self._serve.own.get(uuid)
        if own is not None:
            owner, target = OURS, own.target
        elif (found := self._find_region(uuid)) is not None:
            owner, target = found
        else:
            return None
        if read.tag != tag or group is None or (own is not None and slot >= own.slots):
            return STALE
        return _Row(read, owned_by(owner, place_of(target, slot)), group)

    def _begin(self, rows: Sequence[_Row]) -> None:
        now_s = self._clock()
        reads = [row.read for row in rows]
        batch = ChunkBatch.of(
            b"".join(read.identity.key for read in reads),
            np.array([read.identity.generation for read in reads], np.uint64),
            np.array([self._memory.slot_of(read.address) for read in reads], np.int32),
            np.array([row.place for row in rows], np.int64),
            np.array([row.group for row in rows], np.uint8),
        )
        within_s = [read.deadline_s - now_s for read in reads]
        self._machine.serve([read.token for read in reads], batch, within_s)


class _Row(NamedTuple):
    read: PeerRead
    place: int
    group: int


class PeerLinks:
    """The connections to peers. `clients` is None if no peer reads for us, and `server` is None if
    we read for no peer. `landing` copies chunks from peers into cache slots."""

    def __init__(
        self, clients: PeerClients | None, server: PeerServer | None, landing: CopyEngine
    ) -> None:
        self.clients, self._server, self.landing = clients, server, landing
        #: Descriptors that are readable while a peer's read may have ended.
        self.fds: Sequence[int] = () if clients is None else (clients.fileno(),)
        self._taken = Counts()

    def set_tag(self, tag: bytes) -> None:
        """End all sessions that have a different share tag. Call this before a reset begins."""
        for one in (self.clients, self._server):
            if one is not None:
                one.set_tag(tag)

    def take_counts(self) -> Counts:
        """Return the counts since the last call, by series (`metrics.COUNTERS`)."""
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
        """End all sessions. Return whether no peer and no pull can still touch our memory."""
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
    """Start the threads for peers; return None without the messaging libraries. `tag` is the
    current share tag. `wake` is called after chunks from peers have been copied into cache slots.
    Raises ConfigError if this process cannot listen at `peer_listen`, or its messaging library does
    not support share secrets."""
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
        logger.warning("no peers: %s; %s", error, install_extra("peers"))
        return None
    if common.secret and not zmq.has("curve"):
        remedy = "a secret needs CURVE, which this libzmq lacks; install pyzmq from its wheel"
        raise ConfigError("share_secret_file", settings.share_secret_file, remedy)
    why_not = why_no_pulls()
    how = f"in messages: {why_not}" if why_not else "by RDMA where both sides have it"
    logger.info("peers send chunks %s", how)
    clients, server, slots, by_nixl = None, None, staging.map, not why_not
    if serve_port is not None:
        memory = SlotMemory(slots.serve_address, slots.slot_bytes, slots.serve_slots)
        parts = common, tag, memory, _part(staging, memory), serve_port
        address = host_and_port(listen, common.port_offset)
        deadline_s = settings.read_deadline_ms / 1000
        try:
            server = PeerServer(address, *parts, by_nixl=by_nixl, read_deadline_s=deadline_s)
        except EngineError as error:
            remedy = f"{error}; name an address of this machine and a free port"
            raise ConfigError("peer_listen", listen, remedy) from None
        logger.info("serving peers at %s with %d slots", server.address, slots.serve_slots)
    if settings.peers:
        memory = SlotMemory(slots.stream_address, slots.slot_bytes, slots.stream_slots)
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
