# SPDX-License-Identifier: Apache-2.0
"""Mutants of reports, resets and the bounds on waits."""

from __future__ import annotations

from typing import Any

from vllm_nvmeof_offload.manager import core
from vllm_nvmeof_offload.protocol import OpKind, ResetCommand

from . import world
from .mutants import Patch, mutant, native
from .rank import Metadata, Output, SimRank
from .storage import SimIo
from .store import START_TAG, RankStore, Superblock

# -- reports and reset --------------------------------------------------------------------


@mutant
def owed_reports_are_forgotten() -> list[Patch]:
    return [(core.ManagerCore, "has_pending_work", lambda self: bool(self._unsent))]


@mutant
def pending_work_never_ends() -> list[Patch]:
    return [(core.ManagerCore, "has_pending_work", lambda self: bool(len(self._ledger)))]


@mutant
def reset_keeps_the_entries() -> list[Patch]:
    def reset(self: Any) -> None:
        op = self._ledger.open(core.OpKind.RESET)
        command = ResetCommand(op.number, self._tag, self.config.weights_never_change)
        self._unsent.append(command)

    return [(core.ManagerCore, "reset", reset)]


@mutant
def new_weights_are_adopted() -> list[Patch]:
    real = RankStore.begin_reset
    return [(RankStore, "begin_reset", lambda self, tag, named: real(self, START_TAG, True))]


@mutant
def unnamed_epoch_is_adopted() -> list[Patch]:
    """The share tag alone would keep a start from it."""
    real = RankStore.begin_reset
    return [
        (RankStore, "begin_reset", lambda self, tag, named: real(self, tag, True)),
        (RankStore, "is_of_this_start", lambda self, one: True),
    ]


@mutant
def old_epoch_is_adopted() -> list[Patch]:
    return [(RankStore, "new_epoch", lambda self: 1)]


@mutant
def lower_sequence_wins() -> list[Patch]:
    def newest(self: RankStore) -> Superblock:
        return min(self.superblocks, key=lambda superblock: superblock.sequence)

    return [(RankStore, "newest", newest)]


@mutant
def start_believes_rank_0_for_all_ranks() -> list[Patch]:
    real = world.agree
    return [(world, "agree", lambda hellos: real([hellos[0]] * len(hellos)))]


native(
    "reset_overtakes_writes",
    "a_write_passes_the_reset_before_it",
    "a_write_behind_one_lanes_reset_passes_it",
    "a_reset_waits_for_a_late_write",
    "a_reset_waits_for_other_lanes",
    "a_superblock_has_no_deadline",
    "a_late_superblock_is_forgotten",
    "old_writes_follow_the_reset",
    "failed_reset_is_ignored",
    "suspect_target_fails_the_reset",
)

# -- leases ------------------------------------------------------------------------------


def _starting(kind: OpKind) -> list[Patch]:
    """Operations of this kind do not look at the permit."""
    real = SimIo.may_start
    return [(SimIo, "may_start", lambda self, op: op.kind is kind or real(self, op))]


@mutant
def expired_permit_writes() -> list[Patch]:
    return _starting(OpKind.WRITE)


@mutant
def paused_owners_late_superblock() -> list[Patch]:
    """It was paused in its reset, and goes on when another one has the region."""
    return _starting(OpKind.RESET)


# -- every wait is bounded ----------------------------------------------------------------


native(
    "hung_fill_blocks_its_readers",
    "hung_stream_slots_block_loads",
    "full_engine_blocks_forever",
    "ops_have_no_deadline",
    "a_retry_gets_a_new_deadline",
)


@mutant
def deferred_stores_are_lost() -> list[Patch]:
    real = SimRank.execute

    def execute(self: Any, metadata: Metadata) -> Output:
        if metadata.step % 7 == 0:
            self._deferred.clear()
        return real(self, metadata)

    return [(SimRank, "execute", execute)]
