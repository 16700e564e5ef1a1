# SPDX-License-Identifier: Apache-2.0
"""The threads engine: blocking `preadv`/`pwritev` on a few threads. Runs everywhere.

Seal, checksum and system calls run on the I/O threads and release the GIL. A thread whose
operation is past its deadline counts as lost, and a spare one takes its place (a bounded
number of them), so that a hung target does not stop the others; when a lost one returns and
there are enough without it, it ends.
"""

from __future__ import annotations

import enum
import errno
import heapq
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, EngineError, Outcome, io_error
from vllm_nvmeof_offload.io.base import (
    Completion,
    IoLimits,
    IoOp,
    Waker,
    reset_pool,
    unbind_this_thread,
)
from vllm_nvmeof_offload.pool.format import Stamp, check_key, encode_entry, seal, verify
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES, slot_stride_bytes


class SlotFiles(NamedTuple):
    """A pool slot with the descriptors and byte offsets of its slab and table entry.

    Take it when an operation is submitted: the target's files may be exchanged before the
    operation runs, and only those of its submission stay open until its release.
    """

    pool_slot: int
    slab_fd: int
    slab_offset: int
    table_fd: int
    table_offset: int

    @staticmethod
    def of(pool: Pool, pool_slot: int) -> SlotFiles:
        """Return the files that serve `pool_slot` now."""
        return SlotFiles(pool_slot, *pool.slab_fd(pool_slot), *pool.table_fd(pool_slot))


class Payload(NamedTuple):
    """What is written behind a header page. crc: as `IoOp.payload_crc`."""

    size_bytes: int
    crc: int | None = None


def read_slot(
    pool: Pool,
    slot: memoryview,
    files: SlotFiles,
    identity: SlotIdentity,
    tag: bytes,
    payload_bytes: int | None = None,
) -> Outcome:
    """Read the pool slot into `slot` (uint8[slot_bytes]) and verify it.

    tag: the share tag that it must have. payload_bytes: the length of this slot's payload; None:
    the pool's longest.
    """
    place = pool.place(files.pool_slot)
    size = pool.payload_bytes if payload_bytes is None else payload_bytes
    try:
        _transfer(os.preadv, files.slab_fd, slot[: slot_stride_bytes(size)], files.slab_offset)
    except OSError as error:
        return _failure(error)
    return verify(slot, identity, size, place, tag)


def write_slot(
    pool: Pool,
    slot: memoryview,
    files: SlotFiles,
    identity: SlotIdentity,
    stamp: Stamp,
    wanted: Callable[[], bool],
    payload: Payload | None = None,
) -> Outcome:
    """Seal `slot` (uint8[slot_bytes]), write it, and then its table entry.

    wanted: asked between the two. A write that was given up meanwhile gets no table entry,
    because its pool slot may soon hold another chunk. payload: None: it has the pool's longest
    length.
    """
    size, crc = payload or Payload(pool.payload_bytes)
    place = pool.place(files.pool_slot)
    seal(slot, identity, size, stamp, place, pool.kind_of(identity.key), crc)
    entry = encode_entry(place.slot, identity, stamp.epoch)
    try:
        _transfer(os.pwritev, files.slab_fd, slot[: slot_stride_bytes(size)], files.slab_offset)
        if not wanted():
            return io_error(errno.ECANCELED)
        if os.pwrite(files.table_fd, entry, files.table_offset) != len(entry):
            return io_error(errno.EIO)
    except OSError as error:
        return _failure(error)
    return OK


def _failure(error: OSError) -> Outcome:
    return io_error(errno.EIO if error.errno is None else error.errno)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, slot: memoryview, offset: int
) -> None:
    """Repeat `preadv`/`pwritev` until all of `slot` is done (Python itself repeats on EINTR).

    The rest of a short transfer starts on a page boundary again, as O_DIRECT requires.

    Raises:
        OSError: the kernel's error; if a call makes no progress EIO, or 0 where it moved nothing.
    """
    done = 0
    while done < len(slot):
        count = moved = call(fd, [slot[done:]], offset + done)
        if done + count < len(slot):
            count -= (done + count) % PAGE_BYTES
        if count <= 0:
            raise OSError(errno.EIO if moved else 0, f"no progress at {done} of {len(slot)} bytes")
        done += count


