# SPDX-License-Identifier: Apache-2.0
"""`bench latency`: its loop on a made-up engine, its arithmetic, its tables; and one real run."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm_nvmeof_bench.latency import Order, Place, Settings, drive, kernel_times, run
from vllm_nvmeof_bench.pool import Job, Mover
from vllm_nvmeof_bench.report import Table
from vllm_nvmeof_bench.reports.latency import (
    REPORTS,
    STAND_IN,
    Point,
    Sample,
    added,
    as_expected,
    points_of,
)
from vllm_nvmeof_bench.results import BenchError, distinct

from vllm_nvmeof_offload.units import KIB


class Clocked(Mover):
    """A mover whose jobs take 1/64 s each, one after the other, on a fake clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slots_at_once: list[set[int]] = []
        self._queue: deque[tuple[int, int]] = deque()  # token, slot

    def run(self, jobs: Sequence[Job]) -> None:
        raise AssertionError("the loop is closed: it hands over one at a time")

    def submit(self, token: int, is_read: bool, block: int) -> None:
        self._queue.append((token, block))
        slots = [slot for _, slot in self._queue]
        assert len(set(slots)) == len(slots), "one slot twice at a time"
        self.slots_at_once.append(set(slots))

    def poll(self, timeout_s: float) -> list[int]:
        self.now_s += 1 / 64
        return [self._queue.popleft()[0]]


def test_the_loop_keeps_the_depth_and_counts_jobs_submitted_after_the_ramp() -> None:
    mover = Clocked()
    order = Order("read", depth=3, ramp_s=8 / 64, run_s=16 / 64)
    answer = drive(mover, 8, order, random.Random(1), lambda: mover.now_s, lambda: 5 * mover.now_s)
    assert max(map(len, mover.slots_at_once)) == 3
    # Three in flight where one ends every 1/64 s: each takes 3/64 s.
    assert set(answer.latencies_us) == {3e6 / 64}
    assert len(answer.latencies_us) == 16
    assert answer.seconds == 18 / 64  # what is in flight at the end is awaited
    assert answer.cpu_s == 5 * 18 / 64


def test_a_target_slower_than_the_run_counts_nothing_and_ends() -> None:
    mover = Clocked()
    order = Order("read", depth=2, ramp_s=0.0, run_s=1 / 128)
    answer = drive(mover, 8, order, random.Random(1), lambda: mover.now_s, lambda: 0.0)
    assert len(answer.latencies_us) == 2, "jobs submitted in time are awaited and counted"
    order = Order("read", depth=2, ramp_s=1 / 256, run_s=1 / 256)
    answer = drive(mover, 8, order, random.Random(1), lambda: mover.now_s, lambda: 0.0)
    assert answer.latencies_us == []


def places_of(targets: Sequence[str], throttle: int) -> tuple[Place, Place]:
    return Settings(target=tuple(targets), throttle=throttle).places


def test_two_targets_are_listed_and_a_stand_in_is_marked(tmp_path: Path) -> None:
    one, two = places_of([f"disk={tmp_path}"], 0)
    assert (one.name, one.mb_per_s) == ("disk", None)
    assert STAND_IN in two.name
    assert two.mb_per_s == 100
    one, two = places_of([f"a={tmp_path}", f"b={tmp_path}"], 0)
    assert (two.name, two.mb_per_s) == ("b", None)
    one, two = places_of([f"a={tmp_path}", f"b={tmp_path}"], 50)
    assert STAND_IN in two.name
    for wrong in ([], ["a"], ["=x"], ["a=x", "a=y"], ["a=x", "b=y", "c=z"]):
        with pytest.raises(BenchError, match="NAME=DIRECTORY"):
            places_of(wrong, 0)


def made_up(target: str, arm: str, mean_us: Sequence[float]) -> list[Sample]:
    """MADE-UP samples, one per round, at two sizes. None was measured."""
    return [
        Sample(target, arm, "read", size, 1, 4, number, 1000, value, value / 2, 9 * value, 5.0, 0.2)
        for size in (4 * KIB, 512 * KIB)
        for number, value in enumerate(mean_us)
    ]


def everything() -> list[Sample]:
    return [
        *made_up("disk", "fio", [100.0, 90.0, 400.0]),
        *made_up("disk", "ours", [130.0, 150.0, 120.0]),
        *made_up("fabric", "fio", [125.0] * 3),
        *made_up("fabric", "ours", [160.0] * 3),
    ]


def side(target: str, arm: str) -> dict[str, object]:
    return {"target": target, "arm": arm}


def test_added_latency_is_computed_from_medians_and_the_first_arm() -> None:
    samples = everything()
    point = Point("read", 4 * KIB, 1, 4)
    assert point in points_of(samples)
    assert distinct(samples, "target") == ["disk", "fabric"]
    found = added(samples, side("disk", "fio"), side("fabric", "fio"), point, "mean_us")
    assert found is not None
    assert (found.us, found.per_cent) == (25.0, 25.0)
    found = added(samples, side("disk", "fio"), side("disk", "ours"), point, "mean_us")
    assert found is not None
    assert (found.us, found.per_cent) == (30.0, 30.0)
    assert added(samples, side("disk", "fio"), side("none", "fio"), point, "mean_us") is None


