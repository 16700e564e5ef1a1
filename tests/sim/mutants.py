# SPDX-License-Identifier: Apache-2.0
"""Mutants: each breaks one rule on purpose. A mutant that survives shows a blind simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from vllm_nvmeof_offload.copy import geometry
from vllm_nvmeof_offload.copy.base import Descriptors, Direction
from vllm_nvmeof_offload.copy.geometry import CacheTensor
from vllm_nvmeof_offload.errors import OK, Outcome
from vllm_nvmeof_offload.groups import Group
from vllm_nvmeof_offload.manager import core, handshake
from vllm_nvmeof_offload.manager.core import ManagerCore
from vllm_nvmeof_offload.manager.handshake import Agreement
from vllm_nvmeof_offload.manager.hold_and_prefetch import Holds, ReloadScheduler
from vllm_nvmeof_offload.manager.look_up import Answer, RequestLookUps
from vllm_nvmeof_offload.manager.requests import ResumeCounter
from vllm_nvmeof_offload.manager.stores import StoreThreshold
from vllm_nvmeof_offload.native import _tiers_mutants as tests_build  # type: ignore[attr-defined]
from vllm_nvmeof_offload.protocol import (
    RELEASED,
    AdoptedEntries,
    AttachCommand,
    ChunkBatch,
    Command,
    OpKind,
    OpReport,
    RankHello,
    Report,
    ResetCommand,
    SavedSessions,
    WriteCommand,
    owned_by,
    unpacked,
)
from vllm_nvmeof_offload.worker import pipeline
from vllm_nvmeof_offload.worker.pipeline import TransferPipeline
from vllm_nvmeof_offload.worker.regions import Regions

from . import copying, follower, rank, scheduler, world
from .base import Knobs
from .queue import LookUp
from .rank import Metadata, Output, SimRank
from .requests import Request
from .scheduler import SimScheduler
from .shapes import unit_of_blocks
from .storage import SimIo
from .store import START_TAG, Claim, RankStore, Record, Superblock

Patch = tuple[Any, str, Any]

#: Name → the patches that break the rule.
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}

#: The names of those that are switches of the native module.
NATIVE: set[str] = set()

#: Name → the weather in which the rule matters often.
PROFILE = {
    "an_owner_of_many_failures_is_believed": "borrowing",
    "expired_permit_writes": "leases",
    "paused_owners_late_superblock": "leases",
    "gates_accept_stale": "hangs",
    "tag_is_not_compared": "waiting",
    "wait_for_a_load_does_not_cancel": "flushes",
    "reads_ignore_the_generation": "restarts",
    "outcome_counts_as_release": "hangs",
    "stream_slot_is_free_at_the_outcome": "hangs",
    "release_report_is_lost": "hangs",
    "pending_work_never_ends": "hangs",
    "suspect_target_fails_the_reset": "hangs",
    "stale_at_a_gate_dooms_a_good_copy": "hangs",
    "a_reset_waits_for_a_late_write": "stuck",
    "hung_fill_blocks_its_readers": "stuck",
    "hung_stream_slots_block_loads": "hangs",
    "hung_share_of_a_target_blocks_its_loads": "stuck",
    "promoted_fetch_never_runs": "waiting",
    "reset_forgets_the_writes_of_other_targets": "pool",
    "stream_slots_are_not_released": "pool",
    "full_engine_blocks_forever": "stuck",
    "ops_have_no_deadline": "stuck",
    "failed_reset_is_ignored": "restarts",
    "demotion_never_begins": "demotion",
    "demotion_begins_at_once": "demotion",
    "unwritten_is_evicted_before_clean": "demotion",
    "read_evicts_the_unwritten": "demotion",
    "held_chunk_is_not_pinned": "waiting",
    "holds_outlive_their_requests": "waiting",
    "reset_keeps_the_holds": "waiting",
    "doomed_chunk_stays_held": "waiting",
    "budgets_are_ignored": "waiting",
    "cancelled_fetch_still_counts_for_its_entry": "waiting",
    "cancelled_fetch_frees_its_slot_at_once": "waiting",
    "cancelled_prefetches_are_not_counted": "waiting",
    "rejected_drafts_count_as_computed": "waiting",
    "a_dropped_intent_leaves": "waiting",
    "first_miss_is_not_asked_again": "waiting",
    "remembered_answer_survives_a_move": "waiting",
    "remembered_answer_survives_an_eviction": "waiting",
    "fetch_that_a_load_waits_for_is_cancelled": "waiting",
    "release_of_one_rank_frees_a_row": "hangs",
    "a_shared_stream_slot_returns_at_the_first_reader": "pool",
    "a_hung_serve_slot_is_free_at_the_outcome": "hangs",
    "intersection_over_all_ranks": "restarts",
    "retained_chunks_are_evicted_like_others": "retaining",
    "a_session_never_expires": "retaining",
    "an_expired_session_is_restored": "retaining",
    "a_session_is_lost_over_a_restart": "retaining",
    "a_write_forgets_its_client": "retaining",
    "a_client_retains_all_that_it_wants": "retaining",
}

#: Name → the groups with which the rule matters; otherwise full attention only.
SHAPE = {
    "length_of_another_group_is_accepted": "full+window",
    "a_hole_is_stored": "window",
    "provisional_is_written_at_once": "full+window",
    "padding_is_copied": "full+window",
    "neighbours_bytes_are_copied": "full+window",
    "block_ids_are_reported_for_a_window": "window",
    "admission_trims": "full+window",
    "boundary_is_touched_out_of_order": "full+window",
}

#: Name → the number of sets of ranks with which the rule matters; otherwise ranks share nothing.
SETS = {
    "a_holders_failure_is_masked": 1,
    "a_reader_passes_the_fill_word": 1,
    "a_shared_stream_slot_returns_at_the_first_reader": 1,
    "intersection_over_all_ranks": 2,
    "unequal_ranks_are_believed": 1,
    "unequal_ranks_keep_their_pool": 1,
}

#: Name → the number of other engines with which the rule matters; otherwise there are none.
OWNERS = {
    "a_name_survives_new_weights": 2,
    "a_named_reset_keeps_its_tag": 2,
    "a_borrowed_chunk_is_written": 2,
    "a_deduped_chunk_is_never_written": 2,
    "a_duplicate_is_written": 2,
    "a_foreign_entry_survives_a_reset": 2,
    "a_foreign_entry_survives_its_acceptance": 2,
    "a_foreign_entry_survives_new_weights": 2,
    "a_foreign_failure_dooms_an_own_row": 2,
    "a_reader_writes_into_a_region": 2,
    "a_refused_pair_comes_back": 2,
    "a_regions_error_marks_its_target": 2,
    "an_attach_failure_is_ignored_on_one_rank": 2,
    "an_owner_of_many_failures_is_believed": 2,
    "files_are_closed_under_their_reads": 2,
    "loads_leave_before_the_attach": 2,
    "other_weights_are_accepted": 2,
    "reads_do_not_wait_for_their_files": 2,
    "tag_is_not_compared_in_a_region": 3,
    "tag_is_taken_from_the_region": 3,
}

#: Name → the number of peers with which the rule matters; otherwise there are none.
PEERS = {
    "a_chunk_has_landed_before_it_is_copied": 1,
    "a_chunk_is_asked_of_two_peers": 2,
    "a_hint_of_helpers_is_ignored": 2,
    "a_failed_pull_counts_as_pulled": 1,
    "a_peers_failure_is_the_chunks": 1,
    "a_peers_failure_uses_the_retry": 1,
    "a_second_try_gets_a_new_deadline": 1,
    "a_silent_peer_is_waited_for": 1,
    "a_pull_writes_into_its_cache_slot": 1,
    "a_zombies_buffer_is_reused": 1,
    "credits_are_ignored": 1,
    "what_lands_stays_on_the_targets_share": 1,
}

#: Those that matter where peers ask this rank for chunks; otherwise nobody asks.
SERVING = {
    "a_cancelled_serve_is_answered",
    "a_hung_serve_slot_is_free_at_the_outcome",
    "serve_before_demand",
    "serve_reads_survive_a_reset",
    "serve_reads_wait_for_ever",
    "serves_forget_that_loads_read",
    "serves_take_every_place",
}

#: Those that matter where copies of loads check payloads; otherwise the reads do.
CHECKS = {
    "a_cancelled_read_counts_as_proven",
    "a_failed_check_reports_other_blocks",
    "a_job_finishes_before_its_checks",
    "a_part_is_copied_unproven",
    "an_unproven_slot_is_lent",
}

#: Broken rules that cannot be mutants here → the file and the text of what is there instead.
REPLACED = {
    # No group leads the look-up: full attention comes first wherever it stands.
    "group_0_leads": (
        "tests/unit/manager/test_groups.py",
        "index = Index([STATE_3, WINDOW_1, FULL_0], 80, set())",
    ),
    # The machine refuses such a read; the mutant is `loads_come_before_the_fills_that_they_need`.
    "a_fill_that_was_never_given_is_stale": (
        "vllm_nvmeof_offload/native/machine/gates.cpp",
        "a slot is read, but no such fill was queued",
    ),
    # No seed of 1,300 has an answer that another engine's chunk made, then a store of that chunk,
    # and then something that only the stored copy can change.
    "remembered_answer_survives_a_store": (
        "tests/unit/tiers/test_foreign.py",
        "def test_an_answer_is_void_when_we_store_a_chunk_that_it_has_of_others",
    ),
    # The simulator has no files.
    "files_are_taken_when_the_transfer_starts": (
        "tests/contract/test_io_engine.py",
        "def test_a_queued_operation_keeps_the_files_of_its_submission_over_two_exchanges",
    ),
}


def native(*names: str) -> None:
    """Mutants of the native core: switches that only the tests' build of the module has."""
    for name in names:
        MUTANTS[name] = lambda: [
            (core, "Tiers", tests_build.Tiers),
            (core, "Holds", tests_build.Holds),
            (follower, "Foreign", tests_build.Foreign),
            (pipeline, "Machine", tests_build.Machine),
            (pipeline, "MachineOptions", tests_build.MachineOptions),
            (geometry, "NativeGeometry", tests_build.CacheGeometry),
        ]
        NATIVE.add(name)


def mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    MUTANTS[make.__name__] = make
    return make


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Run the block with this rule broken."""
    with ExitStack() as stack:
        if name in NATIVE:
            tests_build.set_mutant(name)
            stack.callback(tests_build.set_mutant, "")
        for target, attribute, replacement in MUTANTS[name]():
            stack.enter_context(mock.patch.object(target, attribute, replacement))
        yield


# -- rule 1: per-slot order and identity --------------------------------------------------


native("gates_ignore_order", "gates_accept_stale", "failed_copy_counts_as_copied")


@mutant
def loads_come_before_the_fills_that_they_need() -> list[Patch]:
    """With STALE instead of the machine's assertion it would look like chunks that are gone."""
    real = SimRank.execute

    def execute(self: Any, metadata: Metadata) -> Output:
        early = [job for job in metadata.loads.items() if metadata.commands]
        for op, job in early:
            self._loads[op] = job
            self._submit(op, job)
        return real(
            self,
            replace(
                metadata, loads=dict([item for item in metadata.loads.items() if item not in early])
            ),
        )

    return [(SimRank, "execute", execute)]


# -- rule 2: a store in flight is a hit ---------------------------------------------------


native("store_in_flight_is_a_miss")


# -- rule 3: GPU order --------------------------------------------------------------------


