# SPDX-License-Identifier: Apache-2.0
"""Chunks through the pipeline: order, identity, checks, batches, streaming, and counters."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chunks import Reported, batch_of, begin, geometry_of, place_in
from vllm_nvmeof_offload.copy.base import Direction
from vllm_nvmeof_offload.copy.geometry import CacheTensor
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    OK,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.protocol import (
    FetchCommand,
    LoadCommand,
    OpReport,
    OpReports,
    RateReport,
    StoreCommand,
    WriteCommand,
    unpacked,
)
from vllm_nvmeof_offload.units import HEADER_BYTES

from .bench import READ_S, STRIDE, WRITE_S, Bench, identity, whole_blocks


def test_a_store_is_done_when_copied_and_not_before() -> None:
    bench = Bench()
    bench.store(1, slot=2, number=7)
    assert bench.copy.submitted == [(0, Direction.STORE, [2 * STRIDE + HEADER_BYTES], "fence")]
    assert bench.reports() == []
    assert bench.finished() == []
    bench.copy.finish(0)
    bench.pipeline.step()
    assert bench.reports() == [Reported(1)]
    assert bench.finished() == [(1, ())]
    assert bench.idle()


def test_a_report_carries_the_time_it_took() -> None:
    bench = Bench()
    bench.store(1, slot=2, number=7)
    bench.now_s += 0.25
    bench.copy.finish(0)
    bench.pipeline.step()
    (report,) = bench.take()
    assert isinstance(report, OpReport)
    assert report.seconds == pytest.approx(0.25)


def test_a_fetch_ends_when_its_read_ended_and_not_when_it_was_polled() -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=0, cache=0)
    bench.pipeline.step()
    bench.now_s += 0.75
    bench.io.complete(bench.io_of(0), ended_s=0.25)
    bench.pipeline.step()
    (report,) = [r for r in bench.take() if isinstance(r, OpReport)]
    assert report.seconds == pytest.approx(0.25)


def test_a_load_whose_own_copy_fails_has_its_error() -> None:
    bench = Bench()
    bench.stored(1, slot=0, number=7)
    bench.finished()
    bench.load(2, 7, cache=0, pool=None)
    bench.copy.finish(1, io_error(errno.EIO))
    bench.pipeline.step()
    assert bench.reports() == [Reported(2, 0, io_error(errno.EIO))]
    assert bench.finished() == [(2, ((0, io_error(errno.EIO)),))]


@pytest.mark.parametrize("kind", ["load", "write"])
def test_a_slot_whose_fill_failed_is_stale_and_untouched(kind: str) -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    bench.io_done(CHECKSUM_MISMATCH)
    bench.reports()
    if kind == "load":
        bench.load(2, 7, cache=0, pool=None)
    else:
        bench.write(2, 7, cache=0, pool=5)
        bench.pipeline.step()
    assert bench.reports() == [Reported(2, 0, STALE)]
    assert not bench.copy.submitted
    assert len(bench.io.started) == 1


@pytest.mark.parametrize("outcome", [CHECKSUM_MISMATCH, STALE, io_error(errno.EINVAL)])
def test_a_failed_read_is_not_copied(outcome: Outcome) -> None:
    bench = Bench()
    bench.load(1, 7, cache=None, pool=3)
    bench.io_done(outcome)
    assert not bench.copy.submitted
    assert bench.reports() == [Reported(1, 0, outcome)]
    assert bench.finished() == [(1, ((0, outcome),))]
    assert bench.idle()


def test_a_retryable_read_error_is_tried_once_more() -> None:
    bench = Bench()
    bench.load(1, 7, cache=None, pool=3)
    bench.io_done(io_error(errno.EIO))
    assert len(bench.io.started) == 2
    bench.io_done(io_error(errno.EIO))
    assert bench.reports() == [Reported(1, 0, io_error(errno.EIO))]


def test_a_write_is_not_retried() -> None:
    bench = Bench()
    bench.stored(1, slot=0, number=7)
    bench.write(2, 7, cache=0, pool=5)
    bench.pipeline.step()
    bench.io_done(io_error(errno.EIO))
    assert bench.reports() == [Reported(2, 0, io_error(errno.EIO))]
    assert len(bench.io.started) == 1


def test_a_landed_chunk_can_be_read_by_others_while_it_is_copied() -> None:
    bench = Bench()
    bench.load(1, 7, cache=0, pool=3)
    bench.load(2, 7, cache=0, pool=None)
    assert not bench.copy.submitted
    bench.io_done()
    ((ticket, direction, *_),) = bench.copy.submitted  # of both
    assert direction is Direction.LOAD
    bench.copy.finish(ticket)
    bench.pipeline.step()
    assert set(bench.reports()) == {Reported(1), Reported(2)}
    assert bench.idle()


@pytest.mark.parametrize("kind", ["store", "load"])
def test_chunks_of_a_group_without_bytes_are_copied_too(kind: str) -> None:
    """Their copy waits for the fence and for copies before it, as any other."""
    bench = Bench()
    if kind == "load":
        bench.stored(1, slot=0, number=7)
    batch = batch_of((identity(7), 0, None), group=1)
    bench.begin(StoreCommand(2, batch) if kind == "store" else LoadCommand(2, batch))
    bench.pipeline.step()
    ticket, _, pieces, _ = bench.copy.submitted[-1]
    assert pieces == []
    bench.copy.finish(ticket)
    bench.pipeline.step()
    assert (2, ()) in bench.finished()


# -- calls of the copy engine: one for all fences that have passed, one for each that has not


def _begin(bench: Bench, *jobs: tuple[int, str, object]) -> None:
    """Begin jobs (op, kind, fence) of one chunk, in the slot of the op's number; nothing moves."""
    for op, kind, fence in jobs:
        batch = batch_of((identity(op), op, None))
        bench.begin(StoreCommand(op, batch) if kind == "store" else LoadCommand(op, batch), fence)


