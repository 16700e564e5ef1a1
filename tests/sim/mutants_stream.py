# SPDX-License-Identifier: Apache-2.0
"""Mutants of streaming: transfers that wait for a stream slot or for room in a target's queue."""

from __future__ import annotations

from .mutants import native

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
