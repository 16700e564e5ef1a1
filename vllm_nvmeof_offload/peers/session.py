# SPDX-License-Identifier: Apache-2.0
"""The common parts of both ends of sessions: the proof of the share secret, the turns of their
threads, the measurement of silence and rates, and the delay before a peer is greeted again.

With a share secret, ZMQ's CURVE encrypts and authenticates every byte of a message. Chunks that
RDMA carries are not protected, except by their checksums. All servers derive the same two pairs of
keys from the secret, one for the serving side (D) and one for the loading side (P). D accepts no
message of a connection until the other end has proved that it has P's key, and P accepts none
without D's. CURVE draws new keys for each connection, so nothing can be replayed.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterator

import zmq
from zmq.utils import z85

from vllm_nvmeof_offload.io.base import Waker

_SOON_S = 0.2
_AGAIN_MAX_S = 2.0
#: A listening thread's turn takes less than this, unless the thread cannot run.
_TURN_S = 0.05
#: Transfers are measured in windows of at least this length.
_WINDOW_S = 0.02
_NEW_SHARE = 0.3
_RECENT_S = 5.0
FRAMES_MAX = 256  # received before anything else is done
_MOVING_TICK_S = 0.0001


class BackOff:
    """Decides when to greet a peer again: soon after a session or attempt of more than two seconds,
    and otherwise after twice the last wait, up to two seconds."""

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
    """The clock that measures the silence of others. It stops while the listening thread cannot
    run, because a process that was suspended, or has a busy interpreter, cannot know what others
    sent."""

    def __init__(self, now_s: float) -> None:
        self.now_s = self._turn_s = now_s

    def turn(self, now_s: float, sleep_s: float) -> None:
        """Advance the clock after a turn in which the thread meant to sleep for `sleep_s`."""
        self.now_s += min(now_s - self._turn_s, sleep_s + _TURN_S)
        self._turn_s = now_s


class BusyRate:
    """Measures the rate of transfers over the time in which any is in progress."""

    def __init__(self) -> None:
        self.bytes_per_s = self._moved_s = 0.0
        self._since_s: float | None = None
        self._bytes = 0
        self._seconds = 0.0

    def moves(self, now_s: float) -> None:
        """Record that a transfer began at `now_s`."""
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
        """Return the rate, or 0 if nothing has moved for a while, so that a formerly slow peer is
        tried again."""
        return self.bytes_per_s if now_s - self._moved_s <= _RECENT_S else 0.0

    def stop(self) -> None:
        """Record that the transfers in progress were abandoned."""
        self._since_s = None


class SessionThread:
    """One end of sessions with peers, on a separate thread until it is closed."""

    def __init__(self, name: str, run: Callable[[], None], tag: bytes) -> None:
        """Prepare a thread for `run`; the subclass starts it. `tag` is our share tag."""
        self._tag = tag
        self._listening = Listening(time.monotonic())
        self._waker, self._closed = Waker(), threading.Event()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def set_tag(self, tag: bytes) -> None:
        """End the sessions with another tag before anything more is requested or read."""
        self._tag = tag
        self._waker.wake()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End all sessions. Returns True if the thread has ended."""
        self._closed.set()
        self._waker.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake_ups(self, beat_s: Callable[[], float]) -> Iterator[None]:
        """Sleep until an event, but never longer than half a beat, and yield after each sleep.

        `beat_s` returns 0 if transfers progress only in the thread's turns.
        """
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


#: The events of `recv_monitor_message` for a connection to a peer with another secret.
NOT_PROVEN = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
STRANGER = "its share secret differs, or it is not a peer; give all the same share_secret_file"


def lock(socket: zmq.Socket[bytes], secret: bytes, *, serves: bool) -> None:
    """Let a socket talk only to peers with the same share secret; to any peer if `secret` is empty.

    `serves` is True for the serving side's socket. Raises zmq.ZMQError if the library lacks CURVE.
    """
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
