# SPDX-License-Identifier: Apache-2.0
"""Holding and fetching in the real core: eviction, the end of a fetch, cancels, several ranks."""

from __future__ import annotations

import errno

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, Outcome, io_error
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.manager.handshake import WritePolicy
from vllm_nvmeof_offload.manager.hold_and_prefetch import InGpu, Order
from vllm_nvmeof_offload.protocol import (
    CancelCommand,
    Command,
    FetchCommand,
    OpReport,
    ResetCommand,
    Urgency,
)

from .bench import Bench, key, keys_of, numbers_of, release

SHARES = {"reload_cache_share": 0.5, "prefetch_cache_share": 0.5}


def not_in_gpu(_chunk: int) -> bool:
    return False


class HoldsBench(Bench):
    """A bench with requests that wait."""

    def __init__(self, cache: int = 8, pool: int = 32, **config: object) -> None:
        super().__init__(cache=cache, pool=pool, **{**SHARES, **config})  # type: ignore[arg-type]

    def in_both_tiers(self, *numbers: int) -> None:
        self.store(*numbers)
        self.write_all()

    def in_the_pool(self, *numbers: int) -> None:
        """Put chunks only into the pool; the cache is full of clean chunks from 100 on."""
        self.in_both_tiers(*numbers)
        self.fill()
        assert {self.source(number) for number in numbers} == {Source.POOL}

    def fill(self) -> None:
        """Store and write as many chunks as fit beside the held ones."""
        new = range(100 + self.core.counters["stored_chunks"], 200)[
            : self.core.capacity.cache_slots
        ]
        self.in_both_tiers(*new)

    def preempted(self, name: str, *numbers: int, in_gpu: InGpu = not_in_gpu) -> None:
        self.core.reload.follow(name, keys_of(*numbers), in_gpu)

    def queued(
        self, name: str, *numbers: int, order: Order = (), in_gpu: InGpu = not_in_gpu
    ) -> None:
        self.core.reload.follow(name, keys_of(*numbers), in_gpu, order)

    def fetches(self) -> list[FetchCommand]:
        """The fetches of one step, a command for each reason."""
        self.core.turn()
        commands = self.core.take_commands()
        fetches = [command for command in commands if isinstance(command, FetchCommand)]
        assert len(fetches) == len(commands)
        return fetches

    def fetch(self) -> FetchCommand:
        """The only fetch command of one step."""
        (command,) = self.fetches()
        return command

    def slots(self, number: int) -> tuple[int, int]:
        """Cache slot and place; -1: none."""
        (entry,) = (e for e in self.core.entries() if e.key == key(number))
        return entry.cache, entry.place

    def held(self) -> list[int]:
        return sorted(int(one[:8]) for one in self.core.held())

    def ended(self) -> dict[str, int]:
        """Fetches by how they ended; each of them once."""
        return {
            series[1]: count
            for series, count in self.core.counters.items()
            if series[0] == "prefetches_ended" and count
        }

    def begun(self) -> int:
        counters = self.core.counters
        return sum(n for series, n in counters.items() if series[0] == "prefetches")

    def late(self, op: int, outcome: Outcome) -> None:
        """Fail the fetch of one chunk while the kernel still has its buffer."""
        self.report(op, (0, outcome), released=False, rank_count=self.ranks)

    def check_idle(self) -> None:
        """Check that nothing is held, used or in flight."""
        gauges = self.core.gauges()
        for name in (
            "ops",
            ("held_cache_slots", "reload"),
            ("held_cache_slots", "queue"),
            "requests_waiting",
        ):
            assert gauges[name] == 0, name
        for name in ("cache_slots_in_use", "cache_slots_orphaned", "pool_slots_orphaned"):
            assert gauges[name] == 0, name
        assert self.held() == []
        assert sum(self.ended().values()) == self.begun()
        assert self.core._holds.fetching == 0, "it bounds the next fetches"


def test_cached_chunks_of_a_victim_are_not_evicted_until_it_runs() -> None:
    bench = HoldsBench()
    bench.in_both_tiers(0, 1, 2, 3)
    bench.preempted("a", 0, 1, 2, 3)
    assert bench.fetches() == []
    assert bench.core.gauges()["held_cache_slots", "reload"] == 4
    for _ in range(3):
        bench.fill()
    assert [bench.source(n) for n in range(4)] == [Source.CPU] * 4
    bench.core.reload.left("a")
    bench.fill()
    assert [bench.source(n) for n in range(4)] == [Source.POOL] * 4
    bench.check_idle()
    assert bench.begun() == 0, "holding is no prefetch"


