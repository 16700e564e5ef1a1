# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies between a KV cache in GPU memory and pinned staging.

Each direction has one stream, which never waits for the model: a wait on the stream would delay all
later tickets, even those with an older fence, for a whole forward pass. Instead, a ticket is held
here until `poll` finds that its fence has passed. A started ticket is a copy and then an event on
the stream. Native code submits both, and native threads wait for the events, so that nothing takes
the interpreter lock between a copy's first call and the signal of its end. Only `close` waits for
the GPU.

If the GPU computes checksums, each direction has a second stream for them, on which a ticket with
payloads ends. A store's checksums are computed alongside its copy, because its source is complete
when its fence has passed; a load's are computed after its copy, from the KV cache. Copies never
wait for checksums, so DMA keeps running.

The caller (the pipeline's gates) guarantees that the staging bytes of a submitted load are complete
and visible to the host, and that nothing else uses the staging bytes of a ticket in flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.copy.base import (
    DESCRIPTORS_MAX,
    Backend,
    Descriptors,
    Direction,
    Payloads,
    address_of,
    coalesce,
    cut_sizes,
    sides,
    spans,
)
from vllm_nvmeof_offload.copy.driver import NO_END, ORDER_ANY, ORDER_STREAM, Cuda, CudaError, End
from vllm_nvmeof_offload.copy.gpu_checksums import Checksums, GpuChecksums
from vllm_nvmeof_offload.copy.pinning import Readiness, StagingPinning
from vllm_nvmeof_offload.errors import OK, Outcome, OutcomeKind
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.units import KIB, MIB

_THREADS = 512
_LANES = 32
#: The maximum number of bytes that one warp copies; a multiple of 16 preserves alignment.
PART_BYTES_MAX = 16 * KIB
#: The limit on bytes per launch. The model cannot use a launch's multiprocessors until the launch
#: ends: 8 MiB take 0.15 ms at 55 GB/s.
LAUNCH_BYTES_MAX = 8 * MIB
#: The limit on thread blocks per launch; `bench copy --parts sweep` measures other numbers.
BLOCKS_MAX = 8
_TABLES = 16
_ROW_BYTES = 3 * 8
_TABLE_BYTES = DESCRIPTORS_MAX * _ROW_BYTES
#: The outcome if CUDA refuses a copy. A retry would fail too.
_FAILED = Outcome(OutcomeKind.IO_ERROR, errno.EIO)


class DmaCopier:
    """Copies with the GPU's copy engines, in few driver calls if the driver supports batches."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def copy(
        self,
        direction: Direction,
        pieces: Descriptors,
        stream: int,
        *,
        overlap: bool = False,
        end: End = NO_END,
    ) -> None:
        """Submit pieces, as returned by `coalesce`, to `stream`, and then mark their end.

        `overlap` sets CUDA 13.1's hint that copies should overlap with compute; it is ignored if
        the driver has no batch call.

        A store reads memory that the model's kernels write, so the driver must read it in stream
        order, after the fence. A load reads staging that is already complete (docs/protocol.md,
        rule 3), so the driver can read it immediately.
        """
        columns, count = sides(direction, pieces), len(pieces)
        order = ORDER_STREAM if direction is Direction.STORE else ORDER_ANY
        to, source, size = map(address_of, columns) if count else (0, 0, 0)
        self._cuda.submit_copies((to, source, size), count, stream, order, overlap, end)


class Table:
    """A table of 4096 parts for one or more launches, in pinned memory that the kernel reads."""

    def __init__(self, address: int, idle: deque[Table]) -> None:
        self.address = address
        self._idle = idle
        memory = (ctypes.c_uint64 * (DESCRIPTORS_MAX * 3)).from_address(address)
        self.rows = np.ctypeslib.as_array(memory).reshape(DESCRIPTORS_MAX, 3)

    def give_back(self) -> None:
        """Return the table to the idle tables. Call only when the kernel has finished."""
        self._idle.append(self)


class KernelCopier:
    """Copies with a kernel, for fragments too small for the copy engines.

    `blocks_max` bounds the thread blocks per launch, so that the model keeps the other
    multiprocessors. `tables` is the number of tables; a transfer uses at least one.
    """

    def __init__(
        self, cuda: Cuda, kernel: int, blocks_max: int = BLOCKS_MAX, tables: int = _TABLES
    ) -> None:
        self._cuda = cuda
        self._kernel = kernel
        self._blocks_max = blocks_max
        self._memory = cuda.allocate_host(tables * _TABLE_BYTES)
        self._idle: deque[Table] = deque()
        for number in range(tables):
            self._idle.append(Table(self._memory + number * _TABLE_BYTES, self._idle))

    def copy(
        self,
        direction: Direction,
        pieces: Descriptors,
        stream: int,
        used: list[Table],
        end: End = NO_END,
    ) -> bool:
        """Submit pieces to `stream`, and then mark their end. Do nothing and return False if too
        few tables are idle.

        Append the tables to `used` before the kernel reads them, even if an error occurs later. The
        caller gives them back when the stream has passed this point.
        """
        parts = cut(*sides(direction, pieces))
        if -(-len(parts) // DESCRIPTORS_MAX) > len(self._idle):
            return False
        launches: list[tuple[int, int, int]] = []
        for start in range(0, len(parts), DESCRIPTORS_MAX):
            rows = parts[start : start + DESCRIPTORS_MAX]
            table = self._idle.popleft()
            used.append(table)
            table.rows[: len(rows)] = rows
            for first, count in spans(rows[:, 2], LAUNCH_BYTES_MAX):
                blocks = min(self._blocks_max, -(-count * _LANES // _THREADS))
                launches.append((blocks, table.address + first * _ROW_BYTES, count))
        array = np.array(launches, np.uint64)
        self._cuda.submit_launches(self._kernel, _THREADS, array, stream, end)
        return True

    def close(self) -> None:
        """Free the kernel's memory. Call only when nothing is in progress."""
        self._idle.clear()
        self._cuda.free_host(self._memory)


def cut(
    destinations: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """Return parts of at most `PART_BYTES_MAX`, as uint64[n, 3]: (destination, source, bytes)."""
    if int(sizes.max(initial=1)) <= PART_BYTES_MAX:
        rows = np.empty((len(sizes), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = destinations, sources, sizes
        return rows
    repeats, offsets, parts = cut_sizes(sizes, PART_BYTES_MAX)
    rows = np.empty((len(parts), 3), np.uint64)
    rows[:, 0] = np.repeat(destinations, repeats) + offsets
    rows[:, 1] = np.repeat(sources, repeats) + offsets
    rows[:, 2] = parts
    return rows


@dataclass(slots=True, eq=False)
class Fence:
    """One recording of an event. The event is reused when nothing refers to this fence any more and
    the waiting thread no longer needs it."""

    event: int
    number: int
    idle: deque[tuple[int, int]]
    passed: bool = False  # whether the GPU is known to have passed it
    watched: int = 0  # its number at the waiter; 0 if it is not watched

    def __del__(self) -> None:
        self.idle.append((self.event, self.watched))


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A submitted copy with coalesced pieces. `summed` holds the pieces before coalescing, and
    their payloads; None if no checksum is computed."""

    number: int
    direction: Direction
    pieces: Descriptors
    fence: Fence | None  # None once it has passed
    summed: tuple[Descriptors, Payloads] | None = None


@dataclass(slots=True)
class _Launched:
    """A ticket that was submitted to the GPU."""

    ticket: int
    event: int = 0
    recorded: bool = False  # whether `event` marks its end
    watched: int = 0  # the event's number at the waiter; 0 if it is not watched
    outcome: Outcome = OK
    tables: list[Table] = field(default_factory=list)
    checksums: Checksums | None = None  # until they are given back
    checksums_failed: bool = False  # whether they may end after `event`


class Fences:
    """Points on the model's stream that copies wait for.

    All fences are on one stream, so they pass in order, and only the oldest open one is checked.
    The model's thread records them; the engine's thread makes all other calls. `waiter` signals
    that an announced fence has passed; None if the caller polls.
    """

    def __init__(
        self, cuda: Cuda, model_stream: Callable[[], int], waiter: core.EventWaiter | None
    ) -> None:
        self._cuda = cuda
        self._model_stream = model_stream
        self._waiter = waiter
        self._idle: deque[tuple[int, int]] = deque()  # events, and their numbers at the waiter
        self._count = 0
        # Oldest first: fences not yet seen to have passed, and those not yet given to the waiter.
        self._open: deque[Fence] = deque()
        self._unannounced: deque[Fence] = deque()

    def record(self) -> Fence:
        """Record a fence on the model's thread, with at most two driver calls."""
        self._cuda.enter_models_thread()
        # Only this thread takes events, so the first one cannot change before `popleft`.
        if self._idle and _is_over(self._waiter, self._idle[0][1]):
            event, _ = self._idle.popleft()
        else:
            event = self._cuda.create_event()
        self._count += 1
        fence = Fence(event, self._count, self._idle)
        self._cuda.record_event(event, self._model_stream())
        self._open.append(fence)
        self._unannounced.append(fence)
        return fence

    def look(self) -> None:
        """Check which fences have passed, usually with one driver call. Raises CudaError."""
        while self._open and self._cuda.event_is_done(self._open[0].event):
            self._open.popleft().passed = True
        while self._unannounced and self._unannounced[0].passed:
            self._unannounced.popleft()

    def announce(self, fence: Fence) -> None:
        """Have the waiter signal when `fence` and every older fence has passed.

        Without the older ones, the waiter could wait for this fence while a later copy needs an
        older one, and would wake the caller too late for that copy.
        """
        while self._unannounced and self._unannounced[0].number <= fence.number:
            older = self._unannounced.popleft()
            if self._waiter is not None:
                self._waiter.watch(older.event)
                older.watched = self._waiter.newest

    def close(self) -> list[int]:
        """Wait for the model's stream to pass all fences; return the events to destroy."""
        if self._waiter is not None:
            self._waiter.close()
        self._open.clear()
        self._unannounced.clear()
        return [event for event, _ in self._idle]


def _is_over(waiter: core.EventWaiter | None, number: int) -> bool:
    return waiter is None or waiter.is_over(number)


@dataclass(slots=True)
class _Stream:
    handle: int
    #: The checksum stream, and the event after copies that it waits for; 0 without checksums.
    checksums: int
    copied: int
    waiter: core.EventWaiter | None
    launched: deque[_Launched] = field(default_factory=deque)
    #: Finished tickets, whose events are reused when they are no longer watched.
    finished: deque[_Launched] = field(default_factory=deque)

    @property
    def handles(self) -> list[int]:
        return [self.handle, self.checksums] if self.checksums else [self.handle]


@dataclass(frozen=True)
class Copiers:
    """The ways to move bytes, and the function that chooses one. `kernel` is None if it is
    unavailable; `checksums` is None if the GPU computes none."""

    dma: DmaCopier
    kernel: KernelCopier | None
    choose: Callable[[Direction, Descriptors], Backend]
    checksums: GpuChecksums | None = None


class CudaCopyEngine:
    """Implements `copy.base.CopyEngine`. `model_stream` returns the model's current stream, on the
    model's thread. `pins` is closed with this engine. `cache_starts` are the addresses of the KV
    cache tensors. `waker` is set when there may be something to poll; None if the caller polls
    without it."""

    def __init__(
        self,
        cuda: Cuda,
        model_stream: Callable[[], int],
        copiers: Copiers,
        pins: StagingPinning,
        cache_starts: npt.NDArray[np.uint64],
        waker: Waker | None = None,
    ) -> None:
        self.asleep = False
        self._cuda = cuda
        self._waker = waker
        self._copiers = copiers
        self._pins = pins
        self._starts = np.unique(np.concatenate([pins.starts, cache_starts.astype(np.uint64)]))
        self._checksums = copiers.checksums
        self.makes_checksums = self._checksums is not None
        self._streams = {
            direction: _Stream(
                cuda.create_stream(),
                cuda.create_stream() if self.makes_checksums else 0,
                cuda.create_event() if self.makes_checksums else 0,
                self._waiter(direction.value),
            )
            for direction in Direction
        }
        self._next = 1
        self._done: list[tuple[int, Outcome]] = []
        self._fences = Fences(cuda, model_stream, self._waiter("fences"))
        self._held: list[_Ticket] = []  # in order of submission
        self._events: list[int] = []  # all events created for tickets
        self._logged: set[tuple[str, str]] = set()

    def _waiter(self, of: str) -> core.EventWaiter | None:
        if self._waker is None:
            return None
        return core.EventWaiter(self._cuda.functions, self._waker.fd, f"nvmeof-{of}")

    @property
    def streams(self) -> dict[Direction, int]:
        """Return the CUDA stream of each direction's copies. `bench copy` waits for them."""
        return {direction: stream.handle for direction, stream in self._streams.items()}

    def record_fence(self) -> object:
        """Record a fence on the model's thread. If this raises a CudaError, the model stops too."""
        return self._fences.record()

    def has_passed(self, fence: object) -> bool:
        assert isinstance(fence, Fence)
        if not fence.passed:
            self._cuda.enter_own_thread()
            try:
                self._fences.look()
            except CudaError as error:  # tickets after this fence fail when they are submitted
                self._log(error)
        return fence.passed

    def submit(
        self,
        direction: Direction,
        pieces: Descriptors,
        fence: object,
        payloads: Payloads | None = None,
    ) -> int:
        assert fence is None or isinstance(fence, Fence)
        self._cuda.enter_own_thread()
        summed = (pieces, payloads) if self.makes_checksums and payloads is not None else None
        ticket = _Ticket(self._next, direction, coalesce(pieces, self._starts), fence, summed)
        self._next += 1
        self._start([ticket])
        return ticket.number

    def poll(self) -> list[tuple[int, Outcome]]:
        self._cuda.enter_own_thread()
        held, self._held = self._held, []
        if held:
            self._start(held)
        for stream in self._streams.values():
            while stream.launched and self._has_ended(stream, stream.launched[0]):
                one = stream.launched.popleft()
                self._finish_checksums(one)
                self._done.append((one.ticket, one.outcome))
                stream.finished.append(one)
                for table in one.tables:
                    table.give_back()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        with self._logging_errors():
            self._cuda.make_current()
        self._launch_held()
        for stream in self._streams.values():
            for handle in stream.handles:
                with self._logging_errors():
                    self._cuda.synchronize_stream(handle)
            if stream.waiter is not None:
                stream.waiter.close()
        fences = self._fences.close()
        self._pins.close()
        if self._copiers.kernel is not None:
            self._copiers.kernel.close()
        if self._checksums is not None:
            self._checksums.close()
        copied = [stream.copied for stream in self._streams.values() if stream.copied]
        for event in (*self._events, *copied, *fences):
            with self._logging_errors():
                self._cuda.destroy_event(event)
        for stream in self._streams.values():
            for handle in stream.handles:
                with self._logging_errors():
                    self._cuda.destroy_stream(handle)

    # -- inside -----------------------------------------------------------------------

    def _start(self, tickets: Sequence[_Ticket]) -> None:
        """Start, in order, the tickets that need not wait; hold the others."""
        try:
            self._fences.look()
        except CudaError as error:  # it is unknown whether their fences will ever pass
            self._log(error)
            self._fail(*tickets)
            return
        for ticket in tickets:
            readiness = self._pins.readiness(ticket.pieces[:, 1])
            if self.asleep or readiness is Readiness.FAILED:
                self._fail(ticket)
            elif readiness is Readiness.WAITING or self._must_queue(ticket):
                self._held.append(ticket)
            elif ticket.fence is not None and not ticket.fence.passed:
                self._fences.announce(ticket.fence)
                self._held.append(ticket)
            else:
                self._launch(ticket)

    def _fail(self, *tickets: _Ticket) -> None:
        """Fail tickets that were not launched, and set the waker, because no waiter will."""
        self._done += [(ticket.number, _FAILED) for ticket in tickets]
        if self._waker is not None:
            self._waker.wake()

    def _launch_held(self) -> None:
        """Launch all held tickets. No ticket follows them, so the stream may wait for fences."""
        held, self._held = self._held, []
        for ticket in held:
            if self._pins.readiness(ticket.pieces[:, 1]) is Readiness.READY:
                with self._logging_errors():
                    stream = self._streams[ticket.direction].handle
                    if ticket.fence is not None:
                        self._cuda.wait_event(stream, ticket.fence.event)
                    # Nothing reads the checksums, and their stream does not wait for the fence.
                    self._launch(replace(ticket, summed=None))

    def _must_queue(self, ticket: _Ticket) -> bool:
        """Return whether `ticket` has no pieces, and so must wait for earlier tickets."""
        return not len(ticket.pieces) and any(
            earlier.direction is ticket.direction for earlier in self._held
        )

    def _launch(self, ticket: _Ticket) -> None:
        stream = self._streams[ticket.direction]
        one = _Launched(ticket.number)
        stream.launched.append(one)
        end = stream.handle
        try:
            one.event = self._take_event(stream)
            # A ticket with checksums ends after them, so the end of its copy is not marked.
            mark = NO_END if ticket.summed is not None else (one.event, stream.waiter)
            self._copy(ticket, stream.handle, one.tables, mark)
            one.recorded = ticket.summed is None
        except CudaError as error:
            self._log(error)
            one.outcome = _FAILED
        else:
            end = self._make_checksums(ticket, stream, one)
        # Copies submitted before an error may still be running, so the ticket must end after them.
        if not one.recorded and one.event:
            with self._logging_errors():
                self._cuda.record_event(one.event, end)
                one.recorded = True
                if stream.waiter is not None:
                    stream.waiter.watch(one.event)
        if one.recorded and stream.waiter is not None:
            one.watched = stream.waiter.newest

    def _copy(self, ticket: _Ticket, stream: int, tables: list[Table], end: End) -> None:
        direction, pieces = ticket.direction, ticket.pieces
        kernel = self._copiers.kernel
        backend = self._copiers.choose(direction, pieces) if len(pieces) else Backend.DMA
        if (
            kernel is not None
            and backend is Backend.KERNEL
            and kernel.copy(direction, pieces, stream, tables, end)
        ):
            return
        overlap = backend is Backend.OVERLAP
        self._copiers.dma.copy(direction, pieces, stream, overlap=overlap, end=end)

    def _make_checksums(self, ticket: _Ticket, stream: _Stream, one: _Launched) -> int:
        """Launch the checksums of a submitted copy. Return the stream on which the ticket ends."""
        if self._checksums is None or ticket.summed is None:
            return stream.handle
        one.checksums = self._checksums.prepare(*ticket.summed)
        if one.checksums is None:
            return stream.handle
        try:
            if ticket.direction is Direction.LOAD:
                self._wait_for_copies(stream)
            self._checksums.launch(one.checksums, stream.checksums)
            if ticket.direction is Direction.STORE:
                self._wait_for_copies(stream)
        except CudaError as error:
            self._log(error, "the GPU cannot compute a copy's checksums, so the CPU does")
            one.checksums_failed = True
            return stream.handle
        return stream.checksums

    def _wait_for_copies(self, stream: _Stream) -> None:
        self._cuda.record_event(stream.copied, stream.handle)
        self._cuda.wait_event(stream.checksums, stream.copied)

    def _finish_checksums(self, one: _Launched) -> None:
        if self._checksums is None or one.checksums is None:
            return
        if one.outcome.ok and not one.checksums_failed:
            self._checksums.write(one.checksums)
        self._checksums.give_back(one.checksums)
        one.checksums = None

    def _take_event(self, stream: _Stream) -> int:
        while stream.finished and _is_over(stream.waiter, stream.finished[0].watched):
            event = stream.finished.popleft().event
            if event:
                return event
        event = self._cuda.create_event()
        self._events.append(event)
        return event

    def _has_ended(self, stream: _Stream, one: _Launched) -> bool:
        try:
            if one.recorded and not self._cuda.event_is_done(one.event):
                return False
            if one.checksums_failed and not self._cuda.stream_is_done(stream.checksums):
                return False  # the launches may still use their table
            if one.recorded:
                return True
            ended = all(self._cuda.stream_is_done(handle) for handle in stream.handles)
        except CudaError as error:  # the context is lost, with all work in progress
            self._log(error)
            ended = True
        if ended:
            one.outcome = _FAILED
        return ended

    def _log(self, error: CudaError, what: str = "a copy to or from the GPU failed") -> None:
        if (what, error.name) not in self._logged:  # once a context is lost, every call fails
            self._logged.add((what, error.name))
            logger.error("%s: %s", what, error)

    @contextlib.contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except CudaError as error:
            self._log(error)
