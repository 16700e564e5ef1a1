# SPDX-License-Identifier: Apache-2.0
"""The contract of a copy engine: bytes between the KV cache and staging, asynchronously."""

from __future__ import annotations

import enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.errors import Outcome

__all__ = ["CopyEngine", "Descriptors", "Direction"]

#: uint64[n, 3]: (KV cache address, staging address, bytes) of n pieces.
Descriptors = npt.NDArray[np.uint64]


class Direction(enum.Enum):
    """Which way the bytes go."""

    STORE = "store"  # KV cache → staging
    LOAD = "load"  # staging → KV cache


class CopyEngine(Protocol):
    """Submit/poll. Called by one thread at a time, the pipeline's; never blocks in submit.

    A ticket is in flight from `submit` until `poll` returns it: until then the engine may
    touch both sides of every piece.

    No chunk waits for another job's fence. A ticket starts when its own fence has passed and its
    memory is registered, whatever was submitted before it and whatever fences are still open:
    loads that stream in from the pool hold a stream slot each, and a younger load whose fence
    lies behind a running forward pass must not keep those slots. So where one ticket writes what
    another one touches, the order is the caller's: it submits the second when `poll` has returned
    the first. Only a ticket of no pieces waits for others: it ends behind every ticket of its
    direction that was submitted before it, and behind its own fence.
    """

    #: Set where no ticket is in flight: the KV cache's memory is gone, and every ticket fails.
    asleep: bool

    def record_fence(self) -> object:
        """Record, on the model's thread, the point that a later copy must come after.

        CUDA: an event on the model's stream, the same one for all fences, so that they pass in
        the order of their recording. Host: whatever; the forward pass has run.
        """

    def submit(self, direction: Direction, pieces: Descriptors, fence: object) -> int:
        """Start copying; return the ticket."""

    def poll(self) -> list[tuple[int, Outcome]]:
        """Return the tickets that have finished since the last call, with their outcome."""

    def close(self) -> None:
        """Wait for what is in flight and free everything."""
