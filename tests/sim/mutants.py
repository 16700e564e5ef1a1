# SPDX-License-Identifier: Apache-2.0
"""Mutants: each breaks one rule on purpose. A mutant that survives shows a blind simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from vllm_nvmeof_offload.manager import core, hold_and_prefetch
from vllm_nvmeof_offload.native import _tiers_mutants as tests_build  # type: ignore[attr-defined]
from vllm_nvmeof_offload.worker import pipeline

from . import follower

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
    "a_hint_with_an_old_generation_touches": 2,
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
        "tests/unit/manager/test_boundary.py",
        "index = Index([STATE, WINDOW, FULL], 80, set())",
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
        "tests/contract/test_io_engine_replace.py",
        "def test_a_queued_operation_keeps_the_files_of_its_submission_over_two_exchanges",
    ),
}


def native(*names: str) -> None:
    """Mutants of the native core: switches that only the tests' build of the module has."""
    for name in names:
        MUTANTS[name] = lambda: [
            (core, "Tiers", tests_build.Tiers),
            (hold_and_prefetch, "Holds", tests_build.Holds),
            (follower, "Foreign", tests_build.Foreign),
            (pipeline, "Machine", tests_build.Machine),
            (pipeline, "MachineOptions", tests_build.MachineOptions),
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
