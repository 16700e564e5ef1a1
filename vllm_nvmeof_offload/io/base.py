# SPDX-License-Identifier: Apache-2.0
"""The contract of an I/O engine, which moves slots between staging and the pool.

The native machine (native/machine/io_queue.h) handles deadlines, bounds and order. It submits only
operations that the engine has room for, and gives an operation an outcome at its deadline even if
the engine has not answered. Operations of one kind start in the order of their submission. Each
operation yields one `Completion`, however late, unless `cancel` has removed it; until then its
buffer belongs to the engine.

The engine requeues the remainder of a short transfer. A transfer that makes no progress ends with
IO_ERROR, whose errno is 0 if no byte was moved.

* A slot write seals the slot (header and payload CRC-32C, `pool.format`), writes header page and
  payload, and then the slot's table entry, so that an entry never precedes its data. The entry is
  logged afterwards (`pool.log`); the operation does not wait for that.
* A slot read verifies header and payload against `identity`, length, place and share tag: damaged
  bytes are CHECKSUM_MISMATCH, and intact bytes that differ in one of these are STALE. With
  `header_only` an engine may leave the payload check to the copy.
* A read of another engine's region uses that region's files and place. Nothing is ever written
  there.
* Each operation has its own payload length. The rest of the slot is not touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vllm_nvmeof_offload.errors import OK, Outcome, code_of
from vllm_nvmeof_offload.native import InstantLanes
from vllm_nvmeof_offload.pool.format import SlotPlace, Stamp
from vllm_nvmeof_offload.protocol import TAG_BYTES, OpKind, SlotIdentity, Urgency, place_of


@dataclass(frozen=True, slots=True)
class IoOp:
    """One I/O operation.

    `token` is unique among operations in flight. The `place` of a read can be in another engine's
    region (`attach_region`). `kind` is WRITE, LOAD, FETCH or RESET; LOAD and FETCH read. A RESET
    writes the newest superblock to the target of `place` (`pool.write_superblock`), logs its epoch
    before it ends, and has no `identity`, `address` or `stamp`. `address` is the staging address of
    the slot's header page, which precedes the payload. `payload_bytes` is at most a slot's
    capacity, and is transferred in whole pages.
    """

    token: int
    kind: OpKind
    urgency: Urgency
    place: int
    address: int
    identity: SlotIdentity | None
    payload_bytes: int
    #: A write stores the stamp; a read accepts only chunks with the stamp's tag.
    stamp: Stamp | None = None
    #: WRITE only: the payload's CRC-32C from the copy into staging; if None, the engine computes
    #: it.
    payload_crc: int | None = None
    #: WRITE only: whether no other rank of the set has the chunk. Header and table entry record it.
    single_copy: bool = False
    #: WRITE only: the client of `WriteCommand`, stored in header and table entry.
    client: int = 0
    #: Reads only: the copy verifies the payload, so the engine need only verify the header if its
    #: completion reports the payload's expected CRC.
    header_only: bool = False

    @property
    def is_read(self) -> bool:
        return self.kind in (OpKind.LOAD, OpKind.FETCH)


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an operation, after which nothing touches its buffer.

    `ended_s` is the time of the end (`time.monotonic`), possibly long before `poll`; None if
    unknown. After a successful read with `header_only`, `payload_crc` is the CRC-32C from the
    header, or None if the payload was verified.
    """

    token: int
    outcome: Outcome
    ended_s: float | None = field(default=None, compare=False)
    payload_crc: int | None = None


class ForeignSlab(NamedTuple):
    """The slab of another engine's region on one of our targets, open for reading, with O_DIRECT if
    our slab is open with it or if the region is leased. `uuid` is the region's, 16 bytes. Its slots
    are as large as ours."""

    fd: int
    uuid: bytes
    rank: int

    def place(self, slot: int) -> SlotPlace:
        return SlotPlace(self.uuid, self.rank, slot)


class Room(NamedTuple):
    """The number of operations that an engine can take now. A RESET needs no room."""

    reads: int
    writes: int


class Lanes(Protocol):
    """The lanes that the native machine drives. `address` points to a `NativeLanes` (lanes.h)."""

    @property
    def address(self) -> int: ...


