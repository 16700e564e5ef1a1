# SPDX-License-Identifier: Apache-2.0
"""Operations with the I/O engine, and what the pump tells the pipeline of them."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.worker.lanes import Line
from vllm_nvmeof_offload.worker.tasks import Task

__all__ = ["Flight", "IoEvent"]


@dataclass(frozen=True, slots=True)
class IoEvent:
    """outcome None: the late release of a task whose outcome came before."""

    task: Task
    outcome: Outcome | None
    released: bool
    ended_s: float | None = None


@dataclass(slots=True)
class Flight:
    """line: where its task waited, and holds a place until the outcome; None: a reset.

    attachment: of its target, when it was submitted. began_s: when that was. late: past its
    deadline, not released.
    """

    task: Task
    line: Line | None
    attachment: int
    began_s: float = 0.0
    late: bool = False

    @property
    def is_write(self) -> bool:
        return self.line in (None, Line.WRITE)