native(
    "copies_of_several_fences_are_one",
    "an_open_fences_chunks_go_with_the_passed_ones",
    "each_job_is_a_copy_of_its_own",
)


def _without_fences(is_store: bool) -> list[Patch]:
    real = TransferPipeline.transfer

    def transfer(self: Any, cache: Any, transfers: Any, fence: object, *more: Any) -> None:
        real(self, cache, transfers, 0.0 if transfers[0][1] is is_store else fence, *more)

    return [(TransferPipeline, "transfer", transfer)]


@mutant
def stores_ignore_the_fence() -> list[Patch]:
    return _without_fences(is_store=True)


@mutant
def loads_ignore_the_fence() -> list[Patch]:
    return _without_fences(is_store=False)


@mutant
def chunks_share_a_younger_fence() -> list[Patch]:
    real = TransferPipeline.transfer

    def transfer(self: Any, cache: Any, transfers: Any, fence: object, *more: Any) -> None:
        real(self, cache, transfers, fence, *more)
        if not transfers[0][1]:
            self._open = dict.fromkeys(self._open, fence)

    return [(TransferPipeline, "transfer", transfer)]


# -- rule 4: GPU blocks and waits ---------------------------------------------------------


native("job_finishes_while_dma_runs")


@mutant
def wait_returns_before_the_copy() -> list[Patch]:
    return [(SimRank, "wait", lambda self, ops: None)]


