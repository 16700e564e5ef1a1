# SPDX-License-Identifier: Apache-2.0
"""Memory shared by the ranks of a set, which find each other at start.

The ranks in a set hold equal bytes for some KV cache group and run on the same host
(`RankGroup.set_size`). The first rank creates the memory as an anonymous file and sends its
descriptor to the others over an abstract Unix socket, so nothing needs a path, space on a file
system, or cleanup. All ranks must want the same layout. If one rank does not connect, no rank gets
the memory, and each keeps its own copies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass

from vllm_nvmeof_offload.native import set_words_bytes
from vllm_nvmeof_offload.staging import SetMemory

MEET_S = 60.0  # vLLM allocates the KV caches of all ranks at about the same time
_RETRY_S = 0.02
_MESSAGE_BYTES_MAX = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_WELCOME = b"welcome"


class NoSetError(Exception):
    """The ranks of a set could not share memory. The message names the cause."""


@dataclass(frozen=True, slots=True)
class SetLayout:
    """The layout on which all members must agree. `name` is unique among the sets that start on
    this machine, and `keyspace` is a digest."""

    name: str
    keyspace: str
    members: int
    set_sizes: tuple[int, ...]
    slot_bytes: int
    cache_slots: int
    stream_slots: int
    serve_slots: int = 0

    @property
    def words_bytes(self) -> int:
        size = set_words_bytes(self.members, self.cache_slots, self.stream_slots)
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def staging_bytes(self) -> int:
        """The staging bytes of one member."""
        return self.slot_bytes * (self.cache_slots + self.stream_slots + self.serve_slots)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    @property
    def address(self) -> bytes:
        return b"\0vllm-nvmeof-" + hashlib.sha256(self.name.encode()).hexdigest()[:32].encode()


def join_set(layout: SetLayout, member: int, timeout_s: float = MEET_S) -> SetMemory:
    """Join the other members and map the set's memory. Every member must call this. Raises
    NoSetError if a member does not connect, wants a different layout, or cannot map the memory."""
    end_s = time.monotonic() + timeout_s
    try:
        fd = _lead(layout, end_s) if member == 0 else _follow(layout, member, end_s)
        try:
            sizes = layout.words_bytes, layout.staging_bytes
            return SetMemory(fd, *sizes, layout.members, member, layout.set_sizes)
        finally:
            os.close(fd)
    except TimeoutError:
        raise NoSetError(f"a rank did not connect within {timeout_s:.0f} s") from None
    except (OSError, ValueError) as error:
        raise NoSetError(str(error)) from error


def _lead(layout: SetLayout, end_s: float) -> int:
    """Create the memory and send it to the other members. Return its file descriptor."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_socket(end_s))
        listener.bind(layout.address)
        listener.listen(layout.members)
        others: dict[int, socket.socket] = {}
        while len(others) < layout.members - 1:
            listener.settimeout(_left(end_s))
            other, _ = listener.accept()
            opened.enter_context(other)
            member = _greeted(other, layout, end_s)
            if member is not None and member not in others:
                others[member] = other
        fd = _make(layout)
        try:
            for other in others.values():
                socket.send_fds(other, [_WELCOME], [fd])
        except BaseException:
            os.close(fd)
            raise
        return fd


def _greeted(other: socket.socket, layout: SetLayout, end_s: float) -> int | None:
    """Return the number of the member that connected, or None if `other` is not a member."""
    other.settimeout(_left(end_s))
    if _user_of(other) != os.getuid():
        return None
    try:
        greeting = json.loads(other.recv(_MESSAGE_BYTES_MAX))
        member, digest = int(greeting["member"]), greeting["digest"]
    except (ValueError, KeyError, TypeError, ConnectionError):
        return None
    if digest != layout.digest:
        raise NoSetError("the ranks want different slot layouts")
    return member if 0 < member < layout.members else None


def _make(layout: SetLayout) -> int:
    fd = os.memfd_create("vllm-nvmeof-set", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, layout.words_bytes + layout.members * layout.staging_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _follow(layout: SetLayout, member: int, end_s: float) -> int:
    while True:
        with _socket(end_s) as first:
            try:
                first.connect(layout.address)
            except ConnectionRefusedError:  # the first member is not listening yet
                time.sleep(_RETRY_S)
                continue
            if _user_of(first) != os.getuid():
                raise NoSetError("another user's process uses the set's socket name")
            first.send(json.dumps({"member": member, "digest": layout.digest}).encode())
            first.settimeout(_left(end_s))
            flags = socket.MSG_CMSG_CLOEXEC
            message, fds, _, _ = socket.recv_fds(first, len(_WELCOME), 1, flags)
            if message != _WELCOME or len(fds) != 1:
                raise NoSetError("the first rank did not send the set's shared memory")
            return fds[0]


def _socket(end_s: float) -> socket.socket:
    """Create a socket that times out at `end_s`. Raises TimeoutError if it has passed."""
    left_s = _left(end_s)
    # SOCK_SEQPACKET keeps messages whole and reports the end of the connection immediately.
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(left_s)
    return made


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _user_of(peer: socket.socket) -> int:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