def _addresses(*slots: int) -> list[int]:
    return [slot * STRIDE + HEADER_BYTES for slot in slots]


def test_chunks_whose_fences_have_passed_are_one_call_and_others_one_for_each_fence() -> None:
    bench = Bench(cache_slots=8)
    _begin(bench, (0, "store", "a"), (1, "store", "b"), (2, "store", "c"), (3, "store", "c"))
    _begin(bench, (4, "store", "d"), (5, "store", None))
    bench.copy.passed = {"a", "b"}
    bench.pipeline.step()
    assert bench.copy.submitted == [
        (0, Direction.STORE, _addresses(0, 1, 5), None),
        (1, Direction.STORE, _addresses(2, 3), "c"),
        (2, Direction.STORE, _addresses(4), "d"),
    ]


def test_loads_and_stores_by_turns_are_one_call_in_each_direction() -> None:
    bench = Bench(cache_slots=8)
    for op in (0, 2):
        bench.stored(op + 100, slot=op, number=op)
    bench.copy.passed = {"fence", "a"}
    del bench.copy.submitted[:]
    _begin(bench, (0, "load", "a"), (1, "store", "a"), (2, "load", "a"), (3, "store", "a"))
    bench.pipeline.step()
    assert [one[1:] for one in bench.copy.submitted] == [
        (Direction.LOAD, _addresses(0, 2), None),
        (Direction.STORE, _addresses(1, 3), None),
    ]


def test_large_jobs_whose_fences_have_passed_are_one_call() -> None:
    """However many bytes: the engine cuts what its driver does not take."""
    bench = Bench(cache_slots=2)
    bench.copy.passed = {"a", "b"}
    large = geometry_of([CacheTensor(1 << 30, 64 << 20, 64 << 20, 1)])
    for op, fence in enumerate("ab"):
        batch = batch_of((identity(op), op, None))
        begin(bench.pipeline, large, StoreCommand(op, batch), [0], fence)
    bench.pipeline.step()
    assert len(bench.copy.submitted) == 1


def test_only_the_oldest_open_fence_is_asked_and_none_that_has_passed() -> None:
    bench = Bench(cache_slots=8)
    _begin(bench, (0, "store", "a"), (1, "store", "b"))
    bench.pipeline.step()
    assert bench.copy.asked == ["a"]
    bench.copy.passed = {"a", "b"}
    bench.pipeline.step()
    assert bench.copy.asked == ["a", "a", "b"]
    _begin(bench, (2, "store", "b"))  # as for a job that comes late
    bench.pipeline.step()
    assert bench.copy.asked == ["a", "a", "b"]
    assert [fence for *_, fence in bench.copy.submitted] == ["a", "b", None]


# -- batches of many rows: each is reported, released and cancelled by itself ---------


