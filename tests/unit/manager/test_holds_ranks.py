# SPDX-License-Identifier: Apache-2.0
"""Fetches and their cancellation on two ranks, by cases and by random sequences."""

from __future__ import annotations

import errno

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nvmeof_offload.errors import CANCELLED, CHECKSUM_MISMATCH, DEADLINE, Outcome, io_error
from vllm_nvmeof_offload.manager.core import Source
from vllm_nvmeof_offload.protocol import (
    FetchCommand,
    OpReport,
    ResetCommand,
    WriteCommand,
)

from .bench import keys_of, release
from .test_holds import HoldsBench
from .test_holds_cancel import cancels


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


class Storm:
    """Random requests on a small core of two ranks that report row by row, in any order."""

    def __init__(self) -> None:
        self.bench = HoldsBench(cache=8, pool=12, ranks=2)
        self.core = self.bench.core
        self.owed: list[tuple[int, int, str]] = []  # (op, row, kind), for each rank
        self.late: list[tuple[int, int]] = []
        self.waiting: set[str] = set()

    def owe(self, op: int, kind: str, rows: int = 1) -> None:
        self.owed += [(op, row, kind) for row in range(rows) for _rank in (0, 1)]

    def store(self, first: int, count: int) -> None:
        plan = self.core.prepare_store(keys_of(*range(first, first + count)))
        if plan.command is not None:
            self.owe(plan.command.op, "store", len(plan.command.batch))

    def load(self, first: int, count: int) -> None:
        found: list[bytes] = []
        for key in keys_of(*range(first, first + count)):
            if self.core.lookup(key) is None:
                break
            found.append(key)
        if found:
            command = self.core.prepare_load(found, limit_s=1.0)
            self.owe(command.op, "load", len(command.batch))

    def wait(self, name: str, first: int, count: int, victim: bool) -> None:
        self.core.reload.left(name)
        (self.bench.preempted if victim else self.bench.queued)(name, *range(first, first + count))

    def turn(self) -> None:
        self.bench.now_s += 0.7
        self.core.turn()

    def step(self) -> None:
        self.turn()
        for command in self.core.take_commands():
            if isinstance(command, WriteCommand | FetchCommand):
                self.owe(command.op, type(command).__name__, len(command.batch))
            elif isinstance(command, ResetCommand):
                self.owe(command.op, "reset")

    def report(self, which: int, how: int) -> None:
        if not self.owed:
            return
        op, row, kind = self.owed.pop(which % len(self.owed))
        failures: list[tuple[int, Outcome]] = []
        released = True
        if kind != "reset" and how % 5 == 1:
            failures = [(row, CHECKSUM_MISMATCH if how % 2 else io_error(errno.EIO))]
        elif kind in ("load", "FetchCommand") and how % 5 == 2:
            failures = [(row, CANCELLED)]
        elif kind in ("load", "FetchCommand", "WriteCommand") and how % 5 == 3:
            failures, released = [(row, DEADLINE)], False
            self.late.append((op, row))
        self.bench.report(op, *failures, rows=[row], released=released, seconds=0.1)

    def check(self) -> None:
        gauges = self.core.gauges()
        assert gauges["held_cache_slots", "reload"] <= 4
        assert gauges["held_cache_slots", "queue"] <= 4
        assert sum(self.bench.ended().values()) <= self.bench.begun()

    def finish(self) -> None:
        for name in "abcde":
            self.core.reload.left(name)
        for _ in range(200):
            self.step()
            while self.owed:
                self.report(-1, 0)
        while self.late:
            op, row = self.late.pop()
            self.core.report([release(op, row)])
        self.step()
        while self.owed:
            self.report(-1, 0)
        self.bench.check_idle()


actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "load", "wait", "leave", "turn", "step", "report", "probe", "reset"]
        ),
        st.integers(0, 29),
        st.integers(0, 5),
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(actions)
def test_nothing_is_held_or_pending_when_all_requests_have_left(
    todo: list[tuple[str, int, int]],
) -> None:
    storm = Storm()
    for what, number, count in todo:
        name = "abcde"[number % 5]
        match what:
            case "store":
                storm.store(number % 14, 1 + count)
            case "load":
                storm.load(number % 14, 1 + count)
            case "wait":
                storm.wait(name, number % 14, 1 + count, victim=bool(count % 2))
            case "leave":
                storm.core.reload.left(name)
            case "turn":
                storm.turn()
            case "step":
                storm.step()
            case "report":
                storm.report(number, number + count)
            case "probe":
                storm.core.reload.probe(keys_of(*range(number % 14, number % 14 + count)))
            case "reset" if count == 0:
                storm.core.reset()
        storm.check()
    storm.finish()
