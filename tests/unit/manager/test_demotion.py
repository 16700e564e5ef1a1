# SPDX-License-Identifier: Apache-2.0
"""`write_policy`: "on eviction" writes the coldest chunks ahead of need; "off" writes nothing."""

from __future__ import annotations

import errno

from vllm_nvmeof_offload.errors import io_error
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.manager.handshake import WritePolicy
from vllm_nvmeof_offload.protocol import VerdictReport

from .bench import Bench, keys_of


def demoting(cache: int = 8, pool: int = 32, **config: object) -> Bench:
    return Bench(cache, pool, write_policy=WritePolicy.ON_EVICTION, clean_share=0.25, **config)


def test_nothing_is_written_while_there_is_room() -> None:
    bench = demoting(cache=8)
    bench.store(1, 2, 3, 4, 5, 6)
    assert bench.writes() == []
    assert bench.core.gauges()["writes_pending", "waiting"] == 6
    assert not bench.core.has_pending_work(), "a waiting demotion does not keep the engine stepping"


def test_the_coldest_are_written_ahead_of_need_and_then_evicted_without_a_loss() -> None:
    bench = demoting(cache=8)
    for number in range(1, 8):
        bench.store(number)
    assert bench.write_all() == [1], "one slot of eight is free, and two shall be free or clean"
    bench.store(8)
    assert bench.write_all() == [2]
    bench.store(9, 10)
    assert [bench.source(number) for number in (1, 2, 3)] == [Source.POOL, Source.POOL, Source.CPU]
    assert bench.core.counters["unwritten_chunks", "evicted"] == 0


def test_chunks_in_use_are_not_written() -> None:
    bench = demoting(cache=8)
    for number in range(1, 7):
        bench.store(number)
    bench.core.ended(keys_of(1, 2))
    bench.store(7, 8)
    assert bench.write_all() == [3, 4]


def test_writes_ahead_of_need_are_bounded() -> None:
    bench = demoting(cache=8, writes_pending_share=0.125)
    bench.store(*range(8))
    assert len(bench.write().batch) == 1


def test_chunks_evicted_before_their_write_began_are_counted() -> None:
    bench = demoting(cache=4)
    bench.core.report([VerdictReport(0, 0, "suspect")])
    bench.store(1, 2, 3, 4)
    bench.store(5, 6)
    assert bench.core.counters["unwritten_chunks", "evicted"] == 2
    assert bench.hits(range(1, 7)) == [1, 2, 5, 6]
    bench.core.report([VerdictReport(0, 0, "ok")])
    assert bench.write_all() == [2]


def test_evicting_a_clean_chunk_before_a_colder_one_starts_the_colder_ones_write() -> None:
    bench = demoting(cache=4, land_cache_share=1.0)
    for number in (1, 2, 3, 4):
        bench.store(number)
    assert bench.write_all() == [1]
    bench.store(5)  # 1 goes
    assert bench.write_all() == [2]
    bench.done(bench.load(1).op)  # 2 goes, 1 lands: clean, and hot
    assert bench.source(3) is Source.CPU
    bench.store(6)  # 1 is evicted again, although 3 is colder
    assert bench.source(1) is Source.POOL
    assert bench.write_all()[:2] == [3, 4]


def test_a_load_lands_only_where_nothing_is_lost() -> None:
    bench = demoting(cache=4, land_cache_share=1.0, writes_pending_share=0.25)
    for number in (1, 2, 3, 4):
        bench.store(number)
    bench.write_all()
    bench.store(5)  # 1 goes
    held = bench.write()  # 2 is being written, which pins it
    batch = bench.load(1).batch
    assert (batch.cache[0], batch.places[0] >= 0) == (-1, True), "it streams"
    assert bench.hits([2, 3, 4, 5]) == [2, 3, 4, 5]
    bench.done(held.op)


def test_a_failed_demotion_is_not_tried_again() -> None:
    bench = demoting(cache=4)
    for number in (1, 2, 3, 4):
        bench.store(number)
    bench.done(bench.write().op, (0, io_error(errno.EIO)))
    assert bench.source(1) is Source.CPU
    assert bench.writes() == [], "its slot can be reused, so a retry gains nothing"
    bench.store(5)
    assert bench.hits([1]) == []


def test_a_reset_forgets_waiting_demotions() -> None:
    bench = demoting(cache=4)
    bench.store(1, 2)
    bench.core.reset()
    assert bench.core.gauges()["writes_pending", "waiting"] == 0
    bench.store(1, 2, 3)
    assert bench.core.gauges()["writes_pending", "waiting"] == 3


def test_off_writes_nothing_and_still_reads() -> None:
    bench = Bench(cache=2, write_policy=WritePolicy.OFF)
    bench.store(1, 2)
    bench.store(3)
    assert bench.writes() == []
    assert bench.core.gauges()["writes_pending", "waiting"] == 0
    assert bench.hits([1, 2, 3]) == [1, 3]
