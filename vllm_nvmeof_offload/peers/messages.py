# SPDX-License-Identifier: Apache-2.0
"""What two peers send each other: msgpack in a frame of ZMQ each, of a bounded size.

Every message has `n`, its number in its direction of the session: a gap means that the connection
was lost meanwhile. Fields that a receiver does not know are ignored, so that a later release may
add some. What is no message, too large, or has the wrong number is malformed: the receiver counts
it and closes the session.

| message | sender | meaning |
|---|---|---|
| `Hello` | P | asks for a session: what P must have in common with D |
| `Welcome` | D | D's serve slots, and the credits |
| `Refused` | D | there is no session, and why |
| `Read` | P | chunks that D is asked to read into its serve slots |
| `Ready` | D | serve slots that are lent to P |
| `Sent` | D | a chunk that was read, in a second frame |
| `Failed` | D | reads that have failed |
| `Done` | P | lent slots that P needs no more, and chunks that came in messages |
| `Cancel` | P | reads that P does not want any more |
| `Beat` | both | "I live", with D's levels |
| `Bye` | both | the session is over |

D answers each token of a `Read` once, by `Ready`, `Sent` or `Failed`, however late.

With a share secret ZMQ's CURVE encrypts and authenticates every byte of a message, but not chunks
that RDMA carries, which only their checksums prove. All servers have two pairs of
keys in common, one of those who serve and one of those who load, both derived from the secret: D
takes in no message of a connection whose other end has not proved that it has P's key, and P of
none that has not D's. CURVE draws new keys for each connection, so that nothing can be replayed.
"""

from __future__ import annotations

import enum
import errno
import hmac
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
    OutcomeKind,
    io_error,
)

VERSION = 2
MESSAGE_BYTES_MAX = 1 << 18
#: That CURVE adds to a frame, and more: ZMQ's limit is of what arrives, encrypted or not.
CURVE_BYTES = 64
READS_MAX = 64  # in one message
TOKENS_MAX = 1024  # in one message, and credits of a session
_ERROR_MAX = 200  # of a text that names what was sent

_Sixteen = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Key = Annotated[bytes, Meta(min_length=1, max_length=46)]
_U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger ones
_U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
_Rate = Annotated[float, Meta(ge=0, le=1e15)]
_Metadata = Annotated[bytes, Meta(max_length=1 << 17)]
_Text = Annotated[str, Meta(max_length=256)]
_Credits = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
_Tokens = Annotated[list[_U64], Meta(max_length=TOKENS_MAX)]


class MalformedError(OffloadError):
    """What a peer has sent is no message, or not one that it may send now."""


class Reason(enum.IntEnum):
    """Why a read has failed at D."""

    STALE = 1
    CHECKSUM_MISMATCH = 2
    IO_ERROR = 3
    DEADLINE = 4
    CANCELLED = 5
    NOT_ATTACHED = 6  # D has not opened the region
    BUSY = 7  # more reads than credits


class WantedRead(Struct, array_like=True, frozen=True):
    """One read: a slot of a region, which must have this content.

    within_ms: the time after which P does not want it any more; clocks are not compared.
    """

    token: _U64
    region: _Sixteen
    slot: _U32
    key: _Key
    generation: _U64
    payload_bytes: _U64
    within_ms: _U32


class Lent(Struct, array_like=True, frozen=True):
    """A serve slot that has what was asked for under `token`."""

    token: _U64
    slot: _U32


class FailedRead(Struct, array_like=True, frozen=True):
    """errno: of an IO_ERROR."""

    token: _U64
    reason: Reason
    errno: _U32 = 0


class Message(Struct, kw_only=True, tag_field="type"):
    """n: the message's number in its direction, from 0; set when it is sent."""

    n: _U64 = 0


class Hello(Message, tag="hello"):
    """keyspace: 32 hex digits. tag: the share tag. slot_bytes: of a staging slot. pulls: P
    can pull by RDMA, so that D's agent is of use."""

    version: _U32
    keyspace: Annotated[str, Meta(max_length=64)]
    tag: _Sixteen
    rank: _U32
    world_size: _U32
    slot_bytes: _U64
    pulls: bool = False


class Welcome(Message, tag="welcome"):
    """credits: reads that P may have open. metadata: of D's agent; empty: chunks come in messages.
    address, slots: of D's serve slots, for P's pulls.
    """

    metadata: _Metadata
    address: _U64
    slots: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    credits: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]


