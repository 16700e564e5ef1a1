# SPDX-License-Identifier: Apache-2.0
"""The contract of an I/O engine: whole slots between staging and the pool, asynchronously.

Outcome and release are two events. An operation that passes its deadline yields a
`Completion` with `DEADLINE` and `released=False` at once; when the kernel releases the buffer, a
second `Completion` follows with `outcome=None` and `released=True`. Every other operation yields
one `Completion` that has both. Until its release an operation's buffer belongs to the engine.

The engine requeues the rest of a short transfer; one that makes no progress is an IO_ERROR, with
errno 0 if no byte was moved.

* A slot write seals the slot (header and payload CRC-32C, `pool.format`), writes header page and
  payload, and after that the slot's table entry, so that a table entry never precedes its data.
* A slot read reads as much and verifies it against `identity`, length, place and the share tag
  that the pool has when it is submitted: damaged bytes are CHECKSUM_MISMATCH, and intact bytes
  that differ in one of these are STALE.
* Each operation has its own payload length. What the slot has behind it is not touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_nvmeof_offload.config import OffloadConfig
from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.pool.pool import Pool
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency


@dataclass(frozen=True, slots=True)
class IoOp:
    """One operation.

    token: the caller's number, unique among operations in flight.
    kind: WRITE; LOAD or FETCH, which read; or RESET, which voids everything on disk (`pool.reset`)
    and has `identity` None and `address` 0.
    address: staging address of the slot (its header page); the payload follows it.
    payload_bytes: at most what a slot holds; it is transferred in whole pages.
    deadline_s: on the engine's clock (`time.monotonic` unless injected); None: never.
    """

    token: int
    kind: OpKind
    urgency: Urgency
    pool_slot: int
    address: int
    identity: SlotIdentity | None
    payload_bytes: int
    deadline_s: float | None = None
    #: RESET only: as in `protocol.ResetCommand`.
    tag: bytes = b""
    named: bool = True
    #: WRITE only: the CRC-32C of the payload of `identity`, from the copy that put it into staging;
    #: None: not known, so that the engine reads the payload for it.
    payload_crc: int | None = None

    @property
    def is_read(self) -> bool:
        return self.kind in (OpKind.LOAD, OpKind.FETCH)


@dataclass(frozen=True, slots=True)
class Completion:
    """`outcome` None: the late release of an operation whose outcome came before.

    ended_s: when it ended in the engine, which may be long before `poll`; None: not known.
    """

    token: int
    outcome: Outcome | None
    released: bool = True
    ended_s: float | None = field(default=None, compare=False)


_KEYS = OffloadConfig.model_fields


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Bounds of an engine, each for one target if it has rings; see the keys in `config`.

    The `bytes_in_flight` count operations that run, not overdue ones (a path that hangs must not
    stop the others); at least one of each kind may always run.
    """

    threads: int = _KEYS["io_threads"].default
    depth: int = _KEYS["io_depth"].default
    split_bytes: int = _KEYS["io_split_bytes"].default
    read_bytes_in_flight_max: int = _KEYS["read_bytes_in_flight_max"].default
    write_bytes_in_flight_max: int = _KEYS["write_bytes_in_flight_max"].default
    write_bytes_beside_reads_max: int = _KEYS["write_bytes_beside_reads_max"].default
    #: Operations that wait in the engine, over all targets.
    queue_max: int = 4096

    @staticmethod
    def of(settings: OffloadConfig) -> IoLimits:
        """Return the bounds that `settings` asks for."""
        return IoLimits(
            settings.io_threads,
            settings.io_depth,
            settings.io_split_bytes,
            settings.read_bytes_in_flight_max,
            settings.write_bytes_in_flight_max,
            settings.write_bytes_beside_reads_max,
        )


@dataclass(frozen=True, slots=True)
class Lanes:
    """An engine's native lanes. address: of its `NativeLanes` (native/lanes.h).

    stamp: returns the stamp of an operation that is handed over now.
    """

    address: int
    stamp: Callable[[], Stamp]


class IoEngine(Protocol):
    """Submit/poll; only the pipeline's thread calls. BUSY is an answer: fewer accepted."""

    #: The engine and its mode, for humans and metrics: "threads", "uring (registered)", …
    name: str

    def attach(self) -> Lanes | None:
        """Let the native machine drive reads and writes; `submit` and `poll` are for resets then.

        None: the engine has no native lanes, and everything goes through `submit` and `poll`.
        """

    def submit(self, ops: Sequence[IoOp]) -> int:
        """Take operations in order; return how many were accepted. Never blocks."""

    def cancel(self, tokens: Sequence[int]) -> None:
        """Complete those not yet started with CANCELLED; the others run on."""

    def poll(self) -> list[Completion]:
        """Return what has happened since the last call, deadlines included."""

    def replace_target(self, target: int) -> None:
        """Use the files that the pool now has of `target` for what is submitted from now on.

        Earlier operations may use the old files, which stay open until they are released.
        """

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` may have something to return."""

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop; True if nothing is left in flight (else threads and buffers are left behind)."""


class Waker:
    """An eventfd that any thread can set; closed when the last reference to this is gone."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd).atexit = False

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full: awake already
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class NoIoEngine:
    """The engine of a server without a pool: completes resets, refuses the rest with ENODEV."""

    name = "none"

    def __init__(self) -> None:
        self._waker = Waker()
        self._done: list[Completion] = []

    def attach(self) -> None:
        return None

    def submit(self, ops: Sequence[IoOp]) -> int:
        for op in ops:
            outcome = OK if op.kind is OpKind.RESET else io_error(errno.ENODEV)
            self._done.append(Completion(op.token, outcome))
        self._waker.wake()
        return len(ops)

    def cancel(self, tokens: Sequence[int]) -> None:
        return

    def replace_target(self, target: int) -> None:
        return

    def poll(self) -> list[Completion]:
        self._waker.clear()
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        return self._waker.fd

    def close(self, timeout_s: float = 5.0) -> bool:
        return True


def reset_pool(pool: Pool, op: IoOp) -> Outcome:
    """Execute a RESET. Blocks."""
    try:
        pool.reset(op.tag, op.named)
    except OSError as error:
        return io_error(error.errno or errno.EIO)
    return OK


def _find_allowed() -> frozenset[int]:
    cpus: set[int] = set()
    for pid in (0, os.getppid()):
        with contextlib.suppress(OSError):
            cpus |= os.sched_getaffinity(pid)
    return frozenset(cpus)


#: CPUs on which I/O threads may run: those that this process or its parent may use, at import.
#: vLLM's CPU worker binds its threads to cores for OpenMP, and a thread inherits the binding of
#: the one that created it: eight I/O threads would then share one core with the model's busiest
#: thread. Nobody binds the parent for OpenMP; a user's taskset or cpuset stays respected.
ALLOWED_CPUS = _find_allowed()


def unbind_this_thread() -> None:
    """Let the calling thread run on every allowed CPU; failure is harmless."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, ALLOWED_CPUS)
