# SPDX-License-Identifier: Apache-2.0
"""Mutants of rules 7 to 9: eviction, release, doomed entries, the subset that fits."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.errors import Outcome
from vllm_nvmeof_offload.manager import core
from vllm_nvmeof_offload.manager.index import Entry, Index, State
from vllm_nvmeof_offload.manager.slots import SlotPool
from vllm_nvmeof_offload.manager.tiers import Tiers
from vllm_nvmeof_offload.protocol import ReleaseReport
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.tasks import Task

from .mutants import Patch, mutant
from .rank import Output, SimRank

# -- rule 7: eviction and release ---------------------------------------------------------


@mutant
def pinned_slot_is_evicted() -> list[Patch]:
    return [(SlotPool, "in_use", lambda self, slot: False)]


@mutant
def orphan_is_free_at_once() -> list[Patch]:
    def orphan(self: Any, slot: int, retire: bool = False) -> None:
        self._free_again(slot)

    return [(SlotPool, "orphan", orphan)]


@mutant
def outcome_counts_as_release() -> list[Patch]:
    real = TransferPipeline._decide

    def decide(self: Any, task: Task, outcome: Outcome, *, released: bool = True) -> None:
        if not released and task.cache_slot is not None:
            task.job.unreleased -= 1
        real(self, task, outcome, released=released)

    late = TransferPipeline._released_late

    def released_late(self: Any, task: Task, *, filled: bool) -> None:
        task.job.unreleased += 2
        late(self, task, filled=filled)

    return [
        (TransferPipeline, "_decide", decide),
        (TransferPipeline, "_released_late", released_late),
    ]


@mutant
def stream_slot_is_free_at_the_outcome() -> list[Patch]:
    real = TransferPipeline._hold_buffer

    def hold(self: Any, task: Task) -> None:
        if task.stream_slot is None:
            real(self, task)
        else:
            self._streams.give_back(task)

    return [(TransferPipeline, "_hold_buffer", hold)]


@mutant
def release_report_is_lost() -> list[Patch]:
    real = TransferPipeline.take_reports
    take = lambda self: [r for r in real(self) if not isinstance(r, ReleaseReport)]  # noqa: E731
    return [(TransferPipeline, "take_reports", take)]


# -- rule 8: doomed -----------------------------------------------------------------------


@mutant
def failed_key_is_not_dropped() -> list[Patch]:
    return [(core.ManagerCore, "_doom_failed", lambda self, op, report: None)]


@mutant
def stale_at_a_gate_dooms_a_good_copy() -> list[Patch]:
    return [(core, "_READ_FIRST", frozenset())]


@mutant
def doomed_entry_still_hits() -> list[Patch]:
    return [(Index, "drop", lambda self, entry: None)]


@mutant
def doom_ignores_the_generation() -> list[Patch]:
    real = Tiers.doom

    def doom(self: Any, entry: Entry, *, retire: bool = False) -> None:
        real(self, self.index.find(entry.identity.key) or entry, retire=retire)

    return [(Tiers, "doom", doom)]


@mutant
def failed_blocks_are_reported_a_step_late() -> list[Patch]:
    real = SimRank._output

    def output(self: Any) -> Output:
        result = real(self)
        late, self._late = getattr(self, "_late", set()), result.invalid_blocks
        result.invalid_blocks = late
        return result

    return [(SimRank, "_output", output)]


@mutant
def only_rank_0_reports_failed_blocks() -> list[Patch]:
    real = SimRank._output

    def output(self: Any) -> Output:
        result = real(self)
        if self.rank:
            result.invalid_blocks = set()
        return result

    return [(SimRank, "_output", output)]


# -- rule 9: the subset that fits ---------------------------------------------------------


@mutant
def prepare_store_is_all_or_nothing() -> list[Patch]:
    real = core.ManagerCore.prepare_store

    def prepare_store(self: Any, keys: Any) -> Any:
        plan = real(self, keys)
        return None if plan.refused else plan

    return [(core.ManagerCore, "prepare_store", prepare_store)]


@mutant
def settled_entries_are_not_admitted() -> list[Patch]:
    real = Tiers.settle

    def settle(self: Any, entry: Entry) -> None:
        if entry.state is not State.BOTH:
            real(self, entry)

    return [(Tiers, "settle", settle)]