class Phase(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    #: Past its deadline while running: its outcome is out, its buffer is not.
    OVERDUE = "overdue"
    DONE = "done"


@dataclass(slots=True, eq=False)
class OpState:
    """One operation inside the engine."""

    op: IoOp
    sequence: int
    #: The pool's files at its submission; None for a reset.
    files: SlotFiles | None = None
    #: The pool's stamp at its submission. Of a write for which resets were pending then: when the
    #: last of those finished. So a reset voids exactly the writes submitted before it.
    stamp: Stamp | None = None
    phase: Phase = Phase.QUEUED


@dataclass(slots=True)
class Queues:
    """Waiting and running operations, and which starts next. Pure, not thread-safe.

    Operations start by urgency, first come, first served within one. Writes never hold every
    thread, and while any read waits or runs at most one write runs: a read beside 64 MiB of
    writes in flight takes five times as long as beside one write.
    """

    limits: IoLimits
    slot_bytes: int
    threads_working: int = 0  # those not lost in the kernel
    waiting: dict[Urgency, OrderedDict[int, OpState]] = field(
        default_factory=lambda: {urgency: OrderedDict() for urgency in Urgency}
    )
    resets: OrderedDict[int, OpState] = field(default_factory=OrderedDict)
    reads_running: int = 0
    writes_running: int = 0
    #: Sequence numbers of resets that have not finished: later writes wait for them.
    barriers: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.resets) + sum(map(len, self.waiting.values()))

    def add(self, state: OpState) -> None:
        if state.op.kind is OpKind.RESET:
            self.barriers.append(state.sequence)
        self._queue_of(state)[state.op.token] = state

    def remove(self, state: OpState) -> None:
        """Take out an operation that has not started."""
        assert state.phase is Phase.QUEUED
        del self._queue_of(state)[state.op.token]
        self._lift_barrier(state)

    def all_waiting(self) -> Iterator[OpState]:
        for queue in (self.resets, *self.waiting.values()):
            yield from list(queue.values())

    def start_next(self) -> OpState | None:
        """Take the operation to start now, if any."""
        state = self._next()
        if state is not None:
            del self._queue_of(state)[state.op.token]
            state.phase = Phase.RUNNING
            self._count(state, 1)
        return state

    def overdue(self, state: OpState) -> None:
        """Stop counting a running operation, because it hangs."""
        assert state.phase is Phase.RUNNING
        state.phase = Phase.OVERDUE
        self._count(state, -1)

    def finish(self, state: OpState) -> None:
        """End an operation that has started."""
        if state.phase is Phase.RUNNING:
            self._count(state, -1)
        self._lift_barrier(state)
        state.phase = Phase.DONE

    def _queue_of(self, state: OpState) -> OrderedDict[int, OpState]:
        if state.op.kind is OpKind.RESET:
            return self.resets
        return self.waiting[state.op.urgency]

    def _lift_barrier(self, state: OpState) -> None:
        if state.op.kind is OpKind.RESET:
            self.barriers.remove(state.sequence)

    def _count(self, state: OpState, change: int) -> None:
        if state.op.is_read:
            self.reads_running += change
        elif state.op.kind is OpKind.WRITE:
            self.writes_running += change

    def _next(self) -> OpState | None:
        reset = next(iter(self.resets.values()), None)
        if reset is not None and not self._waits_for_reset(reset):
            return reset
        reads_wait = False
        for urgency in Urgency:
            # Only the first one: nothing overtakes within an urgency.
            state = next(iter(self.waiting[urgency].values()), None)
            if state is None:
                continue
            if state.op.is_read:
                reads_wait = True
                if self._may_read():
                    return state
            elif self._may_write(state, reads_wait):
                return state
        return None

    def mark_writes(self, stamp: Stamp) -> None:
        """Stamp the waiting writes that have no stamp and wait for no reset any more."""
        for state in self.all_waiting():
            is_unmarked = state.op.kind is OpKind.WRITE and state.stamp is None
            if is_unmarked and not self._waits_for_reset(state):
                state.stamp = stamp

    def _waits_for_reset(self, state: OpState) -> bool:
        return any(barrier < state.sequence for barrier in self.barriers)

    def _may_read(self) -> bool:
        in_flight = (self.reads_running + 1) * self.slot_bytes
        return self.reads_running == 0 or in_flight <= self.limits.read_bytes_in_flight_max

    def _may_write(self, state: OpState, reads_wait: bool) -> bool:
        if self._waits_for_reset(state) or self.writes_running >= self.threads_working - 1:
            return False
        if self.writes_running == 0:
            return True
        if reads_wait or self.reads_running:
            return False
        in_flight = (self.writes_running + 1) * self.slot_bytes
        return in_flight <= self.limits.write_bytes_in_flight_max