def _op_reports(bench: Bench) -> list[OpReport]:
    return [report for report in bench.take() if isinstance(report, OpReport)]


def _finish_copies(bench: Bench) -> None:
    for ticket in list(bench.copy.open):
        bench.copy.finish(ticket)
    bench.pipeline.step()


# -- reports in parts -----------------------------------------------------------------


def test_the_rows_of_a_fetch_are_reported_as_their_reads_end() -> None:
    bench = Bench(cache_slots=3)
    bench.fetch_chunks(1, [(7, 0, 10), (8, 1, 11), (9, 2, 12)])
    bench.pipeline.step()
    bench.io.complete(bench.io_of(11))
    bench.pipeline.step()
    assert bench.reports() == [Reported(1, 1)]
    assert not bench.pipeline.idle()
    bench.io.complete(bench.io_of(12))
    bench.io.complete(bench.io_of(10))
    bench.pipeline.step()
    assert bench.reports() == [Reported(1, 0), Reported(1, 2)], "in the order of their rows"
    assert bench.idle()
    assert bench.reports() == []


def test_a_report_has_only_the_columns_that_say_something() -> None:
    bench = Bench(cache_slots=4)
    bench.fetch_chunks(1, [(n, n, n) for n in range(4)])
    bench.pipeline.step()
    bench.io.complete(bench.io_of(0))
    bench.pipeline.step()
    (partial,) = _op_reports(bench)
    assert partial.indexes is not None
    assert (partial.indexes.dtype, partial.indexes.tolist()) == (np.uint32, [0])
    assert (partial.codes, partial.errnos, partial.released) == (None, None, None)
    bench.io.complete(bench.io_of(3))
    bench.io.complete(bench.io_of(1), io_error(errno.ENODATA))
    bench.hang()
    (failed,) = _op_reports(bench)
    columns = failed.indexes, failed.codes, failed.errnos, failed.released
    assert [column.dtype for column in columns if column is not None] == [
        np.uint32,
        np.uint8,
        np.int16,
        np.uint8,
    ]
    assert [column.tolist() for column in columns if column is not None] == [
        [1, 2, 3],
        [1, 4, 0],
        [errno.ENODATA, 0, 0],
        [1, 0, 1],
    ]


def test_a_report_of_all_rows_at_once_names_none() -> None:
    bench = Bench()
    bench.fetch_chunks(1, [(n, n, n) for n in range(4)])
    bench.pipeline.step()
    for token in list(bench.io.ops):
        bench.io.complete(token)
    bench.pipeline.step()
    (report,) = _op_reports(bench)
    assert (report.indexes, report.codes) == (None, None)


def test_each_part_of_a_report_carries_the_time_of_its_last_outcome() -> None:
    bench = Bench(cache_slots=4)
    bench.fetch_chunks(1, [(n, n, 10 + n) for n in range(4)])
    bench.pipeline.step()
    bench.now_s = 1.0
    bench.io.complete(bench.io_of(10), ended_s=0.75)
    bench.io.complete(bench.io_of(11), ended_s=0.5)
    bench.pipeline.step()
    assert [report.seconds for report in _op_reports(bench)] == [0.75]
    bench.io.complete(bench.io_of(12), ended_s=0.25)
    bench.pipeline.step()
    assert [report.seconds for report in _op_reports(bench)] == [0.25]
    bench.now_s = 2.0
    bench.cancel(1, 3)
    assert [report.seconds for report in _op_reports(bench)] == [2.0]


def test_ops_that_end_well_side_by_side_are_one_report() -> None:
    bench = Bench(cache_slots=5)
    for op in range(1, 6):
        bench.fetch_chunks(op, [(op, op - 1, op)])
    bench.pipeline.step()
    for op in range(1, 6):
        outcome = io_error(errno.ENODATA) if op == 3 else OK
        bench.io.complete(bench.io_of(op), outcome, ended_s=0.25 * op)
    bench.pipeline.step()
    before, failed, after, *_ = bench.pipeline.take_reports()
    assert isinstance(before, OpReports) and isinstance(after, OpReports)
    assert before.columns() == ([1, 2], [0.25, 0.5])
    assert after.columns() == ([4, 5], [1.0, 1.25])
    assert isinstance(failed, OpReport)
    assert (failed.op, failed.seconds) == (3, 0.75)
    each = list(unpacked([before, failed, after]))
    assert [one.op for one in each if isinstance(one, OpReport)] == [1, 2, 3, 4, 5]
    assert [one.codes for one in each if one is not failed] == [None] * 4  # type: ignore[union-attr]


