# SPDX-License-Identifier: Apache-2.0
"""Chunks through the pipeline: order, identity, checks, batches, streaming, and counters."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import pytest

from tests.chunks import Reported, batch_of, begin, place_in
from vllm_nvmeof_offload.copy.base import Direction
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
    StoreCommand,
    WriteCommand,
    unpacked,
)
from vllm_nvmeof_offload.units import HEADER_BYTES

from .bench import READ_S, STRIDE, Bench, identity, whole_blocks


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


# -- calls of the copy engine: one for all fences that have passed, one for each that has not


# -- batches of many rows: each is reported, released and cancelled by itself ---------


def _finish_copies(bench: Bench) -> None:
    for ticket in list(bench.copy.open):
        bench.copy.finish(ticket)
    bench.pipeline.step()


# -- reports in parts -----------------------------------------------------------------


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


# -- cancels of some rows -------------------------------------------------------------


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


# -- bytes, time and queue lengths ----------------------------------------------------


def test_a_failed_read_moves_no_bytes() -> None:
    bench = Bench()
    bench.load(1, 8, None, 3)
    bench.io_done(io_error(errno.ENODATA))
    assert bench.pipeline.counters["transfer_operations", "load", "pool"] == 1
    assert bench.pipeline.counters["transfer_bytes", "load", "pool"] == 0
