# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may block for ever, for example in a file of a lost target.

They are all started with their owner. A container's limit on threads can then end a
start, but no running server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from vllm_nvmeof_offload import logger


class Background:
    """A fixed number of threads. Calls of one lane run in order, one at a time.

    So each lane that hangs holds one thread. A call without a thread waits for one; the caller
    bounds the number of waiting calls.
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
        """End the threads when no calls wait for them any more. Does not wait for that."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            lane, call = job
            try:
                call()
            except Exception:  # noqa: BLE001 - a bug; the other calls go on
                logger.exception("a call in the background has failed")
            finally:
                with self._changed:
                    self._running.discard(lane)

    def _take(self) -> tuple[Hashable, Callable[[], None]] | None:
        """Wait for a call with a free lane. Return None if there are no calls any more."""
        with self._changed:
            while True:
                for at, job in enumerate(self._waiting):
                    if job[0] not in self._running:
                        del self._waiting[at]
                        self._running.add(job[0])
                        return job
                if self._ended:  # the thread that runs a lane takes its waiting calls
                    return None
                self._changed.wait()