@mutant
def wait_for_a_load_does_not_cancel() -> list[Patch]:
    return [(TransferPipeline, "cancel", lambda self, op, rows=None: None)]


# -- rule 5: write after copy, table after write, every rank ------------------------------


native("write_begins_with_the_store", "failed_write_counts_as_written", "first_rank_decides")


@mutant
def table_is_written_before_data() -> list[Patch]:
    real = SimIo.submit

    def submit(self: Any, ops: Any) -> None:
        real(self, ops)
        for flight in list(self._flights.values())[-len(ops) :]:
            flight.data_s, flight.table_s = flight.table_s, flight.data_s

    return [(SimIo, "submit", submit)]


@mutant
def adoption_is_the_union() -> list[Patch]:
    real = world.agree

    def union(one: AdoptedEntries, other: AdoptedEntries) -> AdoptedEntries:
        more = np.flatnonzero(~np.isin(other.places, one.places))
        return handshake._in_order(
            AdoptedEntries(
                np.concatenate([one.places, other.places[more]]),
                np.concatenate([one.generations, other.generations[more]]),
                one.keys + other.key_rows()[more].tobytes(),
            )
        )

    def agree(hellos: Sequence[RankHello]) -> Agreement:
        adopted = reduce(union, (hello.adopted for hello in hellos))
        return real([replace(hello, adopted=adopted) for hello in hellos])

    return [(world, "agree", agree)]


# -- rule 6: nothing wrong is accepted ----------------------------------------------------


native(
    "pipeline_ignores_failed_reads",
    "a_cancelled_read_counts_as_proven",
    "a_failed_check_reports_other_blocks",
    "a_job_finishes_before_its_checks",
    "a_part_is_copied_unproven",
    "an_unproven_slot_is_lent",
)


@mutant
def reads_ignore_the_generation() -> list[Patch]:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, wanted: Claim) -> Outcome:
        if record is not None and record.intact:
            found = record.claim.identity
            if found.key == wanted.identity.key:
                return real(self, record, wanted._replace(identity=found))
        return real(self, record, wanted)

    return [(SimIo, "verify", verify)]


@mutant
def reads_ignore_the_checksum() -> list[Patch]:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, wanted: Claim) -> Outcome:
        if record is not None and record.claim == wanted:
            return OK
        return real(self, record, wanted)

    return [(SimIo, "verify", verify)]


@mutant
def tag_is_not_compared() -> list[Patch]:
    return [(SimIo, "verify", _verify_without("tag"))]


@mutant
def length_of_another_group_is_accepted() -> list[Patch]:
    return [(SimIo, "verify", _verify_without("payload_bytes"))]


def _verify_without(field: str) -> Any:
    real = SimIo.verify

    def verify(self: Any, record: Record | None, wanted: Claim) -> Outcome:
        if record is not None:
            wanted = wanted._replace(**{field: getattr(record.claim, field)})
        return real(self, record, wanted)

    return verify


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
        command = ResetCommand(op.number, self.name[0], self.config.weights_never_change)
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


# -- several KV cache groups, and several steps in flight ---------------------------------

native("a_hole_is_stored", "provisional_is_written_at_once")


@mutant
def padding_is_copied() -> list[Patch]:
    """As if a group had all bytes from one block to the next."""

    def tensor(address: int, stride_bytes: int, page_bytes: int, block_count: int) -> CacheTensor:
        return CacheTensor(address, stride_bytes, stride_bytes, block_count)

    return [(rank, "CacheTensor", tensor)]


@mutant
def neighbours_bytes_are_copied() -> list[Patch]:
    real = copying.SimCopy.submit

    def submit(self: Any, direction: Direction, pieces: Descriptors, *more: Any) -> int:
        wider = np.array([1, 1, 2 if direction is Direction.LOAD else 1], np.uint64)
        return real(self, direction, pieces * wider, *more)

    return [(copying.SimCopy, "submit", submit)]


@mutant
def block_ids_are_reported_for_a_window() -> list[Patch]:
    return [(Knobs, "reports_blocks", True)]


