# SPDX-License-Identifier: Apache-2.0
"""Sessions between a loading server and a helper: messages, and the common parts of both ends.

A message is bounded msgpack in one ZMQ frame. Every message carries `n`, its number in its
direction of the session; a gap means that messages were lost. The receiver ignores unknown fields,
so that a later release may add some. A frame that is not a message, is too large, or has the wrong
number is malformed: the receiver counts it and closes the session.

| message | sender | meaning |
|---|---|---|
| `Hello` | loading server | a request for a session, with what both must have in common |
| `Welcome` | helper | the helper's serve slots, and the credits |
| `Refused` | helper | there is no session, and why |
| `Read` | loading server | chunks for the helper to read into its serve slots |
| `Ready` | helper | serve slots from which the loading server may pull |
| `Sent` | helper | a chunk that was read, in a second frame |
| `Failed` | helper | reads that failed |
| `Done` | loading server | slots that it no longer needs, and chunks that have arrived |
| `Cancel` | loading server | reads that it has cancelled |
| `Beat` | both | a keep-alive, with the helper's levels |
| `Bye` | both | the session is over |

The helper answers each token in a `Read` once, with `Ready`, `Sent` or `Failed`, however late.

With a share secret, ZMQ's CURVE encrypts and authenticates every byte of a message. Chunks that
RDMA carries are not protected, except by their checksums. All servers derive the same two pairs of
keys from the secret, one for helpers and one for loading servers. Neither side accepts a message on
a connection until the other end has proved that it has its key. CURVE draws new keys for each
connection, so nothing can be replayed.
"""

from __future__ import annotations

import enum
import errno
import hmac
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, TypeAlias

import msgspec
import zmq
from msgspec import Meta, Struct
from zmq.utils import z85

from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    STALE,
    OffloadError,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.io.base import Waker

VERSION = 2
MESSAGE_BYTES_MAX = 1 << 18
CURVE_BYTES = 64  # more than CURVE adds to a frame: ZMQ's limit applies to the encrypted frame
READS_MAX = 64  # in one message
TOKENS_MAX = 1024  # the maximum in one message, and as a session's credits
_ERROR_MAX = 200  # the maximum number of characters quoted from a frame

_Sixteen = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Key = Annotated[bytes, Meta(min_length=1, max_length=46)]
_U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger integers
_U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_Rate = Annotated[float, Meta(ge=0, le=1e15)]
_Metadata = Annotated[bytes, Meta(max_length=1 << 17)]
_Text = Annotated[str, Meta(max_length=256)]
_Credits = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
_Tokens = Annotated[list[_U64], Meta(max_length=TOKENS_MAX)]


class MalformedError(OffloadError):
    """A frame from a peer that is not a message, or a message that the peer may not send now."""


class Reason(enum.IntEnum):
    """The reason for a helper's failed read. The first five are named after `OutcomeKind`s."""

    STALE = 1
    CHECKSUM_MISMATCH = 2
    IO_ERROR = 3
    DEADLINE = 4
    CANCELLED = 5
    NOT_ATTACHED = 6  # the helper has not opened the region
    BUSY = 7  # more reads than credits


class WantedRead(Struct, array_like=True, frozen=True):
    """A read of a slot in a region. The slot must have this content. `within_ms` is how long the
    loading server waits: a duration, because the clocks of two hosts may differ."""

    token: _U64
    region: _Sixteen
    slot: _U32
    key: _Key
    generation: _U64
    payload_bytes: _U64
    within_ms: _U32


class Lent(Struct, array_like=True, frozen=True):
    """A serve slot with the chunk requested under `token`."""

    token: _U64
    slot: _U32


class FailedRead(Struct, array_like=True, frozen=True):
    """A failed read. `errno` is the errno of an IO_ERROR."""

    token: _U64
    reason: Reason
    errno: _U32 = 0


class Message(Struct, kw_only=True, tag_field="type"):
    """The base of all messages. `n` is the message's number in its direction, from 0, set when it
    is sent."""

    n: _U64 = 0


class Hello(Message, tag="hello"):
    """A request for a session. `keyspace` is 32 hex digits. `tag` is the share tag. `slot_bytes` is
    the size of a staging slot. `pulls` is True if the loading server can pull by RDMA."""

    version: _U32
    keyspace: Annotated[str, Meta(max_length=64)]
    tag: _Sixteen
    rank: _U32
    world_size: _U32
    slot_bytes: _U64
    pulls: bool = False