def test_an_eighth_of_the_slots_stays_evictable() -> None:
    bench = HoldsBench(cache=16, reload_cache_share=1.0)
    bench.in_both_tiers(*range(16))
    load = bench.load(14, 15)
    bench.preempted("a", *range(16))
    bench.fetches()
    assert bench.held() == list(range(12))
    bench.done(load.op)
    bench.fetches()
    assert bench.held() == list(range(14)), "tried again once there is room"
    assert bench.core.prepare_store(keys_of(200, 201, 202)).refused == keys_of(202)
    bench.core.reload.left("a")


def test_a_loaded_fetch_counts_as_used() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0, 1)
    bench.preempted("a", 0, 1)
    fetch = bench.fetch()
    assert (fetch.urgency, numbers_of(fetch.batch.keys)) == (Urgency.URGENT, [0, 1])
    assert bench.fetches() == []
    bench.done(fetch.op)
    assert (bench.source(0), bench.core.gauges()["held_cache_slots", "reload"]) == (Source.CPU, 2)
    bench.done(bench.load(0, 1).op)
    assert bench.ended() == {}
    bench.core.reload.left("a")
    assert bench.ended() == {"used": 2}
    assert bench.core.counters["prefetches", "reload"] == 2
    bench.check_idle()


def test_a_fetch_for_the_queue_is_not_urgent_and_wasted_if_not_loaded() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.queued("a", 0)
    fetch = bench.fetch()
    assert fetch.urgency is Urgency.PREFETCH
    bench.done(fetch.op)
    bench.core.reload.left("a")
    assert bench.ended() == {"wasted": 1}
    assert bench.core.counters["prefetches", "queue"] == 1
    assert bench.source(0) is Source.CPU, "wasted, but there"
    bench.check_idle()


def test_a_fetch_that_failed_is_counted_once_and_its_key_misses() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0, 1)
    bench.preempted("a", 0, 1)
    fetch = bench.fetch()
    bench.report(fetch.op, (0, io_error(errno.EIO)), rows=[0])
    assert (bench.source(0), bench.held()) == (None, [1])
    bench.report(fetch.op, (1, CANCELLED), rows=[1])  # decided by the worker
    assert (bench.source(1), bench.held()) == (Source.POOL, [])
    bench.core.reload.left("a")
    assert bench.ended() == {"failed": 2}
    bench.check_idle()


def test_reset_while_chunks_are_held_being_fetched_and_to_be_fetched() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0, 1)
    bench.in_both_tiers(2)
    bench.preempted("a", 0)
    bench.queued("b", 0)
    bench.preempted("c", 2)
    sent = bench.fetch()
    assert bench.held() == [0, 2]
    bench.core.reload.probe(keys_of(1))
    bench.core.turn()  # its command is not sent yet
    bench.core.reset()
    (reset,) = bench.core.take_commands()
    assert isinstance(reset, ResetCommand)
    assert bench.held() == []
    assert bench.core.gauges()["slots_used", "cache"] == 1, "the read under way has it"
    bench.store(0)  # the key is back before the old read has ended
    bench.write_all()
    bench.preempted("a", 0)
    assert (bench.fetches(), bench.held()) == ([], [0])
    bench.done(sent.op)
    assert (bench.source(0), bench.held()) == (Source.CPU, [0])
    for name in "abc":
        bench.core.reload.left(name)
    bench.done(reset.op)
    assert bench.ended() == {"failed": 2}
    bench.check_idle()


def test_an_unwritten_chunk_stays_unwritten_while_it_is_held() -> None:
    bench = HoldsBench(write_policy=WritePolicy.ON_EVICTION, clean_share=0.5)
    bench.store(0, 1)
    bench.preempted("a", 0, 1)
    bench.fetches()
    bench.store(2, 3, 4, 5, 6)
    written = numbers_of(bench.write().batch.keys)
    assert written and not {0, 1} & set(written)
    bench.core.reload.left("a")
    assert bench.core.gauges()["held_cache_slots", "reload"] == 0