@mutant
def admission_trims() -> list[Patch]:
    """A hit that is declined is loaded in half instead of looked up again."""

    def second(self: Any, request: Request, local: int, first: LookUp) -> LookUp:
        assert first.found is not None
        unit = unit_of_blocks(self._knobs.groups) * self._knobs.blocks_per_chunk
        found = first.found // 2 // unit * unit
        keys = self._keys_of(request, local, local + found)
        return replace(first, found=found, keys=keys)

    return [(SimScheduler, "_second_look_up", second)]


@mutant
def boundary_is_touched_out_of_order() -> list[Patch]:
    """In vLLM's order: group after group."""

    def order(
        keys: Sequence[bytes], ends: npt.NDArray[np.int64], groups: Sequence[Group]
    ) -> npt.NDArray[np.uint32]:
        return np.arange(len(keys), dtype=np.uint32)

    return [(core, "prefix_order", order)]


@mutant
def report_of_a_step_is_read_as_of_the_next() -> list[Patch]:
    """A report without the number of its op would be taken for the latest one's."""
    real = core.ManagerCore.report

    def latest(self: Any, report: Report) -> Report:
        if not isinstance(report, OpReport):
            return report
        own = self._ledger[report.op]
        alike = [
            op.number
            for op in self._ledger
            if op.kind is own.kind
            and (op.batch is None) == (own.batch is None)
            and (op.batch is None or len(op.batch) == len(own.batch))
        ]
        return replace(report, op=max(alike))

    def read(self: Any, reports: Iterable[Report]) -> None:
        real(self, [latest(self, report) for report in unpacked(reports)])

    return [(core.ManagerCore, "report", read)]


# -- rule 17: one copy where ranks hold equal KV ------------------------------------------

native(
    "a_holders_failure_is_masked",
    "a_reader_passes_the_fill_word",
    "a_shared_stream_slot_returns_at_the_first_reader",
    "unequal_ranks_are_believed",
)


@mutant
def unequal_ranks_keep_their_pool() -> list[Patch]:
    """What they shared is dropped in memory only, so the next start adopts it."""
    real = ManagerCore.reset

    def reset(core: ManagerCore, *, same_weights: bool = False) -> bool:
        if not same_weights:
            return real(core)
        core._tiers.reset()
        core._holds.reset()
        core.reload.reset()
        return True

    return [(ManagerCore, "reset", reset)]


@mutant
def intersection_over_all_ranks() -> list[Patch]:
    """A single copy is on no other rank of its set, so that none is adopted."""
    real = handshake._adopted

    def adopted(hellos: Sequence[RankHello], set_sizes: Mapping[Group, int]) -> Any:
        return real(hellos, dict.fromkeys(set_sizes, 1))

    return [(handshake, "_adopted", adopted)]


# -- sharing: other engines' chunks are hints that prove themselves, and only borrowed ----

native(
    "a_borrowed_chunk_is_written",
    "a_deduped_chunk_is_never_written",
    "a_duplicate_is_written",
    "a_foreign_entry_survives_a_reset",
    "a_foreign_entry_survives_its_acceptance",
    "a_foreign_entry_survives_new_weights",
    "a_foreign_failure_dooms_an_own_row",
    "a_refused_pair_comes_back",
    "a_regions_error_marks_its_target",
    "an_owner_of_many_failures_is_believed",
    "other_weights_are_accepted",
    "reads_do_not_wait_for_their_files",
)


@mutant
def tag_is_not_compared_in_a_region() -> list[Patch]:
    def tag_of(self: Any, flight: Any, record: Any) -> bytes:
        foreign = flight.region is not None and record is not None
        return record.claim.tag if foreign else flight.op.stamp.tag

    return [(SimIo, "tag_of", tag_of)]


@mutant
def tag_is_taken_from_the_region() -> list[Patch]:
    """From the newest superblock there."""

    def tag_of(self: Any, flight: Any, record: Any) -> bytes:
        if flight.region is None:
            return flight.op.stamp.tag
        return self.opener.files(flight.region).named.tag

    return [(SimIo, "tag_of", tag_of)]


@mutant
def a_named_reset_keeps_its_tag() -> list[Patch]:
    """A later start takes the chunks for its own."""
    real = core.ManagerCore.take_commands

    def take(self: Any) -> list[Command]:
        return [
            replace(one, tag=START_TAG) if isinstance(one, ResetCommand) and one.named else one
            for one in real(self)
        ]

    return [(core.ManagerCore, "take_commands", take)]