def test_a_store_is_reported_when_all_of_it_is_finished() -> None:
    bench = Bench(cache_slots=2)
    bench.stored(1, slot=0, number=7)
    bench.load(2, 7, cache=0, pool=None)  # its copy holds the first slot
    bench.store_chunks(3, [(8, 0), (9, 1)])
    bench.pipeline.step()
    loading, storing = (ticket for ticket, *_ in bench.copy.submitted[1:])
    bench.copy.finish(storing, io_error(errno.EFAULT))
    bench.pipeline.step()
    assert bench.finished() == [(1, ())]
    assert bench.reports() == [], "vLLM would learn of the failure too late"
    bench.copy.finish(loading)
    bench.pipeline.step()
    _finish_copies(bench)
    assert bench.finished() == [(2, ()), (3, ((1, io_error(errno.EFAULT)),))]
    assert bench.reports() == [
        Reported(2),
        Reported(3, 0),
        Reported(3, 1, io_error(errno.EFAULT)),
    ]
    assert bench.idle()


def test_a_load_is_reported_when_all_of_it_is_finished() -> None:
    bench = Bench(stream_slots=1)
    bench.stream(1, [3, 4])
    bench.pipeline.step()
    bench.io_done(io_error(errno.ENODATA))
    assert bench.finished() == []
    assert bench.reports() == [], "vLLM would learn of the failure too late"
    bench.turn()
    assert bench.finished() == [(1, ((0, io_error(errno.ENODATA)),))]
    assert bench.reports() == [Reported(1, 0, io_error(errno.ENODATA)), Reported(1, 1)]
    assert bench.idle()


def test_the_failures_of_a_load_are_in_the_order_of_its_rows() -> None:
    bench = Bench(stream_slots=3)
    bench.stream(1, [3, 4, 5])
    bench.pipeline.step()
    for number in (5, 4, 3):
        bench.io.complete(bench.io_of(number), io_error(errno.ENODATA))
        bench.pipeline.step()
    ((_, failures),) = bench.finished()
    assert [row for row, _ in failures] == [0, 1, 2]


# -- one hung row ---------------------------------------------------------------------


def test_a_hung_row_holds_its_own_slot_only() -> None:
    bench = Bench(cache_slots=3)
    bench.fetch_chunks(1, [(7, 0, 10), (8, 1, 11), (9, 2, 12)])
    bench.pipeline.step()
    hung = bench.io_of(11)
    bench.io.complete(bench.io_of(10))
    bench.io.complete(bench.io_of(12))
    bench.hang()
    assert [one for one in bench.reports() if isinstance(one, Reported)] == [
        Reported(1, 0),
        Reported(1, 1, DEADLINE, released=False),
        Reported(1, 2),
    ]
    bench.store_chunks(2, [(20, 0), (21, 2)])
    bench.store_chunks(3, [(22, 1)])
    bench.pipeline.step()
    _finish_copies(bench)
    assert bench.finished() == [(2, ())], "only the third has to wait for its slot"
    bench.io.complete(hung)
    bench.pipeline.step()
    assert Reported(1, 1, None) in bench.reports()
    _finish_copies(bench)
    assert bench.finished() == [(3, ())]
    assert bench.idle()


def test_rows_that_are_released_late_are_reported_one_by_one() -> None:
    bench = Bench(cache_slots=2)
    for slot in (0, 1):
        bench.stored(1 + slot, slot, number=slot)
    bench.write_chunks(9, [(0, 0, 10), (1, 1, 11)])
    bench.pipeline.step()
    tokens = [bench.io_of(10), bench.io_of(11)]
    bench.hang(WRITE_S)
    assert [one.released for one in bench.reports() if isinstance(one, Reported)] == [False] * 2
    for token, row in zip(reversed(tokens), (1, 0), strict=True):
        bench.io.complete(token)
        bench.pipeline.step()
        assert Reported(9, row, None) in bench.reports()
    assert bench.idle()


