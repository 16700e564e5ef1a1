# SPDX-License-Identifier: Apache-2.0
"""The threads engine: blocking `preadv`/`pwritev` on a few threads. Runs everywhere.

Seal, checksum and system calls run on the I/O threads and release the GIL. A thread whose
operation is past its deadline counts as lost, and a spare one takes its place (a bounded
number of them), so that a hung target does not stop the others; when a lost one returns and
there are enough without it, it ends.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, EngineError, Outcome, io_error
from vllm_nvmeof_offload.io.affinity import unbind_this_thread
from vllm_nvmeof_offload.io.base import Completion, IoKind, IoOp
from vllm_nvmeof_offload.io.queues import Limits, OpState, Phase, Queues
from vllm_nvmeof_offload.io.transfer import SlotFiles, read_slot, write_slot
from vllm_nvmeof_offload.pool.layout import check_key
from vllm_nvmeof_offload.units import MIB, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_nvmeof_offload.pool.pool import Pool

__all__ = ["ThreadsIoEngine"]

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
        *,
        threads: int = 8,
        read_bytes_in_flight_max: int = 64 * MIB,
        write_bytes_in_flight_max: int = 16 * MIB,
        queue_max: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        memory: all staging, uint8, page-aligned, at address `base_address`; it outlives the
        engine. clock: what deadlines are measured on, seconds.

        Raises:
            EngineError: fewer than two threads (one is kept for reads).
        """
        if threads < 2:
            raise EngineError(f"io_threads={threads}: at least 2, one of them is kept for reads")
        assert memory.format == "B"
        assert base_address % PAGE_BYTES == 0
        self.name = f"threads ({'O_DIRECT' if pool.direct else 'buffered'})"
        self._pool = pool
        self._memory = memory
        self._base_address = base_address
        self._clock = clock
        self._limits = Limits(
            threads,
            pool.slot_bytes,
            read_bytes_in_flight_max,
            write_bytes_in_flight_max,
            queue_max,
        )
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._timer = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._queues = Queues(self._limits)
        self._ops: dict[int, OpState] = {}
        self._deadlines: list[tuple[float, int, OpState]] = []
        self._completions: list[Completion] = []
        self._sequence = 0
        self._overdue = 0
        self._threads_alive = 0
        self._closed = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Its threads keep the engine alive: this runs when the last one has ended.
        weakref.finalize(self, os.close, self._event_fd).atexit = False
        with self._lock:
            for _ in range(threads):
                self._start_thread()
        threading.Thread(target=self._run_timer, name="io-timer", daemon=True).start()

    # ---- the caller's side ----------------------------------------------------------------

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
        if op.kind is not IoKind.RESET:
            offset = op.address - self._base_address
            assert offset % PAGE_BYTES == 0
            assert 0 <= offset <= len(self._memory) - self._limits.slot_bytes
            assert op.identity is not None
            check_key(op.identity.key)
            state.files = SlotFiles.of(self._pool, op.pool_slot)
        self._ops[op.token] = state
        if op.kind is IoKind.WRITE_SLOT and not self._queues.barriers:
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
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        with self._lock:
            self._expire()
            completions, self._completions = self._completions, []
            return completions

    def fileno(self) -> int:
        return self._event_fd

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop. False: threads hang in the kernel; then keep the pool's descriptors open too
        (`pool.close(abandon=True)`), and the memory mapped.
        """
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
        os.eventfd_write(self._event_fd, 1)

    def _end_queued(self, state: OpState, outcome: Outcome) -> None:
        self._queues.remove(state)
        state.phase = Phase.DONE
        del self._ops[state.op.token]
        if state.op.kind is IoKind.RESET:
            self._mark_writes()
        self._complete(Completion(state.op.token, outcome))
        self._work.notify_all()  # it may have been a barrier, or the read that held writes back

    def _mark_writes(self) -> None:
        for state in self._queues.unmarked_writes():
            state.stamp = self._pool.stamp

    def _expire(self) -> None:
        """Give DEADLINE to what is past it; the deadlines of finished operations just go."""
        now = self._clock()
        heap = self._deadlines
        while heap and (heap[0][0] <= now or heap[0][2].phase is Phase.DONE):
            state = heapq.heappop(heap)[2]
            if state.phase is Phase.QUEUED:
                self._end_queued(state, DEADLINE)
            elif state.phase is Phase.RUNNING:
                self._queues.overdue(state)
                self._complete(Completion(state.op.token, DEADLINE, released=False))
                self._overdue += 1
                self._count_working()
                if self._threads_alive < self._limits.threads * (1 + _SPARE_FACTOR):
                    self._start_thread()
                self._work.notify_all()
        if len(heap) > 64 + 2 * len(self._ops):
            self._deadlines = [item for item in heap if item[2].phase is not Phase.DONE]
            heapq.heapify(self._deadlines)

    def _start_thread(self) -> None:
        self._threads_alive += 1
        self._count_working()
        name = f"io-{self._threads_alive}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _count_working(self) -> None:
        self._queues.threads_working = self._threads_alive - self._overdue

    def _take(self) -> OpState | None:
        """Wait for work; None: this thread is to end, and does not count any more."""
        while True:
            surplus = self._queues.threads_working > self._limits.threads
            if self._closed or surplus:
                # Under the same lock: all threads that look before this one has gone would find
                # the same surplus, and none would be left.
                self._leave()
                return None
            state = self._queues.start_next()
            if state is not None:
                return state
            self._work.wait()

    def _leave(self) -> None:
        self._threads_alive -= 1
        self._count_working()
        self._idle.notify_all()

    def _finish(self, state: OpState, outcome: Outcome) -> None:
        late = state.phase is Phase.OVERDUE
        self._overdue -= late
        self._count_working()
        self._queues.finish(state)
        if state.op.kind is IoKind.RESET:
            self._mark_writes()
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
            # An exception here is a mistake of ours; the operation must end even then, and the
            # thread with it.
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
        if op.kind is IoKind.RESET:
            try:
                self._pool.reset(op.adoptable)
            except OSError as error:
                return io_error(error.errno or errno.EIO)
            return OK
        assert op.identity is not None
        assert state.files is not None
        offset = op.address - self._base_address
        slot = self._memory[offset : offset + self._limits.slot_bytes]
        if op.kind is IoKind.READ_SLOT:
            return read_slot(self._pool, slot, state.files, op.identity)
        assert state.stamp is not None
        wanted = lambda: state.phase is Phase.RUNNING  # noqa: E731
        return write_slot(self._pool, slot, state.files, op.identity, state.stamp, wanted)

    def _run_timer(self) -> None:
        """Make deadlines wake the caller, who may be waiting on `fileno()`."""
        with self._lock:
            while not self._closed:
                self._expire()
                if self._deadlines:
                    wait_s = max(self._deadlines[0][0] - self._clock(), _TIMER_SLEEP_S_MIN)
                    self._timer.wait(min(wait_s, threading.TIMEOUT_MAX))
                else:
                    self._timer.wait()
