# SPDX-License-Identifier: Apache-2.0
"""A checksum that a store's copy made is used by the writes of what the copy put there, only."""

from __future__ import annotations

from vllm_nvmeof_offload.errors import OK, STALE, Outcome, io_error

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