def test_a_release_before_the_rest_of_a_load_is_reported_after_its_outcome() -> None:
    bench = Bench(cache_slots=2, target_count=2)
    bench.io.room_max = 1
    bench.load_chunks(1, [(7, 0, 11), (8, 1, 10)])
    bench.pipeline.step()
    hung = bench.io_of(11)
    bench.now_s = 1.0
    bench.pipeline.step()  # the other one begins later
    bench.hang(READ_S - 1.0)
    bench.io.complete(hung)
    bench.pipeline.step()
    assert not [one for one in bench.reports() if isinstance(one, Reported)]
    bench.turn(target_count=2)
    assert [one for one in bench.reports() if isinstance(one, Reported)] == [
        Reported(1, 0, DEADLINE),
        Reported(1, 1),
    ]
    assert bench.idle()


# -- cancels of some rows -------------------------------------------------------------


def test_only_the_named_rows_of_a_fetch_are_cancelled() -> None:
    """Row 0 is with the engine, rows 1 and 2 are queued, row 3 waits for its cache slot."""
    bench = Bench(cache_slots=4, reads_in_flight_max=1)
    bench.store(9, slot=3, number=20)
    bench.fetch_chunks(1, [(7, 0, 10), (8, 1, 11), (9, 2, 12), (10, 3, 13)])
    bench.pipeline.step()
    bench.cancel(1, 1, 3)
    bench.pipeline.step()
    assert bench.reports() == [Reported(1, 1, CANCELLED), Reported(1, 3, CANCELLED)]
    assert bench.io.cancelled == []
    while bench.turn():
        pass
    assert [bench.number(op) for op in bench.io.started] == [10, 12]
    reported = [one for one in bench.reports() if isinstance(one, Reported)]
    assert [one for one in reported if one.op == 1] == [Reported(1, 0), Reported(1, 2)]
    assert bench.idle()


def test_a_cancelled_row_with_the_engine_keeps_its_slot_and_the_others_their_reads() -> None:
    bench = Bench(cache_slots=2, reads_in_flight_max=4)
    bench.fetch_chunks(1, [(7, 0, 10), (8, 1, 11)])
    bench.pipeline.step()
    cut = bench.io_of(10)
    bench.cancel(1, 0)
    bench.cancel(1, 0)
    assert bench.io.cancelled == [cut], "once"
    assert bench.reports() == [Reported(1, 0, CANCELLED, released=False)]
    bench.io.complete(bench.io_of(11), io_error(errno.EIO))
    bench.pipeline.step()
    bench.io.complete(bench.io_of(11))
    bench.pipeline.step()
    assert bench.reports() == [Reported(1, 1)], "a row that was not cancelled is tried again"
    bench.io.complete(cut, io_error(errno.EIO))
    bench.pipeline.step()
    assert bench.reports() == [Reported(1, 0, None)], "a cancelled one is not"
    assert bench.idle()


def test_a_cancel_of_decided_rows_and_of_an_op_that_is_over_does_nothing() -> None:
    bench = Bench(cache_slots=2)
    bench.fetch_chunks(1, [(7, 0, 10), (8, 1, 11)])
    bench.pipeline.step()
    bench.io.complete(bench.io_of(10))
    bench.pipeline.step()
    bench.cancel(1, 0)
    assert bench.reports() == [Reported(1, 0)]
    bench.turn()
    assert bench.reports() == [Reported(1, 1)]
    bench.cancel(1, 0, 1)
    bench.cancel(1)
    assert bench.reports() == []
    assert bench.idle()


def test_a_store_ignores_a_cancel_of_its_rows() -> None:
    bench = Bench()
    bench.store_chunks(1, [(7, 0), (8, 1)])
    bench.cancel(1, 0)
    bench.pipeline.step()
    _finish_copies(bench)
    assert bench.finished() == [(1, ())]


# -- rows of a load without slot and place --------------------------------------------


def test_rows_of_a_load_whose_chunks_are_gone_are_stale_and_touch_nothing() -> None:
    bench = Bench(stream_slots=2)
    bench.stored(1, slot=0, number=7)
    bench.finished()
    bench.load_chunks(2, [(7, 0, None), (8, None, None), (9, None, 4), (10, None, None)])
    bench.pipeline.step()
    assert [bench.number(op) for op in bench.io.started] == [4]
    assert bench.reports() == []
    bench.turn()
    assert [len(pieces) for _, _, pieces, _ in bench.copy.submitted[1:]] == [1, 1]
    assert bench.finished() == [(2, ((1, STALE), (3, STALE)))]
    assert bench.reports() == [
        Reported(2, 0),
        Reported(2, 1, STALE),
        Reported(2, 2),
        Reported(2, 3, STALE),
    ]
    assert bench.idle()


