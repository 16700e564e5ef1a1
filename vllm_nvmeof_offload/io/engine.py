# SPDX-License-Identifier: Apache-2.0
"""The I/O engine of a pool: one ring and one thread per target, in C++ (`native/`).

A ring is an io_uring, or a few threads if io_uring is forbidden. Both use the same code to seal and
verify slots, and to write table entries and logs.
"""

from __future__ import annotations

import enum
import functools
import os
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.errors import EngineError, Outcome, outcome_of
from vllm_nvmeof_offload.io.base import (
    ALLOWED_CPUS,
    Completion,
    ForeignSlab,
    IoOp,
    Lanes,
    Room,
)
from vllm_nvmeof_offload.native import core
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OURS, OpKind, owner_of, slot_of, target_of
from vllm_nvmeof_offload.units import HEADER_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from vllm_nvmeof_offload.native._native import StartGate


_NO_CRC = -1


class How(enum.Enum):
    """The ways to move slots. Each value is the engine's name.

    REGISTERED registers staging with io_uring once, so that the kernel does not pin pages per
    operation. All targets' rings share the registration if the kernel supports it.
    """

    REGISTERED = "io_uring (registered, {})"
    UNREGISTERED = "io_uring (unregistered, {})"
    THREADS = "threads ({})"


#: The maximum number of operations in an engine with rings, over all targets.
OPERATIONS_MAX = 4096
#: The minimum is two threads, because one is reserved for reads.
_THREADS_MIN = 2


class UringDeniedError(EngineError):
    """The kernel or this process's sandbox refused io_uring or a step of its setup."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(f"{step}: {os.strerror(number)}")
        self.step = step
        self.errno = number


class NativeIoEngine:
    """Implements `io.base.IoEngine`."""

    def __init__(
        self,
        pool: Pool,
        memory: memoryview,
        base_address: int,
        tuning: Tuning,
        how: How = How.REGISTERED,
        *,
        operations_max: int = OPERATIONS_MAX,
        gate: StartGate | None = None,
    ) -> None:
        """Set up the rings and start their threads. `gate` is for tests.

        Raises: UringDeniedError: the kernel refuses io_uring or, if REGISTERED, the registration.
        EngineError: the threads that THREADS needs cannot be started.
        """
        assert memory.format == "B"
        assert base_address % PAGE_BYTES == 0
        self.name = how.value.format("O_DIRECT" if pool.direct else "buffered")
        self._pool = pool
        self._memory = memory
        self._base_address = base_address
        self._offset_max = len(memory) - pool.slot_bytes
        self._payload_bytes_max = pool.slot_bytes - HEADER_BYTES
        self._superblocks: deque[Completion] = deque()  # completed superblock writes
        self._closed = self._attached = False
        targets = range(pool.target_count)
        threads = max(_THREADS_MIN, -(-tuning.io_threads // len(targets)))  # per target
        try:
            self._core = core.Engine(
                [pool.files(target) for target in targets],
                base_address,
                len(memory),
                regions=[block.place(0).region_uuid for block in pool.superblocks],
                logs=[pool.log(target)[1:] for target in targets],
                rank=pool.superblocks[0].rank,
                permits=[permit.address for permit in pool.permits],
                groups=list(pool.kinds.items()),
                slot_bytes=pool.slot_bytes,
                registered=how is How.REGISTERED,
                threads=threads if how is How.THREADS else 0,
                limits=SimpleNamespace(
                    depth=tuning.io_depth,
                    split_bytes=tuning.io_split_bytes,
                    operations_max=operations_max,
                    # The rest of the bound keeps a device busy until the pipeline wakes.
                    read_bytes_started_max=tuning.read_bytes_in_flight_max * 3 // 4,
                ),
                cpus=sorted(ALLOWED_CPUS),
                gate=gate,
            )
        except OSError as error:
            if how is How.THREADS:
                raise EngineError(f"the I/O threads cannot be started: {error}") from error
            raise UringDeniedError(str(error.strerror), error.errno or 0) from error

    @property
    def stamp(self) -> Stamp:
        return self._pool.stamp

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        return self._pool.begin_reset(tag, named)

    def save_sessions(self, content: bytes) -> None:
        self._pool.save_sessions(content)

    def attach(self) -> Lanes:
        self._attached = True
        return self._core

    def room(self) -> Room:
        return Room(*self._core.room())

    def submit(self, ops: Sequence[IoOp]) -> None:
        assert not self._closed, "submit after close"
        for number, op in enumerate(ops):
            if op.kind is OpKind.RESET:
                target = target_of(op.place)
                epoch = self._pool.superblocks[target].epoch
                end = functools.partial(self._superblock_ended, op.token, target, epoch)
                self._pool.write_superblock(target, end)
            else:
                self._submit_one(op)
            if not number:
                self._core.kick()  # starts the first while the others are submitted
        self._core.kick()

    def _submit_one(self, op: IoOp) -> None:
        """Submit one operation. With small chunks, even attribute look-ups take noticeable time."""
        identity, stamp = op.identity, op.stamp
        assert identity is not None
        assert stamp is not None
        offset = op.address - self._base_address
        assert offset % PAGE_BYTES == 0
        assert 0 <= offset <= self._offset_max
        slots = self._pool.superblocks[target_of(op.place)].slots
        assert op.is_read if owner_of(op.place) != OURS else slot_of(op.place) < slots
        assert 0 <= op.payload_bytes <= self._payload_bytes_max
        self._core.submit(
            op.token,
            op.urgency,
            op.place,
            op.address,
            op.payload_bytes,
            identity.key,
            identity.generation,
            stamp.epoch,
            stamp.tag,
            _NO_CRC if op.payload_crc is None else op.payload_crc,
            op.single_copy,
            op.client,
            op.header_only,
        )

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if self._core.cancel(token)]

    def replace_target(self, target: int) -> None:
        self._core.replace_target(target, *self._pool.files(target))

    def attach_region(self, owner: int, target: int, region: ForeignSlab) -> None:
        self._core.attach(owner, target, *region)

    def detach_region(self, owner: int, target: int) -> None:
        self._core.detach(owner, target)

    def poll(self) -> list[Completion]:
        found = [] if self._attached else self._core.poll()
        completions = [
            Completion(
                token,
                outcome_of(code, number),
                ended_ns / 1e9,
                None if payload_crc == _NO_CRC else payload_crc,
            )
            for token, code, number, ended_ns, payload_crc in found
        ]
        while self._superblocks:
            completions.append(self._superblocks.popleft())
        return completions

    def fileno(self) -> int:
        return int(self._core.fileno())

    def close(self, timeout_s: float = 5.0) -> bool:
        self._closed = True
        end_s = time.monotonic() + timeout_s
        ended = self._core.close(timeout_s)
        return self._pool.await_superblocks(max(0.0, end_s - time.monotonic())) and ended

    def kick(self) -> None:
        """Make the I/O threads check their queues again. This is for tests that open a gate."""
        self._core.kick()

    def _superblock_ended(self, token: int, target: int, epoch: int, outcome: Outcome) -> None:
        if outcome.ok:
            self._core.log_reset(target, epoch)  # before any write of that epoch
        self._superblocks.append(Completion(token, outcome, time.monotonic()))
        os.eventfd_write(self._core.fileno(), 1)
