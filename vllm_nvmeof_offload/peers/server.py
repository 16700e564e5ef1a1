# SPDX-License-Identifier: Apache-2.0
"""D's side: reads for peers into serve slots, and lends these.

A read is QUEUED, then READING. Then its slot is LENT to a peer that can pull from it, or its bytes
are SENT in a message, which takes a copy. Both end with the peer's `Done`, with the session, or a
second after the read's deadline: whoever pulls from the slot then is refused by the peer's own
proof. Until then the read costs the peer a credit, so that copies which it does not take in stay
few. A slot into which the storage reads is free when the storage says so.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import itertools
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import zmq

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, EngineError, Outcome
from vllm_nvmeof_offload.io.base import Waker, unbind_this_thread
from vllm_nvmeof_offload.peers.base import (
    BEAT_IDLE_S,
    BEAT_OPEN_S,
    SILENT_S,
    Common,
    Levels,
    Served,
    ServePort,
    ServeRead,
    SlotMemory,
)
from vllm_nvmeof_offload.peers.messages import (
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    TOKENS_MAX,
    VERSION,
    AnyMessage,
    Beat,
    Bye,
    Cancel,
    Challenge,
    Channel,
    Done,
    Failed,
    FailedRead,
    Greeting,
    Hello,
    Lent,
    MalformedError,
    Proof,
    Read,
    Ready,
    Reason,
    Refused,
    Sent,
    WantedRead,
    Welcome,
    decode,
    failed_read,
)
from vllm_nvmeof_offload.peers.pace import Listening
from vllm_nvmeof_offload.peers.transport import NixlTransport, TransportError, has_rdma
from vllm_nvmeof_offload.pool.format import SlotPlace
from vllm_nvmeof_offload.protocol import SlotIdentity
from vllm_nvmeof_offload.units import slot_stride_bytes

SESSIONS_MAX = 64
#: A slot is lent, or a copy on its way, so much longer than the read may take.
_DONE_MORE_S = 1.0
_MOVING_TICK_S = 0.0002
_PROBE_BYTES = 16
_FRAMES_MAX = 256  # taken in before anything else is done
#: Messages that wait for the connection, either way; to a peer, beside one per credit.
_WAITING_MAX = 64
#: A peer has so long to prove that it has the share secret.
_GREETED_S = 5.0
#: The answers to a peer without our secret; the log gets each of them once.
_SAME_FILE = "give both the same share_secret_file"
_NO_SECRET_THERE = f"it has no share secret, and the server that it greets has one; {_SAME_FILE}"
_NO_SECRET_HERE = f"it has a share secret, and the server that it greets has none; {_SAME_FILE}"
_OTHER_SECRET = f"it has another share secret than the server that it greets; {_SAME_FILE}"
#: A connection whose other end does not answer for so long is closed, with what waits for it.
_PING_MS, _PONG_MS = 1000, 3000


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
    number: int = 0  # its token at the port
    slot: int = -1
    inline: bool = False  # it is sent, not lent
    given_up: Outcome | None = None

    @property
    def size_bytes(self) -> int:
        return slot_stride_bytes(self.wanted.payload_bytes)


@dataclass(slots=True, eq=False)
class _Session:
    route: bytes
    tag: bytes
    heard_s: float  # by the clock of `Listening`
    channel: Channel
    told_s: float = 0.0  # when it was last told the levels
    told_bytes: int = 0  # what is read before what it asks for next, as it was told
    lent: int = 0  # of those that are open
    queued_bytes: int = 0  # likewise, which wait for a slot
    reading_bytes: int = 0  # that the port has to read for it
    #: In order of arrival.
    open: dict[int, _Serving] = field(default_factory=dict)
    ready: list[Lent] = field(default_factory=list)
    failed: list[FailedRead] = field(default_factory=list)
    is_gone: bool = False  # it takes no messages any more


@dataclass(frozen=True, slots=True)
class _Greeted:
    """A peer that has been asked for its proof."""

    session: _Session
    hello: Hello
    greeting: Greeting


@dataclass(slots=True)
class ServerCounts:
    """What a server has done."""

    sessions: int = 0  # now
    free: int = 0  # serve slots, now
    served_bytes: int = 0
    failed: int = 0
    malformed: int = 0
    busy: int = 0
    lost: int = 0  # sessions of peers that fell silent
    other_secret: int = 0  # greetings between two of which one has no share secret, or another


class PeerServer:
    """Serves until it is closed. It has a thread of its own, which sleeps while nobody asks."""

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
    ) -> None:
        """address: where peers connect, as `tcp://10.0.0.7:7000`. memory, view: the serve slots.

        by_nixl: slots are lent to peers that can pull. EngineError: the address cannot be used.
        """
        assert 0 < memory.slots <= TOKENS_MAX
        self.counts = ServerCounts(free=memory.slots)
        self._common, self._tag, self._memory, self._port = common, tag, memory, port
        self._view, self._by_nixl = memoryview(view), by_nixl
        self._metadata = b""
        self._probe = ctypes.create_string_buffer(os.urandom(_PROBE_BYTES), _PROBE_BYTES)
        self._free = collections.deque(range(memory.slots))
        self._sessions: dict[bytes, _Session] = {}
        self._greeted: dict[bytes, _Greeted] = {}  # in the order of their coming
        self._told: set[str] = set()
        self._listening = Listening(time.monotonic())
        self._by_number: dict[int, _Serving] = {}
        self._numbers = 0
        self._turns: collections.deque[_Session] = collections.deque()
        self._waker, self._closed = Waker(), threading.Event()
        self._context = zmq.Context()
        bound: Future[str] = Future()
        run = self._run
        self._thread = threading.Thread(
            target=run, args=(address, bound), name="peer-server", daemon=True
        )
        self._thread.start()
        #: Where peers connect, with the port that was chosen for port 0.
        self.address = bound.result()

    def set_tag(self, tag: bytes) -> None:
        """End the sessions with another tag before anything more is read for anybody."""
        self._tag = tag
        self._waker.wake()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop serving; True: nobody reads into the serve slots any more."""
        self._closed.set()
        self._waker.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._by_number

    def _run(self, address: str, bound: Future[str]) -> None:
        # First, because the library's own thread, which starts with a socket, is bound likewise.
        unbind_this_thread()
        try:
            self._socket = self._bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            bound.set_exception(EngineError(f"cannot serve peers at {address}: {error}"))
            return
        bound.set_result(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        transport = self._make_transport() if self._by_nixl else None
        try:
            self._serve(transport)
        finally:
            if transport is not None:
                transport.close()
            self._context.destroy(0)
            self._view.release()

    def _bind(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else it drops what has no room
        socket.setsockopt(zmq.SNDHWM, self._memory.slots + _WAITING_MAX)
        socket.setsockopt(zmq.RCVHWM, _WAITING_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        socket.bind(address)
        return socket

    def _make_transport(self) -> NixlTransport | None:
        try:
            transport = NixlTransport(self._memory)
        except (TransportError, ImportError) as error:
            logger.warning("peers get chunks in messages: %s", error)
            return None
        self._metadata = transport.metadata
        return transport

    def _serve(self, transport: NixlTransport | None) -> None:
        poller = zmq.Poller()
        for one in (self._socket, self._waker.fd, self._port.fileno()):
            poller.register(one, zmq.POLLIN)
        while not self._closed.is_set():
            # A pull begins only when both sides let the connection progress.
            moving = any(one.lent for one in self._sessions.values())
            if moving:
                time.sleep(_MOVING_TICK_S)
            sleep_ms = 0 if moving else self._sleep_ms()
            poller.poll(sleep_ms)
            self._listening.turn(time.monotonic(), sleep_ms / 1000)
            self._waker.clear()
            if transport is not None:
                transport.progress()
            self._step()
        for session in list(self._sessions.values()):
            self._end(session, "the server stops")
        self._port.cancel(list(self._by_number))

    def _sleep_ms(self) -> int:
        busy = any(one.open or one.told_bytes for one in self._sessions.values())
        return int(1000 * (BEAT_OPEN_S if busy else BEAT_IDLE_S) / 2)

    def _step(self) -> None:
        drained = self._take_messages()
        for session in [one for one in self._sessions.values() if one.tag != self._tag]:
            self._end(session, "the weights have changed")
        for end in self._port.poll():
            self._take_served(end)
        now_s = time.monotonic()
        self._expire(now_s)
        self._begin(now_s)
        self._forget_greeted()
        for session in list(self._sessions.values()):
            is_silent = self._listening.now_s - session.heard_s > SILENT_S
            if session.is_gone or (drained and is_silent):
                self.counts.lost += 1
                self._end(session, "silence")
            else:
                self._tell(session, now_s)
        self.counts.sessions, self.counts.free = len(self._sessions), len(self._free)

    # What comes in

    def _take_messages(self) -> bool:
        """Return whether all was taken in that has come."""
        for _ in range(_FRAMES_MAX):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            route = frames[0]
            try:
                if len(frames) != 2:
                    raise MalformedError(f"{len(frames)} frames")
                self._take(route, frames[1])
            except MalformedError as error:
                self.counts.malformed += 1
                logger.debug("peers: malformed: %s", error)
                if route in self._sessions:
                    self._end(self._sessions[route], "malformed")
        return False

    def _take(self, route: bytes, raw: bytes) -> None:
        session = self._sessions.get(route)
        if session is None:
            self._greet(route, raw)
            return
        message = session.channel.decode(raw)
        session.heard_s = self._listening.now_s
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
                raise MalformedError(f"{type(message).__name__} from P")

    def _greet(self, route: bytes, raw: bytes) -> None:
        if greeted := self._greeted.pop(route, None):
            self._take_proof(greeted, raw)
            return
        if decode(raw).n:
            return  # of a session that has ended here
        channel = Channel()
        hello = channel.decode(raw)
        if not isinstance(hello, Hello):
            raise MalformedError(f"{type(hello).__name__} without a session")
        session = _Session(route, hello.tag, self._listening.now_s, channel)
        secret = self._common.secret
        if hello.version != VERSION:
            self._send(session, Refused(text=f"version {VERSION} here, not {hello.version}"))
        elif bool(hello.nonce) != bool(secret):
            self._refuse_stranger(session, _NO_SECRET_THERE if secret else _NO_SECRET_HERE)
        elif secret:  # nothing else is said before the proof
            nonce = os.urandom(NONCE_BYTES)
            self._greeted[route] = _Greeted(session, hello, Greeting(secret, raw, nonce))
            self._send(session, Challenge(nonce=nonce))
        else:
            self._admit(session, hello, None)

    def _take_proof(self, greeted: _Greeted, raw: bytes) -> None:
        proof = greeted.session.channel.decode(raw)
        if not isinstance(proof, Proof):
            raise MalformedError(f"{type(proof).__name__} in place of a proof")
        if greeted.greeting.is_of_p(proof):
            self._admit(greeted.session, greeted.hello, greeted.greeting)
        else:
            self._refuse_stranger(greeted.session, _OTHER_SECRET)

    def _refuse_stranger(self, session: _Session, text: str) -> None:
        self.counts.other_secret += 1
        self._send(session, Refused(text=text, about_secret=True))
        if text not in self._told:
            self._told.add(text)
            logger.warning("a peer is refused: %s", text)

    def _forget_greeted(self) -> None:
        """Whoever has not proved anything within a greeting's time greets again."""
        since_s = self._listening.now_s - _GREETED_S
        old = (one for one in self._greeted.values() if one.session.heard_s < since_s)
        excess = itertools.islice(self._greeted.values(), max(0, len(self._greeted) - SESSIONS_MAX))
        for one in [*old, *excess]:
            self._greeted.pop(one.session.route, None)

    def _admit(self, session: _Session, hello: Hello, greeting: Greeting | None) -> None:
        if text := self._refusal(hello):
            ours = self._common
            refused = Refused(text=text, replica=ours.replica, replicas=ours.replicas)
            self._send(session, refused)
            return
        self._sessions[session.route] = session
        self._turns.append(session)
        address, _, slots = self._memory
        welcome = Welcome(
            metadata=self._metadata,
            pid=os.getpid(),
            probe_address=ctypes.addressof(self._probe),
            probe=self._probe.raw,
            has_rdma=has_rdma(),
            address=address,
            slots=slots,
            credits=slots,
        )
        if greeting is not None:
            welcome.proof = greeting.of_d(welcome)
        self._send(session, welcome)

    def _refusal(self, hello: Hello) -> str:
        ours = self._common
        theirs = Common(hello.keyspace, hello.rank, hello.world_size, hello.slot_bytes)
        for name in ("keyspace", "world_size", "rank", "slot_bytes"):
            if getattr(ours, name) != getattr(theirs, name):
                return f"{name} {getattr(ours, name)} here, not {getattr(theirs, name)}"
        if hello.tag != self._tag:
            return "other weights here"
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
            deadline_s = now_s + wanted.within_ms / 1000
            serving = _Serving(session, wanted, deadline_s, inline=message.inline)
            session.open[wanted.token] = serving
            session.queued_bytes += serving.size_bytes

    def _take_done(self, session: _Session, token: int) -> None:
        serving = session.open.get(token)
        if serving is None:
            return  # its time was over
        if serving.stage not in (_Stage.LENT, _Stage.SENT):
            raise MalformedError(f"token {token} is done before it was lent")
        self._done(serving)

    # What is read

    def _begin(self, now_s: float) -> None:
        """Give free slots to what waits, to each session in turn."""
        reads = []
        passed = 0
        while self._free and passed < len(self._turns):
            session = self._turns[0]
            self._turns.rotate(-1)
            queued = (one for one in session.open.values() if one.stage is _Stage.QUEUED)
            serving = next(queued, None)
            if serving is None:
                passed += 1
                continue
            passed = 0
            reads.append(self._read_of(serving))
        if reads:
            self._port.serve(reads)

    def _read_of(self, serving: _Serving) -> ServeRead:
        self._numbers += 1
        serving.number, serving.slot = self._numbers, self._free.popleft()
        serving.stage = _Stage.READING
        serving.session.queued_bytes -= serving.size_bytes
        serving.session.reading_bytes += serving.size_bytes
        self._by_number[serving.number] = serving
        wanted = serving.wanted
        return ServeRead(
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
        session.reading_bytes -= serving.size_bytes
        outcome = serving.given_up or end.outcome
        is_over = session.open.get(token) is not serving
        if is_over or outcome is None or not outcome.ok:
            self._free.append(serving.slot)
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
            self._free.append(serving.slot)
        else:
            serving.stage = _Stage.LENT
            session.lent += 1
            session.ready.append(Lent(token, serving.slot))

    def _fail(self, session: _Session, token: int, outcome: Outcome | None) -> None:
        self.counts.failed += 1
        session.failed.append(failed_read(token, outcome))

    def _give_up(self, serving: _Serving, outcome: Outcome) -> None:
        """P wants it no more: a read that has begun goes on, and its answer says so."""
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
            self._free.append(serving.slot)

    # What goes out

    def _tell(self, session: _Session, now_s: float) -> None:
        queued_bytes, bytes_per_s = self._levels(session)
        has_news = session.open or queued_bytes != session.told_bytes
        while session.failed:
            self._send(session, Failed(failed=session.failed[:TOKENS_MAX]))
            del session.failed[:TOKENS_MAX]
        if session.ready:
            ready = Ready(lent=session.ready, queued_bytes=queued_bytes, bytes_per_s=bytes_per_s)
            self._send(session, ready)
            session.ready = []
        elif now_s - session.told_s >= (BEAT_OPEN_S if has_news else BEAT_IDLE_S):
            self._send(session, Beat(queued_bytes=queued_bytes, bytes_per_s=bytes_per_s))
        else:
            return
        session.told_s, session.told_bytes = now_s, queued_bytes

    def _levels(self, session: _Session) -> Levels:
        """What is read before what this peer asks for next. It counts its own reads itself."""
        queued_bytes, bytes_per_s = self._port.levels()
        others = sum(one.queued_bytes for one in self._sessions.values()) - session.queued_bytes
        return Levels(max(0, queued_bytes - session.reading_bytes) + others, bytes_per_s)

    def _send(self, session: _Session, message: AnyMessage, *more: memoryview) -> None:
        """more: a second frame, which is copied."""
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
                self._free.append(serving.slot)
            elif serving.stage is _Stage.READING:
                reading.append(serving.number)
        session.open.clear()
        self._port.cancel(reading)


def host_and_port(text: str, offset: int) -> str:
    """The address of the port so far behind that of `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    return f"tcp://{host}:{int(port) + offset}"
