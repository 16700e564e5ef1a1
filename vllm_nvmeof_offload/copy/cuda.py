# SPDX-License-Identifier: Apache-2.0
"""Copies between a KV cache in GPU memory and pinned staging, asynchronously.

Each direction has a stream of the lowest priority. A ticket is, in stream order: wait for the
fence that the model's thread recorded, copy, record an event; `poll` queries the events. No
call here waits for the GPU except `close`, and the model's thread makes two: create (at first)
and record the fence's event.

What the caller guarantees (the pipeline's gates do): when a load is submitted, its staging
bytes are complete in the host's eyes, and nothing else uses the staging bytes of a ticket in
flight. So a load may read its source before its fence; it writes GPU memory after it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.bell import Bell
from vllm_nvmeof_offload.copy.descriptors import coalesce
from vllm_nvmeof_offload.copy.dma import DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.copy.kernel import KernelCopier, Table
from vllm_nvmeof_offload.copy.select import Backend
from vllm_nvmeof_offload.errors import OK, Outcome, OutcomeKind
from vllm_nvmeof_offload.names import LOGGER_NAME

__all__ = ["Copiers", "CudaCopyEngine", "Readiness", "StagingPins"]

logger = logging.getLogger(LOGGER_NAME)

#: CUDA said no. The same copy again would fail again.
_FAILED = Outcome(OutcomeKind.IO_ERROR, errno.EIO)


class Readiness(enum.Enum):
    """May the GPU touch these bytes of staging?"""

    READY = "ready"
    WAITING = "waiting"  # their registration is under way
    FAILED = "failed"  # their registration failed


class StagingPins(Protocol):
    """Staging's registration with CUDA (`worker.pinning`)."""

    #: Sorted addresses at which registrations begin.
    starts: npt.NDArray[np.uint64]

    def readiness(self, addresses: npt.NDArray[np.uint64]) -> Readiness:
        """Of pieces of staging that begin at `addresses`."""

    def close(self) -> None:
        """Unregister; nothing uses staging any more."""


@dataclass(frozen=True)
class Copiers:
    """How bytes are moved, and who decides. kernel: None where it cannot be had."""

    dma: DmaCopier
    kernel: KernelCopier | None
    choose: Callable[[Direction, Descriptors], Backend]


class _Fence:
    """An event on the model's stream; goes back for another fence when nobody holds this one.

    That may be before the GPU is there: who waits for an event waits for what it recorded when
    the wait was submitted, not for what it records later.
    """

    __slots__ = ("_idle", "event")

    def __init__(self, event: int, idle: deque[int]) -> None:
        self.event = event
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.event)


@dataclass(slots=True)
class _Flight:
    """One ticket that the GPU works on. recorded: `event` marks its end."""

    ticket: int
    event: int
    outcome: Outcome = OK
    recorded: bool = True
    rung: bool = False
    tables: list[Table] = field(default_factory=list)


@dataclass(slots=True)
class _Lane:
    """One direction."""

    stream: int
    bell: Bell | None
    flights: deque[_Flight] = field(default_factory=deque)
    #: Polled as finished; their events may be used again as soon as the bell has rung.
    finished: deque[_Flight] = field(default_factory=deque)