def test_a_load_of_nothing_but_gone_chunks_ends_at_once() -> None:
    bench = Bench()
    bench.load_chunks(1, [(7, None, None), (8, None, None)])
    assert bench.finished() == [(1, ((0, STALE), (1, STALE)))]
    assert bench.reports() == [Reported(1, 0, STALE), Reported(1, 1, STALE)]
    assert not bench.io.started
    assert not bench.copy.submitted
    assert bench.idle()


# -- commands that no manager sends ---------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cache", "place"),
    [
        ("store", None, None),
        ("store", 0, 3),
        ("write", None, 3),
        ("write", 0, None),
        ("fetch", None, 3),
        ("fetch", 0, None),
    ],
)
def test_a_row_without_what_its_command_needs_is_a_broken_invariant(
    kind: str, cache: int | None, place: int | None
) -> None:
    """Otherwise bytes that were never read would count as the chunk's."""
    bench = Bench()
    batch = batch_of(
        (identity(7), 1, None if kind == "store" else place_in(2)),
        (identity(8), cache, None if place is None else place_in(place)),
    )
    calls: dict[str, Callable[[], None]] = {
        "store": lambda: bench.begin(StoreCommand(1, batch)),
        "write": lambda: bench.pipeline.command(WriteCommand(1, batch)),
        "fetch": lambda: bench.pipeline.command(FetchCommand(1, batch)),
    }
    with pytest.raises(AssertionError):
        calls[kind]()
    assert not bench.copy.submitted
    assert not bench.io.started


def test_blocks_for_another_number_of_rows_are_a_broken_invariant() -> None:
    bench = Bench()
    batch = batch_of((identity(7), 0, None), (identity(8), 1, None))
    with pytest.raises(AssertionError):
        begin(bench.pipeline, whole_blocks(), LoadCommand(1, batch), range(3), "fence")


# -- loads of any size through a bounded number of stream slots -----------------------


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


# -- bytes, time and queue lengths ----------------------------------------------------


def test_a_store_and_a_load_are_metered_by_stage() -> None:
    bench = Bench()
    bench.store(1, 0, 7)
    bench.now_s += 0.25
    bench.copy.finish(bench.copy.submitted[-1][0])
    bench.pipeline.step()
    counters = bench.pipeline.counters
    assert counters["transfer_operations", "store", "gpu"] == 1
    assert counters["transfer_seconds", "store", "gpu"] == 0.25
    assert counters["transfer_bytes", "store", "gpu"] > 0
    bench.load(2, 8, None, 3)
    bench.now_s += 0.5
    bench.io_done()
    counters = bench.pipeline.counters
    assert counters["transfer_seconds", "load", "pool"] == 0.5
    assert counters["transfer_bytes", "load", "pool"] == STRIDE
    assert counters["transfer_operations", "load", "gpu"] == 0, "its copy is under way"


def test_a_failed_read_moves_no_bytes() -> None:
    bench = Bench()
    bench.load(1, 8, None, 3)
    bench.io_done(io_error(errno.ENODATA))
    assert bench.pipeline.counters["transfer_operations", "load", "pool"] == 1
    assert bench.pipeline.counters["transfer_bytes", "load", "pool"] == 0


def test_queue_lengths_come_with_other_reports_and_end_at_zero() -> None:
    bench = Bench(stream_slots=2, reads_in_flight_max=1)
    bench.stream(1, range(4))
    bench.pipeline.step()
    bench.store(2, 0, 7)
    bench.copy.finish(bench.copy.submitted[-1][0])
    bench.pipeline.step()
    bench.reports()
    (level,) = bench.levels
    assert (level.stream_slots_used, level.stream_slot_waiting) == (2, 2)
    assert (level.reads_in_flight, level.read_waiting) == (1, 1)
    assert bench.pipeline.read_queues() == [(4 * STRIDE, 0.0)], "what is under way counts"
    while bench.turn():
        pass
    bench.reports()
    assert bench.pipeline.read_queues() == [(0, 0.0)]
    assert bench.levels[-1].read_waits_s == (0.0,)
    assert replace(bench.levels[-1], read_waits_s=()) == type(level)(0), (
        "the last report is of empty queues"
    )
