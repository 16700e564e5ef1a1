# SPDX-License-Identifier: Apache-2.0
"""The helper's side: it reads chunks for peers into serve slots, and sends them or lets peers pull.

A read is QUEUED, then READING. Then its slot is LENT to a peer that can pull, or its bytes are
copied into a message and SENT. Both stages end with the peer's `Done`, with the session, or a
second after the read's deadline; a peer that pulls later detects wrong bytes itself. Until then,
the read costs the peer a credit, so that few copies wait for a peer that does not receive them. A
slot into which the storage is reading becomes free when the storage reports the end of the read.
Sessions get equal shares of the slots.

An unauthenticated connection may send one frame of `MESSAGE_BYTES_MAX`, and lasts at most two
seconds. Connections beyond the first `CONNECTIONS_MAX` are closed immediately.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import hmac
import socket
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, EngineError, Outcome
from vllm_nvmeof_offload.io.base import unbind_this_thread
from vllm_nvmeof_offload.peers.base import (
    BEAT_IDLE_S,
    BEAT_OPEN_S,
    SILENT_S,
    Common,
    Levels,
    PeerRead,
    Served,
    ServePort,
    SlotMemory,
)
from vllm_nvmeof_offload.peers.session import (
    CURVE_BYTES,
    FRAMES_MAX,
    MESSAGE_BYTES_MAX,
    STRANGER,
    TOKENS_MAX,
    VERSION,
    AnyMessage,
    Beat,
    Bye,
    Cancel,
    Channel,
    Done,
    Failed,
    FailedRead,
    Hello,
    Lent,
    MalformedError,
    Read,
    Ready,
    Reason,
    Refused,
    Sent,
    SessionThread,
    WantedRead,
    Welcome,
    decode,
    failed_read,
    key_pair,
    lock,
    take_in,
)
from vllm_nvmeof_offload.peers.transport import NixlTransport, TransportError
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import slot_stride_bytes

SESSIONS_MAX = 64
CONNECTIONS_MAX = 2 * SESSIONS_MAX
_DONE_MORE_S = 1.0  # a slot stays lent, or a copy in flight, this long after the deadline
_MOVING_S = 0.01  # without an event for this long, the thread sleeps even while slots are lent
#: The limit on messages queued per connection and direction. The queue of messages to a peer also
#: has room for one message per serve slot.
_WAITING_MAX = 64
#: A connection without an answer for this long is closed, and its queued messages are dropped.
_PING_MS, _PONG_MS = 1000, 3000
_HANDSHAKE_MS = 2000
_SHUT_S = 2.0  # if descriptors run out, all connections end, and none is accepted this long


class _Stage(enum.Enum):
    QUEUED = enum.auto()
    READING = enum.auto()
    LENT = enum.auto()
    SENT = enum.auto()


@dataclass(slots=True, eq=False)
class _Serving:
    session: _Session
    wanted: WantedRead
    deadline_s: float
    stage: _Stage = _Stage.QUEUED
    number: int = 0  # the token at the port
    slot: int = -1
    inline: bool = False  # whether it is sent, not lent
    given_up: Outcome | None = None

    @property
    def size_bytes(self) -> int:
        return slot_stride_bytes(self.wanted.payload_bytes)


@dataclass(slots=True, eq=False)
class _Session:
    route: bytes
    tag: bytes
    received_s: float  # by `Listening`'s clock
    channel: Channel
    sent_s: float = 0.0  # when the levels were last sent
    sent_bytes: int = 0  # the bytes ahead of its next read, as last sent
    sent_credits: int = 0
    lent: int = 0  # open reads that are lent
    held: int = 0  # serve slots in use
    queued_bytes: int = 0  # bytes of open reads that wait for a slot
    reading_bytes: int = 0  # bytes that the port must read for it
    open: dict[int, _Serving] = field(default_factory=dict)  # open reads in order of arrival
    ready: list[Lent] = field(default_factory=list)
    failed: list[FailedRead] = field(default_factory=list)
    is_gone: bool = False  # whether it no longer accepts messages


@dataclass(slots=True)
class ServerCounts:
    sessions: int = 0  # at present
    free: int = 0  # serve slots at present
    served_bytes: int = 0
    failed: int = 0
    malformed: int = 0
    busy: int = 0
    lost: int = 0  # sessions with peers that became silent
    other_secret: int = 0  # connections from peers with a different share secret


class _Door:
    """The admission of peers: a bounded number of connections, all with the share secret."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        address: str,
        secret: bytes,
    ) -> None:
        """Open `address`. Raises zmq.ZMQError if it is unusable, or CURVE is needed but missing."""
        self._router = router
        self._connected: set[int] = set()  # descriptors
        self._opens_s = 0.0  # 0 while open
        self.refused = 0
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
        failed = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = router.get_monitor_socket(events | failed)
        lock(router, secret, serves=True)
        self._key = z85.decode(key_pair(secret, serves=False)[0]) if secret else b""
        #: ZMQ asks through this socket which keys to admit.
        self._asked = context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        router.bind(address)
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.sockets = self._monitor, self._asked

    def turn(self, now_s: float) -> None:
        for _ in range(FRAMES_MAX):
            if self._asked.poll(0):
                self._answer(self._asked.recv_multipart())
            elif self._monitor.poll(0):
                event = recv_monitor_message(self._monitor)
                self._take(event["event"], event["value"], now_s)
            else:
                break
        if self._opens_s and now_s >= self._opens_s:
            try:
                self._router.bind(self.address)
                self._opens_s = 0.0
            except zmq.ZMQError:
                self._opens_s = now_s + _SHUT_S

    def _answer(self, request: list[bytes]) -> None:
        version, number, _, _, _, _, *keys = request
        is_ours = len(keys) == 1 and hmac.compare_digest(keys[0], self._key)
        self._asked.send_multipart([version, number, b"200" if is_ours else b"400", b"", b"", b""])

    def _take(self, event: int, descriptor: int, now_s: float) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._connected.add(descriptor)
            if len(self._connected) > CONNECTIONS_MAX:
                with contextlib.suppress(OSError):
                    self._cut(descriptor)
        elif event == zmq.EVENT_DISCONNECTED:
            self._connected.discard(descriptor)
        elif event != zmq.EVENT_ACCEPT_FAILED:
            self.refused += 1
        elif not self._opens_s:  # unbinding ends all connections; otherwise ZMQ retries constantly
            self._router.unbind(self.address)
            self._connected.clear()
            self._opens_s = now_s + _SHUT_S

    def _cut(self, descriptor: int) -> None:
        """Close a connection, unless its descriptor now belongs to a different file."""
        ours = (int(self.address.rpartition(":")[2]),)
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as one:
            if one.getsockname()[1:2] == ours:
                one.shutdown(socket.SHUT_RDWR)


