# SPDX-License-Identifier: Apache-2.0
"""The io_uring engine: one ring and I/O thread per target, in C++ (`native/`), without the GIL.

With `registered`, staging is registered with the rings once, so that the kernel does not pin
its pages at every operation; all targets' rings share that registration if the kernel can.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    OK,
    STALE,
    EngineError,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.io.base import ALLOWED_CPUS, Completion, IoLimits, IoOp, Lanes, reset_pool
from vllm_nvmeof_offload.native import WHY_NOT, core
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OpKind
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native._native import StartGate


class _Resets:
    """Runs resets one at a time, on a thread of its own, because the rings' threads run no Python.

    A reset voids exactly the writes submitted before it. Those carry an earlier stamp, so they may
    run beside it. Writes submitted after it wait behind its *barrier*, a number that counts up,
    and get the stamp that the reset left.

    `order` is held while a write learns its barrier and is handed over, and while barriers are
    lifted, so that a write cannot miss the end of the reset that it waits for.
    """

    def __init__(self, pool: Pool, on_end: Callable[[int, int, Outcome], None]) -> None:
        """on_end(token, lifted, outcome): a reset ended; writes behind barriers up to `lifted`
        may start. Called under `order`, on any thread.
        """
        self.order = threading.RLock()
        self._pool = pool
        self._on_end = on_end
        self._waiting: deque[tuple[int, IoOp]] = deque()
        self._outstanding: set[int] = set()
        self._last = 0
        self._thread: threading.Thread | None = None

    @property
    def barrier(self) -> int:
        """The barrier of a write submitted now; 0: none. Read it under `order`."""
        return max(self._outstanding, default=0)

    def add(self, op: IoOp) -> None:
        with self.order:
            self._last += 1
            self._outstanding.add(self._last)
            self._waiting.append((self._last, op))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="io-reset", daemon=True)
                self._thread.start()

    def cancel(self, tokens: Collection[int] | None = None) -> None:
        """Cancel those of `tokens` that have not started; None: all of them."""
        with self.order:
            for item in list(self._waiting):
                if tokens is None or item[1].token in tokens:
                    self._waiting.remove(item)
                    self._end(*item, CANCELLED)

    def join(self, timeout_s: float) -> bool:
        """Wait for the reset that runs; False if it still does."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _end(self, barrier: int, op: IoOp, outcome: Outcome) -> None:
        self._outstanding.remove(barrier)
        lifted = min(self._outstanding, default=self._last + 1) - 1
        self._on_end(op.token, lifted, outcome)

    def _run(self) -> None:
        while True:
            with self.order:
                if not self._waiting:
                    self._thread = None
                    return
                barrier, op = self._waiting.popleft()
            outcome = reset_pool(self._pool, op)
            with self.order:
                self._end(barrier, op, outcome)


_NEVER_NS = (1 << 63) - 1
_NO_CRC = -1
#: By the core's code: ok, io_error, checksum_mismatch, stale, deadline, cancelled, released.
_IO_ERROR = 1
_OUTCOMES = (OK, None, CHECKSUM_MISMATCH, STALE, DEADLINE, CANCELLED, None)


