# SPDX-License-Identifier: Apache-2.0
"""Copies between a KV cache in CPU memory and staging: one background thread, memmove.

vLLM's CPU engine uses it, and tests without a GPU. The forward pass on a CPU has run when vLLM
calls the worker, so no fence is needed.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.errors import OK, Outcome

_memmove_address = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value
assert _memmove_address is not None
_SIGNATURE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: Large pieces release the interpreter lock; small ones do not, because taking it back can cost
#: its switch interval of 5 ms per piece while the model's thread is busy.
_UNLOCK_BYTES = 256 << 10
_copy_unlocked = ctypes.CFUNCTYPE(*_SIGNATURE)(_memmove_address)
_copy_locked = ctypes.PYFUNCTYPE(*_SIGNATURE)(_memmove_address)


class HostCopyEngine:
    """See `copy.base.CopyEngine`. `on_done` is called from the thread after each ticket.

    Memory of a CPU stays valid when vLLM sleeps, so `asleep` changes nothing.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        self.asleep = False
        self._on_done = on_done
        self._lock = threading.Condition()
        self._queue: deque[tuple[int, Direction, Descriptors]] = deque()
        self._done: list[tuple[int, Outcome]] = []
        self._next = 1
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="nvmeof-copy", daemon=True)
        self._thread.start()

    def record_fence(self) -> object:
        return None

    def submit(self, direction: Direction, pieces: Descriptors, fence: object) -> int:
        with self._lock:
            ticket = self._next
            self._next += 1
            self._queue.append((ticket, direction, pieces))
            self._lock.notify()
        return ticket

    def poll(self) -> list[tuple[int, Outcome]]:
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closing:
                    self._lock.wait()
                if not self._queue:
                    return
                ticket, direction, pieces = self._queue.popleft()
            _copy(direction, pieces)
            with self._lock:
                self._done.append((ticket, OK))
            self._on_done()


def _copy(direction: Direction, pieces: Descriptors) -> None:
    for cache_address, staging_address, count in pieces.tolist():
        copy = _copy_unlocked if count >= _UNLOCK_BYTES else _copy_locked
        if direction is Direction.STORE:
            copy(staging_address, cache_address, count)
        else:
            copy(cache_address, staging_address, count)
