# SPDX-License-Identifier: Apache-2.0
"""Mutants of rule 16 and of what bounds the reads that peers make for us."""

from __future__ import annotations

from .mutants import native

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