class CudaCopyEngine:
    """See `copy.base.CopyEngine`.

    model_stream: the model's current stream, asked on its thread. pins: closed with this.
    cache_starts: addresses at which KV cache tensors begin. on_done: called from threads of
    this engine when there may be something to poll; None: the caller polls unasked.
    """

    def __init__(
        self,
        cuda: Cuda,
        model_stream: Callable[[], int],
        copiers: Copiers,
        pins: StagingPins,
        cache_starts: npt.NDArray[np.uint64],
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self.asleep = False
        self._cuda = cuda
        self._model_stream = model_stream
        self._copiers = copiers
        self._pins = pins
        self._starts = np.unique(np.concatenate([pins.starts, cache_starts.astype(np.uint64)]))
        self._lanes: Mapping[Direction, _Lane] = {
            direction: _Lane(
                cuda.create_stream(),
                Bell(cuda, on_done, f"nvmeof-{direction.value}-bell") if on_done else None,
            )
            for direction in Direction
        }
        self._next = 1
        self._done: list[tuple[int, Outcome]] = []
        self._held: list[tuple[int, Direction, Descriptors, _Fence]] = []
        self._idle_fences: deque[int] = deque()
        self._events: list[int] = []  # all that were made for tickets
        self._complained: set[str] = set()

    def record_fence(self) -> object:
        """On the model's thread. Raises CudaError: then the model cannot go on either."""
        self._cuda.make_current()
        try:
            event = self._idle_fences.popleft()
        except IndexError:
            event = self._cuda.create_event()
        fence = _Fence(event, self._idle_fences)
        self._cuda.record_event(event, self._model_stream())
        return fence

    def submit(self, direction: Direction, pieces: Descriptors, fence: object) -> int:
        assert isinstance(fence, _Fence)
        self._cuda.enter_own_thread()
        ticket = self._next
        self._next += 1
        self._start(ticket, direction, coalesce(pieces, self._starts), fence)
        return ticket

    def poll(self) -> list[tuple[int, Outcome]]:
        self._cuda.enter_own_thread()
        if self._held:
            held, self._held = self._held, []
            for waiting in held:
                self._start(*waiting)
        for lane in self._lanes.values():
            while lane.flights and self._has_ended(lane, lane.flights[0]):
                flight = lane.flights.popleft()
                self._done.append((flight.ticket, flight.outcome))
                lane.finished.append(flight)
                for table in flight.tables:
                    table.give_back()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        with self._complaining():
            self._cuda.make_current()
        for lane in self._lanes.values():
            with self._complaining():
                self._cuda.synchronize_stream(lane.stream)
            if lane.bell is not None:
                lane.bell.close()
        self._held.clear()  # their memory was never touched
        self._pins.close()
        if self._copiers.kernel is not None:
            self._copiers.kernel.close()
        for event in (*self._events, *self._idle_fences):
            with self._complaining():
                self._cuda.destroy_event(event)
        for lane in self._lanes.values():
            with self._complaining():
                self._cuda.destroy_stream(lane.stream)

    # -- inside -----------------------------------------------------------------------

    def _start(self, ticket: int, direction: Direction, pieces: Descriptors, fence: _Fence) -> None:
        if self.asleep:
            self._done.append((ticket, _FAILED))
            return
        match self._pins.readiness(pieces[:, 1]):
            case Readiness.WAITING:
                self._held.append((ticket, direction, pieces, fence))
            case Readiness.FAILED:
                self._done.append((ticket, _FAILED))
            case Readiness.READY:
                self._launch(ticket, direction, pieces, fence)

    def _launch(
        self, ticket: int, direction: Direction, pieces: Descriptors, fence: _Fence
    ) -> None:
        lane = self._lanes[direction]
        flight = _Flight(ticket, 0, recorded=False, rung=True)
        lane.flights.append(flight)
        try:
            flight.event = self._take_event(lane)
            self._cuda.wait_event(lane.stream, fence.event)
            self._copy(direction, pieces, lane.stream, flight.tables)
        except CudaError as error:
            self._complain(error)
            flight.outcome = _FAILED
        # Whatever went through before an error is under way: the ticket ends after it.
        with self._complaining():
            if flight.event:
                self._cuda.record_event(flight.event, lane.stream)
                flight.recorded = True
        if flight.recorded and lane.bell is not None:
            flight.rung = False
            lane.bell.watch(flight)

    def _copy(
        self, direction: Direction, pieces: Descriptors, stream: int, tables: list[Table]
    ) -> None:
        if not len(pieces):  # a ticket that only waits for its turn
            return
        kernel = self._copiers.kernel
        if (
            kernel is not None
            and self._copiers.choose(direction, pieces) is Backend.KERNEL
            and kernel.copy(direction, pieces, stream, tables)
        ):
            return
        self._copiers.dma.copy(direction, pieces, stream)

    def _take_event(self, lane: _Lane) -> int:
        while lane.finished and lane.finished[0].rung:
            event = lane.finished.popleft().event
            if event:
                return event
        event = self._cuda.create_event()
        self._events.append(event)
        return event

    def _has_ended(self, lane: _Lane, flight: _Flight) -> bool:
        try:
            if flight.recorded:
                return self._cuda.event_is_done(flight.event)
            ended = self._cuda.stream_is_done(lane.stream)
        except CudaError as error:  # the context is lost, and with it all that was under way
            self._complain(error)
            ended = True
        if ended:
            flight.outcome = _FAILED
        return ended

    def _complain(self, error: CudaError) -> None:
        if error.name not in self._complained:  # a lost context fails every call after it
            self._complained.add(error.name)
            logger.error("a copy to or from the GPU failed: %s", error)

    @contextlib.contextmanager
    def _complaining(self) -> Any:
        try:
            yield
        except CudaError as error:
            self._complain(error)