class Welcome(Message, tag="welcome"):
    """The answer that opens a session. `credits` is the number of reads that may be open.
    `metadata` describes the helper's agent, and is empty if chunks arrive in messages. `address`
    and `slots` describe the helper's serve slots, for pulls."""

    metadata: _Metadata
    address: _U64
    slots: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    credits: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]


class Refused(Message, tag="refused"):
    """The answer that refuses a session, from replica `replica` of `replicas`."""

    text: _Text
    replica: _U32 = 0
    replicas: Annotated[int, Meta(ge=1, le=1 << 16)] = 1


class Read(Message, tag="read"):
    """Chunks to read. With `inline`, the helper sends them; otherwise they are pulled."""

    inline: bool
    reads: Annotated[list[WantedRead], Meta(max_length=READS_MAX)]


class Ready(Message, tag="ready"):
    """Serve slots to pull from. `queued_bytes` are the bytes that the helper's storage must read
    before this session's next read, at `bytes_per_s`. `credits` is the new number of credits, or 0
    if it is unchanged."""

    lent: Annotated[list[Lent], Meta(max_length=TOKENS_MAX)]
    queued_bytes: _U64 = 0
    bytes_per_s: _Rate = 0.0
    credits: _Credits = 0


class Sent(Message, tag="sent"):
    """A chunk. The second frame holds the serve slot's header page and payload."""

    token: _U64


class Failed(Message, tag="failed"):
    failed: Annotated[list[FailedRead], Meta(max_length=TOKENS_MAX)]


class Done(Message, tag="done"):
    tokens: _Tokens


class Cancel(Message, tag="cancel"):
    tokens: _Tokens


class Beat(Message, tag="beat"):
    """A keep-alive. A helper sets the fields as in `Ready`."""

    queued_bytes: _U64 = 0
    bytes_per_s: _Rate = 0.0
    credits: _Credits = 0


class Bye(Message, tag="bye"):
    text: _Text = ""


AnyMessage: TypeAlias = (
    Hello | Welcome | Refused | Read | Ready | Sent | Failed | Done | Cancel | Beat | Bye
)
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_encoder = msgspec.msgpack.Encoder()


def decode(raw: bytes) -> AnyMessage:
    """Decode a message without checking its number. Raises MalformedError."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise MalformedError(f"{len(raw)} bytes")
    try:
        message: AnyMessage = _decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedError(repr(str(error)[:_ERROR_MAX])) from None
    return message


class Channel:
    """The numbers of a session's messages, set in sent messages and checked in received ones."""

    def __init__(self) -> None:
        self._sent = self._received = 0

    def encode(self, message: AnyMessage) -> bytes:
        message.n = self._sent
        self._sent += 1
        raw = _encoder.encode(message)
        assert len(raw) <= MESSAGE_BYTES_MAX
        return raw

    def decode(self, raw: bytes) -> AnyMessage:
        """Decode a message and check its number. Raises MalformedError."""
        message = decode(raw)
        if message.n != self._received:
            raise MalformedError(f"message {message.n} instead of {self._received}")
        self._received += 1
        return message


_OUTCOMES = {
    Reason.STALE: STALE,
    Reason.CHECKSUM_MISMATCH: CHECKSUM_MISMATCH,
    Reason.DEADLINE: DEADLINE,
    Reason.CANCELLED: CANCELLED,
    Reason.NOT_ATTACHED: io_error(errno.EBADF),
    Reason.BUSY: io_error(errno.EAGAIN),
}


def failed_read(token: int, outcome: Outcome | None) -> FailedRead:
    """Return the answer to a read that the helper's storage could not serve."""
    if outcome is None:
        return FailedRead(token, Reason.NOT_ATTACHED)
    return FailedRead(token, Reason[outcome.kind.name], outcome.errno)


def outcome_of_failed(one: FailedRead) -> Outcome:
    """Return the outcome of a read that failed on a helper; it says nothing about our targets."""
    return _OUTCOMES.get(one.reason) or io_error(one.errno)


_SOON_S = 0.2
_AGAIN_MAX_S = 2.0
_TURN_S = 0.05  # a listening thread's turn takes less than this, unless the thread cannot run
_WINDOW_S = 0.02  # the minimum length of the windows in which transfers are measured
_NEW_SHARE = 0.3
_RECENT_S = 5.0
FRAMES_MAX = 256  # received in a row before anything else is done
_MOVING_TICK_S = 0.0001


