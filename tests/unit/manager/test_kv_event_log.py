# SPDX-License-Identifier: Apache-2.0
"""Every arrival in a tier and every departure is logged in order; tests/sim checks random ones."""

from __future__ import annotations

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import agree
from vllm_nvmeof_offload.manager.index import Index
from vllm_nvmeof_offload.manager.kv_events import KvEventLog

from .bench import Bench, hello, keys_of

CPU, POOL = Source.CPU, Source.POOL
CAME, LEFT = False, True


def logged(core: ManagerCore) -> list[tuple[Source, bool, list[bytes]]]:
    """Every event since the last call."""
    assert core.kv_events is not None
    changes = core.kv_events.take()
    assert not core.kv_events
    return [(change.tier, change.removed, change.keys) for change in changes]


def test_a_store_is_logged_when_copied_and_a_write_when_written() -> None:
    bench = Bench(ranks=2, kv_events=True)
    plan = bench.core.prepare_store(keys_of(1, 2))
    assert logged(bench.core) == [], "under way"
    assert plan.command is not None
    bench.done(plan.command.op)
    assert logged(bench.core) == [(CPU, CAME, keys_of(1, 2))]
    bench.write_all()
    assert logged(bench.core) == [(POOL, CAME, keys_of(1, 2))]


def test_an_eviction_takes_a_chunk_from_one_tier() -> None:
    bench = Bench(cache=1, pool=8, kv_events=True)
    bench.store(1)
    bench.write_all()
    logged(bench.core)
    bench.store(2)
    assert logged(bench.core) == [(CPU, LEFT, keys_of(1)), (CPU, CAME, keys_of(2))]
    assert bench.hits([1]) == [1], "it is in the pool still"


def test_a_failed_chunk_leaves_every_tier() -> None:
    bench = Bench(kv_events=True)
    bench.store(1)
    bench.write_all()
    logged(bench.core)
    load = bench.core.prepare_load(keys_of(1))
    bench.done(load.op, (0, CHECKSUM_MISMATCH))
    assert logged(bench.core) == [(CPU, LEFT, keys_of(1)), (POOL, LEFT, keys_of(1))]


def test_adoption_is_logged_and_a_reset_removes_everything() -> None:
    agreement = agree([hello(0, 2, 8, [(3, 7, b"a"), (5, 8, b"b")])])
    core = ManagerCore(CoreConfig(kv_events=True), agreement)
    assert logged(core) == [(POOL, CAME, [b"a", b"b"])]
    core.reset()
    assert logged(core) == [(POOL, LEFT, [b"a", b"b"])]


def test_a_large_adoption_is_logged_in_parts_and_dropped_by_a_reset() -> None:
    log = KvEventLog()
    log.add(POOL, [b"%d" % n for n in range(100_000)], removed=False)
    parts = [len(change.keys) for change in log.take()]
    assert sum(parts) == 100_000 // 8, "not all in one step"
    log.add(CPU, [b"gone"], removed=True)
    log.all_leave(Index(1, 1))
    assert [(c.tier, c.removed, c.keys) for c in log.take()] == [(CPU, LEFT, [b"gone"])]
    assert not log


def test_no_events_are_kept_without_a_subscriber() -> None:
    assert Bench().core.kv_events is None