@mutant
def a_name_survives_new_weights() -> list[Patch]:
    return [(core.ManagerCore, "weights_changed", lambda self: None)]


@mutant
def an_attach_failure_is_ignored_on_one_rank() -> list[Patch]:
    """Only the rank that reports last is believed."""
    real = core.ManagerCore.report

    def report(self: Any, reports: Any) -> None:
        real(self, [_forgiven(self, one) for one in reports])

    return [(core.ManagerCore, "report", report)]


def _forgiven(manager: Any, report: Any) -> Any:
    if not isinstance(report, OpReport):
        return report
    op = manager._ledger[report.op]
    if op.kind is not core.OpKind.ATTACH or op.ranks_left == 1:
        return report
    return replace(report, codes=None, errnos=None)


@mutant
def loads_leave_before_the_attach() -> list[Patch]:
    real = core.ManagerCore.take_commands

    def take(self: Any) -> list[Command]:
        commands = real(self)
        late, self._late = getattr(self, "_late", []), []
        for command in commands:
            (self._late if isinstance(command, AttachCommand) else late).append(command)
        return late

    return [(core.ManagerCore, "take_commands", take)]


@mutant
def a_reader_writes_into_a_region() -> list[Patch]:
    real = TransferPipeline.command

    def command(self: Any, one: Command) -> None:
        if isinstance(one, WriteCommand):
            keys, generations, cache, _, groups = one.batch
            places = owned_by(1, 0) | one.batch.places
            batch = ChunkBatch((keys, generations, cache, places.tobytes(), groups))
            one = WriteCommand(one.op, batch)
        real(self, one)

    return [(TransferPipeline, "command", command)]


@mutant
def files_are_closed_under_their_reads() -> list[Patch]:
    def drop(self: Any, owner: int, target: int) -> None:
        self._io.detach_region(owner, target)
        self._opener.close([self._used.pop((owner, target))])

    return [(Regions, "_drop", drop)]


# -- rule 16, and what bounds the reads that peers make for us ----------------------------

native(
    "a_chunk_has_landed_before_it_is_copied",
    "a_chunk_is_asked_of_two_peers",
    "a_hint_of_helpers_is_ignored",
    "a_failed_pull_counts_as_pulled",
    "a_peers_failure_is_the_chunks",
    "a_peers_failure_uses_the_retry",
    "a_second_try_gets_a_new_deadline",
    "a_silent_peer_is_waited_for",
    "a_pull_writes_into_its_cache_slot",
    "a_zombies_buffer_is_reused",
    "credits_are_ignored",
    "what_lands_stays_on_the_targets_share",
)


# -- what a rank reads for peers ----------------------------------------------------------

native(
    "a_cancelled_serve_is_answered",
    "a_hung_serve_slot_is_free_at_the_outcome",
    "serve_before_demand",
    "serve_reads_survive_a_reset",
    "serve_reads_wait_for_ever",
    "serves_forget_that_loads_read",
    "serves_take_every_place",
)


# -- waits for a stream slot or for room in a target's queue ------------------------------

native(
    "bytes_of_the_next_operation_do_not_count",
    "fetches_take_every_place",
    "stream_slots_are_charged_to_the_lane_of_a_job",
    "stream_slots_are_not_released",
    "hung_share_of_a_target_blocks_its_loads",
    "promoted_fetch_never_runs",
    "reset_forgets_the_writes_of_other_targets",
    "room_at_a_target_is_not_released",
    "writes_keep_no_cap_beside_reads",
)


# -- the reload of waiting requests -------------------------------------------------------

native(
    "held_chunk_is_not_pinned",
    "cancelled_fetch_still_counts_for_its_entry",
    "cancelled_fetch_frees_its_slot_at_once",
    "a_dropped_intent_leaves",
    "holds_outlive_their_requests",
    "fetch_that_a_load_waits_for_is_cancelled",
    "doomed_chunk_stays_held",
    "cancelled_prefetches_are_not_counted",
)


@mutant
def reset_keeps_the_holds() -> list[Patch]:
    class Keeps(Holds):
        def reset(self) -> None:
            pass

    return [(core, "Holds", Keeps)]


