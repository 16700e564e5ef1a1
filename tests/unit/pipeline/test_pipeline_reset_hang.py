# SPDX-License-Identifier: Apache-2.0
"""A reset lane by lane: a target that hangs or fails holds up no other, nor for ever its own."""

from __future__ import annotations

import errno

import pytest

from tests.chunks import Reported
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, io_error
from vllm_nvmeof_offload.protocol import ResetCommand
from vllm_nvmeof_offload.targets.health import TargetHealth

from .bench import NO_EPOCH, TAG, WRITE_S, Bench

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


def test_superblocks_do_not_wait_for_a_write_that_hangs() -> None:
    bench = _stored()
    bench.write(10, 1, cache=0, pool=0)
    bench.pipeline.step()
    bench.hang(WRITE_S)
    assert Reported(10, 0, DEADLINE, released=False) in bench.reports()
    _reset(bench)
    assert set(bench.superblocks()) == {0, 1}


def test_a_superblock_waits_for_writes_of_its_own_target_only() -> None:
    bench = _stored()
    bench.write(10, 1, cache=0, pool=0)
    bench.pipeline.step()
    _reset(bench)
    assert set(bench.superblocks()) == {1}
    bench.io.complete(bench.superblocks()[1])
    bench.hang(WRITE_S)
    assert set(bench.superblocks()) == {0}


def test_a_targets_writes_wait_for_its_own_superblock_only() -> None:
    bench = _stored()
    _reset(bench)
    _write_each(bench, 20)
    assert bench.writes() == []
    bench.io.complete(bench.superblocks()[1])
    bench.pipeline.step()
    assert bench.writes() == [(21, 1)]
    assert _rows(bench) == [Reported(11)], "what is on disk is void from now on"
    bench.io.complete(bench.superblocks()[0])
    bench.pipeline.step()
    assert set(bench.writes()) == {(21, 1), (20, 1)}
    assert _rows(bench) == []


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
