# SPDX-License-Identifier: Apache-2.0
"""The target of the next write: the one with the shortest expected wait, so shares follow rates."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from vllm_nvmeof_offload.protocol import RateReport, VerdictReport, target_of

from .bench import Bench

GB = 1e9


def bench_of(targets: int, *rates: float, pool: int = 400, cache: int = 64) -> Bench:
    bench = Bench(cache=cache, pool=pool, targets=targets)
    bench.core.report([RateReport(0, target, rate, rate) for target, rate in enumerate(rates)])
    return bench


def targets_of_writes(bench: Bench) -> list[int]:
    """The targets of the writes that are due, which are sent."""
    return [target for command in bench.writes() for target in target_of(command.batch.places)]


def serve(bench: Bench, count: int, service: list[float], at_once: int) -> Counter[int]:
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


@pytest.mark.parametrize("at_once", [1, 2, 7, 24])
def test_a_target_twice_as_fast_gets_twice_the_writes(at_once: int) -> None:
    shares = serve(bench_of(2, 2 * GB, 1 * GB), 240, [1.0, 2.0], at_once)
    assert 0.60 <= shares[0] / shares.total() <= 0.72


@pytest.mark.parametrize("rates", [(), (1 * GB,), (1 * GB, 0.0)])
def test_with_an_unknown_rate_the_targets_take_turns(rates: tuple[float, ...]) -> None:
    shares = serve(bench_of(2, *rates), 100, [1.0, 1.0], 1)
    assert shares == {0: 50, 1: 50}


def test_the_slowest_rank_decides() -> None:
    bench = Bench(cache=64, pool=400, targets=2, ranks=2)
    rates = [(0, 0, 2.0), (1, 0, 1.0), (0, 1, 1.0), (1, 1, 3.0)]
    bench.core.report([RateReport(rank, target, rate, 1.0) for rank, target, rate in rates])
    assert serve(bench, 100, [1.0, 1.0], 1) == {0: 50, 1: 50}


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
    assert serve(bench, 15, [1.0, 4.0], 1) == {0: 10, 1: 5}, "the fast one is full"
    bench.store(100)
    assert targets_of_writes(bench) == [1], "room on the slow one, and nothing waits there"
    bench.store(101)
    assert targets_of_writes(bench) == [0], "now something does"
    assert bench.core.counters["evictions", "pool"] == 1


def test_a_target_that_was_suspect_gets_no_extra_writes() -> None:
    bench = bench_of(2, GB, GB)
    bench.core.report([VerdictReport(0, 1, "suspect")])
    assert serve(bench, 50, [1.0, 1.0], 1) == {0: 50}
    bench.core.report([VerdictReport(0, 1, "ok")])
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
