# SPDX-License-Identifier: Apache-2.0
"""Checksums computed by copies: for writes after a store, and to verify loads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chunks import Reported
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, OK, STALE, Outcome, io_error
from vllm_nvmeof_offload.worker import pipeline

from .bench import Bench


def _store(bench: Bench, op: int, number: int, crc: int | None, outcome: Outcome = OK) -> None:
    bench.store(op, slot=0, number=number)
    bench.copy.finish(bench.copy.submitted[-1][0], outcome, crc)
    bench.pipeline.step()


def _written(bench: Bench) -> list[int | None]:
    return [op.payload_crc for op in bench.io.started]


def test_every_write_of_a_fill_has_its_checksum() -> None:
    bench = Bench()
    _store(bench, 1, number=7, crc=99)
    bench.write(2, 7, cache=0, pool=1)
    bench.write(3, 7, cache=0, pool=2)
    bench.pipeline.step()
    assert _written(bench) == [99, 99]


def test_a_write_after_a_copy_without_a_checksum_has_none() -> None:
    bench = Bench()
    _store(bench, 1, number=7, crc=99)
    _store(bench, 2, number=8, crc=None)
    bench.write(3, 8, cache=0, pool=1)
    bench.pipeline.step()
    assert _written(bench) == [None]


def test_a_write_of_what_was_read_from_the_pool_has_none() -> None:
    bench = Bench()
    _store(bench, 1, number=7, crc=99)
    bench.fetch(2, 8, pool=1, cache=0)
    bench.pipeline.step()
    bench.io_done()
    bench.write(3, 8, cache=0, pool=2)
    bench.pipeline.step()
    assert _written(bench) == [None, None]


def test_the_checksum_of_a_failed_copy_is_not_used() -> None:
    bench = Bench()
    _store(bench, 1, number=7, crc=99, outcome=io_error(5))
    bench.write(2, 7, cache=0, pool=1)
    bench.pipeline.step()
    assert not bench.io.started
    assert [one.outcome for one in bench.reports() if getattr(one, "op", 0) == 2] == [STALE]


# -- loads whose reads check the header alone -----------------------------------------


def _bench(**more: Any) -> Bench:
    return Bench(copies_check=True, **more)


def _read(bench: Bench, pool: int, crc: int | None = 99) -> None:
    """End the read of a pool slot; crc: what its header names; None: the engine has checked it."""
    bench.io.complete(bench.io_of(pool), crc=crc)
    bench.pipeline.step()


def _copied(bench: Bench, crc: int | None, outcome: Outcome = OK) -> None:
    """End the newest copy. crc: of what has arrived."""
    bench.copy.finish(bench.copy.submitted[-1][0], outcome, crc)
    bench.pipeline.step()


def _ended(bench: Bench) -> dict[int, tuple[tuple[int, Outcome], ...]]:
    return dict(bench.finished())


@pytest.mark.parametrize("cache", [None, 0])
@pytest.mark.parametrize(("found", "failures"), [(99, ()), (98, ((0, CHECKSUM_MISMATCH),))])
def test_a_load_is_worth_what_its_copy_finds(
    cache: int | None, found: int, failures: tuple[tuple[int, Outcome], ...]
) -> None:
    bench = _bench()
    bench.load(1, 7, cache=cache, pool=3)
    assert [op.header_only for op in bench.io.started] == [True]
    _read(bench, 3)
    assert not bench.finished(), "nothing is known of the payload yet"
    _copied(bench, found)
    assert bench.finished() == [(1, failures)]
    assert bench.reports() == [Reported(1, 0, failures[0][1] if failures else OK)]
    assert bench.idle()


def test_a_wrong_chunk_fails_alone() -> None:
    bench = _bench(stream_slots=3)
    bench.stream(1, [3, 4, 5])
    bench.pipeline.step()
    for pool, crc in ((3, 30), (4, 40), (5, 50)):
        bench.io.complete(bench.io_of(pool), crc=crc)
    bench.pipeline.step()
    payloads = bench.copy.payloads_of(0)
    assert payloads is not None
    payloads.crcs[:] = [30, 41, 50]
    _copied(bench, None)
    assert bench.finished() == [(1, ((1, CHECKSUM_MISMATCH),))]


def test_an_engine_may_check_the_payload_all_the_same() -> None:
    bench = _bench()
    bench.load(1, 7, cache=None, pool=3)
    _read(bench, 3, crc=None)
    assert bench.copy.payloads_of(0) is None, "the copy need not check it"
    _copied(bench, None)
    assert bench.finished() == [(1, ())]


def test_what_was_checked_and_what_was_not_are_copied_apart() -> None:
    bench = _bench(stream_slots=2)
    bench.stream(1, [3, 4])
    bench.pipeline.step()
    bench.io.complete(bench.io_of(3), crc=None)
    bench.io.complete(bench.io_of(4), crc=40)
    bench.pipeline.step()
    apart = [bench.copy.payloads_of(ticket) is not None for ticket in (0, 1)]
    assert sorted(apart) == [False, True]
    for ticket, checks in enumerate(apart):
        bench.copy.finish(ticket, OK, 40 if checks else None)
    bench.pipeline.step()
    assert bench.finished() == [(1, ())]


@pytest.mark.parametrize(("found", "second"), [(99, ()), (98, ((0, STALE),))])
def test_nobody_gets_what_has_landed_before_it_is_checked(
    found: int, second: tuple[tuple[int, Outcome], ...]
) -> None:
    bench = _bench()
    bench.load(1, 7, cache=0, pool=3)
    _read(bench, 3)
    bench.load(2, 7, cache=0, pool=None)
    bench.write(3, 7, cache=0, pool=4)
    bench.pipeline.step()
    assert len(bench.copy.submitted) == 1
    assert len(bench.io.started) == 1
    _copied(bench, found)
    if second:
        assert _ended(bench) == {1: ((0, CHECKSUM_MISMATCH),), 2: second}
        assert len(bench.io.started) == 1, "wrong bytes are not written"
        return
    assert bench.copy.payloads_of(1) is None, "the first load has proven it"
    assert [op.payload_crc for op in bench.io.started[1:]] == [99]
    _copied(bench, None)
    assert _ended(bench) == {1: (), 2: ()}


def test_a_copy_that_fails_proves_nothing() -> None:
    bench = _bench()
    bench.load(1, 7, cache=0, pool=3)
    _read(bench, 3)
    bench.load(2, 7, cache=0, pool=None)
    _copied(bench, None, io_error(5))
    assert _ended(bench) == {1: ((0, io_error(5)),), 2: ((0, STALE),)}
    assert bench.idle()


@pytest.mark.parametrize("first", [0, 1])
def test_a_load_of_a_part_is_checked_by_its_read(first: int) -> None:
    bench = _bench()
    bench.load_halves(1, 7, 3, first, 1)
    assert [op.header_only for op in bench.io.started] == [False]


def test_a_load_in_several_pieces_is_checked_by_its_copy() -> None:
    bench = _bench()
    bench.load_halves(1, 7, 3, 0, 2)
    assert [op.header_only for op in bench.io.started] == [True]


def test_only_loads_are_checked_by_their_copies() -> None:
    bench = _bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.stored(2, slot=1, number=8)
    bench.write(3, 8, cache=1, pool=4)
    bench.pipeline.step()
    assert [op.header_only for op in bench.io.started] == [False, False]


def test_copies_check_only_where_it_is_asked_for() -> None:
    bench = Bench()
    bench.load(1, 7, cache=None, pool=3)
    assert [op.header_only for op in bench.io.started] == [False]


def test_the_cpu_makes_the_checksum_that_the_copy_engine_could_not_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = _bench()
    asked: list[int] = []

    def crc_of(payload: memoryview) -> int:
        asked.append(len(payload))
        return 98

    monkeypatch.setattr(pipeline, "crc32c", crc_of)
    bench.load(1, 7, cache=None, pool=3)
    _read(bench, 3)
    _copied(bench, None)
    assert asked == [4096]
    assert bench.finished() == [(1, ((0, CHECKSUM_MISMATCH),))]


def _cut_off(*, handed_over: bool) -> Bench:
    """Load 1 was cut off, and load 2 waits for what it reads."""
    bench = _bench()
    bench.io.busy = not handed_over
    bench.load(1, 7, cache=0, pool=3)
    bench.load(2, 7, cache=0, pool=None)
    bench.pipeline.cancel(1)
    bench.io.busy = False
    bench.pipeline.step()
    assert bench.finished() == [(1, ((0, CANCELLED),))]
    return bench


def test_what_a_cancelled_load_has_read_is_read_again_for_others() -> None:
    bench = _cut_off(handed_over=True)
    _read(bench, 3)
    assert not bench.copy.submitted, "nobody has checked it"
    assert [op.header_only for op in bench.io.started] == [True, False]
    _read(bench, 3, crc=None)
    _copied(bench, None)
    assert bench.finished() == [(2, ())]
    assert bench.idle()


def test_the_read_of_a_cancelled_load_that_had_not_begun_checks_all() -> None:
    bench = _cut_off(handed_over=False)
    assert [op.header_only for op in bench.io.started] == [False]
    _read(bench, 3, crc=None)
    assert len(bench.copy.submitted) == 1


def test_a_second_read_that_finds_damage_ends_those_who_wait() -> None:
    bench = _cut_off(handed_over=True)
    _read(bench, 3)
    bench.io_done(CHECKSUM_MISMATCH)
    assert bench.finished() == [(2, ((0, STALE),))]
    assert bench.idle()


def test_there_is_no_second_read_behind_the_deadline() -> None:
    bench = _cut_off(handed_over=True)
    token = bench.io_of(3)
    bench.now_s += 5.0
    bench.io.complete(token, crc=99)
    bench.pipeline.step()
    assert bench.finished() == [(2, ((0, STALE),))]
    assert len(bench.io.started) == 1
    assert bench.idle()
