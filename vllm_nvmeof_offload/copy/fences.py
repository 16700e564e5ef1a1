# SPDX-License-Identifier: Apache-2.0
"""Points on the model's stream that copies come after, and who has to know that one has passed.

All fences of an engine are recorded on one stream, so they pass in the order in which they were
recorded. The oldest that has not passed therefore stands for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from vllm_nvmeof_offload.copy.bell import Bell
from vllm_nvmeof_offload.copy.driver import Cuda

__all__ = ["Fence", "Fences"]


class Fence:
    """One recording of an event, which serves another fence when nobody holds this one.

    passed: the GPU was seen there.
    """

    __slots__ = ("_idle", "event", "number", "passed", "rung")

    def __init__(self, event: int, number: int, idle: deque[int]) -> None:
        self.event = event
        self.number = number
        self.passed = False
        self.rung = False
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.event)


class Fences:
    """Recorded by the model's thread; everything else is called by the engine's.

    on_passed: called from a thread when an announced fence has passed; None: nobody is told.
    """

    def __init__(
        self, cuda: Cuda, model_stream: Callable[[], int], on_passed: Callable[[], None] | None
    ) -> None:
        self._cuda = cuda
        self._model_stream = model_stream
        self._bell = Bell(cuda, on_passed, "nvmeof-fence-bell") if on_passed else None
        self._idle: deque[int] = deque()
        self._count = 0
        # Oldest first: not seen to have passed, and of these the ones the bell does not know.
        self._open: deque[Fence] = deque()
        self._unannounced: deque[Fence] = deque()

    def record(self) -> Fence:
        """On the model's thread: at most two calls of the driver."""
        self._cuda.make_current()
        try:
            event = self._idle.popleft()
        except IndexError:
            event = self._cuda.create_event()
        self._count += 1
        fence = Fence(event, self._count, self._idle)
        self._cuda.record_event(event, self._model_stream())
        self._open.append(fence)
        self._unannounced.append(fence)
        return fence

    def look(self) -> None:
        """See which fences have passed: mostly one call of the driver. Raises CudaError."""
        while self._open and self._cuda.event_is_done(self._open[0].event):
            self._open.popleft().passed = True
        while self._unannounced and self._unannounced[0].passed:
            self._unannounced.popleft()

    def announce(self, fence: Fence) -> None:
        """Ring when `fence` passes.

        The bell also gets every older fence. Otherwise it would be waiting for this one when a
        copy turns up that waits for an older one, and would ring too late for that copy.
        """
        while self._unannounced and self._unannounced[0].number <= fence.number:
            older = self._unannounced.popleft()
            if self._bell is not None:
                self._bell.watch(older)

    def close(self) -> list[int]:
        """Only when the model's stream gets there: this waits. Returns the events to destroy."""
        if self._bell is not None:
            self._bell.close()
        self._open.clear()
        self._unannounced.clear()
        return list(self._idle)
