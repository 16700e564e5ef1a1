# SPDX-License-Identifier: Apache-2.0
"""Jobs (one command each) and tasks (one chunk each), on which the pipeline works."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from vllm_nvmeof_offload.copy.base import Descriptors
from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency
from vllm_nvmeof_offload.staging import StagingMap

_NO_PIECES: Descriptors = np.empty((0, 3), np.uint64)


class Step(enum.Enum):
    """The part of its way that a task has reached."""

    GATE = "gate"  # waits for its turn at its cache slot
    STREAM = "stream"  # waits for a stream slot
    IO = "io"  # queued for, or in, the I/O engine
    COPY = "copy"  # queued for, or in, the copy engine
    ZOMBIE = "zombie"  # decided; the kernel still has its buffer
    DONE = "done"


@dataclass(slots=True, eq=False)
class Job:
    """One command."""

    op: int
    kind: OpKind
    tasks: list[Task] = field(default_factory=list)
    fence: object = None
    started_s: float = 0.0
    tasks_left: int = 0
    #: Cache slots of this job that the kernel still has.
    unreleased: int = 0
    cancelled: bool = False
    reported: bool = False
    failures: list[tuple[int, Outcome]] = field(default_factory=list)
    copied_bytes: int = 0
    #: Fetch only: when its read ended, if the engine knows.
    ended_s: float | None = None


@dataclass(slots=True, eq=False)
class Task:
    """One chunk of a job.

    cache_slot None: through a stream slot. pool_slot None: no I/O; otherwise it is on `target`.
    pieces: uint64[n, 3] of (KV cache address, offset in the slot's payload, bytes).
    """

    job: Job
    index: int
    identity: SlotIdentity
    cache_slot: int | None
    pool_slot: int | None
    urgency: Urgency
    target: int = 0
    pieces: Descriptors = field(default_factory=lambda: _NO_PIECES)
    step: Step = Step.GATE
    stream_slot: int | None = None
    hung: bool = False  # the kernel holds its stream slot past the deadline
    #: The gate of `cache_slot` counts this task as its filler, as a reader, or not at all.
    fills: bool = False
    reads: bool = False
    io_token: int | None = None
    io_retries_left: int = 1
    #: Fetch only: the load that waits for it and on whose share of the reads it therefore goes.
    promoted_for: Job | None = None
    #: Reset only: may what is written from now on be adopted at a later start?
    adoptable: bool = True

    @property
    def charged_to(self) -> Job:
        """The job on whose share of the reads this task goes."""
        return self.job if self.promoted_for is None else self.promoted_for

    def address(self, staging: StagingMap) -> int:
        """Address of the task's slot in staging."""
        if self.stream_slot is not None:
            return staging.stream_address(self.stream_slot)
        assert self.cache_slot is not None
        return staging.cache_address(self.cache_slot)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A store or load that no DMA works on any more. failures: chunk index → outcome."""

    op: int
    failures: tuple[tuple[int, Outcome], ...]
    copied_bytes: int
    seconds: float
