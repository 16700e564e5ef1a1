# SPDX-License-Identifier: Apache-2.0
"""The loading server's side: one lane per peer, and one thread for all lanes.

A read is ASKED, then PULLING if NIXL moves its bytes, and then ends. A read that is cancelled or
past its deadline gets its outcome immediately. If its peer still owes an answer, the read is then
DROPPED and costs a credit; if its pull has not ended, the read is a ZOMBIE, and its buffer is
released later.

Nothing waits for a peer. If a peer sends nothing for half a second, its reads end, and nothing more
is requested from it until it sends something. A session ends if the peer errs, stays silent, holds
a zombie for a second, or loses its connection; the peer is greeted again soon afterwards. The
machine gives no reads to a peer that is lost repeatedly (peer_judge.h).
"""

from __future__ import annotations

import collections
import enum
import errno
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, Outcome, io_error
from vllm_nvmeof_offload.io.base import Waker, unbind_this_thread
from vllm_nvmeof_offload.peers.base import (
    BEAT_IDLE_S,
    BEAT_OPEN_S,
    NO_PEER,
    SILENT_S,
    STALLED_S,
    Common,
    PeerEnd,
    PeerRead,
    PeerState,
    SlotMemory,
)
from vllm_nvmeof_offload.peers.session import (
    CURVE_BYTES,
    MESSAGE_BYTES_MAX,
    NOT_PROVEN,
    READS_MAX,
    STRANGER,
    TOKENS_MAX,
    VERSION,
    AnyMessage,
    BackOff,
    Beat,
    BusyRate,
    Bye,
    Cancel,
    Channel,
    Done,
    Failed,
    FailedRead,
    Hello,
    Lent,
    Listening,
    MalformedError,
    Read,
    Ready,
    Reason,
    Refused,
    Sent,
    SessionThread,
    WantedRead,
    Welcome,
    lock,
    outcome_of_failed,
    take_in,
)
from vllm_nvmeof_offload.peers.transport import NixlTransport, Pull, TransportError
from vllm_nvmeof_offload.pool.format import verify
from vllm_nvmeof_offload.units import slot_stride_bytes

_GREETING_S = 2.0
_ZOMBIE_S = 1.0
_NOT_ATTACHED_S = 0.25  # the time that a peer gets to open a region that it has not opened yet
_BYE_MS = 100  # the time for which ZMQ keeps a closed socket open to send pending messages
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
LOST = io_error(errno.ENOTCONN)


class _Stage(enum.Enum):
    ASKED = enum.auto()
    DROPPED = enum.auto()
    PULLING = enum.auto()
    ZOMBIE = enum.auto()


@dataclass(slots=True, eq=False)
class _Reading:
    read: PeerRead
    stage: _Stage = _Stage.ASKED
    pull: Pull | None = None
    is_timed: bool = False  # its pull measures the rate
    decided_s: float = 0.0  # when it became a zombie


@dataclass(slots=True)
class ClientCounts:
    """Counts of all peers' reads and of their failures."""

    pulled_bytes: int = 0
    failed: collections.Counter[str] = field(default_factory=collections.Counter)
    malformed: int = 0
    lost: int = 0  # sessions
    other_secret: int = 0  # connections with peers that have a different share secret


class _SessionLostError(Exception):
    """An exception that ends the session. Its text is the reason."""


class _OtherSecretError(_SessionLostError):
    """The end of a connection before a session, for example if share secrets differ or are
    missing."""