class Refused(Message, tag="refused"):
    """replica: which of the server's `replicas` says this."""

    text: _Text
    replica: _U32 = 0
    replicas: Annotated[int, Meta(ge=1, le=1 << 16)] = 1


class Read(Message, tag="read"):
    """inline: the chunks are to be sent, not lent."""

    inline: bool
    reads: Annotated[list[WantedRead], Meta(max_length=READS_MAX)]


class Ready(Message, tag="ready"):
    """queued_bytes, bytes_per_s: what D's storage has to read before P's next one, and its rate.
    credits: P's from now on; 0: as before."""

    lent: Annotated[list[Lent], Meta(max_length=TOKENS_MAX)]
    queued_bytes: _U64 = 0
    bytes_per_s: _Rate = 0.0
    credits: _Credits = 0


class Sent(Message, tag="sent"):
    """The second frame has the start of the serve slot: the header page and the payload."""

    token: _U64


class Failed(Message, tag="failed"):
    failed: Annotated[list[FailedRead], Meta(max_length=TOKENS_MAX)]


class Done(Message, tag="done"):
    tokens: _Tokens


class Cancel(Message, tag="cancel"):
    tokens: _Tokens


class Beat(Message, tag="beat"):
    """As in `Ready`, from D."""

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
    """Decode a message, whatever its number. Raise MalformedError."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise MalformedError(f"{len(raw)} bytes")
    try:
        message: AnyMessage = _decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedError(repr(str(error)[:_ERROR_MAX])) from None
    return message


#: What `recv_monitor_message` says of a connection whose other end has not the same secret.
NOT_PROVEN = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
STRANGER = "it has not the same share secret, or is no peer; give all the same share_secret_file"


def lock(socket: zmq.Socket[bytes], secret: bytes, *, serves: bool) -> None:
    """Let a socket talk only to peers with the same share secret; to any peer if `secret` is empty.

    serves: the socket is the serving side's. zmq.ZMQError: the library has no CURVE.
    """
    if not secret:
        return
    socket.curve_publickey, socket.curve_secretkey = key_pair(secret, serves=serves)
    if serves:
        socket.curve_server = True
        socket.zap_domain = b"peers"  # else ZMQ asks nobody whose keys it admits
    else:
        socket.curve_serverkey, _ = key_pair(secret, serves=True)


def key_pair(secret: bytes, *, serves: bool) -> tuple[bytes, bytes]:
    """The public and the secret key, as Z85, of all who serve, or of all who load."""
    about = b"vllm-nvmeof peers, key of " + (b"D" if serves else b"P")
    key = z85.encode(hmac.digest(secret, about, "sha256"))
    return zmq.curve_public(key), key


class Channel:
    """Numbers what goes out, and checks the numbers of what comes in."""

    def __init__(self) -> None:
        self._sent = self._received = 0

    def encode(self, message: AnyMessage) -> bytes:
        message.n = self._sent
        self._sent += 1
        raw = _encoder.encode(message)
        assert len(raw) <= MESSAGE_BYTES_MAX
        return raw

    def decode(self, raw: bytes) -> AnyMessage:
        """Raise MalformedError."""
        message = decode(raw)
        if message.n != self._received:
            raise MalformedError(f"message {message.n} in place of {self._received}")
        self._received += 1
        return message


_REASONS = {
    OutcomeKind.STALE: Reason.STALE,
    OutcomeKind.CHECKSUM_MISMATCH: Reason.CHECKSUM_MISMATCH,
    OutcomeKind.IO_ERROR: Reason.IO_ERROR,
    OutcomeKind.DEADLINE: Reason.DEADLINE,
    OutcomeKind.CANCELLED: Reason.CANCELLED,
}
_OUTCOMES = {
    Reason.STALE: STALE,
    Reason.CHECKSUM_MISMATCH: CHECKSUM_MISMATCH,
    Reason.DEADLINE: DEADLINE,
    Reason.CANCELLED: CANCELLED,
    Reason.NOT_ATTACHED: io_error(errno.EBADF),
    Reason.BUSY: io_error(errno.EAGAIN),
}


def failed_read(token: int, outcome: Outcome | None) -> FailedRead:
    """What D says of a read that its storage could not give (`base.Served`)."""
    if outcome is None:
        return FailedRead(token, Reason.NOT_ATTACHED)
    return FailedRead(token, _REASONS[outcome.kind], outcome.errno)


def outcome_of_failed(one: FailedRead) -> Outcome:
    """What P says of a read that D could not give it. It is never a verdict on P's targets."""
    return _OUTCOMES.get(one.reason) or io_error(one.errno)