class BackOff:
    """The time to greet a peer again: soon after a session or attempt that lasted more than two
    seconds; otherwise after a wait twice as long as the last one, at most two seconds."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._again_s = _SOON_S

    def is_over(self, now_s: float) -> bool:
        return now_s >= self._until_s

    def begin(self, now_s: float) -> None:
        """Start the wait after a session or an attempt has ended."""
        if now_s - self._until_s > _AGAIN_MAX_S:
            self._again_s = _SOON_S
        self._until_s = now_s + self._again_s
        self._again_s = min(2 * self._again_s, _AGAIN_MAX_S)


class Listening:
    """The clock that measures the silence of peers. It stops while the listening thread cannot run,
    because a suspended process, or one with a busy interpreter, cannot know what peers sent."""

    def __init__(self, now_s: float) -> None:
        self.now_s = self._turn_s = now_s

    def turn(self, now_s: float, sleep_s: float) -> None:
        """Advance the clock after a turn in which the thread meant to sleep for `sleep_s`."""
        self.now_s += min(now_s - self._turn_s, sleep_s + _TURN_S)
        self._turn_s = now_s


class BusyRate:
    """The rate of transfers over the time during which at least one is in progress."""

    def __init__(self) -> None:
        self.bytes_per_s = self._moved_s = 0.0
        self._since_s: float | None = None
        self._bytes = 0
        self._seconds = 0.0

    def moves(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s

    def moved(self, size_bytes: int, now_s: float, *, more: bool) -> None:
        """Record that a transfer has ended. `more`: whether others are in progress."""
        assert self._since_s is not None
        self._moved_s = now_s
        self._bytes += size_bytes
        self._seconds += now_s - self._since_s
        self._since_s = now_s if more else None
        if self._seconds >= _WINDOW_S:
            rate = self._bytes / self._seconds
            old = self.bytes_per_s
            self.bytes_per_s = old + _NEW_SHARE * (rate - old) if old else rate
            self._bytes, self._seconds = 0, 0.0

    def recent(self, now_s: float) -> float:
        """Return the rate, or 0 if it is old, so that a formerly slow peer is tried again."""
        return self.bytes_per_s if now_s - self._moved_s <= _RECENT_S else 0.0

    def stop(self) -> None:
        """Record that the transfers in progress have been abandoned."""
        self._since_s = None


class SessionThread:
    """One end of sessions with peers, on a separate thread until it is closed."""

    def __init__(self, name: str, run: Callable[[], None], tag: bytes) -> None:
        """Prepare the thread that executes `run`; the subclass starts it. `tag` is our share
        tag."""
        self._tag = tag
        self._listening = Listening(time.monotonic())
        self._waker, self._closed = Waker(), threading.Event()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def set_tag(self, tag: bytes) -> None:
        """End the sessions with a different tag before anything more is requested or read."""
        self._tag = tag
        self._waker.wake()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End all sessions. Return whether the thread has ended."""
        self._closed.set()
        self._waker.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake_ups(self, beat_s: Callable[[], float]) -> Iterator[None]:
        """Sleep until an event, but at most half a beat, and yield after each sleep. `beat_s`
        returns 0 if transfers progress only in the thread's turns."""
        while not self._closed.is_set():
            sleep_ms = int(1000 * beat_s() / 2)
            if not sleep_ms:
                time.sleep(_MOVING_TICK_S)
            self._poller.poll(sleep_ms)
            self._listening.turn(time.monotonic(), sleep_ms / 1000)
            self._waker.clear()
            yield


def take_in(socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> bool:
    """Pass each message's frames to `take`. Return whether all received messages were passed."""
    for _ in range(FRAMES_MAX):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return True
        take(frames)
    return False


#: The events of `recv_monitor_message` for a connection to a peer with a different secret.
NOT_PROVEN = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
STRANGER = (
    "its share secret differs, or it is not a peer; give all servers the same share_secret_file"
)


def lock(socket: zmq.Socket[bytes], secret: bytes, *, serves: bool) -> None:
    """Restrict a socket to peers with the same share secret; an empty `secret` admits any peer.
    `serves` is True for the server's socket. Raises zmq.ZMQError if the library lacks CURVE."""
    if not secret:
        return
    socket.curve_publickey, socket.curve_secretkey = key_pair(secret, serves=serves)
    if serves:
        socket.curve_server = True
        socket.zap_domain = b"peers"  # otherwise ZMQ does not ask which keys to admit
    else:
        socket.curve_serverkey, _ = key_pair(secret, serves=True)


def key_pair(secret: bytes, *, serves: bool) -> tuple[bytes, bytes]:
    """Return the public and secret key, as Z85, that all serving or all loading servers share."""
    about = b"vllm-nvmeof peers, key of " + (b"D" if serves else b"P")
    key = z85.encode(hmac.digest(secret, about, "sha256"))
    return zmq.curve_public(key), key
