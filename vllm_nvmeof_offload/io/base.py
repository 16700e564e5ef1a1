# SPDX-License-Identifier: Apache-2.0
"""The contract of an I/O engine: whole slots between staging and the pool, asynchronously.

Outcome and release are two events. An operation that passes its deadline yields a
`Completion` with `DEADLINE` and `released=False` at once; when the kernel lets go of the
buffer, a second `Completion` follows with `outcome=None` and `released=True`. Every other
operation yields one `Completion` that has both. Until its release an operation's buffer
belongs to the engine.

Short transfers are requeued by the engine; one that makes no progress is an IO_ERROR, with
errno 0 where no byte was moved.

* A slot write seals the slot (header and payload CRC-32C, `pool.layout`), writes it whole,
  and after that writes the slot's table entry, so that a table entry never precedes its data.
* A slot read reads the slot whole and verifies it against `identity`: bytes that do not
  prove themselves are CHECKSUM_MISMATCH (damaged) or STALE (intact, but another's).

The I/O engine of a server without a pool: `pool_bytes: 0`, the CPU tier only.

CPU affinity of I/O threads.

vLLM's CPU worker binds its threads to cores for OpenMP, and a thread inherits the binding of
the one that made it: eight I/O threads would then share one core with the model's busiest
thread. They run wherever the process was allowed to when this module was imported, or its
parent is, which nobody binds for OpenMP; a user's taskset or cpuset stays respected.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_nvmeof_offload.errors import OK, Outcome, io_error
from vllm_nvmeof_offload.protocol import IoClass, SlotIdentity

__all__ = [
    "Completion",
    "IoEngine",
    "IoKind",
    "IoOp",
    "NoIoEngine",
    "allowed_cpus",
    "unbind_this_thread",
]


class IoKind(enum.Enum):
    READ_SLOT = "read_slot"
    WRITE_SLOT = "write_slot"
    #: Void everything on disk (`pool.reset`); `identity` is None, `address` 0.
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class IoOp:
    """One operation.

    token: the caller's number, unique among operations in flight.
    address: staging address of the slot (its header page); `slot_bytes` of it are transferred.
    deadline_s: on the engine's clock (`time.monotonic` unless injected); None: never.
    """

    token: int
    kind: IoKind
    io_class: IoClass
    pool_slot: int
    address: int
    identity: SlotIdentity | None
    deadline_s: float | None = None
    #: RESET only: may what is written from now on be adopted at a later start?
    adoptable: bool = True


@dataclass(frozen=True, slots=True)
class Completion:
    """`outcome` None: the late release of an operation whose outcome came before.

    ended_s: when the engine had it, which may be long before the caller asks; None: not known.
    """

    token: int
    outcome: Outcome | None
    released: bool = True
    ended_s: float | None = field(default=None, compare=False)


class IoEngine(Protocol):
    """Submit/poll; one caller thread, the pipeline's. BUSY is an answer: fewer accepted."""

    #: What actually runs, for humans and metrics: "threads", "uring (registered)", …
    name: str

    def submit(self, ops: Sequence[IoOp]) -> int:
        """Take operations in order; return how many were accepted. Never blocks."""

    def cancel(self, tokens: Sequence[int]) -> None:
        """Complete those not yet started with CANCELLED; the others run on."""

    def poll(self) -> list[Completion]:
        """Return what has happened since the last call, deadlines included."""

    def replace_target(self, target: int) -> None:
        """The pool has other files of `target` by now: use them for what is submitted from now on.

        What was submitted before may use the old ones, which stay open until it is released.
        """

    def fileno(self) -> int:
        """An eventfd that is readable when `poll` may have something to say."""

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop; True if nothing is left in flight (else threads and buffers are left behind)."""


class NoIoEngine:
    """Completes resets, refuses everything else with ENODEV."""

    name = "none"

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._done: list[Completion] = []

    def submit(self, ops: Sequence[IoOp]) -> int:
        for op in ops:
            outcome = OK if op.kind is IoKind.RESET else io_error(errno.ENODEV)
            self._done.append(Completion(op.token, outcome))
        os.eventfd_write(self._fd, 1)
        return len(ops)

    def cancel(self, tokens: Sequence[int]) -> None:
        return

    def replace_target(self, target: int) -> None:
        return

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._fd)
        return done

    def fileno(self) -> int:
        return self._fd

    def close(self, timeout_s: float = 5.0) -> bool:
        os.close(self._fd)
        return True


def _find_allowed() -> frozenset[int]:
    cpus: set[int] = set()
    for pid in (0, os.getppid()):
        with contextlib.suppress(OSError):
            cpus |= os.sched_getaffinity(pid)
    return frozenset(cpus)


_ALLOWED = _find_allowed()


def allowed_cpus() -> frozenset[int]:
    """The CPUs on which I/O threads may run."""
    return _ALLOWED


def unbind_this_thread() -> None:
    """Let the calling thread run on every CPU the process may use; failure is harmless."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, _ALLOWED)
