# SPDX-License-Identifier: Apache-2.0
"""The order in which operations start, without threads."""

from __future__ import annotations

from vllm_nvmeof_offload.io.base import IoLimits, IoOp
from vllm_nvmeof_offload.io.threads import OpState, Queues
from vllm_nvmeof_offload.pool.format import Stamp
from vllm_nvmeof_offload.protocol import OpKind, SlotIdentity, Urgency

SLOT = 1000


class Bench:
    def __init__(self, threads: int = 8, reads: int = 4, writes: int = 3) -> None:
        limits = IoLimits(
            read_bytes_in_flight_max=reads * SLOT, write_bytes_in_flight_max=writes * SLOT
        )
        self.queues = Queues(limits, SLOT, threads_working=threads)
        self.states: dict[int, OpState] = {}

    def add(self, kind: OpKind, urgency: Urgency = Urgency.DEMAND) -> int:
        token = len(self.states) + 1
        if kind is OpKind.WRITE:
            urgency = Urgency.WRITE
        op = IoOp(token, kind, urgency, 0, 0, SlotIdentity(b"k", 1), SLOT)
        self.states[token] = OpState(op, token)
        self.queues.add(self.states[token])
        return token

    def start(self) -> list[int]:
        started = []
        while (state := self.queues.start_next()) is not None:
            started.append(state.op.token)
        return started

    def finish(self, token: int) -> None:
        self.queues.finish(self.states[token])


READ, WRITE, RESET = OpKind.FETCH, OpKind.WRITE, OpKind.RESET


def test_urgent_classes_go_first_and_each_in_its_order() -> None:
    bench = Bench(reads=100)
    low = [bench.add(READ, Urgency.PREFETCH) for _ in range(3)]
    high = [bench.add(READ) for _ in range(3)]
    assert bench.start() == high + low


def test_bytes_in_flight_are_capped() -> None:
    bench = Bench(reads=4, writes=3)
    reads = [bench.add(READ) for _ in range(6)]
    assert bench.start() == reads[:4]
    bench.finish(reads[0])
    assert bench.start() == reads[4:5]
    bench = Bench(writes=3)
    writes = [bench.add(WRITE) for _ in range(6)]
    assert bench.start() == writes[:3]


def test_one_write_runs_while_reads_run() -> None:
    bench = Bench()
    reads = [bench.add(READ) for _ in range(2)]
    writes = [bench.add(WRITE) for _ in range(3)]
    assert bench.start() == [*reads, writes[0]]
    bench.finish(reads[0])
    bench.finish(reads[1])
    assert bench.start() == writes[1:]


def test_writes_never_take_the_last_thread() -> None:
    bench = Bench(threads=3, writes=100)
    writes = [bench.add(WRITE) for _ in range(5)]
    assert bench.start() == writes[:2]
    bench = Bench(threads=3, writes=100)
    bench.queues.threads_working = 1
    bench.add(WRITE)
    assert bench.start() == []


def test_an_overdue_operation_stops_counting() -> None:
    bench = Bench(reads=1)
    reads = [bench.add(READ) for _ in range(2)]
    assert bench.start() == reads[:1]
    bench.queues.overdue(bench.states[reads[0]])
    assert bench.start() == reads[1:]
    bench.finish(reads[0])
    assert bench.queues.reads_running == 1


def test_a_write_waits_for_the_resets_before_it_and_they_run_one_by_one() -> None:
    bench = Bench()
    early, first, second, late = (
        bench.add(WRITE),
        bench.add(RESET),
        bench.add(RESET),
        bench.add(WRITE),
    )
    assert bench.start() == [first, early]
    bench.finish(first)
    bench.queues.mark_writes(Stamp(1, bytes(16)))
    assert bench.states[late].stamp is None
    assert bench.start() == [second]
    bench.finish(second)
    bench.queues.mark_writes(Stamp(2, bytes(16)))
    assert bench.states[late].stamp == Stamp(2, bytes(16))
    assert bench.start() == [late]


def test_a_cancelled_reset_holds_nothing_back() -> None:
    bench = Bench()
    first, second, write = bench.add(RESET), bench.add(RESET), bench.add(WRITE)
    assert bench.start() == [first]
    bench.queues.remove(bench.states[second])
    bench.finish(first)
    assert bench.start() == [write]
