# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a rank reads for peers."""

from __future__ import annotations

from .mutants import native

native(
    "a_cancelled_serve_is_answered",
    "a_hung_serve_slot_is_free_at_the_outcome",
    "serve_before_demand",
    "serve_reads_survive_a_reset",
    "serve_reads_wait_for_ever",
    "serves_forget_that_loads_read",
    "serves_take_every_place",
)
