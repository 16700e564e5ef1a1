# SPDX-License-Identifier: Apache-2.0
"""Every arrival in a tier and every departure is logged in order; tests/sim checks random ones."""

from __future__ import annotations

from vllm_nvmeof_offload.errors import CHECKSUM_MISMATCH
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import agree

from .bench import KEY_BYTES, Bench, hello, keys_of

CPU, POOL = Source.CPU, Source.POOL
CAME, LEFT = False, True


def logged(core: ManagerCore) -> list[tuple[Source, bool, list[bytes]]]:
    """Every event since the last call."""
    changes = core.take_changes()
    assert not core.changed_keys
    return [(change.tier, change.removed, change.keys) for change in changes]


def adopting(numbers: range) -> ManagerCore:
    """A core that adopts these chunks."""
    agreement = agree([hello(0, 2, len(numbers), [(n, n + 7, n) for n in numbers])])
    return ManagerCore(CoreConfig(kv_events=True, key_bytes=KEY_BYTES), agreement)


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
    bench.done(bench.load(1).op, (0, CHECKSUM_MISMATCH))
    assert logged(bench.core) == [(CPU, LEFT, keys_of(1)), (POOL, LEFT, keys_of(1))]


def test_adoption_is_logged_and_a_reset_removes_everything() -> None:
    core = adopting(range(2))
    assert logged(core) == [(POOL, CAME, keys_of(0, 1))]
    core.reset()
    assert logged(core) == [(POOL, LEFT, keys_of(0, 1))]


def test_a_reset_reports_each_tier_at_once() -> None:
    bench = Bench(cache=4, kv_events=True)
    bench.store(1, 2)
    bench.write_all()
    bench.store(3)
    logged(bench.core)
    bench.core.prepare_store(keys_of(4))  # under way: it was never reported
    bench.core.reset()
    assert logged(bench.core) == [(CPU, LEFT, keys_of(1, 2, 3)), (POOL, LEFT, keys_of(1, 2))]


def test_a_large_adoption_is_logged_in_parts_and_dropped_by_a_reset() -> None:
    core = adopting(range(100_000))
    (part,) = core.take_changes()
    assert part.keys == keys_of(*range(100_000 // 8)), "not all in one step"
    assert core.changed_keys == 100_000 // 8 * 7
    core.reset()
    assert core.changed_keys == 100_000, (
        "arrivals that no router knows of are dropped, departures are not"
    )
    left: list[bytes] = []
    while core.changed_keys:
        for change in core.take_changes():
            assert (change.tier, change.removed) == (POOL, LEFT)
            left += change.keys
    assert left == keys_of(*range(100_000))


def test_no_step_carries_more_than_32768_keys() -> None:
    core = adopting(range(300_000))
    assert [len(change.keys) for change in core.take_changes()] == [32_768]


def test_no_events_are_kept_without_a_subscriber() -> None:
    bench = Bench()
    bench.store(1)
    assert (bench.core.changed_keys, bench.core.take_changes()) == (0, [])