def test_a_landing_chunk_is_released_when_its_load_is_cut_off() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    loads = bench.load(0).op
    bench.preempted("b", 0)
    assert bench.fetches() == []  # it has a cache slot: held
    bench.done(loads, (0, CANCELLED))
    assert (bench.source(0), bench.held()) == (Source.POOL, [])
    assert bench.core.gauges()["cache_slots_orphaned"] == 0
    bench.preempted("c", 0)
    assert len(bench.fetches()) == 1


def test_a_probe_is_read_and_released_and_teaches_admission() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.core.reload.probe(keys_of(0))
    fetch = bench.fetch()
    assert fetch.urgency is Urgency.PREFETCH
    bench.done(fetch.op)
    assert bench.ended() == {"probe": 1}
    assert bench.source(0) is Source.CPU
    bench.check_idle()


def test_deadline_of_a_fetch_frees_its_slot_at_its_release() -> None:
    bench = HoldsBench(cache=4)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.late(fetch.op, DEADLINE)
    assert (bench.held(), bench.core.gauges()["cache_slots_orphaned"]) == ([], 1)
    bench.core.reload.left("a")
    bench.core.report([release(fetch.op, 0)])
    bench.check_idle()


# -- fetches that no request wants any more -------------------------------------------


def cancels(commands: list[Command]) -> list[tuple[int, list[int]]]:
    """The cancellations: (op, its rows). There is nothing else."""
    found = []
    for command in commands:
        assert isinstance(command, CancelCommand) and command.indexes is not None
        found.append((command.target_op, command.indexes.tolist()))
    return found


def test_an_unsent_fetch_is_dropped() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    free = bench.core.gauges()["slots_used", "cache"]
    bench.queued("a", 0)
    bench.core.turn()
    bench.core.reload.left("a")
    assert bench.core.take_commands() == []
    assert (bench.ended(), bench.source(0)) == ({"cancelled": 1}, Source.POOL)
    assert bench.core.gauges()["slots_used", "cache"] == free - 1, "its victim is gone"
    bench.check_idle()
    bench.queued("b", 0)
    fetch = bench.fetch()
    bench.done(fetch.op)
    assert bench.source(0) is Source.CPU


def test_a_cancelled_fetch_is_in_the_pool_at_once_and_frees_its_slot_at_release() -> None:
    bench = HoldsBench(cache=4, reload_cache_share=0.25)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.core.reload.left("a")
    assert cancels(bench.core.take_commands()) == [(fetch.op, [0])]
    assert (bench.source(0), bench.ended()) == (Source.POOL, {"cancelled": 1})
    command = bench.load(0)
    (place,), (slot,) = command.batch.places, command.batch.cache
    assert place == fetch.batch.places[0]
    assert slot != fetch.batch.cache[0]
    stored = bench.core.prepare_store(keys_of(300, 301, 302, 303)).command
    assert stored is not None
    assert fetch.batch.cache[0] not in stored.batch.cache
    bench.done(command.op)
    bench.done(fetch.op)  # the read had already ended
    assert bench.slots(0) == (slot, place), "its end changed nothing"
    again = bench.core.prepare_store(keys_of(304)).command
    assert again is not None
    assert again.batch.cache[0] == fetch.batch.cache[0]
    bench.done(stored.op)
    bench.done(again.op)
    bench.write_all()
    bench.check_idle()


def test_a_fetch_that_a_load_waits_for_is_not_cancelled() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    command = bench.load(0)
    assert command.batch.places[0] == -1
    bench.core.reload.left("a")
    assert (bench.core.take_commands(), bench.ended()) == ([], {"used": 1})
    bench.done(fetch.op)
    bench.done(command.op)
    assert bench.source(0) is Source.CPU
    bench.check_idle()


def test_a_load_that_took_an_unsent_fetch_is_all_that_waits_for_it() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.queued("a", 0)
    bench.core.turn()
    loads = bench.load(0).op
    bench.core.reload.left("a")
    bench.preempted("b", 0)  # holds the chunk, and is not what fetches it
    fetch = bench.fetch()
    bench.done(fetch.op)
    bench.done(loads)
    assert bench.source(0) is Source.CPU
    bench.core.reload.left("b")
    assert bench.ended() == {"used": 1}
    bench.check_idle()


