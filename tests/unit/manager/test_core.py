# SPDX-License-Identifier: Apache-2.0
"""The core's stores, loads, writes, resets, adoption and evictions, and what it logs. Races are the
simulator's (tests/sim)."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lru_policy import LruPolicy
from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, io_error
from vllm_nvmeof_offload.manager.core import CoreConfig, ManagerCore, Source
from vllm_nvmeof_offload.manager.handshake import WritePolicy, agree
from vllm_nvmeof_offload.manager.stores import StoreThreshold
from vllm_nvmeof_offload.protocol import (
    OpReport,
    OpReports,
    RateReport,
    ResetCommand,
    Verdict,
    VerdictReport,
    WriteCommand,
    place_of,
    target_of,
    unpacked,
)

from .bench import KEY_BYTES, TAG, Bench, hello, key, keys_of, release, report

# -- stores and loads -----------------------------------------------------------------


def _several(*ops: int) -> OpReports:
    return OpReports(
        np.array(ops, np.uint64).tobytes(), np.full(len(ops), 0.25, np.float32).tobytes()
    )


def _two_ranks(*, joined: bool) -> tuple[object, ...]:
    """What is known after two ranks have reported on two stores, of which one failed on the first
    rank, on two loads, and on a reset. joined: the ops that went well in one report."""
    bench = Bench(cache=4, pool=8, ranks=2)
    bench.store(1, 2, 3, 4)
    bench.write_all()
    plans = [bench.core.prepare_store(keys_of(number)) for number in (5, 6)]
    good, bad = (plan.command.op for plan in plans if plan.command is not None)
    loads = [bench.load(number).op for number in (1, 4)]
    bench.report(bad, (0, io_error(errno.EFAULT)))
    for ops in ([good, *loads], [good, bad, *loads]):
        report = _several(*ops)
        bench.core.report([report] if joined else unpacked([report]))
        seen = bench.core.gauges()["ops"]
        assert seen == (4 if ops[1] != bad else 0), "an op is over when every rank has reported"
    held = bench.hits(range(1, 7))
    assert 6 not in held
    assert 5 in held
    bench.core.reset()
    (reset,) = bench.core.take_commands()
    assert isinstance(reset, ResetCommand)
    for _ in range(2):
        bench.core.report([_several(reset.op)] if joined else [OpReport(reset.op, seconds=0.25)])
    return held, bench.core.gauges(), dict(bench.core.counters), bench.core.last_failures


def test_one_report_on_several_ops_is_a_report_on_each() -> None:
    assert _two_ranks(joined=True) == _two_ranks(joined=False)


CHUNK_TOKENS = 256


def test_tokens_of_a_load_are_those_that_vllm_loads() -> None:
    """vLLM has 240 tokens in GPU memory, a part of the first chunk. The third chunk is gone."""
    bench = Bench(cache=8, tokens_per_chunk=CHUNK_TOKENS)
    bench.store(0, 1)
    bench.core.prepare_load(keys_of(0, 1, 2), tokens=range(240, 3 * CHUNK_TOKENS))
    counters = bench.core.counters
    assert counters["loaded_tokens", "cpu"] == 2 * CHUNK_TOKENS - 240
    assert counters["loaded_tokens", "pool"] == 0


def test_tokens_are_lost_from_the_first_failed_chunk_on() -> None:
    """vLLM computes on from there."""
    bench = Bench(cache=8, tokens_per_chunk=CHUNK_TOKENS)
    bench.store(0, 1, 2, 3)
    tokens = range(240, 4 * CHUNK_TOKENS)
    op = bench.core.prepare_load(keys_of(0, 1, 2, 3), tokens=tokens).op
    lost = []
    for row in (2, 3, 0, 1):
        bench.report(op, (row, CHECKSUM_MISMATCH), rows=[row])
        lost.append(bench.core.counters["recomputed_tokens", "load_failed"])
    assert lost == [2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS, len(tokens), len(tokens)]


# -- writes, suspect targets, resets and adoption -------------------------------------


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


def test_with_one_target_suspect_the_others_take_the_writes() -> None:
    bench = Bench(cache=8, pool=6, targets=3, writes_pending_share=1.0)
    bench.core.report([VerdictReport(0, 1, Verdict.SUSPECT)])
    bench.store(*range(6))
    assert sorted(target_of(bench.write().batch.places)) == [0, 0, 2, 2]
    assert bench.core.gauges()["writes_pending", "waiting"] == 2
    bench.core.report([VerdictReport(0, 1, Verdict.OK)])
    assert target_of(bench.write().batch.places).tolist() == [1, 1]


def test_a_suspect_target_misses_until_every_rank_finds_it_usable() -> None:
    bench = Bench(cache=1, ranks=2)
    bench.store(1)
    bench.write_all()
    bench.store(2)
    assert bench.source(1) is Source.POOL
    bench.core.report([VerdictReport(0, 0, Verdict.SUSPECT), VerdictReport(1, 0, Verdict.SUSPECT)])
    bench.core.report([VerdictReport(0, 0, Verdict.OK)])
    assert bench.source(1) is None
    bench.core.report([VerdictReport(1, 0, Verdict.OK)])
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
    bench.core.report([VerdictReport(0, 0, Verdict.DEGRADED)])
    assert bench.source(1) is Source.POOL
    assert bench.core.targets.worst_verdicts() == [1]
    assert bench.core.counters["verdict_changes"] == 0
    before = bench.core.activity()
    bench.core.report([VerdictReport(1, 0, Verdict.GONE)])
    assert bench.core.activity() != before
    assert bench.core.targets.worst_verdicts() == [3]
    assert bench.source(1) is None
    bench.core.report([VerdictReport(1, 0, Verdict.OK), VerdictReport(0, 0, Verdict.SUSPECT)])
    assert bench.core.targets.worst_verdicts() == [2]
    bench.core.report([VerdictReport(0, 0, Verdict.OK)])
    assert bench.core.targets.worst_verdicts() == [0]
    assert bench.core.counters["verdict_changes"] == 4


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


# -- write_policy: on eviction, or off ------------------------------------------------


def demoting(cache: int = 8, pool: int = 32, **config: object) -> Bench:
    return Bench(cache, pool, write_policy=WritePolicy.ON_EVICTION, clean_share=0.25, **config)


def test_writes_ahead_of_need_are_bounded() -> None:
    bench = demoting(cache=8, writes_pending_share=0.125)
    bench.store(*range(8))
    assert len(bench.write().batch) == 1


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


def test_a_reset_forgets_waiting_demotions() -> None:
    bench = demoting(cache=4)
    bench.store(1, 2)
    bench.core.reset()
    assert bench.core.gauges()["writes_pending", "waiting"] == 0
    bench.store(1, 2, 3)
    assert bench.core.gauges()["writes_pending", "waiting"] == 3


# -- which chunks are kept; tests/unit/tiers has when one counts as used --------------

#: Four conversations of up to seven chunks, and room for more.
_ALL = 30


def serve(bench: Bench, numbers: Sequence[int]) -> int:
    """One request: look up, load, store what is missing, end; returns how many were found."""
    keys = keys_of(*numbers)
    found = 0
    while found < len(keys) and bench.core.lookup(keys[found]) is not None:
        found += 1
    if found:
        bench.done(bench.core.prepare_load(keys[:found]).op)
    plan = bench.core.prepare_store(keys)
    if plan.command is not None:
        bench.done(plan.command.op)
    bench.write_all()
    bench.core.ended(keys)
    return found


@pytest.mark.parametrize(("share", "found"), [(0.0, 0), (2.0, 4)])
def test_reused_chunks_outlive_chunks_used_once(share: float, found: int) -> None:
    bench = Bench(cache=8, pool=0, credit_share=share)
    for _ in range(2):
        serve(bench, [1, 2, 3, 4])
    for other in (10, 20):
        serve(bench, [other, other + 1, other + 2, other + 3])
    assert serve(bench, [1, 2, 3, 4]) == found


@settings(deadline=None, max_examples=60)
@given(
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), max_size=60),
    cache=st.integers(7, 20),
    pool=st.sampled_from([0, _ALL]),
)
def test_a_conversation_is_kept_from_its_beginning(
    asks: list[tuple[int, int]], cache: int, pool: int
) -> None:
    """Within a tier no chunk stays without its predecessor, because no look-up could find it."""
    assert _stranded(Bench(cache=cache, pool=pool, credit_share=2.0), asks)[1] == 0


def _stranded(bench: Bench, asks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Count the chunks present after each of `asks` (conversation, growth), and those without
    their predecessor.
    """
    there = stranded = 0
    longest = [0] * 4
    for user, more in asks:
        longest[user] = min(7, longest[user] + more)
        serve(bench, [100 * user + at for at in range(longest[user])])
        for one in range(4):
            held = [hit - 100 * one for hit in bench.hits(100 * one + at for at in range(7))]
            there += len(held)
            stranded += sum(at != place for place, at in enumerate(held))
    return there, stranded