#: Threads that may be lost in the kernel, as a multiple of those that work.
_SPARE_FACTOR = 3
_TIMER_SLEEP_S_MIN = 0.001


class ThreadsIoEngine:
    """Implements `io.base.IoEngine`."""

    def __init__(
        self,
        pool: Pool,
        memory: memoryview,
        base_address: int,
        limits: IoLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads. Raises: EngineError: fewer than two (one is kept for reads)."""
        if limits.threads < 2:
            raise EngineError(
                f"io_threads={limits.threads}: at least 2, one of them is kept for reads"
            )
        assert memory.format == "B"
        assert base_address % PAGE_BYTES == 0
        self.name = f"threads ({'O_DIRECT' if pool.direct else 'buffered'})"
        self._pool = pool
        self._memory = memory
        self._base_address = base_address
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._timer = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queues = Queues(limits, pool.slot_bytes)
        self._ops: dict[int, OpState] = {}
        self._deadlines: list[tuple[float, int, OpState]] = []
        self._completions: list[Completion] = []
        self._sequence = 0
        self._threads_alive = 0
        self._closed = False
        self._waker = Waker()  # the threads keep it open until the last one has ended
        with self._lock:
            for _ in range(limits.threads):
                self._start_thread()
        threading.Thread(target=self._run_timer, name="io-timer", daemon=True).start()

    # ---- the caller's side ----------------------------------------------------------------

    def attach(self) -> None:
        return None

    def submit(self, ops: Sequence[IoOp]) -> int:
        with self._lock:
            assert not self._closed, "submit after close"
            room = self._limits.queue_max - len(self._queues)
            accepted = ops[: max(room, 0)]
            for op in accepted:
                self._accept(op)
            self._work.notify(len(accepted))
            return len(accepted)

    def _accept(self, op: IoOp) -> None:
        assert op.token not in self._ops, "token in use"
        self._sequence += 1
        state = OpState(op, self._sequence)
        if op.kind is not OpKind.RESET:
            offset = op.address - self._base_address
            assert offset % PAGE_BYTES == 0
            assert 0 <= offset <= len(self._memory) - self._pool.slot_bytes
            assert 0 <= op.payload_bytes <= self._pool.slot_bytes - HEADER_BYTES
            assert op.identity is not None
            check_key(op.identity.key)
            state.files = SlotFiles.of(self._pool, op.pool_slot)
        self._ops[op.token] = state
        if op.is_read or (op.kind is OpKind.WRITE and not self._queues.barriers):
            state.stamp = self._pool.stamp
        self._queues.add(state)
        if op.deadline_s is not None:
            heapq.heappush(self._deadlines, (op.deadline_s, state.sequence, state))
            if self._deadlines[0][2] is state:
                self._timer.notify()

    def cancel(self, tokens: Sequence[int]) -> None:
        with self._lock:
            for token in tokens:
                state = self._ops.get(token)
                if state is not None and state.phase is Phase.QUEUED:
                    self._end_queued(state, CANCELLED)

    def replace_target(self, target: int) -> None:
        """Nothing to do: an operation has the files of its submission."""

    def poll(self) -> list[Completion]:
        # Clear the event before looking: what completes in between signals it again.
        self._waker.clear()
        with self._lock:
            self._expire()
            completions, self._completions = self._completions, []
            return completions

    def fileno(self) -> int:
        return self._waker.fd

    def close(self, timeout_s: float = 5.0) -> bool:
        with self._lock:
            self._closed = True
            for state in self._queues.all_waiting():
                self._end_queued(state, CANCELLED)
            self._work.notify_all()
            self._timer.notify_all()
            return self._idle.wait_for(lambda: self._threads_alive == 0, timeout_s)

    # ---- under the lock -------------------------------------------------------------------

    def _complete(self, completion: Completion) -> None:
        self._completions.append(replace(completion, ended_s=self._clock()))
        self._waker.wake()

    def _end_queued(self, state: OpState, outcome: Outcome) -> None:
        self._queues.remove(state)
        state.phase = Phase.DONE
        del self._ops[state.op.token]
        if state.op.kind is OpKind.RESET:
            self._queues.mark_writes(self._pool.stamp)
        self._complete(Completion(state.op.token, outcome))
        self._work.notify_all()  # it may have been a barrier, or the read that held writes back

    def _expire(self) -> None:
        """Give DEADLINE to what is past it, and drop the deadlines of finished operations."""
        now = self._clock()
        heap = self._deadlines
        while heap and (heap[0][0] <= now or heap[0][2].phase is Phase.DONE):
            state = heapq.heappop(heap)[2]
            if state.phase is Phase.QUEUED:
                self._end_queued(state, DEADLINE)
            elif state.phase is Phase.RUNNING:
                self._queues.overdue(state)
                self._complete(Completion(state.op.token, DEADLINE, released=False))
                self._queues.threads_working -= 1
                if self._threads_alive < self._limits.threads * (1 + _SPARE_FACTOR):
                    self._start_thread()
                self._work.notify_all()
        if len(heap) > 64 + 2 * len(self._ops):
            self._deadlines = [item for item in heap if item[2].phase is not Phase.DONE]
            heapq.heapify(self._deadlines)

    def _start_thread(self) -> None:
        self._threads_alive += 1
        self._queues.threads_working += 1
        name = f"io-{self._threads_alive}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _take(self) -> OpState | None:
        """Wait for work; None: this thread must end, and does not count any more."""
        while True:
            if self._closed or self._queues.threads_working > self._limits.threads:
                # Under the same lock: all threads that look before this one is gone would find
                # the same surplus, and none would be left.
                self._leave()
                return None
            state = self._queues.start_next()
            if state is not None:
                return state
            self._work.wait()

    def _leave(self) -> None:
        self._threads_alive -= 1
        self._queues.threads_working -= 1
        self._idle.notify_all()

    def _finish(self, state: OpState, outcome: Outcome) -> None:
        late = state.phase is Phase.OVERDUE
        self._queues.threads_working += late
        self._queues.finish(state)
        if state.op.kind is OpKind.RESET:
            self._queues.mark_writes(self._pool.stamp)
        del self._ops[state.op.token]
        self._complete(Completion(state.op.token, None if late else outcome))
        # The end of one read may let several writes start, so wake everybody.
        self._work.notify_all()

    # ---- the threads ----------------------------------------------------------------------

    def _run(self) -> None:
        unbind_this_thread()
        while True:
            with self._lock:
                state = self._take()
            if state is None:
                return
            # An exception here is a bug; the operation must end even then, and the thread too.
            outcome, ends = io_error(errno.EIO), True
            try:
                outcome = self._execute(state)
                ends = False
            finally:
                with self._lock:
                    self._finish(state, outcome)
                    if ends:
                        self._leave()

    def _execute(self, state: OpState) -> Outcome:
        op = state.op
        if op.kind is OpKind.RESET:
            return reset_pool(self._pool, op)
        assert op.identity is not None
        assert state.files is not None
        assert state.stamp is not None
        offset = op.address - self._base_address
        slot = self._memory[offset : offset + self._pool.slot_bytes]
        if op.is_read:
            wanted_tag, size = state.stamp.tag, op.payload_bytes
            return read_slot(self._pool, slot, state.files, op.identity, wanted_tag, size)
        wanted = lambda: state.phase is Phase.RUNNING  # noqa: E731
        payload = Payload(op.payload_bytes, op.payload_crc)
        return write_slot(self._pool, slot, state.files, op.identity, state.stamp, wanted, payload)

    def _run_timer(self) -> None:
        """Wake the caller at deadlines: it may be waiting on `fileno()`."""
        with self._lock:
            while not self._closed:
                self._expire()
                next_s = self._deadlines[0][0] if self._deadlines else float("inf")
                wait_s = max(next_s - self._clock(), _TIMER_SLEEP_S_MIN)
                self._timer.wait(min(wait_s, threading.TIMEOUT_MAX))