class IoEngine(Protocol):
    """A submit/poll interface for the pipeline's thread."""

    #: The engine and its mode, for display and metrics, such as "io_uring (registered, O_DIRECT)".
    name: str

    @property
    def stamp(self) -> Stamp: ...

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        """Begin a reset, as `Pool.begin_reset` does; one RESET per target follows."""

    def save_sessions(self, content: bytes) -> None:
        """Replace the file of retained sessions in the background, as `Pool.save_sessions` does."""

    def attach(self) -> Lanes:
        """Let the machine drive reads and writes; from then on, `submit` and `poll` only handle
        resets."""

    def room(self) -> Room: ...

    def submit(self, ops: Sequence[IoOp]) -> None:
        """Accept operations, without blocking. The caller never has a RESET and a write to the same
        target in flight at once. A RESET ends with CANCELLED if a newer superblock replaced it."""

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        """Remove operations that have not started; these never complete. Return their tokens. The
        others continue, but their outcomes are ignored, and a write adds no table entry."""

    def poll(self) -> list[Completion]: ...

    def replace_target(self, target: int) -> None:
        """Use the pool's current files of `target` for later operations. The old files stay open
        until earlier operations have ended."""

    def attach_region(self, owner: int, target: int, region: ForeignSlab) -> None:
        """Use `region` for later reads of the owner's slots on this target. Its descriptor stays
        open until it is replaced or detached and all earlier reads have ended."""

    def detach_region(self, owner: int, target: int) -> None:
        """Make later reads of the owner's slots on this target fail with EBADF."""

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` may have something to return."""

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop. Operations that have not started end with CANCELLED. Return True if nothing is left
        in flight; otherwise threads and buffers stay."""


def end_of(one: Completion) -> tuple[int, int, int, float, int, bool]:
    crc = -1 if one.payload_crc is None else one.payload_crc
    return one.token, code_of(one.outcome.kind), one.outcome.errno, one.ended_s or 0.0, crc, True


def reset_op(token: int, target: int) -> IoOp:
    return IoOp(token, OpKind.RESET, Urgency.WRITE, place_of(target, 0), 0, None, 0)


class Waker:
    """An eventfd that any thread can set; closed when nothing refers to this object."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd).atexit = False

    # The pipeline calls these methods in each turn; `contextlib.suppress` would double their cost.

    def wake(self) -> None:
        try:  # noqa: SIM105
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:  # the counter is full, so the reader will wake
            pass

    def clear(self) -> None:
        try:  # noqa: SIM105
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass


class NoIoEngine:
    """The engine of a server without a pool: resets succeed, and all else fails with ENODEV."""

    name = "none"
    stamp = Stamp(0, bytes(TAG_BYTES))

    def __init__(self) -> None:
        self._waker = Waker()
        self._done: list[Completion] = []

    def begin_reset(self, tag: bytes, named: bool) -> tuple[Stamp, Stamp]:
        return self.stamp, self.stamp

    def save_sessions(self, content: bytes) -> None:
        pass

    def attach(self) -> Lanes:
        return InstantLanes(self._waker.fd, errno.ENODEV)

    def room(self) -> Room:
        return Room(0, 0)

    def submit(self, ops: Sequence[IoOp]) -> None:
        self._done += [Completion(op.token, OK) for op in ops]
        self._waker.wake()

    def cancel(self, tokens: Sequence[int]) -> list[int]:
        return []

    def replace_target(self, target: int) -> None:
        return

    def attach_region(self, owner: int, target: int, region: ForeignSlab) -> None:
        return

    def detach_region(self, owner: int, target: int) -> None:
        return

    def poll(self) -> list[Completion]:
        self._waker.clear()
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        return self._waker.fd

    def close(self, timeout_s: float = 5.0) -> bool:
        return True


def _find_allowed() -> frozenset[int]:
    cpus: set[int] = set()
    for pid in (0, os.getppid()):
        with contextlib.suppress(OSError):
            cpus |= os.sched_getaffinity(pid)
    return frozenset(cpus)


#: The CPUs for I/O threads: those that this process or its parent may use at import time. vLLM's
#: CPU worker binds its threads to cores for OpenMP. New threads inherit this binding, so all I/O
#: threads would share one core with the model's busiest thread. The worker's parent is bound only
#: by a user's taskset or cpuset.
ALLOWED_CPUS = _find_allowed()


def unbind_this_thread() -> None:
    """Let the calling thread run on every allowed CPU. A failure is harmless."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, ALLOWED_CPUS)
