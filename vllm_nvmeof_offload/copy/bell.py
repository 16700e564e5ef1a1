# SPDX-License-Identifier: Apache-2.0
"""Wakes the pipeline when copies finish or fences pass, by a thread that sleeps meanwhile.

The pipeline's thread sleeps on file descriptors, and an event of CUDA's is none. Only the
engine's `poll` says what has finished; this says when to ask.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from vllm_nvmeof_offload.copy.driver import Cuda, CudaError

__all__ = ["Bell", "Watched"]


class Watched(Protocol):
    """rung: the bell does not need `event` any more."""

    event: int
    rung: bool


class Bell:
    """One thread, which blocks in the driver until the oldest copy is done."""

    def __init__(self, cuda: Cuda, on_done: Callable[[], None], name: str) -> None:
        self._cuda = cuda
        self._on_done = on_done
        self._queue: queue.SimpleQueue[Watched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, flight: Watched) -> None:
        """Call `on_done` when its event is done. Flights must be given in stream order."""
        self._queue.put(flight)

    def close(self) -> None:
        """Only when all that is watched is done: this waits for it."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(CudaError):  # then every wait below fails, and rings
            self._cuda.enter_own_thread()
        while (flight := self._queue.get()) is not None:
            with contextlib.suppress(CudaError):  # `poll` sees the same error, and says so
                self._cuda.synchronize_event(flight.event)
            flight.rung = True
            del flight  # before the call: whoever is told may use its event again
            self._on_done()