class _Session:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        common: Common,
        listening: Listening,
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        frame_bytes_max = max(MESSAGE_BYTES_MAX, common.slot_bytes) + CURVE_BYTES
        self.socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)  # messages would be lost in between
        self.socket.setsockopt(zmq.IPV6, 1)
        lock(self.socket, common.secret, serves=False)
        #: Readable after the connection has ended, or if no server listens at the address.
        self.monitor = self.socket.get_monitor_socket(_ENDED | NOT_PROVEN)
        self.socket.connect(address)
        self.channel = Channel()
        self.is_up = False
        self._cut_off = ""
        self.has_pulled = False  # the first pull connects, which takes milliseconds
        self.transport: NixlTransport | None = None  # None if chunks arrive in messages
        self._listening = listening
        self.sent_s = 0.0
        self.received_s = self.opened_s = listening.now_s  # by the clock that measures silence
        self.is_stalled = False
        self.broken = ""  # why nothing can be sent
        self.credits = self.slots = 0
        self.open: dict[int, _Reading] = {}
        self.moving: dict[int, _Reading] = {}  # the PULLING and ZOMBIE reads
        self.dropped = 0
        self.done: list[int] = []

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)

    def why_cut_off(self) -> str:
        """Return the reason why the connection was cut off; empty if it was not."""
        while self.monitor.poll(0):
            is_stranger = recv_monitor_message(self.monitor)["event"] & NOT_PROVEN
            self._cut_off = self._cut_off or (STRANGER if is_stranger else "no connection")
        return self._cut_off

    def hear(self) -> None:
        self.received_s = self._listening.now_s
        self.is_stalled = False

    def opens(self) -> None:
        """Record that a read was requested while none was open. From now on, the peer must send
        often."""
        self.opened_s = self._listening.now_s

    def is_silent(self) -> bool:
        return self._listening.now_s - self.received_s > (SILENT_S if self.is_up else _GREETING_S)

    def stalls(self) -> bool:
        """Return whether the peer has been silent for too long since the last request."""
        received_s = max(self.received_s, self.opened_s)
        return bool(self.open) and self._listening.now_s - received_s > STALLED_S

    def send(self, message: AnyMessage) -> None:
        self.sent_s = time.monotonic()
        try:
            self.socket.send(self.channel.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.broken = f"it accepts no messages: {error}"


@dataclass(slots=True, eq=False)
class _Lane:
    number: int
    address: str
    back_off: BackOff = field(default_factory=BackOff)
    session: _Session | None = None
    tag: bytes = b""  # the session's tag
    state: PeerState = NO_PEER  # as reported to others
    queued_bytes: int = 0
    bytes_per_s: float = 0.0
    pull_rate: BusyRate = field(default_factory=BusyRate)
    unusable_until_s: float = 0.0
    lost: int = 0  # lost sessions, and stalls
    logged: str = ""  # the last text in the log


class PeerClients(SessionThread):
    """The loading server's reads through peers, until `close`. `submit`, `cancel`, `poll` and
    `close` must be called on one thread, and do not wait for peers."""

    def __init__(
        self,
        addresses: Sequence[str],
        common: Common,
        tag: bytes,
        memory: SlotMemory,
        view: memoryview,
        *,
        by_nixl: bool = True,
    ) -> None:
        """`addresses` lists each lane's peer, such as `tcp://10.0.0.7:7000`. Chunks may be written
        into `memory`, which `view` covers. With `by_nixl`, NIXL pulls chunks if it can; otherwise
        peers send them."""
        self.counts = ClientCounts()
        super().__init__("peer-clients", self._run, tag)
        self._common, self._memory = common, memory
        self._view = memoryview(view)
        self._by_nixl = by_nixl
        self._lanes = [_Lane(number, address) for number, address in enumerate(addresses)]
        self._commands: collections.deque[tuple[int, list[PeerRead], list[int]]] = (
            collections.deque()
        )
        self._ends: collections.deque[PeerEnd] = collections.deque()
        #: Unfreed agents of lost sessions, and the reads whose buffers they may still write to.
        self._leaving: list[tuple[NixlTransport, list[_Reading]]] = []
        self._heard = Waker()
        self._thread.start()

    def state(self, lane: int) -> PeerState:
        one = self._lanes[lane]
        return one.state if one.tag == self._tag else NO_PEER._replace(lost=one.lost)

    def submit(self, lane: int, reads: Sequence[PeerRead]) -> None:
        """Request reads from the lane's peer. Each ends at most a beat after its deadline."""
        self._commands.append((lane, list(reads), []))
        self._waker.wake()

    def cancel(self, tokens: Sequence[int]) -> None:
        """Cancel these reads. Any that have no outcome yet end with CANCELLED."""
        self._commands.append((-1, [], list(tokens)))
        self._waker.wake()

    def poll(self) -> list[PeerEnd]:
        self._heard.clear()
        return [self._ends.popleft() for _ in range(len(self._ends))]

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` may have something to return."""
        return self._heard.fd

    def close(self, timeout_s: float = 5.0) -> bool:
        """End all reads. Return whether nothing touches their buffers any more."""
        return super().close(timeout_s) and not self._leaving

    # -- the thread

    def _run(self) -> None:
        unbind_this_thread()
        try:
            for _ in self._wake_ups(self._beat_s):
                self._turn()
        finally:
            self._take_commands()
            for lane in self._lanes:
                self._lose(lane, "this server is stopping", counts=False)
            self._look_at_leaving()
            self._heard.wake()
            self._context.destroy(_BYE_MS)
            self._view.release()

    def _turn(self) -> None:
        for lane in self._lanes:
            if lane.tag != self._tag:
                self._lose(lane, "the weights have changed", counts=False)
        self._take_commands()
        for lane in self._lanes:
            self._step_safely(lane)
        self._look_at_leaving()
        if self._ends:
            self._heard.wake()

    def _beat_s(self) -> float:
        sessions = [one.session for one in self._lanes if one.session is not None]
        if any(one.moving for one in sessions):
            return 0.0
        busy = self._leaving or any(one.open for one in sessions)
        return BEAT_OPEN_S if busy else BEAT_IDLE_S

    def _step_safely(self, lane: _Lane) -> None:
        why = ""
        try:
            self._step(lane)
        except MalformedError as error:
            self.counts.malformed += 1
            why = f"malformed: {error}"
        except (_SessionLostError, TransportError, zmq.ZMQError, ImportError) as error:
            self.counts.other_secret += isinstance(error, _OtherSecretError)
            why = str(error)
        # The handlers do not end the session, because their exception refers to the agent, which
        # must be freed.
        if why:
            self._lose(lane, why)
        self._show(lane)

    def _step(self, lane: _Lane) -> None:
        now_s = time.monotonic()
        if lane.session is None:
            if lane.back_off.is_over(now_s):
                self._greet(lane)
            return
        cut_off = lane.session.why_cut_off()  # if set, nothing more arrives
        take = functools.partial(self._take_frames, lane, lane.session)
        drained = take_in(lane.session.socket, take)
        self._pull_on(lane, lane.session)
        now_s = time.monotonic()
        self._expire(lane.session, now_s)
        if drained and cut_off:
            raise (_OtherSecretError if cut_off == STRANGER else _SessionLostError)(cut_off)
        if drained and lane.session.is_silent():
            raise _SessionLostError("it was silent for too long")
        if drained and lane.session.stalls() and not lane.session.is_stalled:
            self._stall(lane, lane.session)
        if lane.session.broken:
            raise _SessionLostError(lane.session.broken)
        self._tell(lane.session, now_s)

    def _take_commands(self) -> None:
        while self._commands:
            number, reads, cancelled = self._commands.popleft()
            if reads:
                self._ask(self._lanes[number], reads)
            for token in cancelled:
                self._drop(token, CANCELLED)

    def _greet(self, lane: _Lane) -> None:
        common, listening = self._common, self._listening
        lane.session = session = _Session(self._context, lane.address, common, listening)
        lane.tag = tag = self._tag
        for one in (session.socket, session.monitor):
            self._poller.register(one, zmq.POLLIN)
        hello = Hello(
            version=VERSION,
            keyspace=common.keyspace,
            tag=tag,
            rank=common.rank,
            world_size=common.world_size,
            slot_bytes=common.slot_bytes,
            pulls=self._by_nixl,
        )
        session.send(hello)

    # -- what we request

    def _ask(self, lane: _Lane, reads: list[PeerRead]) -> None:
        session = lane.session
        now_s = time.monotonic()
        if session is None or not session.is_up or session.is_stalled:
            for read in reads:
                self._end(read, LOST)
            return
        if not session.open:
            session.opens()
        wanted = []
        for read in reads:
            if len(session.open) >= session.credits:
                self._end(read, outcome_of_failed(FailedRead(read.token, Reason.BUSY)))
                continue
            session.open[read.token] = _Reading(read)
            wanted.append(_wanted(read, now_s))
        if wanted and session.transport is None:
            lane.pull_rate.moves(now_s)  # includes unknown time at the peer's storage
        for start in range(0, len(wanted), READS_MAX):
            part = wanted[start : start + READS_MAX]
            session.send(Read(reads=part, inline=session.transport is None))

    def _drop(self, token: int, outcome: Outcome) -> None:
        """Give the open read `token` its outcome."""
        for lane in self._lanes:
            session = lane.session
            reading = None if session is None else session.open.get(token)
            if session is not None and reading is not None:
                if reading.stage is _Stage.ASKED:
                    reading.stage = _Stage.DROPPED
                    session.dropped += 1
                    self._end(reading.read, outcome)
                    session.send(Cancel(tokens=[token]))
                elif reading.stage is _Stage.PULLING:
                    reading.stage = _Stage.ZOMBIE
                    reading.decided_s = time.monotonic()
                    self._end(reading.read, outcome, released=False)
                return

    def _stall(self, lane: _Lane, session: _Session) -> None:
        """End a silent peer's reads, which are retried elsewhere. The session continues."""
        session.is_stalled = True
        for token, reading in list(session.open.items()):
            if reading.stage in (_Stage.ASKED, _Stage.PULLING):
                self._drop(token, LOST)
        lane.lost += 1
        self._say(lane, f"has not answered a read for {STALLED_S} s")

    def _expire(self, session: _Session, now_s: float) -> None:
        for token, reading in list(session.open.items()):
            if reading.stage is _Stage.ZOMBIE:
                if now_s - reading.decided_s > _ZOMBIE_S:
                    raise _SessionLostError("a pull did not end")
            elif reading.stage is not _Stage.DROPPED and reading.read.deadline_s <= now_s:
                self._drop(token, DEADLINE)

    def _tell(self, session: _Session, now_s: float) -> None:
        if not session.is_up:
            return
        for start in range(0, len(session.done), TOKENS_MAX):
            session.send(Done(tokens=session.done[start : start + TOKENS_MAX]))
        session.done.clear()
        if now_s - session.sent_s >= (BEAT_OPEN_S if session.open else BEAT_IDLE_S):
            session.send(Beat())

    # -- what we receive

    def _take_frames(self, lane: _Lane, session: _Session, frames: list[bytes]) -> None:
        message = session.channel.decode(frames[0])
        session.hear()
        if len(frames) != 1 + isinstance(message, Sent):
            raise MalformedError(f"{len(frames)} frames")
        if isinstance(message, Sent):
            self._take_sent(lane, session, message.token, frames[1])
        else:
            self._take(lane, session, message)

    def _take(self, lane: _Lane, session: _Session, message: AnyMessage) -> None:
        if not session.is_up:
            self._take_answer(lane, session, message)
            return
        match message:
            case Ready() | Beat():
                lane.queued_bytes = message.queued_bytes
                lane.bytes_per_s = message.bytes_per_s
                session.credits = message.credits or session.credits
                for lent in message.lent if isinstance(message, Ready) else ():
                    self._take_ready(lane, session, lent)
            case Failed():
                for one in message.failed:
                    self._take_failed(lane, session, one)
            case Bye():
                raise _SessionLostError(f"it ended the session: {message.text!r}")
            case _:
                raise MalformedError(f"{type(message).__name__} from a helper")

    def _take_answer(self, lane: _Lane, session: _Session, message: AnyMessage) -> None:
        match message:
            case Welcome():
                self._welcomed(lane, session, message)
            case Refused() | Bye():
                raise _SessionLostError(f"refused: {message.text!r}")
            case _:
                raise MalformedError(f"{type(message).__name__} before Welcome")

    def _welcomed(self, lane: _Lane, session: _Session, welcome: Welcome) -> None:
        why_not = "it offers no RDMA" if self._by_nixl else "no RDMA on this side"
        if welcome.metadata and self._by_nixl:
            why_not = self._connect(session, welcome)
        session.is_up = True
        session.credits, session.slots = welcome.credits, welcome.slots
        how = f"in messages ({why_not})" if why_not else "by RDMA"
        self._say(
            lane, f"reads up to {welcome.credits} chunks at a time for us and sends them {how}"
        )

    def _connect(self, session: _Session, welcome: Welcome) -> str:
        """Prepare pulls. Return the reason why pulls are impossible; empty if they are possible."""
        theirs = SlotMemory(welcome.address, self._common.slot_bytes, welcome.slots)
        try:
            session.transport = NixlTransport(self._memory)
            session.transport.connect(welcome.metadata, theirs)
        except (TransportError, ImportError) as error:
            why_not = str(error)
        else:
            return ""
        if session.transport is not None:
            self._leaving.append((session.transport, []))
            session.transport = None
        return why_not

    def _take_sent(self, lane: _Lane, session: _Session, token: int, raw: bytes) -> None:
        reading = self._answered(session, token)
        read = reading.read
        if session.transport is not None or len(raw) != slot_stride_bytes(read.payload_bytes):
            raise MalformedError(f"bad data: {len(raw)} bytes")
        self._forget(session, token)
        session.done.append(token)
        lane.pull_rate.moved(len(raw), time.monotonic(), more=bool(session.open))
        if reading.stage is _Stage.ASKED:
            start = read.address - self._memory.address
            self._view[start : start + len(raw)] = raw
            self._came(read)

    def _came(self, read: PeerRead) -> None:
        """Verify a chunk that has arrived completely. A mismatch fails the read."""
        start = read.address - self._memory.address
        slot = self._view[start : start + slot_stride_bytes(read.payload_bytes)]
        outcome = verify(slot, read.identity, read.payload_bytes, read.place, read.tag)
        self._end(read, outcome)

    def _take_ready(self, lane: _Lane, session: _Session, lent: Lent) -> None:
        reading = self._answered(session, lent.token)
        if reading.stage is _Stage.DROPPED:
            self._forget(session, lent.token)
            session.done.append(lent.token)
            return
        if lent.slot >= session.slots:
            raise MalformedError(f"slot {lent.slot} of {session.slots}")
        if session.transport is None:
            raise MalformedError("it offered a slot for a chunk that it should have sent")
        reading.stage = _Stage.PULLING
        session.moving[lent.token] = reading
        read = reading.read
        begun_s = time.monotonic()
        size_bytes = slot_stride_bytes(read.payload_bytes)
        reading.pull = session.transport.pull(lent.slot, read.address, size_bytes)
        if session.has_pulled:
            reading.is_timed = True
            lane.pull_rate.moves(begun_s)

    def _take_failed(self, lane: _Lane, session: _Session, one: FailedRead) -> None:
        reading = self._answered(session, one.token)
        if one.reason is Reason.NOT_ATTACHED:
            lane.unusable_until_s = time.monotonic() + _NOT_ATTACHED_S
        self._forget(session, one.token)
        if session.transport is None and not session.open:
            lane.pull_rate.stop()
        if reading.stage is _Stage.ASKED:
            self._end(reading.read, outcome_of_failed(one))

    @staticmethod
    def _answered(session: _Session, token: int) -> _Reading:
        reading = session.open.get(token)
        if reading is None or reading.stage not in (_Stage.ASKED, _Stage.DROPPED):
            raise MalformedError(f"an answer to {token}, which was not requested")
        return reading

    @staticmethod
    def _forget(session: _Session, token: int) -> None:
        reading = session.open.pop(token)
        session.dropped -= reading.stage is _Stage.DROPPED
        session.moving.pop(token, None)

    def _pull_on(self, lane: _Lane, session: _Session) -> None:
        for token, reading in list(session.moving.items()):
            assert session.transport is not None
            assert reading.pull is not None  # else the session has ended
            if not session.transport.has_ended(reading.pull):
                continue
            self._forget(session, token)
            session.done.append(token)
            read = reading.read
            size_bytes = slot_stride_bytes(read.payload_bytes)
            session.has_pulled = True
            if reading.is_timed:
                more = any(one.is_timed for one in session.moving.values())
                lane.pull_rate.moved(size_bytes, time.monotonic(), more=more)
            if reading.stage is _Stage.ZOMBIE:
                self._ends.append(PeerEnd(token, CANCELLED, released=True))
                continue
            self._came(read)

    # -- how a session ends

    def _end(self, read: PeerRead, outcome: Outcome, *, released: bool = True) -> None:
        if outcome.ok:
            self.counts.pulled_bytes += read.payload_bytes
        else:
            self.counts.failed[outcome.kind.value] += 1
        self._ends.append(PeerEnd(read.token, outcome, released))

    def _lose(self, lane: _Lane, why: str, *, counts: bool = True) -> None:
        """End the session and all its reads. The peer is greeted again a little later."""
        session, lane.session = lane.session, None
        if session is None:
            return
        was_up = session.is_up
        lane.lost += was_up and counts and not session.is_stalled  # a stall was counted already
        self._show(lane)  # first, so that its reads are not sent to this peer again
        lane.pull_rate.stop()
        self.counts.lost += was_up and counts
        if counts:
            lane.back_off.begin(time.monotonic())
        self._say(lane, why)
        if was_up:
            session.send(Bye(text=why[:256]))
        for one in (session.socket, session.monitor):
            self._poller.unregister(one)
        session.close(_BYE_MS if was_up else 0)
        touched = []
        for reading in session.open.values():
            if reading.stage is _Stage.ASKED:
                self._end(reading.read, LOST)
            elif reading.stage in (_Stage.PULLING, _Stage.ZOMBIE):
                touched.append(reading)
        if session.transport is not None:
            self._leaving.append((session.transport, touched))
        self._look_at_leaving()

    def _look_at_leaving(self) -> None:
        """End the agents of lost sessions, and with them all writes in progress."""
        leaving, self._leaving = self._leaving, []
        for transport, touched in leaving:
            is_gone = transport.close()
            for reading in touched:
                if reading.stage is _Stage.PULLING:
                    self._end(reading.read, LOST, released=is_gone)
                elif is_gone:
                    self._ends.append(PeerEnd(reading.read.token, LOST, released=True))
                reading.stage = _Stage.ZOMBIE
            if not is_gone:
                self._leaving.append((transport, touched))

    def _show(self, lane: _Lane) -> None:
        session = lane.session
        if session is None or not session.is_up:
            lane.state = NO_PEER._replace(lost=lane.lost)
            return
        pull_rate = lane.pull_rate.recent(time.monotonic())
        rates = [one for one in (lane.bytes_per_s, pull_rate) if one]
        lane.state = PeerState(
            time.monotonic() >= lane.unusable_until_s and not session.is_stalled,
            session.credits - session.dropped,
            min(rates, default=0.0),
            lane.queued_bytes,
            lane.lost,
        )

    def _say(self, lane: _Lane, text: str) -> None:
        if text != lane.logged:
            lane.logged = text
            logger.info("peer %s: %s", lane.address, text)


def _wanted(read: PeerRead, now_s: float) -> WantedRead:
    left_ms = max(0, int(1000 * (read.deadline_s - now_s)))
    return WantedRead(
        read.token,
        read.place.region_uuid,
        read.place.slot,
        read.identity.key,
        read.identity.generation,
        read.payload_bytes,
        min(left_ms, 0xFFFFFFFF),
    )