def test_a_reset_forgets_reuses() -> None:
    bench = Bench(cache=4, pool=0, credit_share=2.0)
    for _ in range(3):
        serve(bench, [1, 2])
    bench.core.reset()
    (reset,) = bench.core.take_commands()
    assert isinstance(reset, ResetCommand)
    bench.done(reset.op)
    serve(bench, [1, 2])
    serve(bench, [3, 4])
    serve(bench, [5, 6])
    assert bench.hits([1, 2, 3, 4, 5, 6]) == [3, 4, 5, 6]


# -- store_threshold: a chunk is offloaded when it is seen for the n-th time ----------


def test_what_finds_no_room_does_not_count_as_below_the_threshold() -> None:
    bench = Bench(cache=1, store_threshold=2)
    bench.core.prepare_store(keys_of(1, 2))
    plan = bench.core.prepare_store(keys_of(1, 2, 3))
    assert plan.refused == keys_of(2)
    assert bench.core.counters["unstored_chunks", "below_threshold"] == 3, "1 and 2 at first, and 3"


def test_keys_seen_often_enough_are_stored_at_once_after_a_reset() -> None:
    bench = Bench(store_threshold=2)
    bench.core.prepare_store(keys_of(1))
    bench.store(1)
    bench.core.reset()
    bench.store(1)


