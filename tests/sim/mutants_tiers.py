# SPDX-License-Identifier: Apache-2.0
"""Mutants of rules 7 to 9: eviction, release, doomed entries, the subset that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_nvmeof_offload.manager import core
from vllm_nvmeof_offload.protocol import RELEASED
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline

from . import scheduler
from .mutants import Patch, mutant, native
from .rank import Output, SimRank

# -- rule 7: eviction and release ---------------------------------------------------------


native("pinned_slot_is_evicted", "orphan_is_free_at_once", "release_of_one_rank_frees_a_row")
native(
    "outcome_counts_as_release",
    "stream_slot_is_free_at_the_outcome",
    "row_is_released_with_its_batch",
)


@mutant
def release_report_is_lost() -> list[Patch]:
    real = TransferPipeline.take_reports

    def is_release(report: Any) -> bool:
        codes = getattr(report, "codes", None)
        return codes is not None and codes[0] == RELEASED

    take = lambda self: [r for r in real(self) if not is_release(r)]  # noqa: E731
    return [(TransferPipeline, "take_reports", take)]


@mutant
def partial_report_decides_its_whole_op() -> list[Patch]:
    real = core.ManagerCore._reported

    def reported(self: Any, op: Any, report: Any) -> None:
        partial = op.batch is not None and report.indexes is not None and report.codes is None
        if partial and len(report.indexes) < len(op.batch) == op.batch.undecided:
            report = replace(report, indexes=None, released=None)
        real(self, op, report)

    return [(core.ManagerCore, "_reported", reported)]


# -- rule 8: doomed -----------------------------------------------------------------------


native(
    "failed_key_is_not_dropped",
    "stale_at_a_gate_dooms_a_good_copy",
    "doomed_entry_still_hits",
    "doom_ignores_the_generation",
)


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

    def prepare_store(self: Any, *offer: Any, **more: Any) -> Any:
        plan = real(self, *offer, **more)
        return None if plan.refused else plan

    return [(core.ManagerCore, "prepare_store", prepare_store)]


@mutant
def what_is_refused_is_not_offered_again() -> list[Patch]:
    def noted(request: Any, refused: Any, _: Any) -> None:
        request.refused.update(refused)

    return [(scheduler, "note_refused", noted)]


native("settled_entries_are_not_admitted", "a_store_evicts_the_unwritten")
