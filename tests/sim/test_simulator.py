# SPDX-License-Identifier: Apache-2.0
"""The simulator over many seeds. A failing run prints the seed, the last events and the replay.

`NVMEOF_SIM_SEEDS=5000` plays that many seeds from a random first one (`make soak`).
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from vllm_nvmeof_offload.manager.eviction import POLICIES
from vllm_nvmeof_offload.manager.handshake import CREDITED

from .sanitized import ROOT
from .shapes import FULL, SHAPES
from .world import play

_SOAK = int(os.environ.get("NVMEOF_SIM_SEEDS", "0"))
_BATCHES = 8
_SEEDS = _SOAK or 240
_SEEDS_OF_RANKS = 6
_SEEDS_OF_SHAPES = 12
_SEEDS_OF_SETS = 30
_SEEDS_OF_OWNERS = 30
_SEEDS_OF_PEERS = 30
_SEEDS_OF_SERVING = 25
_SEEDS_OF_CHECKS = 40
_FIRST = int(os.environ.get("NVMEOF_SIM_FIRST", secrets.randbits(40) if _SOAK else 0))

#: Counts over all batches.
_seen: Counter[str] = Counter()
#: What must have happened in the seeds of the tests below, or they prove nothing.
EVENTS = [
    "aborted_loads",
    "adopted_single_copies",
    "copies_from_a_member",
    "io_single_copies",
    "unequal_groups",
    "unstored_chunks:below_threshold",
    "adoption_chunks:adopted",
    "crashes",
    "evictions:cpu",
    "evictions:pool",
    "failed_chunks:cancelled",
    "failed_chunks:checksum_mismatch",
    "failed_chunks:deadline",
    "failed_chunks:io_error",
    "failed_chunks:stale",
    "failed_loads",
    "fault_read_error",
    "fault_read_flip",
    "fault_reset_error",
    "fault_write_error",
    "fault_write_flip",
    "fault_write_length",
    "fault_write_lost",
    "fault_write_misdirected",
    "fault_write_torn",
    "flushed",
    "io_busy",
    "io_cancelled",
    "io_late",
    "io_reset_without_a_target",
    "io_late_superblocks",
    "loaded_tokens:cpu",
    "loaded_tokens:pool",
    "loads_from_inside_a_chunk",
    "lost_entries",
    "lost_slab",
    "lost_superblock",
    "retired_pool_slots",
    "preempted_with_drafts",
    "remembered_answers",
    "preemptions",
    "resets",
    "restored_sessions",
    "unstored_chunks:no_room",
    "verdict_changes",
    "write_failed",
    "unwritten_chunks:evicted",
    "written_chunks",
    "failed_requests",
    "holes",
    "unwritten_chunks:superseded",
    "unlike_stages",
    "borrowed_chunks",
    "loaded_tokens:shared",
    "reads_of_regions",
    "fault_read_region",
    "failed_attaches",
    "opened_regions",
    "closed_regions",
    "followed_anew",
    "double_resets",
    "torn_rows",
    "owner_resets",
    "owners_with_other_weights",
    "owners_with_named_weights",
    "owners_with_a_wrong_name",
    "noticed_weights",
    "borrows_by_name",
    "named_weights",
    "owners_with_a_wrong_tag",
    "owners_gone",
    "dead_owners",
    "held_write",
    "held_reset",
    "permits_run_out",
    "permits_lost",
    "truncated_regions",
    "peer_reads",
    "peer_failures",
    "peer_losses",
    "peer_cancels",
    "pulled",
    "second_tries",
    "serves",
    "serve_cancels",
    "serves_of_unknown_regions",
    "served_cancelled",
    "served_checksum_mismatch",
    "served_deadline",
    "served_io_error",
    "served_ok",
    "served_regions",
    "served_stale",
    "unproven_reads",
    "damaged_unproven_reads",
    "checked_by_copies",
    "damage_found_by_copies",
    "flushed_loads",
    "reads_again",
    *(f"steps_in_flight:{steps}" for steps in range(1, 5)),
    *(f"loads:{shape}" for shape in (FULL, *SHAPES)),
]


@pytest.mark.parametrize("batch", range(_BATCHES))
def test_no_rule_breaks(batch: int) -> None:
    size = -(-_SEEDS // _BATCHES)
    first = _FIRST + batch * size
    print(f"seeds {first} … {first + size - 1}")
    for seed in range(first, first + size):
        _seen.update(play(seed))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_no_rule_breaks_with_several_ranks(ranks: int) -> None:
    """The ranks adopt different sets: one of them lost entries, its slab's end, or everything."""
    first = _FIRST + 100 * ranks
    print(f"seeds {first} … {first + _SEEDS_OF_RANKS - 1}, {ranks} ranks")
    for seed in range(first, first + _SEEDS_OF_RANKS):
        _seen.update(play(seed, "restarts", ranks))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_rule_breaks_with_several_groups(shape: str) -> None:
    """Or with one that is not of full attention."""
    for seed in range(_FIRST + 2000, _FIRST + 2000 + _SEEDS_OF_SHAPES):
        _seen.update(play(seed, shape=shape))


