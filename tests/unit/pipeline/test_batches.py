# SPDX-License-Identifier: Apache-2.0
"""Batches of many rows: each is reported once, released once, and cancelled by itself."""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pytest

from tests.chunks import Reported, batch_of, place_in
from vllm_nvmeof_offload.copy.base import Pieces
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, STALE, io_error
from vllm_nvmeof_offload.protocol import (
    FetchCommand,
    LoadCommand,
    OpReport,
    OpReports,
    StoreCommand,
    WriteCommand,
    unpacked,
)

from .bench import PIECES, READ_S, WRITE_S, Bench, identity


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
        "store": lambda: bench.pipeline.store(
            StoreCommand(1, batch), Pieces.of(PIECES * 2), "fence"
        ),
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
        bench.pipeline.load(LoadCommand(1, batch), Pieces.of(PIECES * 3), "fence")
