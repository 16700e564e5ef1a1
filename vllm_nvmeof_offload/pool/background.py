# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may block forever, for example in a file of a lost target.

All threads start when the object is created. So a container's limit on threads can make a start
fail, but not a running server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from vllm_nvmeof_offload import logger


class Background:
    """A fixed number of threads. Calls of one lane run in order, one at a time.

    So a hung lane occupies only one thread. A call waits until a thread is free; the caller bounds
    the number of waiting calls.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start the threads. Raises RuntimeError if the system allows no more."""
        self._changed = threading.Condition()
        self._waiting: list[tuple[Hashable, Callable[[], None]]] = []
        self._running: set[Hashable] = set()
        self._ended = False
        try:
            for _ in range(threads):
                threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:
            self.end()
            raise

    def run(self, lane: Hashable, call: Callable[[], None]) -> None:
        """Run `call` on one of the threads. Never blocks."""
        with self._changed:
            self._waiting.append((lane, call))
            self._changed.notify()

    def end(self) -> None:
        """End the threads once no calls are waiting for them. Returns at once."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            lane, call = job
            try:
                call()
            except Exception:  # noqa: BLE001 - a bug; the other calls go on
                logger.exception("a background call failed")
            finally:
                with self._changed:
                    self._running.discard(lane)

    def _take(self) -> tuple[Hashable, Callable[[], None]] | None:
        """Wait for a call whose lane is free. Return None if there are no more calls."""
        with self._changed:
            while True:
                for at, job in enumerate(self._waiting):
                    if job[0] not in self._running:
                        del self._waiting[at]
                        self._running.add(job[0])
                        return job
                if self._ended:  # a busy lane's thread also runs the lane's waiting calls
                    return None
                self._changed.wait()