@pytest.mark.parametrize("sets", [1, 2])
def test_no_rule_breaks_where_ranks_share_copies(sets: int) -> None:
    for seed in range(_FIRST + 3000, _FIRST + 3000 + _SEEDS_OF_SETS):
        _seen.update(play(seed, sets=sets))


@pytest.mark.parametrize("owners", [1, 2, 3])
def test_no_rule_breaks_beside_other_engines(owners: int) -> None:
    """With any groups, sets and steps in flight."""
    for seed in range(_FIRST + 4000, _FIRST + 4000 + _SEEDS_OF_OWNERS):
        _seen.update(play(seed, owners=owners))


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_no_rule_breaks_while_peers_read_for_us(peers: int) -> None:
    for seed in range(_FIRST + 5000, _FIRST + 5000 + _SEEDS_OF_PEERS):
        _seen.update(play(seed, peers=peers))


@pytest.mark.parametrize("owners", [0, 1, 2])
def test_no_rule_breaks_while_we_read_for_peers(owners: int) -> None:
    """From other engines' regions too, and while peers read for us."""
    first = _FIRST + 6000 + 100 * owners
    for seed in range(first, first + _SEEDS_OF_SERVING):
        _seen.update(play(seed, owners=owners, peers=seed % 2, serve=True))


@pytest.mark.slow  # every payload has its bytes, and each byte is checked
@pytest.mark.parametrize("owners", [0, 1, 2])
def test_no_rule_breaks_where_copies_check_payloads(owners: int) -> None:
    """With any groups and sets, and while peers read for us and we for them."""
    first = _FIRST + 7000 + 100 * owners
    for seed in range(first, first + _SEEDS_OF_CHECKS):
        serve = seed % 4 == 0
        _seen.update(play(seed, owners=owners, peers=seed % 2, serve=serve, checks=True))
        _seen.update(play(seed, "pool", shape=FULL, sets=0, owners=0, checks=True))


def test_no_rule_breaks_when_vllm_waits_for_loads_that_hang() -> None:
    for seed in range(_FIRST, _FIRST + 30):
        _seen.update(play(seed, "flushes"))


def test_no_rule_breaks_while_permits_run_out_and_leases_are_lost() -> None:
    for seed in range(_FIRST, _FIRST + 40):
        _seen.update(play(seed, "leases"))


def test_no_rule_breaks_while_sessions_retain_chunks() -> None:
    for seed in range(_FIRST, _FIRST + 60):
        _seen.update(play(seed, "retaining", shape=FULL, sets=0, owners=0))


@pytest.mark.parametrize(
    "policy", [*sorted({*POLICIES} - {CREDITED}), "04_custom_policy:SecondChance"]
)
def test_no_rule_breaks_with_each_eviction_policy(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    for seed in range(_FIRST + 1000, _FIRST + 1012):
        _seen.update(play(seed, policy=policy))


def test_every_kind_of_event_happened() -> None:
    """Every kind of event and every fault knob fired in the seeds of the tests above."""
    if not _seen:
        pytest.skip("the seeds did not run")
    assert [what for what in EVENTS if not _seen[what]] == []


@pytest.mark.slow  # it compiles the native module with sanitizers
def test_no_memory_error_in_tiers_and_machine() -> None:
    """Seeds of every kind that a soak plays: with ranks, sets, owners, peers and checks."""
    command = [sys.executable, "-m", "tests.sim", "--first", "1", "--steps", "10000", "--sanitize"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout
