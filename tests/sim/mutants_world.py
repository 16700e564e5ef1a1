# SPDX-License-Identifier: Apache-2.0
"""Mutants of reports, resets and the bounds on waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_nvmeof_offload.errors import CANCELLED, Outcome
from vllm_nvmeof_offload.manager import core
from vllm_nvmeof_offload.protocol import OpKind, ResetCommand
from vllm_nvmeof_offload.worker.io_scheduler import IoEvent, IoScheduler
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.slots import SlotGates
from vllm_nvmeof_offload.worker.tasks import Task

from . import world
from .mutants import Patch, mutant
from .rank import Metadata, Output, SimRank
from .storage import SimIo
from .store import RankStore

# -- reports and reset --------------------------------------------------------------------


@mutant
def owed_reports_are_forgotten() -> list[Patch]:
    return [(core.ManagerCore, "has_pending_work", lambda self: bool(self._ledger.unsent))]


@mutant
def pending_work_never_ends() -> list[Patch]:
    return [(core.ManagerCore, "has_pending_work", lambda self: bool(len(self._ledger)))]


@mutant
def reset_keeps_the_entries() -> list[Patch]:
    def reset(self: Any) -> None:
        op = self._ledger.open(core.OpKind.RESET)
        command = ResetCommand(op.number, self.config.weights_never_change)
        self._ledger.unsent[op.number] = command

    return [(core.ManagerCore, "reset", reset)]


@mutant
def new_weights_are_adopted() -> list[Patch]:
    real = RankStore.reset
    reset = lambda self, *, adoptable, targets: real(self, adoptable=True, targets=targets)  # noqa: E731
    return [(RankStore, "reset", reset)]


@mutant
def start_believes_rank_0_for_all_ranks() -> list[Patch]:
    real = world.agree
    return [(world, "agree", lambda hellos: real([hellos[0]] * len(hellos)))]


@mutant
def reset_overtakes_writes() -> list[Patch]:
    return [(IoScheduler, "_write_may_start", lambda self, task: True)]


@mutant
def a_reset_waits_for_a_late_write() -> list[Patch]:
    real = IoScheduler._write_may_start

    def may_start(self: Any, task: Task) -> bool:
        if task.job.kind is OpKind.RESET:
            return not any(one.is_write for one in self._in_flight.values())
        return real(self, task)

    return [(IoScheduler, "_write_may_start", may_start)]


@mutant
def old_writes_follow_the_reset() -> list[Patch]:
    return [(IoScheduler, "take_queued_writes", lambda self: [])]


@mutant
def failed_reset_is_ignored() -> list[Patch]:
    real = IoScheduler._refusal

    def refusal(self: Any, task: Task) -> Outcome | None:
        self._barred = False
        return real(self, task)

    return [(IoScheduler, "_refusal", refusal)]


@mutant
def suspect_target_fails_the_reset() -> list[Patch]:
    real = IoScheduler._offer_reset

    def offer_reset(self: Any) -> None:
        if self._resets and not self._health[0].verdict.usable:
            self._failed.append(IoEvent(self._resets.popleft(), CANCELLED, released=True))
        real(self)

    return [(IoScheduler, "_offer_reset", offer_reset)]


# -- every wait is bounded ----------------------------------------------------------------


@mutant
def hung_fill_blocks_its_readers() -> list[Patch]:
    return [(SlotGates, "abandon", lambda self, slot: [])]


@mutant
def hung_stream_slots_block_loads() -> list[Patch]:
    return [(TransferPipeline, "_mark_hung", lambda self, task: None)]


@mutant
def full_engine_blocks_forever() -> list[Patch]:
    return [(IoScheduler, "_fail_stalled", lambda self, is_write, patience_s: None)]


@mutant
def ops_have_no_deadline() -> list[Patch]:
    real = SimIo.submit

    def submit(self: Any, ops: Any) -> int:
        return real(self, [replace(op, deadline_s=None) for op in ops])

    return [(SimIo, "submit", submit)]


@mutant
def deferred_stores_are_lost() -> list[Patch]:
    real = SimRank.execute

    def execute(self: Any, metadata: Metadata) -> Output:
        if metadata.step % 7 == 0:
            self._deferred.clear()
        return real(self, metadata)

    return [(SimRank, "execute", execute)]