@mutant
def budgets_are_ignored() -> list[Patch]:
    real = ReloadScheduler.__init__

    def init(self: Any, config: Any, capacity: Any, *more: Any) -> None:
        real(self, config, capacity, *more)
        self._limits = dict.fromkeys(self._limits, capacity.cache_slots)

    return [(ReloadScheduler, "__init__", init)]


@mutant
def rejected_drafts_count_as_computed() -> list[Patch]:
    def computed(self: Any, request_id: str) -> int:
        seen = self._preempted.get(request_id)
        return seen.tokens if seen is not None else 0

    return [(ResumeCounter, "computed", computed)]


# -- rule 2: a remembered look-up is made again when another answer is possible -----------

native(
    "remembered_answer_survives_an_eviction",
    "remembered_answer_survives_a_move",
    "remembered_answer_survives_a_load",
    "fetching_hits_in_the_second_look_up",
)


@mutant
def remembered_answer_survives_another_source_set() -> list[Patch]:
    real = RequestLookUps.recall

    def recall(self: Any, request_id: str, question: Any) -> Answer | None:
        known = self._requests.get(request_id)
        sources = next(iter(known.answers), question.sources) if known else question.sources
        return real(self, request_id, replace(question, sources=sources))

    return [(RequestLookUps, "recall", recall)]


@mutant
def first_miss_is_not_asked_again() -> list[Patch]:
    real = RequestLookUps.asked

    def asked(self: Any, name: str, said: Answer) -> Answer:
        return real(self, name, replace(said, misses=[]))

    return [(RequestLookUps, "asked", asked)]


@mutant
def delay_is_remembered() -> list[Patch]:
    """As nothing found: a request that is delayed is not asked for again."""
    asked, recall = RequestLookUps.asked, RequestLookUps.recall
    delayed: set[tuple[str, Any]] = set()

    def remembers(self: Any, name: str, said: Answer) -> Answer:
        if said.found is None:
            delayed.add((name, said.question))
        return asked(self, name, said)

    def recalls(self: Any, name: str, question: Any) -> Answer | None:
        if (name, question) in delayed:
            return Answer(question, 0, (), ())
        return recall(self, name, question)

    return [(RequestLookUps, "asked", remembers), (RequestLookUps, "recall", recalls)]


# -- the operator's policies: store threshold, demotion, no writes at all -----------------


@mutant
def store_threshold_is_ignored() -> list[Patch]:
    return [(StoreThreshold, "see", lambda self, keys, again: None)]


@mutant
def lookups_are_not_counted() -> list[Patch]:
    def see(self: Any, keys: Any, _: Any = ()) -> Any:
        return None if self._threshold == 1 else np.zeros(len(keys), np.uint8)

    return [(StoreThreshold, "see", see)]


native(
    "policy_off_is_ignored",
    "demotion_never_begins",
    "demotion_begins_at_once",
    "unwritten_is_evicted_before_clean",
    "read_evicts_the_unwritten",
    "retained_chunks_are_evicted_like_others",
    "a_session_never_expires",
    "a_client_retains_all_that_it_wants",
)


@mutant
def an_expired_session_is_restored() -> list[Patch]:
    real = ManagerCore._restore_sessions

    def restore(self: Any, saved: Any, entries: Any) -> None:
        saved.sessions["until"] += 1000
        real(self, saved, entries)

    def decode(raw: bytes) -> Any:
        found = SavedSessions.decode(raw)
        return found._replace(sessions=found.sessions.copy())

    return [
        (ManagerCore, "_restore_sessions", restore),
        (core, "SavedSessions", mock.Mock(side_effect=SavedSessions, decode=decode)),
    ]


@mutant
def a_session_is_lost_over_a_restart() -> list[Patch]:
    return [(ManagerCore, "_restore_sessions", lambda *_: None)]


@mutant
def a_write_forgets_its_client() -> list[Patch]:
    real = ManagerCore.prepare_store

    def prepare_store(self: Any, *offer: Any, **more: Any) -> Any:
        return real(self, *offer, **more | {"client": 0})

    return [(ManagerCore, "prepare_store", prepare_store)]


# -- the events that routers receive ------------------------------------------------------

native(
    "failures_are_not_reported",
    "reset_is_not_reported",
    "reset_forgets_the_pools_copies",
    "fetch_is_reported_at_its_start",
)
