# SPDX-License-Identifier: Apache-2.0
"""The pipeline with hung targets, full engines, cancels and resets."""

from __future__ import annotations

import errno

import pytest

from tests.chunks import Reported
from vllm_nvmeof_offload.errors import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    DEADLINE,
    STALE,
    Outcome,
    io_error,
)
from vllm_nvmeof_offload.protocol import OpKind, ResetCommand, Verdict, VerdictReport
from vllm_nvmeof_offload.targets.health import TargetHealth

from .bench import NO_EPOCH, TAG, WRITE_S, Bench


def test_a_deadline_gives_the_outcome_at_once_and_the_slot_later() -> None:
    bench = Bench()
    bench.load(1, 7, cache=0, pool=3)
    bench.hang()
    assert bench.reports() == [
        Reported(1, 0, DEADLINE, released=False),
        VerdictReport(0, 0, Verdict.SUSPECT),
    ]
    assert bench.finished() == [(1, ((0, DEADLINE),))]
    assert not bench.pipeline.idle()
    bench.io_done()
    assert bench.reports() == [Reported(1, 0, None), VerdictReport(0, 0, Verdict.OK)]
    assert bench.idle()


def _reset_beside_writes(named: bool = False) -> Bench:
    """Write 2 is with the engine, write 4 is queued; then a reset and write 6."""
    bench = Bench(writes_in_flight_max=1)
    for op, slot in ((1, 0), (3, 1), (5, 2)):
        bench.stored(op, slot, number=op)
    bench.write(2, 1, cache=0, pool=0)
    bench.write(4, 3, cache=1, pool=1)
    bench.pipeline.step()
    bench.pipeline.command(ResetCommand(9, TAG, named))
    bench.write(6, 5, cache=2, pool=2)
    bench.pipeline.step()
    return bench


def test_a_reset_follows_earlier_writes_and_precedes_later_ones() -> None:
    bench = _reset_beside_writes()
    assert bench.reports() == [Reported(4, 0, CANCELLED)]
    assert [op.kind for op in bench.io.started] == [OpKind.WRITE]
    bench.io_done()
    assert [op.kind for op in bench.io.ops.values()] == [OpKind.RESET]
    bench.io_done()
    assert bench.writes() == [(0, 0), (2, NO_EPOCH - 1)], "the reset is not named"


def test_what_follows_a_superblock_that_failed_has_an_epoch_that_nothing_names() -> None:
    bench = _reset_beside_writes(named=True)
    bench.io_done()
    bench.io_done(io_error(errno.EIO))
    assert [op.kind for op in bench.io.ops.values()] == [OpKind.RESET], "tried once more"
    bench.reports()
    bench.io_done(io_error(errno.EIO))
    assert bench.reports() == [Reported(9, 0, io_error(errno.EIO))]
    assert bench.writes() == [(0, 0), (2, NO_EPOCH - 1)]
    bench.io_done()
    bench.pipeline.command(ResetCommand(10, TAG, named=True))
    bench.pipeline.step()
    bench.io_done()
    bench.write(11, 5, cache=2, pool=2)
    bench.pipeline.step()
    assert bench.writes()[2:] == [(2, 2)]


def test_a_superblock_is_not_tried_again_past_its_deadline() -> None:
    bench = Bench()
    bench.pipeline.command(ResetCommand(9, TAG, named=True))
    bench.pipeline.step()
    bench.now_s += WRITE_S
    bench.io_done(io_error(errno.EIO))
    assert not bench.io.ops
    assert bench.reports() == [Reported(9, 0, io_error(errno.EIO))]
    assert bench.idle()


def test_a_suspect_target_does_not_fail_a_reset() -> None:
    bench = Bench()
    bench.load(1, 7, cache=None, pool=3)
    bench.hang()
    bench.pipeline.command(ResetCommand(2, TAG, named=False))
    bench.pipeline.step()
    assert [op.kind for op in bench.io.started] == [OpKind.LOAD, OpKind.RESET]


def test_a_write_that_waits_at_its_slot_does_not_follow_a_reset() -> None:
    bench = Bench()
    bench.store(1, slot=0, number=7)
    bench.write(2, 7, cache=0, pool=5)
    bench.pipeline.command(ResetCommand(3, TAG, named=False))
    bench.copy.finish(0)
    bench.pipeline.step()
    assert Reported(2, 0, CANCELLED) in bench.reports()
    assert [op.kind for op in bench.io.started] == [OpKind.RESET]


# -- two loads of one chunk: the second waits for the first one's read ----------------


def _shared(*, queued: bool) -> Bench:
    """Load 1 is cut off, queued here or with the engine; load 2 waits at its cache slot."""
    bench = Bench()
    bench.io.busy = queued
    bench.load(1, 7, cache=0, pool=3)
    bench.load(2, 7, cache=0, pool=None)
    bench.pipeline.cancel(1)
    bench.io.busy = False
    bench.pipeline.step()
    assert bench.finished() == [(1, ((0, CANCELLED),))], "it does not wait for the read"
    return bench


@pytest.mark.parametrize("outcome", [CHECKSUM_MISMATCH, DEADLINE])
def test_a_continued_read_that_fails_ends_the_loads_that_wait(outcome: Outcome) -> None:
    bench = _shared(queued=False)
    if outcome == DEADLINE:
        bench.hang()
    else:
        bench.io_done(outcome)
    assert bench.finished() == [(2, ((0, STALE),))]
    if outcome == DEADLINE:
        bench.io_done()
    assert bench.idle()
    assert not bench.copy.submitted


