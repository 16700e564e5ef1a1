# SPDX-License-Identifier: Apache-2.0
"""Holding and fetching in the real core: eviction, the end of a fetch, cancels, several ranks."""

from __future__ import annotations

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, Outcome
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.manager.hold_and_prefetch import InGpu, Order
from vllm_nvmeof_offload.protocol import (
    CancelCommand,
    Command,
    FetchCommand,
    OpReport,
    ResetCommand,
)

from .bench import Bench, key, keys_of, release

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


# -- two ranks --------------------------------------


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
