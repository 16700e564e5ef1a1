# SPDX-License-Identifier: Apache-2.0
"""Loads of any size through a bounded number of stream slots."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE
from vllm_nvmeof_offload.protocol import RateReport

from .bench import READ_S, STRIDE, Bench


def _place(address: int) -> int:
    return address // STRIDE


def test_a_load_eight_times_larger_than_staging_completes_within_bounds() -> None:
    bench = Bench(stream_slots=4, cache_slots=4, reads_in_flight_max=3)
    chunks = [(n, n if n < 4 else None, n) for n in range(8 * (4 + 4))]  # the first four land
    bench.load_chunks(1, chunks)
    bench.pipeline.step()
    read = {_place(op.address) for op in bench.io.started}
    while bench.turn():
        in_flight = [_place(op.address) for op in bench.io.ops.values()]
        assert len(in_flight) <= 3
        assert len(set(in_flight)) == len(in_flight)
        read |= set(in_flight)
    assert bench.finished() == [(1, ())]
    assert read == set(range(8)), "all of staging, and nothing beyond"
    assert sorted(bench.number(op) for op in bench.io.started) == list(range(64))
    assert len(bench.copy.submitted) > 1
    assert bench.idle()


def test_reads_and_copies_of_one_load_overlap() -> None:
    bench = Bench(stream_slots=4)
    bench.stream(1, range(8))
    bench.pipeline.step()
    assert len(bench.io.ops) == 4
    bench.io_done()
    assert len(bench.copy.submitted) == 1
    assert len(bench.io.ops) == 3, "the first is copied, the others are still being read"
    bench.io_done()
    assert len(bench.copy.submitted) == 2
    bench.copy.finish(0)
    bench.pipeline.step()
    assert len(bench.io.ops) == 3, "its stream slot is in use again while the second is copied"
    assert len(bench.copy.open) == 1


def test_within_a_load_the_order_is_kept() -> None:
    bench = Bench(stream_slots=3)
    bench.stream(1, range(20))
    bench.pipeline.step()
    while bench.turn():
        pass
    assert [bench.number(op) for op in bench.io.started] == list(range(20))


@pytest.mark.parametrize("landing", [False, True])
def test_a_small_load_does_not_wait_for_a_large_one(landing: bool) -> None:
    """Both through stream slots, or all of the large one's reads queued at once."""
    bench = Bench(stream_slots=8, cache_slots=400, reads_in_flight_max=8)
    bench.load_chunks(1, [(n, n if landing else None, n) for n in range(400)])
    bench.pipeline.step()
    bench.turn()
    bench.stream(2, range(1000, 1020))
    bench.pipeline.step()
    before = len(bench.io.started)
    while not (done := bench.finished()):
        assert bench.turn()
    assert done == [(2, ())]
    assert len(bench.io.started) - before <= 2 * 20 + 8, "half of the reads were its own"


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(1, 5), st.data())
def test_no_job_waits_while_another_holds_more(sizes, slots, data) -> None:  # type: ignore[no-untyped-def]
    """Any loads, ends in any order: a stream slot goes to the job that holds the fewest."""
    bench = Bench(stream_slots=slots)
    held = dict.fromkeys(range(len(sizes)), 0)
    left = dict(enumerate(sizes))
    seen = 0

    def see() -> None:
        nonlocal seen
        for op in bench.io.started[seen:]:
            job = bench.number(op) // 100
            assert held[job] == min(held[other] for other in held if left[other])
            held[job] += 1
            left[job] -= 1
        seen = len(bench.io.started)

    for job, size in enumerate(sizes):
        bench.stream(job, range(100 * job, 100 * job + size))
    bench.pipeline.step()
    see()
    while bench.io.ops:
        op = data.draw(st.sampled_from(list(bench.io.ops.values())))
        bench.io.complete(op.token)
        bench.pipeline.step()
        held[bench.number(op) // 100] -= 1
        for ticket in list(bench.copy.open):
            bench.copy.finish(ticket)
        bench.pipeline.step()
        see()
    assert not any(left.values())
    assert bench.idle()


def test_a_hung_target_holds_its_share_and_the_other_target_continues() -> None:
    bench = Bench(stream_slots=8, target_count=2)
    bench.stream(1, range(0, 100, 2))  # target 0, which does not answer
    bench.stream(2, range(1, 101, 2))
    bench.pipeline.step()
    while bench.turn([1], target_count=2):
        hung = [op for op in bench.io.ops.values() if bench.number(op) % 2 == 0]
        assert len(hung) == 4
    assert bench.finished() == [(2, ())]
    bench.hang()
    ((op, failures),) = bench.finished()
    assert (op, len(failures)) == (1, 50), "no task waits for a slot that may never return"
    bench.stream(3, [0])
    bench.stream(4, [1])
    bench.pipeline.step()
    assert bench.finished() == [(3, ((0, DEADLINE),))]
    assert bench.turn([1], target_count=2)
    assert bench.finished() == [(4, ())]
    for token in [t for t, op in bench.io.ops.items() if bench.number(op) % 2 == 0]:
        bench.io.complete(token)
    bench.pipeline.step()
    assert bench.idle()


def test_all_targets_are_served_with_fewer_stream_slots_than_targets() -> None:
    """Each target gets its turn; if the kernel holds all slots, no task waits."""
    bench = Bench(stream_slots=1, target_count=3)
    for target in range(3):
        bench.stream(target, [target, target + 3])
    bench.pipeline.step()
    while bench.turn([0, 1, 2], target_count=3):
        pass
    targets = [bench.number(op) % 3 for op in bench.io.started]
    assert targets == [targets[0], targets[1], targets[2]] * 2
    assert len(set(targets)) == 3
    bench.finished()
    for op in (11, 12):
        bench.stream(op, [op])
    bench.pipeline.step()
    bench.hang()
    assert [failures for _, failures in bench.finished()] == [((0, DEADLINE),)] * 2


def test_a_large_load_fails_as_a_whole_when_the_engine_is_full() -> None:
    bench = Bench(stream_slots=2)
    bench.io.busy = True
    bench.stream(1, range(100))
    bench.pipeline.step()
    bench.now_s = READ_S + 0.1
    bench.pipeline.step()
    ((op, failures),) = bench.finished()
    assert (op, len(failures)) == (1, 100)
    assert bench.idle()


def test_cancelling_a_huge_load_that_waits_is_linear() -> None:
    """The time of each row does not grow with the load, wherever its rows wait."""
    per_row = []
    for size, tries in ((500, 3), (16_000, 2)):
        benches = [Bench(8, 2 * size, reads_in_flight_max=8) for _ in range(tries)]
        per_row.append(min(_seconds_to_cancel(bench, size) for bench in benches) / size)
        for bench in benches:
            _check_cancelled(bench, size)
    assert per_row[1] < 10 * per_row[0], "a walk over what waits would cost 32 times as much"


def _seconds_to_cancel(bench: Bench, size: int) -> float:
    """Cancel two loads through stream slots and two that land, each of so many rows."""
    bench.stream(1, range(size))
    bench.load_chunks(2, [(n, n, n) for n in range(size)])
    bench.stream(3, range(size))
    bench.load_chunks(4, [(n, n, n) for n in range(size, 2 * size)])
    bench.pipeline.step()
    began_s = time.process_time()
    for op in (4, 3, 2, 1):
        bench.pipeline.cancel(op)
    return time.process_time() - began_s


def _check_cancelled(bench: Bench, size: int) -> None:
    finished = dict(bench.finished())
    assert [len(finished[op]) for op in (1, 2, 3, 4)] == [size] * 4
    assert {outcome for failures in finished.values() for _, outcome in failures} == {CANCELLED}
    while bench.turn():
        pass
    assert not [s for s in bench.copy.submitted if s[1] is Direction.LOAD]
    assert bench.idle()


def test_few_stream_slots_suffice_to_detect_that_a_target_became_slow() -> None:
    """The target never has more reads than the slots hold."""
    bench = Bench(stream_slots=2)
    rates = []
    for op, read_s in ((1, 1.0), (2, 4.0)):
        bench.stream(op, [0, 1])
        bench.pipeline.step()
        bench.now_s += read_s
        while bench.turn():
            pass
        rates += [r.read_bytes_per_s for r in bench.reports() if isinstance(r, RateReport)]
    assert rates == [2 * STRIDE, pytest.approx((2 * STRIDE + STRIDE / 2) / 2)]