class PeerServer(SessionThread):
    """A server for peers. Its thread sleeps while no peer requests anything."""

    def __init__(
        self,
        address: str,
        common: Common,
        tag: bytes,
        memory: SlotMemory,
        view: memoryview,
        port: ServePort,
        *,
        by_nixl: bool = True,
        read_deadline_s: float = 5.0,
    ) -> None:
        """Peers connect to `address`, such as `tcp://10.0.0.7:7000`. `memory` and `view` are the
        serve slots. With `by_nixl`, slots are lent to peers that can pull. `read_deadline_s` limits
        a peer's reads as it limits our own. Raises EngineError if the address cannot be used."""
        assert 0 < memory.slots <= TOKENS_MAX
        self.counts = ServerCounts(free=memory.slots)
        super().__init__("peer-server", self._run, tag)
        self._common, self._memory, self._port = common, memory, port
        self._view, self._by_nixl = memoryview(view), by_nixl
        self._read_deadline_s = read_deadline_s
        self._transport: NixlTransport | None = None  # None until a peer can pull
        self._moved_s = 0.0
        self._free = collections.deque(range(memory.slots))
        self._sessions: dict[bytes, _Session] = {}
        self._by_number: dict[int, _Serving] = {}
        self._numbers = 0
        self._turns: collections.deque[_Session] = collections.deque()
        self._wanted, self._bound = address, Future[str]()
        self._thread.start()
        self.address = self._bound.result()  # with the actual port in place of port 0

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop serving. Return whether no peer pulls from the serve slots any more. Reads into the
        slots still end in the port's `poll`."""
        return super().close(timeout_s) and self._transport is None

    def _run(self) -> None:
        # Unbind first: the library's thread, which a socket starts, inherits the CPU binding.
        unbind_this_thread()
        try:
            self._socket = self._make_socket()
            self._door = _Door(self._context, self._socket, self._wanted, self._common.secret)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            failure = EngineError(f"cannot serve peers at {self._wanted}: {error}")
            self._bound.set_exception(failure)
            return
        self._bound.set_result(self._door.address)
        try:
            self._serve()
        finally:
            if self._transport is not None and self._transport.close():
                self._transport = None
            self._context.destroy(0)
            self._view.release()

    def _make_socket(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.ROUTER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX + CURVE_BYTES)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise it drops excess messages
        made.setsockopt(zmq.SNDHWM, self._memory.slots + _WAITING_MAX)
        made.setsockopt(zmq.RCVHWM, _WAITING_MAX)
        made.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        made.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        return made

    def _serve(self) -> None:
        for one in (self._socket, *self._door.sockets, self._port.fileno()):
            self._poller.register(one, zmq.POLLIN)
        for _ in self._wake_ups(self._beat_s):
            self._look_at_door(time.monotonic())
            if self._transport is not None:
                self._transport.progress()
            self._step()
        for session in list(self._sessions.values()):
            self._end(session, "the server is stopping")
        self._port.cancel(list(self._by_number))

    def _beat_s(self) -> float:
        sessions = self._sessions.values()
        # A pull begins only when both sides let the connection progress.
        is_lent = self._transport is not None and any(one.lent for one in sessions)
        if is_lent and time.monotonic() - self._moved_s < _MOVING_S:
            return 0.0
        return BEAT_OPEN_S if any(one.open or one.sent_bytes for one in sessions) else BEAT_IDLE_S

    def _look_at_door(self, now_s: float) -> None:
        self._door.turn(now_s)
        if self._door.refused and not self.counts.other_secret:
            logger.warning("a peer is refused: %s", STRANGER)
        self.counts.other_secret = self._door.refused

    def _step(self) -> None:
        drained = take_in(self._socket, self._take_frames)
        for session in [one for one in self._sessions.values() if one.tag != self._tag]:
            self._end(session, "the weights have changed")
        for end in self._port.poll():
            self._take_served(end)
        now_s = time.monotonic()
        self._expire(now_s)
        self._begin(now_s)
        for session in list(self._sessions.values()):
            is_silent = self._listening.now_s - session.received_s > SILENT_S
            if session.is_gone or (drained and is_silent):
                self.counts.lost += 1
                self._end(session, "the peer was silent for too long")
            else:
                self._tell(session, now_s)
        self.counts.sessions, self.counts.free = len(self._sessions), len(self._free)

    # -- incoming messages

    def _take_frames(self, frames: list[bytes]) -> None:
        route, self._moved_s = frames[0], time.monotonic()
        try:
            if len(frames) != 2:
                raise MalformedError(f"{len(frames)} frames")
            self._take(route, frames[1])
        except MalformedError as error:
            self.counts.malformed += 1
            logger.debug("peers: malformed: %s", error)
            if route in self._sessions:
                self._end(self._sessions[route], "malformed")

    def _take(self, route: bytes, raw: bytes) -> None:
        session = self._sessions.get(route)
        if session is None:
            self._greet(route, raw)
            return
        message = session.channel.decode(raw)
        session.received_s = self._listening.now_s
        match message:
            case Read():
                self._take_reads(session, message)
            case Done():
                for token in message.tokens:
                    self._take_done(session, token)
            case Cancel():
                for token in message.tokens:
                    if serving := session.open.get(token):
                        self._give_up(serving, CANCELLED)
            case Beat():
                pass
            case Bye():
                self._end(session, "")
            case _:
                raise MalformedError(f"{type(message).__name__} from a loading server")

    def _greet(self, route: bytes, raw: bytes) -> None:
        if decode(raw).n:
            return  # the session ended earlier
        channel = Channel()
        hello = channel.decode(raw)
        if not isinstance(hello, Hello):
            raise MalformedError(f"{type(hello).__name__} without a session")
        session = _Session(route, hello.tag, self._listening.now_s, channel)
        if text := self._refusal(hello):
            ours = self._common
            refused = Refused(text=text, replica=ours.replica, replicas=ours.replicas)
            self._send(session, refused)
            return
        self._sessions[session.route] = session
        self._turns.append(session)
        address, _, slots = self._memory
        metadata = self._metadata() if hello.pulls else b""
        session.sent_credits = share = self._share()
        welcome = Welcome(metadata=metadata, address=address, slots=slots, credits=share)
        self._send(session, welcome)

    def _metadata(self) -> bytes:
        """Return our agent's metadata for peers that can pull; empty if there is no agent."""
        if self._transport is None and self._by_nixl:
            try:
                self._transport = NixlTransport(self._memory)
            except (TransportError, ImportError) as error:
                self._by_nixl = False
                logger.warning(
                    "peers get chunks in messages, because NIXL cannot be used: %s", error
                )
        return self._transport.metadata if self._transport is not None else b""

    def _share(self) -> int:
        """Return the number of slots that a session may use at a time."""
        return max(1, self._memory.slots // len(self._sessions))

    def _refusal(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return f"version {VERSION} here, not {hello.version}"
        for name in ("keyspace", "world_size", "rank", "slot_bytes"):
            ours, theirs = getattr(self._common, name), getattr(hello, name)
            if ours != theirs:
                return f"{name} {ours} here, not {theirs}"
        if hello.tag != self._tag:
            return "the weights here are different"
        return "" if len(self._sessions) < SESSIONS_MAX else "too many sessions"

    def _take_reads(self, session: _Session, message: Read) -> None:
        now_s = time.monotonic()
        for wanted in message.reads:
            if wanted.token in session.open:
                raise MalformedError(f"token {wanted.token} twice")
            if slot_stride_bytes(wanted.payload_bytes) > self._memory.slot_bytes:
                raise MalformedError(f"{wanted.payload_bytes} bytes")
            if len(session.open) >= self._memory.slots:
                self.counts.busy += 1
                if len(session.failed) >= TOKENS_MAX:
                    raise MalformedError("far more reads than credits")
                session.failed.append(FailedRead(wanted.token, Reason.BUSY))
                continue
            deadline_s = now_s + min(wanted.within_ms / 1000, self._read_deadline_s)
            serving = _Serving(session, wanted, deadline_s, inline=message.inline)
            session.open[wanted.token] = serving
            session.queued_bytes += serving.size_bytes

    def _take_done(self, session: _Session, token: int) -> None:
        serving = session.open.get(token)
        if serving is None:
            return  # it has expired
        if serving.stage not in (_Stage.LENT, _Stage.SENT):
            raise MalformedError(f"token {token} is done before its slot was offered")
        self._done(serving)

    # -- reads

    def _begin(self, now_s: float) -> None:
        """Give free slots to waiting reads, one session after another."""
        reads = []
        passed = 0
        share = self._share() if self._sessions else 0
        while self._free and passed < len(self._turns):
            session = self._turns[0]
            self._turns.rotate(-1)
            queued = (one for one in session.open.values() if one.stage is _Stage.QUEUED)
            serving = next(queued, None)
            if serving is None or session.held >= share:
                passed += 1
                continue
            passed = 0
            reads.append(self._read_of(serving))
        if reads:
            self._port.serve(reads)

    def _read_of(self, serving: _Serving) -> PeerRead:
        self._numbers += 1
        serving.number, serving.slot = self._numbers, self._free.popleft()
        serving.stage = _Stage.READING
        serving.session.held += 1
        serving.session.queued_bytes -= serving.size_bytes
        serving.session.reading_bytes += serving.size_bytes
        self._by_number[serving.number] = serving
        wanted = serving.wanted
        return PeerRead(
            serving.number,
            self._memory.address_of(serving.slot),
            wanted.payload_bytes,
            SlotIdentity(wanted.key, wanted.generation),
            SlotPlace(wanted.region, self._common.rank, wanted.slot),
            serving.session.tag,
            serving.deadline_s,
        )

    def _take_served(self, end: Served) -> None:
        serving = self._by_number.pop(end.token)
        session, token = serving.session, serving.wanted.token
        self._moved_s = time.monotonic()
        session.reading_bytes -= serving.size_bytes
        outcome = serving.given_up or end.outcome
        is_over = session.open.get(token) is not serving
        if is_over or outcome is None or not outcome.ok:
            self._free_slot(serving)
            if not is_over:
                del session.open[token]
                self._fail(session, token, outcome)
            return
        self.counts.served_bytes += serving.wanted.payload_bytes
        if serving.inline:
            start = serving.slot * self._memory.slot_bytes
            slot = self._view[start : start + serving.size_bytes]
            serving.stage = _Stage.SENT
            self._send(session, Sent(token=token), slot)
            self._free_slot(serving)
        else:
            serving.stage = _Stage.LENT
            session.lent += 1
            session.ready.append(Lent(token, serving.slot))

    def _fail(self, session: _Session, token: int, outcome: Outcome | None) -> None:
        self.counts.failed += 1
        session.failed.append(failed_read(token, outcome))

    def _give_up(self, serving: _Serving, outcome: Outcome) -> None:
        """Cancel an unwanted read. If it has begun, it continues, and its answer follows."""
        if serving.stage is _Stage.QUEUED:
            del serving.session.open[serving.wanted.token]
            serving.session.queued_bytes -= serving.size_bytes
            self._fail(serving.session, serving.wanted.token, outcome)
        elif serving.stage is _Stage.READING and serving.given_up is None:
            serving.given_up = outcome
            self._port.cancel([serving.number])

    def _expire(self, now_s: float) -> None:
        for session in self._sessions.values():
            late = [one for one in session.open.values() if one.deadline_s <= now_s]
            for serving in late:
                if serving.stage in (_Stage.QUEUED, _Stage.READING):
                    self._give_up(serving, DEADLINE)
                elif serving.deadline_s + _DONE_MORE_S <= now_s:
                    self._done(serving)

    def _done(self, serving: _Serving) -> None:
        del serving.session.open[serving.wanted.token]
        if serving.stage is _Stage.LENT:
            serving.session.lent -= 1
            self._free_slot(serving)

    def _free_slot(self, serving: _Serving) -> None:
        serving.session.held -= 1
        self._free.append(serving.slot)

    # -- outgoing messages

    def _tell(self, session: _Session, now_s: float) -> None:
        queued_bytes, bytes_per_s = self._levels(session)
        share = self._share()
        last_sent = session.sent_bytes, session.sent_credits
        has_news = session.open or last_sent != (queued_bytes, share)
        while session.failed:
            self._send(session, Failed(failed=session.failed[:TOKENS_MAX]))
            del session.failed[:TOKENS_MAX]
        if session.ready:
            ready = Ready(
                lent=session.ready,
                queued_bytes=queued_bytes,
                bytes_per_s=bytes_per_s,
                credits=share,
            )
            self._send(session, ready)
            session.ready = []
        elif now_s - session.sent_s >= (BEAT_OPEN_S if has_news else BEAT_IDLE_S):
            beat = Beat(queued_bytes=queued_bytes, bytes_per_s=bytes_per_s, credits=share)
            self._send(session, beat)
        else:
            return
        session.sent_s, session.sent_bytes, session.sent_credits = now_s, queued_bytes, share

    def _levels(self, session: _Session) -> Levels:
        """Return the load ahead of this peer's next read, excluding its own open reads."""
        queued_bytes, bytes_per_s = self._port.levels()
        others = sum(one.queued_bytes for one in self._sessions.values()) - session.queued_bytes
        return Levels(max(0, queued_bytes - session.reading_bytes) + others, bytes_per_s)

    def _send(self, session: _Session, message: AnyMessage, *more: memoryview) -> None:
        """Send a message. `more` is a second frame, which is copied."""
        try:
            raw = session.channel.encode(message)
            self._socket.send_multipart([session.route, raw, *more], zmq.NOBLOCK)
        except zmq.ZMQError:
            session.is_gone = True

    def _end(self, session: _Session, why: str) -> None:
        if self._sessions.pop(session.route, None) is None:
            return
        self._turns.remove(session)
        if why:
            self._send(session, Bye(text=why))
        reading = []
        for serving in session.open.values():
            if serving.stage is _Stage.LENT:
                self._free_slot(serving)
            elif serving.stage is _Stage.READING:
                reading.append(serving.number)
        session.open.clear()
        self._port.cancel(reading)


def host_and_port(text: str, offset: int) -> str:
    """Return the ZMQ address of `HOST:PORT`, with `offset` added to the port."""
    host, _, port = text.rpartition(":")
    return f"tcp://{host}:{int(port) + offset}"