TRACE = """
 ring-7 [0] . 10.000001: io_uring_submit_req: ring 01, req 02, user_data 0xa, opcode READ_FIXED
 ring-7 [0] . 10.000002: block_bio_queue: 254,0 RS 5200 + 16 [ring]
 ring-7 [0] . 10.000003: io_uring_submit_req: ring 01, req 03, user_data 0x0, opcode READ
 ring-7 [0] . 10.000004: io_uring_submit_req: ring 01, req 04, user_data 0xb, opcode READ_FIXED
 ring-7 [0] . 10.000005: block_bio_queue: 254,0 RS 6400 + 16 [ring]
 ring-7 [0] . 10.000006: block_rq_issue: 254,0 RS 8192 () 6400 + 16
 ring-7 [0] . 10.000007: block_rq_issue: 254,0 RS 8192 () 5200 + 16
 ring-8 [1] . 10.000008: io_uring_submit_req: ring 09, req 09, user_data 0xa, opcode READ_FIXED
 other-9 [1] s 10.000008: block_rq_issue: 254,0 WS 8192 () 7777 + 16
 other-9 [1] s 10.000020: block_rq_complete: 254,0 RS () 5200 + 16
 ring-7 [0] . 10.000030: io_uring_complete: ring 01, req 02, user_data 0xa, result 8192
 ring-7 [0] . 10.000031: io_uring_complete: ring 01, req 03, user_data 0x0, result 8
"""


def test_the_events_of_a_read_are_found_in_a_trace() -> None:
    first, second = kernel_times(TRACE, ["7"])
    assert [round(ns - 1e10) for ns in first] == [1000, 7000, 20_000, 30_000]
    assert [round(ns - 1e10) for ns in second[:2]] == [4000, 6000]
    assert all(map(math.isnan, second[2:])), "its request has not completed"


def test_stages_are_shown_by_depth() -> None:
    where = {"payload_bytes": 4 * KIB, "stage": "read by the disk"}
    stages = [
        {**where, "depth": depth, "round": number, "us": us}
        for depth, times in ((1, (50, 60, 55)), (16, (200, 100, 300)))
        for number, us in enumerate(times)
    ]
    tables = [
        one
        for one in REPORTS[0].parts(everything(), {"stages": stages}, [])
        if isinstance(one, Table) and one.title.startswith("stages of a read of 4 KiB")
    ]
    ((columns, rows),) = [([one.name for one in each.columns], each.cells) for each in tables]
    assert columns == ["stage", "depth 1", "depth 16"]
    assert ["read by the disk", "55.0", "200.0"] in [list(row) for row in rows]
    assert ["caller woken", "–", "–"] in [list(row) for row in rows]


def test_ours_is_as_expected_where_it_adds_the_same_on_both_targets() -> None:
    rounds = [0.0, 1.0, 2.0, 3.0, 4.0]
    samples = [
        *made_up("disk", "fio", [100 + one for one in rounds]),
        *made_up("disk", "ours", [150 + one for one in rounds]),
        *made_up("fabric", "fio", [350 + one for one in rounds]),
        *made_up("fabric", "ours", [400 + one for one in rounds]),
    ]
    point = Point("read", 4 * KIB, 1, 4)
    same = as_expected(samples, point)
    assert same is not None
    assert (same.middle, same.n) == (pytest.approx(1.0), 5)
    more = [*samples[:-10], *made_up("fabric", "ours", [440 + one for one in rounds])]
    found = as_expected(more, point)
    assert found is not None
    assert found.interval is not None
    assert 1.098 < found.interval[0] <= found.middle <= found.interval[1] <= 1.1


def test_a_real_run_measures_every_arm_and_leaves_nothing(tmp_path: Path) -> None:
    settings = Settings(
        target=(f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"),
        jobs=(2,),
        depths=(2,),
        slot_bytes=4 * KIB,
        rounds=1,
        run_s=0.5,  # 0.05 s were too short beside other work
        job_bytes=1 << 20,
    )
    kept: list[tuple[list[Sample], dict[str, object]]] = []
    try:
        run(settings, lambda *found: kept.append(found))
    except BenchError as error:
        if "fio is not installed" in str(error) or 'io_engine="uring"' in str(error):
            pytest.skip(str(error))
        raise
    samples, conditions = kept[-1]
    found = [(one.target, one.arm) for one in samples]
    assert found == [("a", "fio"), ("a", "ours"), ("b", "fio"), ("b", "ours")]
    for one in samples:
        assert 0 < one.p50_us <= one.p99_us
        assert one.operations > 0
    assert str(tmp_path) not in json.dumps(conditions)
    assert list(tmp_path.iterdir()) == []
