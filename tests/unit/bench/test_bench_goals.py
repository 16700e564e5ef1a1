# SPDX-License-Identifier: Apache-2.0
"""The goals' arithmetic, on made-up samples."""

from __future__ import annotations

import pytest
from vllm_nvmeof_bench.reports.pool import Sample, goals
from vllm_nvmeof_bench.results import Goal, missed

from tests.unit.bench.made_up import ROUNDS, everything, rounds
from vllm_nvmeof_offload.units import KIB, MIB

BLOCKS = (64 * KIB, 512 * KIB, 2 * MIB)
GOOD_MANAGER = {"lookup_us": 0.5, "bytes_per_entry": 300, "gc_pause_ms_max": 3.0}
GOOD = {"manager": GOOD_MANAGER}


def row(rows: list[Goal], start: str) -> Goal:
    (found,) = (one for one in rows if one.name.startswith(start))
    return found


def test_every_goal_is_listed_and_reached_by_good_samples() -> None:
    rows = goals(everything(BLOCKS), GOOD)
    assert len(rows) == 16
    assert all(one.reached is True for one in rows), missed(rows)
    assert {one.n for one in rows} == {ROUNDS, 1}


def test_the_worst_block_against_the_best_rival_decides() -> None:
    samples = [one for one in everything(BLOCKS) if one.block_bytes != 512 * KIB]
    for arm, value in (("ours", 900.0), ("fio", 950.0), ("ring", 500.0), ("ours_threads", 1000.0)):
        samples += rounds(arm, "batch_read", 512 * KIB, [value] * 3)
    found = row(goals(samples, {}), "batch read ≥ 512 KiB / best")
    assert found.measured == pytest.approx(0.9)
    assert found.where == "512 KiB, ours_threads"
    assert found.reached is False


def test_small_blocks_do_not_count_against_the_device() -> None:
    samples = everything((2 * MIB,)) + rounds("ours", "batch_read", 64 * KIB, [1.0])
    assert row(goals(samples, {}), "batch read ≥ 512 KiB / best").reached is True


def test_a_ring_with_our_slots_is_a_goal_of_its_own() -> None:
    samples = [one for one in everything(BLOCKS) if one.block_bytes != 512 * KIB]
    for arm, value in (("ours", 900.0), ("ring", 1000.0), ("ring_slots", 950.0)):
        samples += rounds(arm, "batch_write", 512 * KIB, [value] * 3)
    found = row(goals(samples, {}), "batch write ≥ 512 KiB / ring with our slots")
    assert found.measured == pytest.approx(900 / 950)
    assert found.where == "512 KiB, ring_slots"
    assert found.reached is True


def test_medians_decide_not_single_rounds() -> None:
    samples = without(everything(BLOCKS), "ours", "single_write", 2 * MIB)
    samples += rounds("ours", "single_write", 2 * MIB, [1.0, 1350.0, 1360.0])
    found = row(goals(samples, {}), "one 128 MiB job of 2 MiB blocks, write")
    assert found.measured == pytest.approx(3.0)
    assert found.reached is True


@pytest.mark.parametrize("arm", ["fio", "ring", "ours_threads", "ours"])
def test_without_a_rival_the_best_rival_is_unknown(arm: str) -> None:
    samples = [one for one in everything(BLOCKS) if one.arm != arm]
    found = row(goals(samples, {}), "batch write ≥ 512 KiB / best")
    assert found.measured is None
    assert found.reached is None


def test_an_unmeasured_goal_is_neither_reached_nor_missed() -> None:
    rows = goals([], {})
    assert len(rows) == 13
    assert all(one.reached is None and one.n == 0 for one in rows)
    assert missed(rows) == []


def test_times_and_the_manager_of_older_files_are_judged_by_upper_bounds() -> None:
    samples = without(everything(BLOCKS), "ours", "read_beside_writes", 2 * MIB)
    samples += rounds("ours", "read_beside_writes", 2 * MIB, [1.0] * 3, None, 30_000.0)
    rows = goals(samples, {"manager": {**GOOD_MANAGER, "lookup_us": 1.5}})
    p99 = row(rows, "p99 of a read beside writes")
    assert (p99.measured, p99.required, p99.reached) == (0.75, "≤ 0.5", False)
    look_up = row(rows, "manager: time per key looked up")
    assert (look_up.measured, look_up.required, look_up.reached) == (1.5, "≤ 1 µs", False)
    assert missed(rows) == [p99, look_up]


def test_cpu_time_is_compared_per_gib() -> None:
    rows = goals(everything(BLOCKS), {})
    assert row(rows, "CPU s/GiB, 2 MiB batch write").measured == pytest.approx(0.01 / 0.4)


def without(samples: list[Sample], arm: str, case: str, block: int) -> list[Sample]:
    return [one for one in samples if (one.arm, one.case, one.block_bytes) != (arm, case, block)]
