# SPDX-License-Identifier: Apache-2.0
"""A chunk through the pipeline: order, identity, checks."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from tests.chunks import Reported, batch_of
from vllm_nvmeof_offload.copy.base import Direction, Pieces
from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH, STALE, Outcome, io_error
from vllm_nvmeof_offload.protocol import LoadCommand, OpReport, StoreCommand
from vllm_nvmeof_offload.units import HEADER_BYTES

from .bench import PIECES, STRIDE, Bench, identity


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


def test_a_load_of_a_slot_that_is_being_stored_waits_for_the_copy() -> None:
    bench = Bench()
    bench.store(1, slot=0, number=7)
    bench.load(2, 7, cache=0, pool=None)
    assert len(bench.copy.submitted) == 1
    bench.copy.finish(0)
    bench.pipeline.step()
    assert bench.copy.submitted[1][1] is Direction.LOAD


def test_a_load_of_a_failed_store_is_stale() -> None:
    bench = Bench()
    bench.store(1, slot=0, number=7)
    bench.load(2, 7, cache=0, pool=None)
    bench.copy.finish(0, io_error(errno.EFAULT))
    bench.pipeline.step()
    assert bench.reports() == [
        Reported(2, 0, STALE),
        Reported(1, 0, io_error(errno.EFAULT)),
    ]


@pytest.mark.parametrize("kind", ["load", "write"])
def test_a_slot_whose_last_fill_is_of_another_chunk_is_a_broken_invariant(kind: str) -> None:
    """It would look like a chunk that is gone, and hide a command that came before its fill."""
    bench = Bench()
    bench.stored(1, slot=0, number=7)
    begin = bench.load if kind == "load" else bench.write
    with pytest.raises(AssertionError, match="no such fill"):
        begin(2, 8, cache=0, pool=None if kind == "load" else 5)
    assert len(bench.copy.submitted) == 1
    assert not bench.io.started


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
    nothing = Pieces.of([np.empty((0, 3), np.uint64)])
    batch = batch_of((identity(7), 0, None), group=1)
    if kind == "store":
        bench.pipeline.store(StoreCommand(2, batch), nothing, "fence")
    else:
        bench.pipeline.load(LoadCommand(2, batch), nothing, "fence")
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
        if kind == "store":
            bench.pipeline.store(StoreCommand(op, batch), Pieces.of(PIECES), fence)
        else:
            bench.pipeline.load(LoadCommand(op, batch), Pieces.of(PIECES), fence)


def _payloads(*slots: int) -> list[int]:
    return [slot * STRIDE + HEADER_BYTES for slot in slots]


def test_chunks_whose_fences_have_passed_are_one_call_and_others_one_for_each_fence() -> None:
    bench = Bench(cache_slots=8)
    _begin(bench, (0, "store", "a"), (1, "store", "b"), (2, "store", "c"), (3, "store", "c"))
    _begin(bench, (4, "store", "d"), (5, "store", None))
    bench.copy.passed = {"a", "b"}
    bench.pipeline.step()
    assert bench.copy.submitted == [
        (0, Direction.STORE, _payloads(0, 1, 5), None),
        (1, Direction.STORE, _payloads(2, 3), "c"),
        (2, Direction.STORE, _payloads(4), "d"),
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
        (Direction.LOAD, _payloads(0, 2), None),
        (Direction.STORE, _payloads(1, 3), None),
    ]


def test_large_jobs_whose_fences_have_passed_are_one_call() -> None:
    """However many bytes: the engine cuts what its driver does not take."""
    bench = Bench(cache_slots=2)
    bench.copy.passed = {"a", "b"}
    large = Pieces.of([np.array([[1 << 30, 0, 64 << 20]], np.uint64)])
    for op, fence in enumerate("ab"):
        batch = batch_of((identity(op), op, None))
        bench.pipeline.store(StoreCommand(op, batch), large, fence)
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
