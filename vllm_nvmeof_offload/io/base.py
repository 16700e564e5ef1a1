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
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.protocol import IoClass, SlotIdentity

__all__ = ["Completion", "IoEngine", "IoKind", "IoOp"]


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