class UringDeniedError(EngineError):
    """The kernel, or the sandbox of this process, refuses the ring or a step of its set-up."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(f"{step}: {os.strerror(number)}")
        self.step = step
        self.errno = number


class UringIoEngine:
    """Implements `io.base.IoEngine`."""

    def __init__(
        self,
        pool: Pool,
        memory: memoryview,
        base_address: int,
        limits: IoLimits,
        *,
        registered: bool = True,
        clock: Callable[[], float] = time.monotonic,
        gate: StartGate | None = None,
    ) -> None:
        """Set up the rings and start their threads. gate: for tests.

        Raises:
            UringDeniedError: the kernel refuses io_uring or, if `registered`, the registration.
            EngineError: the native core is not installed.
        """
        if core is None:
            raise EngineError(WHY_NOT)
        assert memory.format == "B"
        assert base_address % PAGE_BYTES == 0
        how = "registered" if registered else "unregistered"
        self.name = f"io_uring ({how}, {'O_DIRECT' if pool.direct else 'buffered'})"
        self._pool = pool
        self._memory = memory
        self._base_address = base_address
        self._offset_max = len(memory) - pool.slot_bytes
        self._payload_bytes_max = pool.slot_bytes - HEADER_BYTES
        self._pool_slots = pool.slots
        self._clock = clock
        self._reset_completions: list[Completion] = []
        self._resets = _Resets(pool, self._reset_ended)
        self._closed = self._attached = False
        targets = range(pool.target_count)
        try:
            self._core = core.Engine(
                [(pool.slab_fd(target)[0], pool.table_fd(target)[0]) for target in targets],
                base_address,
                len(memory),
                # Slot `target` is the first one of that target.
                regions=[pool.place(target).region_uuid for target in targets],
                rank=pool.place(0).rank,
                groups=list(pool.kinds.items()),
                slot_bytes=pool.slot_bytes,
                registered=registered,
                limits=limits,
                cpus=sorted(ALLOWED_CPUS),
                gate=gate,
            )
        except OSError as error:
            raise UringDeniedError(str(error.strerror), error.errno or 0) from error

    def attach(self) -> Lanes:
        self._attached = True
        return Lanes(self._core.lanes(), lambda: self._pool.stamp)

    def submit(self, ops: Sequence[IoOp]) -> int:
        assert not self._closed, "submit after close"
        accepted = 0
        with self._resets.order:
            stamp, barrier = self._pool.stamp, self._resets.barrier
            for op in ops:
                if op.kind is OpKind.RESET:
                    self._resets.add(op)
                    barrier = self._resets.barrier
                elif not self._submit_one(op, stamp, barrier):
                    break
                if not accepted:
                    self._core.kick()  # the first one starts while the others are handed over
                accepted += 1
        if accepted:
            self._core.kick()
        return accepted

    def _submit_one(self, op: IoOp, stamp: Stamp, barrier: int) -> bool:
        """Hand one over. With small chunks the time of every attribute look-up counts here."""
        identity, deadline_s = op.identity, op.deadline_s
        assert identity is not None
        offset = op.address - self._base_address
        assert offset % PAGE_BYTES == 0
        assert 0 <= offset <= self._offset_max
        assert 0 <= op.pool_slot < self._pool_slots
        assert 0 <= op.payload_bytes <= self._payload_bytes_max
        accepted: bool = self._core.submit(
            op.token,
            op.urgency,
            op.pool_slot,
            op.address,
            op.payload_bytes,
            identity.key,
            identity.generation,
            _NEVER_NS if deadline_s is None else int(deadline_s * 1e9),
            stamp.epoch,
            stamp.tag,
            0 if op.is_read else barrier,
            _NO_CRC if op.payload_crc is None else op.payload_crc,
        )
        return accepted

    def cancel(self, tokens: Sequence[int]) -> None:
        self._resets.cancel(tokens)
        for token in tokens:
            self._core.cancel(token)

    def replace_target(self, target: int) -> None:
        # Slot `target` is the first one of that target.
        fds = self._pool.slab_fd(target)[0], self._pool.table_fd(target)[0]
        self._core.replace_target(target, *fds)

    def poll(self) -> list[Completion]:
        found = [] if self._attached else self._core.poll(int(self._clock() * 1e9))
        ahead_s = self._clock() - time.monotonic()  # the core's clock is the latter
        completions = [
            Completion(
                token,
                io_error(number) if code == _IO_ERROR else _OUTCOMES[code],
                released,
                ended_ns / 1e9 + ahead_s,
            )
            for token, code, number, released, ended_ns in found
        ]
        if self._reset_completions:
            with self._resets.order:
                completions += self._reset_completions
                self._reset_completions.clear()
        return completions

    def fileno(self) -> int:
        return int(self._core.fileno())

    def close(self, timeout_s: float = 5.0) -> bool:
        self._closed = True
        end_s = time.monotonic() + timeout_s
        self._resets.cancel()
        ended = self._core.close(timeout_s)
        return self._resets.join(max(0.0, end_s - time.monotonic())) and ended

    def kick(self) -> None:
        """Let the I/O threads look at their queues again, because a test's gate has opened."""
        self._core.kick()

    def _reset_ended(self, token: int, lifted: int, outcome: Outcome) -> None:
        stamp = self._pool.stamp
        self._core.lift(lifted, stamp.epoch, stamp.tag)
        self._reset_completions.append(Completion(token, outcome))
        os.eventfd_write(self._core.fileno(), 1)