def test_the_table_is_bounded_and_keeps_the_last_seen_keys() -> None:
    threshold = StoreThreshold(2, 100)
    for number in range(20_000):
        assert due(threshold, number, -1) == [False, number > 0]
        assert len(threshold) < 100 + 1024
    assert due(threshold, 19_999, 3) == [True, False], "forgotten in between"
    due(threshold, *range(50_000, 55_000))
    assert len(threshold) == 100


def due(threshold: StoreThreshold, *numbers: int) -> list[bool]:
    found = threshold.see(keys_of(*numbers))
    assert found is not None
    return [bool(one) for one in found]


# -- the target of the next write: shares follow rates --------------------------------

GB = 1e9


def bench_of(targets: int, *rates: float, pool: int = 400, cache: int = 64) -> Bench:
    bench = Bench(cache=cache, pool=pool, targets=targets)
    bench.core.report([RateReport(0, target, rate, rate) for target, rate in enumerate(rates)])
    return bench


def targets_of_writes(bench: Bench) -> list[int]:
    """The targets of the writes that are due, which are sent."""
    return [target for command in bench.writes() for target in target_of(command.batch.places)]


def write_to_targets(bench: Bench, count: int, service: list[float], at_once: int) -> Counter[int]:
    """Write chunks to two targets, each at its rate; return the target of each chunk."""
    shares: Counter[int] = Counter()
    queues: list[deque[tuple[int, int]]] = [deque() for _ in service]  # (op, row)
    free_s = [0.0 for _ in service]
    stored = 0
    while stored < count or any(queues):
        waiting = sum(map(len, queues))
        if stored < count and waiting < at_once:
            bench.store(*range(stored, stored + at_once - waiting))
            stored += at_once - waiting
        for command in bench.writes():
            for row, target in enumerate(target_of(command.batch.places).tolist()):
                shares[target] += 1
                queues[target].append((command.op, row))
        target = min(
            (t for t in range(len(service)) if queues[t]), key=lambda t: free_s[t] + service[t]
        )
        free_s[target] += service[target]
        for other in range(len(service)):
            if not queues[other]:
                free_s[other] = max(free_s[other], free_s[target])
        op, row = queues[target].popleft()
        bench.report(op, rows=[row], rank_count=bench.ranks)
    return shares


def test_a_stalled_target_gets_nothing_more() -> None:
    bench = bench_of(2, GB, GB)
    given: Counter[int] = Counter()
    for number in range(50):
        bench.store(number)
        for command in bench.writes():
            (target,) = target_of(command.batch.places).tolist()
            given[target] += 1
            if target:
                bench.done(command.op)
    assert given == {0: 1, 1: 49}


def test_a_free_slot_goes_before_an_eviction_unless_its_queue_is_much_longer() -> None:
    bench = bench_of(2, 4 * GB, 1 * GB, pool=20)
    assert write_to_targets(bench, 15, [1.0, 4.0], 1) == {0: 10, 1: 5}, "the fast one is full"
    bench.store(100)
    assert targets_of_writes(bench) == [1], "room on the slow one, and nothing waits there"
    bench.store(101)
    assert targets_of_writes(bench) == [0], "now something does"
    assert bench.core.counters["evictions", "pool"] == 1


def test_a_target_that_was_suspect_gets_no_extra_writes() -> None:
    bench = bench_of(2, GB, GB)
    bench.core.report([VerdictReport(0, 1, Verdict.SUSPECT)])
    assert write_to_targets(bench, 50, [1.0, 1.0], 1) == {0: 50}
    bench.core.report([VerdictReport(0, 1, Verdict.OK)])
    for number in range(100, 120):
        bench.store(number)
    assert Counter(targets_of_writes(bench)) == {0: 10, 1: 10}


def test_a_write_that_was_never_sent_does_not_count_as_queued() -> None:
    bench = bench_of(2, GB, GB)
    bench.store(1, 2, 3, 4)
    bench.core.reset()
    bench.core.take_commands()
    bench.store(5, 6)
    assert sorted(targets_of_writes(bench)) == [0, 1]


# -- every arrival in a tier and every departure is logged in order -------------------

CPU, POOL = Source.CPU, Source.POOL
LEFT = True


def logged(core: ManagerCore) -> list[tuple[Source, bool, list[bytes]]]:
    """Every event since the last call."""
    changes = core.take_changes()
    assert not core.changed_keys
    return [(change.tier, change.removed, change.keys) for change in changes]


def adopting(numbers: range) -> ManagerCore:
    """A core that adopts these chunks."""
    agreement = agree([hello(0, 2, len(numbers), [(n, n + 7, n) for n in numbers])])
    return ManagerCore(CoreConfig(kv_events=True, key_bytes=KEY_BYTES), agreement)


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