def test_a_second_fetch_ignores_the_reports_of_a_cancelled_first_one() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    first = bench.fetch()
    bench.core.reload.left("a")
    bench.preempted("a", 0)
    bench.core.turn()
    cancel, second = bench.core.take_commands()
    assert cancels([cancel]) == [(first.op, [0])]
    assert isinstance(second, FetchCommand)
    assert second.batch.cache[0] != first.batch.cache[0]
    bench.done(first.op, (0, CANCELLED))
    assert (bench.held(), bench.slots(0)[0]) == ([0], second.batch.cache[0])
    assert bench.core.find(keys_of(0)).leading_cpu == 0, "it is being read still"
    bench.done(second.op)
    assert bench.core.find(keys_of(0)).leading_cpu == 1
    bench.core.reload.left("a")
    assert bench.ended() == {"cancelled": 1, "wasted": 1}
    bench.check_idle()


def test_a_read_that_was_cancelled_and_failed_dooms_the_chunk() -> None:
    bench = HoldsBench()
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    first = bench.fetch()
    bench.core.reload.left("a")
    bench.preempted("b", 0)
    bench.core.turn()
    second = bench.core.take_commands()[1]
    assert isinstance(second, FetchCommand)
    bench.done(first.op, (0, CHECKSUM_MISMATCH))
    assert (bench.source(0), bench.held()) == (None, [])
    bench.done(second.op)
    bench.core.reload.left("b")
    assert bench.ended() == {"cancelled": 1, "failed": 1}
    bench.check_idle()


# -- two ranks --------------------------------------


def test_one_rank_read_the_chunk_and_the_other_stopped() -> None:
    bench = HoldsBench(ranks=2)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.core.report([OpReport(fetch.op)])
    bench.core.reload.left("a")
    assert cancels(bench.core.take_commands()) == [(fetch.op, [0])]
    assert (bench.source(0), bench.core.gauges()["cache_slots_orphaned"]) == (Source.POOL, 1)
    bench.report(fetch.op, (0, CANCELLED))
    assert bench.source(0) is Source.POOL
    assert bench.ended() == {"cancelled": 1}
    bench.check_idle()


def test_the_slot_of_a_cancelled_fetch_waits_for_the_last_rank() -> None:
    bench = HoldsBench(ranks=2)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.core.reload.left("a")
    bench.report(fetch.op, (0, CANCELLED))
    bench.report(fetch.op, (0, CANCELLED), released=False)
    # Its cache slot belongs to a chunk that failed: the kernel may still write into it.
    assert bench.core.gauges()["cache_slots_orphaned"] == 1
    bench.core.report([release(fetch.op, 0)])
    bench.core.take_commands()
    bench.check_idle()


def test_one_rank_fails_a_fetch_that_another_cancelled() -> None:
    bench = HoldsBench(ranks=2)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.core.reload.left("a")
    bench.report(fetch.op, (0, CANCELLED))
    bench.report(fetch.op, (0, io_error(errno.EIO)))
    assert (bench.source(0), bench.ended()) == (None, {"cancelled": 1})
    bench.core.take_commands()
    bench.check_idle()


def test_one_ranks_failure_ends_a_fetch_before_the_other_has_reported() -> None:
    bench = HoldsBench(ranks=2)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.report(fetch.op, (0, CHECKSUM_MISMATCH))
    assert (bench.source(0), bench.held(), bench.ended()) == (None, [], {"failed": 1})
    bench.store(0)
    bench.preempted("b", 0)
    bench.core.turn()
    bench.core.report([OpReport(fetch.op)])
    assert bench.held() == [0], "the new chunk of that key is another one"
    bench.core.reload.left("a")
    bench.core.reload.left("b")
    bench.write_all()
    bench.check_idle()


def test_a_fetch_ends_when_every_rank_has_reported_it() -> None:
    bench = HoldsBench(ranks=2)
    bench.in_the_pool(0)
    bench.preempted("a", 0)
    fetch = bench.fetch()
    bench.core.report([OpReport(fetch.op)])
    assert bench.core.find(keys_of(0)).leading_cpu == 0
    bench.core.report([OpReport(fetch.op)])
    assert bench.core.find(keys_of(0)).leading_cpu == 1
    bench.core.reload.left("a")
    bench.check_idle()
