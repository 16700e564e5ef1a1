# SPDX-License-Identifier: Apache-2.0
"""Mutants of the events that routers receive."""

from __future__ import annotations

from .mutants import native

native(
    "failures_are_not_reported",
    "reset_is_not_reported",
    "reset_forgets_the_pools_copies",
    "fetch_is_reported_at_its_start",
)
