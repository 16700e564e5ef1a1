# SPDX-License-Identifier: Apache-2.0
"""The core's writes, suspect targets, resets and adoption."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lru_policy import LruPolicy
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, io_error
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import WritePolicy, agree
from vllm_nvmeof_offload.native import Tiers
from vllm_nvmeof_offload.protocol import (
    VERDICTS,
    OpReport,
    ResetCommand,
    VerdictReport,
    WriteCommand,
    place_of,
    target_of,
)
from vllm_nvmeof_offload.targets.health import Verdict

from .bench import KEY_BYTES, TAG, Bench, hello, key, keys_of, release, report


def test_a_write_counts_when_every_rank_has_reported_it() -> None:
    bench = Bench(cache=1, ranks=2)
    bench.store(1)
    write = bench.write()
    bench.core.report([OpReport(write.op)])
    bench.report(write.op, (0, io_error(errno.EIO)))
    assert bench.core.counters["written_chunks"] == 0
    assert bench.core.gauges()["slots_used", "pool"] == 0
    assert bench.source(1) is Source.CPU
    bench.store(2)
    assert bench.hits([1]) == [], "it was only in the CPU tier"


def test_writes_pin_no_more_than_their_share_and_the_rest_waits() -> None:
    bench = Bench(cache=4, pool=8, writes_pending_share=0.5)
    bench.store(1, 2, 3, 4)
    first = bench.write()
    assert len(first.batch) == 2
    assert bench.core.gauges()["writes_pending", "waiting"] == 2
    bench.done(first.op)
    assert len(bench.write().batch) == 2
    assert bench.core.gauges()["writes_pending", "waiting"] == 0


def test_a_chunk_whose_read_was_cut_off_gives_its_place_to_a_write_of_the_same_reports() -> None:
    bench = Bench(cache=2, pool=1)
    bench.store(0)
    bench.write_all()
    lost = bench.core.prepare_store(keys_of(1, 2)).command
    assert lost is not None
    bench.done(lost.op, (0, DEADLINE), (1, DEADLINE))
    assert bench.source(0) is Source.POOL
    stored = bench.core.prepare_store(keys_of(3)).command
    assert stored is not None
    load = bench.load(0)
    assert load.batch.cache[0] >= 0, "it lands"
    bench.core.report([report(load.op, (0, CANCELLED), rows=[0]), OpReport(stored.op)])
    assert bench.source(0) is None
    assert bench.write().batch.places[0] == load.batch.places[0]


def test_without_a_pool_nothing_waits_to_be_written() -> None:
    bench = Bench(pool=0)
    bench.store(1)
    assert bench.writes() == []
    assert bench.core.gauges()["writes_pending", "waiting"] == 0


def test_with_one_target_suspect_the_others_take_the_writes() -> None:
    bench = Bench(cache=8, pool=6, targets=3, writes_pending_share=1.0)
    bench.core.report([VerdictReport(0, 1, "suspect")])
    bench.store(*range(6))
    assert sorted(target_of(bench.write().batch.places)) == [0, 0, 2, 2]
    assert bench.core.gauges()["writes_pending", "waiting"] == 2
    bench.core.report([VerdictReport(0, 1, "ok")])
    assert target_of(bench.write().batch.places).tolist() == [1, 1]


def test_a_suspect_target_misses_until_every_rank_finds_it_usable() -> None:
    bench = Bench(cache=1, ranks=2)
    bench.store(1)
    bench.write_all()
    bench.store(2)
    assert bench.source(1) is Source.POOL
    bench.core.report([VerdictReport(0, 0, "suspect"), VerdictReport(1, 0, "suspect")])
    bench.core.report([VerdictReport(0, 0, "ok")])
    assert bench.source(1) is None
    bench.core.report([VerdictReport(1, 0, "ok")])
    assert bench.source(1) is Source.POOL


def test_a_full_file_system_shrinks_the_pool_slot_by_slot() -> None:
    bench = Bench(cache=4, pool=2, writes_pending_share=1.0)
    bench.store(1, 2, 3)
    for _ in range(3):
        for command in bench.writes():
            full = io_error(errno.ENOSPC)
            bench.done(command.op, *((row, full) for row in range(len(command.batch))))
    gauges = bench.core.gauges()
    assert (gauges["slots", "pool"], gauges["slots_used", "pool"]) == (0, 0)
    assert bench.core.counters["retired_pool_slots"] == 2
    assert bench.hits([1, 2, 3]) == [1, 2, 3], "all still in the CPU tier"


def test_a_slot_is_retired_after_its_third_failed_write() -> None:
    bench = Bench(cache=8, pool=1)
    for number in range(3):
        assert bench.core.gauges()["slots", "pool"] == 1
        bench.store(number)
        bench.done(bench.write().op, (0, io_error(errno.EIO)))
    assert bench.core.gauges()["slots", "pool"] == 0


@pytest.mark.parametrize(
    ("number_of_error", "slots_left"), [(errno.EIO, 0), (errno.ENODATA, 0), (errno.ENODEV, 1)]
)
def test_a_slot_whose_reads_fail_is_retired_unless_the_whole_target_fails(
    number_of_error: int, slots_left: int
) -> None:
    bench = Bench(cache=1, pool=1)
    for number in (0, 2, 4):
        assert bench.core.gauges()["slots", "pool"] == 1
        bench.store(number)
        bench.write_all()
        store = bench.core.prepare_store(keys_of(number + 1)).command  # takes the cache slot
        load = bench.load(number)
        bench.done(load.op, (0, io_error(number_of_error)))
        assert store is not None
        bench.done(store.op, (0, io_error(errno.EIO)))
    assert bench.core.gauges()["slots", "pool"] == slots_left


def test_failed_writes_far_apart_do_not_retire_a_slot() -> None:
    bench = Bench(cache=2, pool=1)
    for number in range(60):
        bench.store(number)
        for command in bench.writes():
            bench.done(command.op, *([(0, io_error(errno.EIO))] if number % 10 == 9 else []))
    assert bench.core.counters["failed_chunks", "write", "io_error", "0"] == 6
    assert bench.core.gauges()["slots", "pool"] == 1


def test_failed_reads_far_apart_do_not_retire_a_slot() -> None:
    bench = Bench(cache=1, pool=1)
    for number in range(20):
        bench.store(100 + number)
        bench.write_all()
        store = bench.core.prepare_store(keys_of(200 + number)).command  # takes the cache slot
        assert store is not None
        for failures in ((), ((0, io_error(errno.EIO)),)):
            load = bench.load(100 + number)
            assert load.batch.places.tolist() == [place_of(0, 0)]
            bench.done(load.op, *failures)
        bench.done(store.op, (0, io_error(errno.EIO)))
    assert bench.core.gauges()["slots", "pool"] == 1


def test_a_reset_forgets_the_failures_of_slots() -> None:
    bench = Bench(cache=8, pool=1)
    for number in range(6):
        bench.store(number)
        bench.done(bench.write().op, (0, io_error(errno.EIO)))
        if number % 2:
            bench.core.reset()
            (reset,) = bench.core.take_commands()
            bench.done(reset.op)
    assert bench.core.gauges()["slots", "pool"] == 1


def test_a_degraded_target_is_usable_and_is_reported() -> None:
    bench = Bench(cache=1, ranks=2)
    bench.store(1)
    bench.write_all()
    bench.store(2)
    bench.core.report([VerdictReport(0, 0, "degraded")])
    assert bench.source(1) is Source.POOL
    assert bench.core.targets.worst_verdicts() == [1]
    assert bench.core.counters["verdict_changes"] == 0
    before = bench.core.activity()
    bench.core.report([VerdictReport(1, 0, "gone")])
    assert bench.core.activity() != before
    assert bench.core.targets.worst_verdicts() == [3]
    assert bench.source(1) is None
    bench.core.report([VerdictReport(1, 0, "ok"), VerdictReport(0, 0, "suspect")])
    assert bench.core.targets.worst_verdicts() == [2]
    bench.core.report([VerdictReport(0, 0, "ok")])
    assert bench.core.targets.worst_verdicts() == [0]
    assert bench.core.counters["verdict_changes"] == 4


def test_verdicts_have_the_names_that_health_gives_them() -> None:
    assert tuple(verdict.value for verdict in Verdict) == VERDICTS
    assert [VerdictReport(0, 0, v.value).usable for v in Verdict] == [v.usable for v in Verdict]


def test_the_pool_evicts_what_was_used_least_recently() -> None:
    bench = Bench(cache=8, pool=2)
    for number in (1, 2, 3):
        bench.store(number)
        bench.write_all()
    assert bench.stored(*range(4, 12)) == [*range(4, 12)]
    assert bench.hits([1, 2, 3]) == [2, 3]


def test_reset_voids_everything_and_reuses_slots_after_release() -> None:
    bench = Bench(cache=2, pool=4)
    bench.store(1)
    sent = bench.write()
    bench.done(bench.core.prepare_store(keys_of(2)).command.op)  # type: ignore[union-attr]
    assert bench.core.gauges()["writes_pending", "sent"] == 1, "the bound of this small cache"
    bench.core.reset()
    commands = bench.core.take_commands()
    assert [type(command) for command in commands] == [ResetCommand]
    assert bench.hits([1, 2]) == []
    assert bench.stored(1, 2) == [1], "one slot is still being written from"
    bench.done(sent.op)
    assert bench.stored(2) == [2]


def test_a_reset_drops_writes_that_were_not_sent() -> None:
    bench = Bench(cache=4, pool=4, writes_pending_share=1.0)
    bench.store(1, 2)
    assert bench.core.gauges()["commands_waiting"] == 2
    bench.core.reset()
    gauges = bench.core.gauges()
    assert (gauges["writes_pending", "sent"], gauges["commands_waiting"]) == (0, 1), "the reset"
    assert (gauges["slots_used", "cache"], gauges["slots_used", "pool"]) == (0, 0)
    assert [type(command) for command in bench.core.take_commands()] == [ResetCommand]


@pytest.mark.parametrize("never_change", [True, False])
def test_chunks_after_a_reset_are_named_only_if_the_operator_allows_it(never_change) -> None:  # type: ignore[no-untyped-def]
    bench = Bench(weights_never_change=never_change)
    bench.core.reset()
    (command,) = bench.core.take_commands()
    assert isinstance(command, ResetCommand)
    assert command.named is never_change
    assert (command.tag == TAG) is never_change
    assert len(command.tag) == len(TAG)


def test_nothing_is_named_where_a_rank_has_another_tag() -> None:
    """A rank whose chunks depend on more than the keyspace has none."""
    for tags in ((b"", b""), (TAG, b""), (TAG, bytes(16))):
        hellos = [hello(rank, 4, 4, (), tag=tag) for rank, tag in enumerate(tags)]
        core = ManagerCore(CoreConfig(world_size=2, weights_never_change=True), agree(hellos))
        core.reset()
        (command,) = core.take_commands()
        assert isinstance(command, ResetCommand)
        assert (command.named, command.tag in (b"", TAG)) == (False, False)


def test_work_is_pending_until_its_reports_or_their_deadline() -> None:
    bench = Bench(report_deadline_s=60.0)
    assert not bench.core.has_pending_work()
    bench.store(1)
    assert bench.core.has_pending_work(), "a write waits to be sent"
    write = bench.write()
    bench.now_s = 59.0
    assert bench.core.has_pending_work()
    bench.now_s = 60.5
    assert not bench.core.has_pending_work(), "overdue: the engine does not step for it any more"
    bench.report(write.op, (0, DEADLINE), released=False)
    bench.now_s = 1.0
    assert not bench.core.has_pending_work(), "a release is not waited for"
    bench.core.report([release(write.op, 0)])
    assert bench.core.gauges()["ops"] == 0


def test_only_chunks_that_every_rank_holds_are_adopted() -> None:
    agreement = agree(
        [
            hello(0, 4, 8, [(0, 7, 1), (1, 7, 2), (2, 7, 3), (6, 7, 4)]),
            hello(1, 3, 6, [(0, 7, 1), (1, 8, 2), (2, 7, 3), (6, 7, 4)]),
            hello(2, 5, 9, [(0, 7, 1), (1, 7, 2), (3, 7, 3), (6, 7, 4)]),
        ]
    )
    core = ManagerCore(CoreConfig(world_size=3, key_bytes=KEY_BYTES), agreement, first_generation=1)
    assert [(e.key, e.generation, e.place) for e in core.entries()] == [(key(1), 7, place_of(0, 0))]
    assert core.lookup(key(1)) is Source.POOL
    assert (core.capacity.cache_slots, core.capacity.pool_slots) == (3, (6,))
    assert core.counters["adoption_chunks", "incomplete"] == 3
    assert agreement.notes


def test_a_key_on_two_slots_is_adopted_once_and_ranks_of_other_pools_adopt_nothing() -> None:
    config = CoreConfig(key_bytes=KEY_BYTES)
    alone = agree([hello(0, 2, 4, [(1, 7, 1), (3, 8, 1)])])
    core = ManagerCore(config, alone, first_generation=1)
    assert core.gauges()["slots_used", "pool"] == 1
    entries = [(1, 7, 1)]
    agreement = agree([hello(0, 2, 4, entries), hello(1, 2, 4, entries, keyspace="x")])
    other = ManagerCore(replace(config, world_size=2), agreement, first_generation=1)
    assert other.lookup(key(1)) is None
    assert agreement.notes


@pytest.mark.parametrize(("pool", "made"), [(0, 2), (1, 3), (8, 5)])
def test_a_policy_is_never_made_without_slots(pool: int, made: int) -> None:
    """This holds without a pool, on a target without slots, and after a reset."""
    sizes: list[int] = []

    def make(used: Sequence[int]) -> LruPolicy:
        sizes.append(len(used))
        return LruPolicy(used)

    agreement = agree([hello(0, 4, pool, (), target_count=3)])
    config = CoreConfig(key_bytes=KEY_BYTES, writes_pending_share=0.5)
    core = ManagerCore(config, agreement, policy=make)
    core.reset()
    assert len(sizes) == 2 * made
    assert min(sizes) >= 1
    stored = core.prepare_store(keys_of(1, 2)).command
    assert stored is not None
    core.report([OpReport(stored.op)])
    commands = core.take_commands()
    assert isinstance(commands[0], ResetCommand)
    writes = [c.batch for c in commands if isinstance(c, WriteCommand)]
    assert [len(batch) for batch in writes] == [min(pool, 2)] * bool(pool)


def test_the_core_imports_no_torch_no_vllm_and_does_no_io() -> None:
    """Rule 11: no torch, no vLLM, no files."""
    code = (
        "import sys, vllm_nvmeof_offload.manager.core\n"
        "print([m for m in ('torch', 'vllm', 'mmap', 'socket') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_after_new_weights_nothing_is_named_whatever_the_configuration() -> None:
    bench = Bench(weights_never_change=True)
    bench.core.weights_changed()
    bench.core.reset()
    bench.store(1)
    bench.core.reset()
    resets = [c for c in bench.core.take_commands() if isinstance(c, ResetCommand)]
    assert [command.named for command in resets] == [False, False]
    assert len({TAG, *(command.tag for command in resets)}) == 3


def test_weights_that_arrive_in_many_pieces_reset_once_per_step() -> None:
    bench = Bench(weights_never_change=True)
    bench.store(1)
    bench.core.reset()
    bench.core.weights_changed()
    for _ in range(100):
        bench.core.reset()
    (before, after) = (c for c in bench.core.take_commands() if isinstance(c, ResetCommand))
    assert (before.named, after.named) == (True, False)
    bench.core.reset()
    bench.store(2)  # no step in between
    bench.core.reset()
    assert bench.hits([2]) == []


@pytest.mark.parametrize("write_policy", [WritePolicy.THROUGH, WritePolicy.ON_EVICTION])
def test_a_prompt_that_is_stored_faster_than_it_is_written_has_no_hole(
    write_policy: WritePolicy,
) -> None:
    """Its end is refused until chunks are written, and nothing of its middle is lost."""
    bench = Bench(cache=100, pool=400, write_policy=write_policy)
    stored = 0
    for step in range(60):
        plan = bench.core.prepare_store(keys_of(*range(stored, 300)[:25]))
        if plan.command is not None:
            stored += len(plan.command.batch)
            bench.done(plan.command.op)
        assert bench.hits(range(300)) == list(range(stored))
        if step == 5:
            assert stored == 100, "the pool has written nothing yet"
        for command in bench.writes() if step > 5 else ():
            bench.done(command.op)
    assert stored == 300
    assert bench.core.counters["unwritten_chunks", "evicted"] == 0
    assert bench.core.counters["evictions", "cpu"] > 0


def test_what_no_target_takes_gives_way_the_coldest_first() -> None:
    bench = Bench(cache=4)
    bench.store(1, 2, 3, 4)
    assert bench.core.prepare_store(keys_of(5)).refused == keys_of(5)
    bench.core.report([VerdictReport(0, 0, "suspect")])
    bench.core.ended(keys_of(1))
    bench.store(5, 6)
    assert bench.hits(range(1, 7)) == [1, 2, 5, 6]
    assert bench.core.counters["unwritten_chunks", "evicted"] == 2


def test_the_write_order_does_not_grow_with_what_has_left_it() -> None:
    """While no target takes writes, and its first chunk stays in use."""
    tiers = Tiers(8, [8], key_bytes=KEY_BYTES)
    tiers.set_usable(0, False)

    def store(first: int, count: int) -> None:
        for number in range(first, first + count, 4):
            batch, _, refused, _ = tiers.plan_store(keys_of(*range(number, number + 4)), None, 1)
            assert not refused
            tiers.report(0, batch)
            tiers.touch(keys_of(1))

    store(1, 40_000)
    before = resident_bytes()
    store(100_000, 400_000)
    assert tiers.lookup(key(1)) == 1
    assert tiers.backlog == len(tiers) == 8
    assert resident_bytes() - before < 2 << 20, "16 bytes a chunk were 6 MiB"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
