# SPDX-License-Identifier: Apache-2.0
"""Each rule, deliberately broken, makes the simulator fail within a bounded number of seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_nvmeof_offload.manager.handshake import CREDITED

from .mutants import (
    CHECKS,
    MUTANTS,
    OWNERS,
    PEERS,
    PROFILE,
    REPLACED,
    SERVING,
    SETS,
    SHAPE,
    broken,
)
from .shapes import FULL
from .world import play

SEEDS_MAX = 1000

#: Name → the first seed to try. A seed that is known to catch the mutant keeps the test short.
#: After a change to the simulator the search continues from this seed and wraps around.
FIRST: dict[str, int] = {
    "a_cancelled_read_counts_as_proven": 39,
    "a_deduped_chunk_is_never_written": 46,
    "a_failed_check_reports_other_blocks": 47,
    "a_foreign_entry_survives_a_reset": 16,
    "a_foreign_entry_survives_its_acceptance": 33,
    "a_foreign_entry_survives_new_weights": 8,
    "a_job_finishes_before_its_checks": 4,
    "a_part_is_copied_unproven": 4,
    "a_peers_failure_uses_the_retry": 516,
    "a_regions_error_marks_its_target": 2,
    "a_retry_gets_a_new_deadline": 275,
    "a_second_try_gets_a_new_deadline": 197,
    "a_silent_peer_is_waited_for": 114,
    "a_zombies_buffer_is_reused": 136,
    "admission_trims": 24,
    "an_attach_failure_is_ignored_on_one_rank": 5,
    "an_unproven_slot_is_lent": 4,
    "doom_ignores_the_generation": 71,
    "failed_copy_counts_as_copied": 14,
    "fetches_take_every_place": 35,
    "files_are_closed_under_their_reads": 5,
    "first_miss_is_not_asked_again": 812,
    "full_engine_blocks_forever": 113,
    "gates_accept_stale": 32,
    "hung_fill_blocks_its_readers": 200,
    "hung_share_of_a_target_blocks_its_loads": 121,
    "hung_stream_slots_block_loads": 51,
    "lower_sequence_wins": 16,
    "new_weights_are_adopted": 36,
    "other_weights_are_accepted": 2,
    "policy_off_is_ignored": 31,
    "promoted_fetch_never_runs": 7,
    "reads_ignore_the_generation": 257,
    "remembered_answer_survives_a_load": 133,
    "reset_keeps_the_holds": 7,
    "stale_at_a_gate_dooms_a_good_copy": 439,
    "stream_slot_is_free_at_the_outcome": 54,
    "stream_slots_are_charged_to_the_lane_of_a_job": 212,
    "suspect_target_fails_the_reset": 75,
    "tag_is_not_compared": 7,
    "tag_is_not_compared_in_a_region": 11,
    "tag_is_taken_from_the_region": 11,
    "unnamed_epoch_is_adopted": 36,
    "wait_for_a_load_does_not_cancel": 25,
    "what_lands_stays_on_the_targets_share": 335,
}


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_what_replaces_a_mutant_is_still_there(name: str) -> None:
    path, text = REPLACED[name]
    assert text in (Path(__file__).parents[2] / path).read_text()


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_caught(name: str) -> None:
    profile, shape = PROFILE.get(name), SHAPE.get(name, FULL)
    rest = SETS.get(name, 0), OWNERS.get(name, 0), PEERS.get(name, 0), name in SERVING
    checks = name in CHECKS
    for offset in range(SEEDS_MAX):
        seed = (FIRST.get(name, 0) + offset) % SEEDS_MAX
        try:
            with broken(name):
                play(seed, profile, None, CREDITED, shape, *rest, checks)
        except AssertionError as error:
            print(f"caught by seed {seed}: {str(error).splitlines()[0]}")
            break
    else:
        pytest.fail(f"{name} survived {SEEDS_MAX} seeds: the simulator is too weak")
    # The same seed passes unbroken: the seed caught the broken rule.
    play(seed, profile, None, CREDITED, shape, *rest, checks)
