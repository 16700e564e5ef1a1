# SPDX-License-Identifier: Apache-2.0
"""What an arm is, and what an arm inside this process moves: jobs of numbered blocks.

Block i lies at place i of the staging memory and at place i of the arm's storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_nvmeof_bench.pool.samples import Figures

__all__ = ["Arm", "Job", "Mover"]


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer of some blocks; no block is in two jobs that write at one time."""

    token: int
    is_read: bool
    blocks: Sequence[int]


class Arm(Protocol):
    """One contestant at one block size."""

    name: str

    def measure(self, kind: str) -> dict[str, Figures]:
        """Run one kind of measurement; return the cases it yields. Prepares untimed.

        Raises:
            BenchError: a transfer failed.
        """

    def tidy(self) -> bool:
        """Delete what is of no more use; True if the disk may be busy with it for a while."""

    def close(self) -> None:
        """Stop threads and let go of memory."""


class Mover(Protocol):
    """How an arm in this process takes jobs."""

    #: Blocks of one job in a batch; None: the arm has no jobs, a block is a block.
    batch_job_bytes: int | None

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Untimed: make sure that what is to be read exists, and name what is to be written."""

    def run(self, jobs: Sequence[Job]) -> None:
        """Hand all over at once; return when all is done."""

    def submit(self, job: Job) -> None:
        """Hand over one job; prepares it itself."""

    def poll(self, timeout_s: float) -> list[int]:
        """Wait for jobs to end, at most so long; return their tokens."""

    def tidy(self) -> bool:
        """As of `Arm`."""

    def close(self) -> None:
        """As of `Arm`."""
