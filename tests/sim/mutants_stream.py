# SPDX-License-Identifier: Apache-2.0
"""Mutants of streaming: transfers that wait for a stream slot or for room in a target's queue."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.protocol import Urgency
from vllm_nvmeof_offload.worker.io_scheduler import IoScheduler, TargetQueue
from vllm_nvmeof_offload.worker.slots import StreamSlots
from vllm_nvmeof_offload.worker.tasks import FairQueue, Job, Task

from .mutants import Patch, mutant


@mutant
def stream_slots_are_not_released() -> list[Patch]:
    def give_back(self: Any, task: Task) -> None:
        task.stream_slot = None

    return [(StreamSlots, "give_back", give_back)]


@mutant
def hung_share_of_a_target_blocks_its_loads() -> list[Patch]:
    real = StreamSlots.take_unservable

    def take_unservable(self: Any) -> list[Task]:
        return real(self) if sum(self._hung) == self._slots else []

    return [(StreamSlots, "take_unservable", take_unservable)]


@mutant
def promoted_fetch_never_runs() -> list[Patch]:
    def promote(self: Any, task: Task, job: Job) -> None:
        self._queue_of(task).remove(task)

    return [(IoScheduler, "promote", promote)]


@mutant
def reset_forgets_the_writes_of_other_targets() -> list[Patch]:
    def take_queued_writes(self: Any) -> list[Task]:
        return list(self._targets[0].queue(Urgency.WRITE).take_all())

    return [(IoScheduler, "take_queued_writes", take_queued_writes)]


@mutant
def room_at_a_target_is_not_released() -> list[Patch]:
    stalled = lambda self, now_s, patience_s, *, is_write: []  # noqa: E731
    return [
        (FairQueue, "give_back", lambda self, task: None),
        (TargetQueue, "take_stalled", stalled),
    ]