# -- a reset lane by lane: a target that hangs holds up no other ----------------------

UNNAMED = NO_EPOCH - 1  # the epoch of writes after the first reset to a target that missed it


def _stored(**config: object) -> Bench:
    """Two targets; chunk n is in cache slot n - 1."""
    bench = Bench(target_count=2, **config)  # type: ignore[arg-type]
    for op, slot in ((1, 0), (2, 1)):
        bench.stored(op, slot, number=op)
    return bench


def _reset(bench: Bench, op: int = 11) -> None:
    bench.pipeline.command(ResetCommand(op, TAG, named=True))
    bench.pipeline.step()


def _write_each(bench: Bench, op: int) -> None:
    """Write to pool slots `op` and `op + 1`, of targets 0 and 1."""
    assert op % 2 == 0
    for target in (0, 1):
        bench.write(op + target, 1 + target, cache=target, pool=op + target)
    bench.pipeline.step()


def _rows(bench: Bench) -> list[object]:
    return [report for report in bench.reports() if isinstance(report, Reported)]


def test_a_superblock_that_hangs_has_a_deadline_and_names_when_it_comes() -> None:
    bench = _stored()
    _reset(bench)
    bench.io.complete(bench.superblocks()[1])
    _write_each(bench, 20)
    assert bench.writes() == [(21, 1)]
    assert bench.pipeline.deadline_in_s() <= WRITE_S
    bench.hang(WRITE_S)
    assert set(bench.writes()) == {(21, 1), (20, UNNAMED)}
    bench.io.complete(bench.superblocks()[0])
    for pool in (20, 21):
        bench.io.complete(bench.io_of(pool))
    bench.pipeline.step()
    _write_each(bench, 30)
    assert set(bench.writes()[2:]) == {(30, 1), (31, 1)}
    while bench.io.ops:
        bench.io_done()
    assert bench.idle()


@pytest.mark.parametrize("late", [CANCELLED, io_error(errno.EIO)])
def test_a_superblock_that_fails_late_names_nothing(late: object) -> None:
    bench = _stored()
    _reset(bench)
    bench.hang(WRITE_S)
    assert _rows(bench) == [Reported(11, 0, DEADLINE)], "no target has the superblock"
    for token in bench.superblocks().values():
        bench.io.complete(token, late)  # type: ignore[arg-type]
    bench.pipeline.step()
    _write_each(bench, 20)
    assert set(bench.writes()) == {(20, UNNAMED), (21, UNNAMED)}


def test_a_late_superblock_of_an_earlier_reset_names_nothing() -> None:
    bench = _stored()
    _reset(bench)
    first = bench.superblocks()
    bench.hang(WRITE_S)
    _reset(bench, 12)
    assert set(bench.superblocks()) == {0, 1}, "a newer one does not wait for those that hang"
    for token in first.values():
        bench.io.complete(token)
    second = bench.superblocks()
    bench.hang(WRITE_S)
    _write_each(bench, 20)
    assert set(bench.writes()) == {(20, NO_EPOCH - 2), (21, NO_EPOCH - 2)}
    bench.io.complete(second[0])
    for pool in (20, 21):
        bench.io.complete(bench.io_of(pool))
    bench.pipeline.step()
    _write_each(bench, 30)
    assert set(bench.writes()[2:]) == {(30, 2), (31, NO_EPOCH - 2)}


def test_resets_in_a_row_are_reported_one_by_one() -> None:
    bench = _stored()
    for op in (11, 12):
        bench.pipeline.command(ResetCommand(op, TAG, named=True))
    bench.pipeline.step()
    _write_each(bench, 20)
    for op in (11, 12):
        assert len(bench.io.ops) == 2
        assert bench.writes() == []
        for token in bench.superblocks().values():
            bench.io.complete(token)
        bench.pipeline.step()
        assert _rows(bench) == [Reported(op)]
    assert set(bench.writes()) == {(20, 2), (21, 2)}


def test_a_target_that_was_attached_again_has_the_superblock() -> None:
    health = TargetHealth(), TargetHealth()
    bench = _stored(health=health)
    _reset(bench)
    for target, token in bench.superblocks().items():
        bench.io.complete(token, *(() if target else (io_error(errno.ENODEV),)))
    bench.pipeline.step()
    _write_each(bench, 20)
    assert set(bench.writes()) == {(20, UNNAMED), (21, 1)}
    for pool in (20, 21):
        bench.io.complete(bench.io_of(pool))
    health[0].attached()
    _write_each(bench, 30)
    assert set(bench.writes()[2:]) == {(30, 1), (31, 1)}


def test_a_target_that_was_attached_before_a_reset_has_not_its_superblock() -> None:
    health = TargetHealth(), TargetHealth()
    bench = _stored(health=health)
    health[0].attached()
    bench.pipeline.command(ResetCommand(11, TAG, named=True))
    bench.pipeline.step()
    for token in bench.superblocks().values():
        bench.io.complete(token, io_error(errno.ENOSPC))
    bench.pipeline.step()
    _write_each(bench, 20)
    assert set(bench.writes()) == {(20, UNNAMED), (21, UNNAMED)}
