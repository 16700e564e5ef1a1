# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may block for ever: in a file of a target that is lost, for example.

They are all started with their owner. A limit of threads, as containers have it, can then end a
start but nothing that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from vllm_nvmeof_offload import logger


class Background:
    """A fixed number of threads. Calls of one lane run in their order, one at a time.

    So each lane that hangs holds one thread. What finds no thread waits for one; whoever adds calls
    bounds how many wait.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start the threads. RuntimeError: the system allows no more."""
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
        """End the threads when nothing waits for them any more. Does not wait for that."""
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
        """Wait for a call whose lane is free; None: there are none any more."""
        with self._changed:
            while True:
                for at, job in enumerate(self._waiting):
                    if job[0] not in self._running:
                        del self._waiting[at]
                        self._running.add(job[0])
                        return job
                if self._ended:  # whoever runs a lane takes what waits for it
                    return None
                self._changed.wait()
