# SPDX-License-Identifier: Apache-2.0
"""Copies between a KV cache in GPU memory and pinned staging, asynchronously.

Each direction has one stream, on which nothing ever waits for the model: a ticket whose fence has
not passed is held here, and `poll` starts it when it has. So a ticket waits for its own fence and
for no other, whatever the order in which tickets and fences come, and two streams are enough. A
wait on the stream would hold up every later ticket of an older fence, for a whole forward pass.
A ticket is, in stream order: copy, record an event; `poll` queries the events. No call here
waits for the GPU except `close`, and the model's thread makes two: create (at first) and record
the fence's event.

What the caller guarantees (the pipeline's gates do): when a load is submitted, its staging
bytes are complete in the host's eyes, and nothing else uses the staging bytes of a ticket in
flight.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.bell import Bell
from vllm_nvmeof_offload.copy.descriptors import coalesce
from vllm_nvmeof_offload.copy.dma import DmaCopier
from vllm_nvmeof_offload.copy.driver import Cuda, CudaError
from vllm_nvmeof_offload.copy.fences import Fence, Fences
from vllm_nvmeof_offload.copy.kernel import KernelCopier, Table
from vllm_nvmeof_offload.copy.lane import Flight, Lane, Ticket
from vllm_nvmeof_offload.copy.select import Backend
from vllm_nvmeof_offload.errors import Outcome, OutcomeKind
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
        self._on_done = on_done
        self._copiers = copiers
        self._pins = pins
        self._starts = np.unique(np.concatenate([pins.starts, cache_starts.astype(np.uint64)]))
        self._lanes: Mapping[Direction, Lane] = {
            direction: Lane(
                cuda.create_stream(),
                Bell(cuda, on_done, f"nvmeof-{direction.value}-bell") if on_done else None,
            )
            for direction in Direction
        }
        self._next = 1
        self._done: list[tuple[int, Outcome]] = []
        self._fences = Fences(cuda, model_stream, on_done)
        self._held: list[Ticket] = []  # in the order of their submission
        self._events: list[int] = []  # all that were made for tickets
        self._complained: set[str] = set()

    def record_fence(self) -> object:
        """On the model's thread. Raises CudaError: then the model cannot go on either."""
        return self._fences.record()

    def submit(self, direction: Direction, pieces: Descriptors, fence: object) -> int:
        assert isinstance(fence, Fence)
        self._cuda.enter_own_thread()
        ticket = Ticket(self._next, direction, coalesce(pieces, self._starts), fence)
        self._next += 1
        self._start([ticket])
        return ticket.number

    def poll(self) -> list[tuple[int, Outcome]]:
        self._cuda.enter_own_thread()
        held, self._held = self._held, []
        if held:
            self._start(held)
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
        self._launch_held()
        for lane in self._lanes.values():
            with self._complaining():
                self._cuda.synchronize_stream(lane.stream)
            if lane.bell is not None:
                lane.bell.close()
        fences = self._fences.close()
        self._pins.close()
        if self._copiers.kernel is not None:
            self._copiers.kernel.close()
        for event in (*self._events, *fences):
            with self._complaining():
                self._cuda.destroy_event(event)
        for lane in self._lanes.values():
            with self._complaining():
                self._cuda.destroy_stream(lane.stream)

    # -- inside -----------------------------------------------------------------------

    def _start(self, tickets: Sequence[Ticket]) -> None:
        """Start what may start, in this order; hold the others."""
        try:
            self._fences.look()
        except CudaError as error:  # nobody will ever know that their fences have passed
            self._complain(error)
            self._fail(*tickets)
            return
        for ticket in tickets:
            readiness = self._pins.readiness(ticket.pieces[:, 1])
            if self.asleep or readiness is Readiness.FAILED:
                self._fail(ticket)
            elif readiness is Readiness.WAITING or self._must_queue(ticket):
                self._held.append(ticket)
            elif not ticket.fence.passed:
                self._fences.announce(ticket.fence)
                self._held.append(ticket)
            else:
                self._launch(ticket)

    def _fail(self, *tickets: Ticket) -> None:
        """Before anything of theirs is under way. No bell will ring for them."""
        self._done += [(ticket.number, _FAILED) for ticket in tickets]
        if self._on_done is not None:
            self._on_done()

    def _launch_held(self) -> None:
        """Before the end: nothing comes behind them, so the GPU itself may wait for fences."""
        held, self._held = self._held, []
        for ticket in held:
            if self._pins.readiness(ticket.pieces[:, 1]) is Readiness.READY:
                with self._complaining():
                    stream = self._lanes[ticket.direction].stream
                    self._cuda.wait_event(stream, ticket.fence.event)
                    self._launch(ticket)

    def _must_queue(self, ticket: Ticket) -> bool:
        """One of nothing ends behind those before it, so it starts behind them."""
        return not len(ticket.pieces) and any(
            earlier.direction is ticket.direction for earlier in self._held
        )

    def _launch(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.direction]
        flight = Flight(ticket.number, 0, recorded=False, rung=True)
        lane.flights.append(flight)
        try:
            flight.event = self._take_event(lane)
            self._copy(ticket.direction, ticket.pieces, lane.stream, flight.tables)
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
        kernel, backend = self._copiers.kernel, self._copiers.choose(direction, pieces)
        if (
            kernel is not None
            and backend is Backend.KERNEL
            and kernel.copy(direction, pieces, stream, tables)
        ):
            return
        overlap = backend is Backend.OVERLAP
        self._copiers.dma.copy(direction, pieces, stream, overlap=overlap)

    def _take_event(self, lane: Lane) -> int:
        while lane.finished and lane.finished[0].rung:
            event = lane.finished.popleft().event
            if event:
                return event
        event = self._cuda.create_event()
        self._events.append(event)
        return event

    def _has_ended(self, lane: Lane, flight: Flight) -> bool:
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
