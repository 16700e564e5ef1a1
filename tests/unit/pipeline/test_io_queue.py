# SPDX-License-Identifier: Apache-2.0
"""The order of operations to the engine: classes, bounds per target, fetches that a load awaits."""

from __future__ import annotations

import errno
import itertools
import math
import time
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests import chunks
from tests.chunks import Reported, place_in
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, OK, STALE, io_error
from vllm_nvmeof_offload.native import CacheGeometry, PythonLanes
from vllm_nvmeof_offload.protocol import (
    ChunkBatch,
    LoadCommand,
    StoreCommand,
    Urgency,
    slot_of,
)
from vllm_nvmeof_offload.targets.health import TargetHealth

from .bench import READ_S, STRIDE, WRITE_S, Bench, identity, machine_of


def _started(bench: Bench) -> list[int]:
    return [bench.number(op) for op in bench.io.started]


def test_demand_then_urgent_fetches_then_fetches_then_writes() -> None:
    bench = Bench(stream_slots=1, target_count=2)
    bench.stored(1, slot=0, number=7)
    bench.io.busy = True
    bench.write(2, 7, cache=0, pool=10)
    bench.fetch(3, number=8, pool=21, cache=1)
    bench.fetch(4, number=9, pool=30, cache=2, urgent=True)
    bench.stream(5, [41])
    bench.pipeline.step()
    bench.io.busy = False
    bench.pipeline.step()
    assert _started(bench) == [41, 30, 21, 10], "over all targets"


def test_a_full_engine_is_offered_every_target_in_turn() -> None:
    bench = Bench(stream_slots=20, target_count=2)
    bench.io.room_max = 1
    bench.stream(1, range(0, 20, 2))
    bench.stream(2, range(1, 21, 2))
    for _ in range(4):
        bench.pipeline.step()
    assert sorted(bench.number(op) % 2 for op in bench.io.started) == [0, 0, 1, 1]


# -- bytes ----------------------------------------------------------------------------


def test_bytes_in_flight_are_capped_per_target_and_direction() -> None:
    bench = Bench(
        stream_slots=20,
        cache_slots=8,
        target_count=2,
        read_bytes_in_flight_max=4 * STRIDE,
        write_bytes_in_flight_max=3 * STRIDE,
    )
    for slot in range(5):
        bench.stored(10 + slot, slot=slot, number=slot)
    bench.stream(1, range(0, 12, 2))
    bench.stream(2, range(1, 3, 2))
    bench.pipeline.step()
    assert sorted(_started(bench)) == [0, 1, 2, 4, 6], "the other target is not held back"
    bench.io.complete(bench.io_of(2))
    bench.pipeline.step()
    assert _started(bench)[-1] == 8
    while bench.turn([0, 1], target_count=2):
        pass
    bench.write_chunks(20, [(slot, slot, 100 + 2 * slot) for slot in range(5)])
    bench.pipeline.step()
    assert len(bench.io.ops) == 3


def test_one_write_goes_on_beside_reads_whatever_its_size() -> None:
    bench = Bench(stream_slots=2, write_bytes_beside_reads_max=1, read_bytes_in_flight_max=1)
    for slot in (0, 1):
        bench.stored(1 + slot, slot=slot, number=slot)
    bench.stream(3, [50, 51])
    bench.write_chunks(4, [(0, 0, 100), (1, 1, 101)])
    bench.pipeline.step()
    assert _started(bench) == [50, 100], "and one read, if a read is larger than its bound"


# -- deadlines ------------------------------------------------------------------------


def test_an_operation_past_its_deadline_does_not_count_against_the_bounds() -> None:
    """The engine gives it up, and work goes on when the target's files are other ones."""
    health = TargetHealth()
    bench = Bench(cache_slots=8, write_bytes_in_flight_max=STRIDE, health=(health,))  # type: ignore[arg-type]
    for slot in (0, 1, 2):
        bench.stored(1 + slot, slot=slot, number=slot)
    bench.write_chunks(4, [(0, 0, 0)])
    bench.pipeline.step()
    bench.hang(WRITE_S)
    assert bench.io.cancelled == [bench.io_of(0)]
    health.attached()
    bench.write_chunks(5, [(1, 1, 1), (2, 2, 2)])
    bench.pipeline.step()
    assert _started(bench) == [0, 1], "one at a time, beside the one that hangs"


def test_a_deadline_comes_whether_the_engine_answers_or_not() -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    assert bench.pipeline.deadline_in_s() == READ_S
    bench.hang(READ_S - 0.001)
    assert bench.reports() == []
    bench.hang(0.001)
    assert Reported(1, 0, DEADLINE, released=False) in bench.reports()
    bench.hang(1000.0)
    assert bench.pipeline.deadline_in_s() == math.inf
    bench.io_done(io_error(errno.EIO))
    assert Reported(1, 0, None) in bench.reports(), "its release is all that counts now"
    assert len(bench.io.started) == 1, "it is not tried again"
    assert bench.idle()


def test_what_the_engine_has_not_started_is_released_at_its_deadline() -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    bench.io.queued = set(bench.io.ops)
    bench.hang()
    assert bench.reports() == [Reported(1, 0, DEADLINE)], "and the target is not suspected"
    assert bench.idle()


def test_an_end_before_its_deadline_counts_even_if_it_is_seen_later() -> None:
    bench = Bench()
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    bench.io.complete(bench.io_of(3), ended_s=1.0)
    bench.hang(10 * READ_S)
    assert bench.reports()[0] == Reported(1, 0)


def test_an_engine_that_takes_nothing_is_waited_for_as_long_as_a_deadline() -> None:
    bench = Bench()
    bench.io.busy = True
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    assert bench.pipeline.deadline_in_s() == READ_S
    bench.hang()
    assert bench.reports() == [Reported(1, 0, DEADLINE)]
    assert bench.pipeline.deadline_in_s() == math.inf


def test_a_retry_keeps_the_deadline() -> None:
    bench = Bench()
    bench.stream(1, [3])
    bench.pipeline.step()
    bench.now_s += 1.0
    bench.io_done(io_error(errno.EIO))
    assert _started(bench) == [3, 3]
    assert bench.pipeline.deadline_in_s() == READ_S - 1.0
    bench.hang(READ_S - 1.0)
    assert bench.finished() == [(1, ((0, DEADLINE),))]


def test_a_retry_that_waits_fails_at_its_deadline() -> None:
    bench = Bench(stream_slots=4, cache_slots=8, target_count=2)
    bench.fetch(1, 7, pool=3, cache=0)
    bench.pipeline.step()
    bench.hang(READ_S - 1.0)
    bench.io.busy = True
    bench.io_done(io_error(errno.EIO))
    bench.load(2, 7, cache=0, pool=None)  # promotes it
    bench.stream(3, [5])
    bench.hang(1.0)
    assert [one for one in bench.reports() if isinstance(one, Reported)] == [
        Reported(2, 0, STALE),
        Reported(1, 0, DEADLINE),
    ]
    assert bench.finished() == [(2, ((0, STALE),))], "what waits for the first time waits on"


def test_a_cancelled_fetch_leaves_nothing_and_its_load_finds_nothing() -> None:
    for where in ("gate", "queue", "engine"):
        bench = Bench(reads_in_flight_max=1)
        bench.stored(1, slot=0, number=7)
        bench.load(2, 7, cache=0, pool=None)
        if where != "gate":
            bench.turn()
        bench.io.busy = where == "queue"
        bench.fetch(3, number=8, pool=3, cache=0)
        bench.load(4, 8, cache=0, pool=None)
        bench.reports()
        bench.cancel(3)
        bench.io.busy = False
        bench.pipeline.step()
        released = where != "engine"
        assert Reported(3, 0, CANCELLED, released) in bench.reports(), where
        if where == "engine":
            bench.io_done(io_error(errno.EIO))  # retryable, but no load wants it
            assert bench.reports() == [Reported(3, 0, None)]
        while bench.turn():
            pass
        assert len(bench.io.started) == (where == "engine")
        assert (4, ((0, STALE),)) in bench.finished(), where
        assert bench.idle(), where


# -- jobs share places, shown by the order in which reads of landing loads start ------

Item = tuple[int, int]  # a load's op, and a row of it or of the fetch that it waits for

_LOAD, _FETCH = 1, 3
_DEMAND, _PREFETCH = int(Urgency.DEMAND), int(Urgency.PREFETCH)
_CODE_OK, _IO_ERROR, _DEADLINE = 0, 1, 4
DEADLINE_S = 5.0


class Queue:
    """A machine that hands over one read at a time. Every read has a cache slot of its own."""

    def __init__(self, slots: int = 10_000, reads_max: int = 1000) -> None:
        self._room = 0
        self._taken: list[Any] = []
        self._lanes = PythonLanes(
            room=lambda: (self._room - len(self._taken), 0),
            submit=self._taken.extend,
            cancel=lambda token: False,
            poll=list,
        )
        self.machine = machine_of(
            self._lanes,
            cache_slots=slots,
            stream_slots=1,
            slot_bytes=4096,
            header_bytes=0,
            group_bytes=[4096],
            targets=1,
            reads_max=reads_max,
            writes_max=1,
            read_deadline_ns=round(DEADLINE_S * 1e9),
            write_deadline_ns=round(DEADLINE_S * 1e9),
            saturating_reads=1,
            saturating_writes=1,
            retryable=[number == errno.EIO for number in range(errno.EIO + 1)],
        )
        self._now_s = 0.0
        self._ops = itertools.count(1)
        self._slots = itertools.count()
        self._by_slot: dict[int, Item] = {}
        self._rows: dict[Item, tuple[int, int]] = {}  # the op that reads it, and its row there
        self._tokens: dict[Item, int] = {}  # of those that have a place

    def load(self, rows: int, fetched: int = 0) -> list[Item]:
        """Begin a load of so many reads; it also waits for so many fetches that were queued."""
        fetch_slots = list(itertools.islice(self._slots, fetched))
        slots = list(itertools.islice(self._slots, rows))
        fetch = next(self._ops)
        load = next(self._ops)
        if fetched:
            self._begin(fetch, _FETCH, _PREFETCH, fetch_slots, fetch_slots)
        self._begin(load, _LOAD, _DEMAND, slots + fetch_slots, slots + [-1] * fetched)
        items = [(load, row) for row in range(rows + fetched)]
        read_by = [(load, row) for row in range(rows)] + [(fetch, row) for row in range(fetched)]
        self._by_slot |= dict(zip(slots + fetch_slots, items, strict=True))
        self._rows |= dict(zip(items, read_by, strict=True))
        return items

    def take(self) -> Item | None:
        """The one read that goes next."""
        self._advance(room=1)
        if not self._taken:
            return None
        (op,) = self._taken
        item = self._by_slot[slot_of(op.place)]
        self._tokens[item] = op.token
        return item

    def give_back(self, item: Item, *, retry: bool = False) -> None:
        """The read ends. retry: with an error after which it is tried again, if it was not yet."""
        code, number = (_IO_ERROR, errno.EIO) if retry else (_CODE_OK, 0)
        self.machine.ended([(self._tokens.pop(item), code, number, 0.0, -1, True)])
        self._settle()

    def remove(self, item: Item) -> bool:
        """Cancel a read; whether it waited."""
        before = len(self)
        op, row = self._rows[item]
        self.machine.cancel(op, np.array([row], np.uint32))
        return len(self) < before

    def fail_all(self) -> list[int]:
        """The engine takes nothing for the time of a deadline; the loads that ended by that, as
        their reads that waited longest ended.
        """
        self._settle()
        for _ in range(2):
            self._advance()
            self._now_s += DEADLINE_S + 1.0
        ended = self.machine.take_finished()
        assert all(code in (1, _DEADLINE, 3, 5) for _, failed, *_ in ended for _, code, _ in failed)
        return [op for op, *_ in ended]

    def _advance(self, room: int = 0) -> None:
        self._room = room
        self._taken.clear()
        self.machine.set_time(self._now_s)
        while self.machine.advance(0.0):
            self.machine.take_health()

    def __len__(self) -> int:
        return self.machine.levels()[2]

    @property
    def held(self) -> int:
        return self.machine.levels()[5]

    def _begin(self, op: int, kind: int, urgency: int, slots: list[int], places: list[int]) -> None:
        """The chunk of each cache slot is in the pool slot of the same number."""
        count = len(slots)
        batch = ChunkBatch.of(
            b"".join(b"%08d" % slot for slot in slots),
            np.ones(count, np.uint64),
            np.array(slots, np.int32),
            np.array([place if place < 0 else place_in(place) for place in places], np.int64),
            np.zeros(count, np.uint8),
        )
        self.machine.set_time(self._now_s)
        if kind == _FETCH:
            self.machine.begin(op, kind, urgency, batch)
        else:
            blocks = np.zeros(count, np.int32), [count], [0]
            geometry = CacheGeometry([([(1, 1, 1, 1)], 1)])
            self.machine.begin_transfers(geometry, [(op, False, batch, *blocks)], 0)

    def _settle(self) -> None:
        self._advance()
        for number, *_ in self.machine.take_copies(0):
            self.machine.copied(number, _CODE_OK, 0)
        self.machine.take_reports()
        self.machine.take_finished()


def test_a_task_with_a_place_cannot_be_removed() -> None:
    queue = Queue()
    a = queue.load(1)
    assert queue.take() == a[0]
    assert not queue.remove(a[0]), "it has a place, it does not wait"
    assert queue.held == 1


def test_a_job_of_many_tasks_costs_no_more_per_task() -> None:
    """Waiting, a place and back, or a cancel, in any order: the time of each is bounded."""

    def seconds_per_task(size: int) -> float:
        queue = Queue(slots=2 * size, reads_max=1)
        jobs = [queue.load(size), queue.load(size)]
        began_s = time.process_time()
        for items in jobs:
            for item in reversed(items[size // 2 :]):
                assert queue.remove(item)
        for _ in range(size):
            taken = queue.take()
            assert taken is not None
            queue.give_back(taken)
        assert not queue
        return (time.process_time() - began_s) / size

    small = min(seconds_per_task(500) for _ in range(3))
    large = min(seconds_per_task(16_000) for _ in range(2))
    assert large < 10 * small, "a walk over what waits would cost 32 times as much"


class SharedByJobs(RuleBasedStateMachine):
    """Compare with the plain definition, for any order of waits, places, retries and cancels."""

    @initialize()
    def start(self) -> None:
        self.queue = Queue()
        self.waiting: dict[int, list[tuple[int, Item]]] = {}  # job → (waits since, task)
        self.holding: list[Item] = []
        self.retried: set[Item] = set()
        self.number = 0

    @rule(count=st.integers(1, 5), fetched=st.integers(0, 2))
    def wait(self, count: int, fetched: int) -> None:
        items = self.queue.load(count, fetched)
        since = range(self.number + 1, self.number + 1 + len(items))
        self.number += len(items)
        self.waiting[items[0][0]] = list(zip(since, items, strict=True))

    @precondition(lambda self: any(self.waiting.values()))
    @rule()
    def take(self) -> None:
        held = {job: sum(item[0] == job for item in self.holding) for job in self.waiting}
        jobs = [job for job in self.waiting if self.waiting[job]]
        best = min(jobs, key=lambda job: (held[job], self.waiting[job][0][0]))
        _, expected = self.waiting[best].pop(0)
        assert self.queue.take() == expected
        self.holding.append(expected)

    @precondition(lambda self: self.holding)
    @rule(data=st.data(), retry=st.booleans())
    def give_back(self, data: st.DataObject, retry: bool) -> None:
        item = data.draw(st.sampled_from(self.holding))
        self.holding.remove(item)
        self.queue.give_back(item, retry=retry)
        if retry and item not in self.retried:
            self.retried.add(item)
            self.number += 1
            self.waiting[item[0]].insert(0, (-self.number, item))

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        everyone = [entry for entries in self.waiting.values() for entry in entries]
        entry = data.draw(st.sampled_from(everyone))
        assert self.queue.remove(entry[1])
        self.waiting[entry[1][0]].remove(entry)

    @precondition(lambda self: not self.holding)
    @rule()
    def fail_fast(self) -> None:
        """Each load ends with the last of its reads."""
        last = {job: max(entries)[0] for job, entries in self.waiting.items() if entries}
        assert self.queue.fail_all() == sorted(last, key=lambda job: last[job])
        self.waiting = {job: [] for job in self.waiting}

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == sum(map(len, self.waiting.values()))
            assert self.queue.held == len(self.holding)


TestSharedByJobs = SharedByJobs.TestCase
TestSharedByJobs.settings = settings(max_examples=150, stateful_step_count=40)


# Gates: order on one slot, exclusion, identity (rule 1), and no waiting on a hung fill.


A, B = 1, 2  # numbers of chunks


class Slot:
    """Cache slot 0: stores fill it, loads read it, and their copies last as long as the test
    likes. A store or load is known by its op.
    """

    def __init__(self) -> None:
        self.bench = Bench()
        self._seen = 0  # copies
        self._tickets: dict[int, int] = {}  # op → its copy

    def ask(self, op: int, number: int, *, fill: bool) -> list[tuple[int, bool]]:
        batch = chunks.batch_of((identity(number), 0, None))
        self.bench.begin(StoreCommand(op, batch) if fill else LoadCommand(op, batch), op)
        return self.granted()

    def end(self, op: int, *, ok: bool = True) -> list[tuple[int, bool]]:
        """The copy of a store or load ends."""
        self.bench.copy.finish(self._tickets.pop(op), OK if ok else io_error(5))
        return self.granted()

    def granted(self) -> list[tuple[int, bool]]:
        """The stores and loads that go on now, each with whether it is stale, in their order."""
        self.bench.pipeline.step()
        new, self._seen = self.bench.copy.submitted[self._seen :], len(self.bench.copy.submitted)
        found = []
        for ticket, _, _, op in new:
            assert isinstance(op, int)
            self._tickets[op] = ticket
            found.append((op, False))
        ended = self.bench.finished()
        return sorted(found + [(op, True) for op, failures in ended if failures == ((0, STALE),)])

    def idle(self) -> bool:
        return self.bench.idle()


def test_what_was_in_the_slot_before_its_last_fill_cannot_be_read() -> None:
    slot = Slot()
    with pytest.raises(AssertionError, match="no such fill"):
        slot.ask(1, A, fill=False)
    slot.ask(2, A, fill=True)
    slot.end(2)
    slot.ask(3, B, fill=True)
    with pytest.raises(AssertionError, match="no such fill"):
        slot.ask(4, A, fill=False)


def test_readers_of_a_hung_fill_fail_at_once_and_the_next_fill_waits() -> None:
    slot = Slot()
    slot.bench.fetch(1, A, pool=0, cache=0)
    assert not slot.ask(2, A, fill=False)
    slot.bench.hang()
    assert slot.granted() == [(2, True)]
    assert slot.ask(3, A, fill=False) == [(3, True)]
    assert not slot.ask(4, B, fill=True)
    assert not slot.idle()
    slot.bench.io.complete(slot.bench.io_of(0))
    assert slot.granted() == [(4, False)], "its bytes are not trusted"
    slot.end(4)
    assert slot.ask(5, B, fill=False) == [(5, False)]


def test_what_a_hung_fill_brings_late_is_not_read() -> None:
    slot = Slot()
    slot.bench.fetch(1, A, pool=0, cache=0)
    slot.granted()
    slot.bench.hang()
    slot.granted()
    slot.bench.io.complete(slot.bench.io_of(0))
    slot.granted()
    assert slot.ask(2, A, fill=False) == [(2, True)]
    assert slot.idle()


def test_a_load_promotes_the_fills_of_its_slot_wherever_they_wait() -> None:
    """The one under way, those behind it in their order, and none of another slot."""
    slot = Slot()
    bench = slot.bench
    slot.ask(1, A, fill=True)
    bench.fetch(2, B, pool=2, cache=0)
    bench.fetch(3, A, pool=3, cache=0)
    bench.fetch(4, 7, pool=4, cache=1)
    assert not slot.ask(5, A, fill=False)
    bench.cancel(2)
    slot.end(1)
    found = [(bench.number(op), op.urgency) for op in bench.io.started]
    assert sorted(found) == [(3, Urgency.DEMAND), (4, Urgency.PREFETCH)]
    bench.io.complete(bench.io_of(3))
    assert slot.granted() == [(5, False)]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([A, B])), max_size=12), st.data())
def test_slots_are_granted_in_the_order_of_requests(asks, data) -> None:  # type: ignore[no-untyped-def]
    """Any interleaving of asks and ends: order is kept, fills are exclusive, reads match.

    A read names what the last fill before it brings.
    """
    numbers: list[int] = []
    for fill, number in asks:
        numbers.append(number if fill or not numbers else numbers[-1])
    asks = [(fill or not at, numbers[at]) for at, (fill, _) in enumerate(asks)]
    slot = Slot()
    granted: list[int] = []
    running: set[int] = set()
    held: int | None = None
    waiting = deque(range(len(asks)))

    def take(grants: list[tuple[int, bool]]) -> None:
        nonlocal held
        for task, stale in grants:
            fill, number = asks[task]
            granted.append(task)
            assert not any(asks[other][0] for other in running), "a fill is exclusive"
            if fill:
                assert not running
                assert not stale
                held = None
            else:
                assert stale == (held != number)
            if not stale:
                running.add(task)

    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            task = waiting.popleft()
            take(slot.ask(task, asks[task][1], fill=asks[task][0]))
            continue
        task = data.draw(st.sampled_from(sorted(running)))
        running.remove(task)
        ok = not asks[task][0] or data.draw(st.booleans())
        if asks[task][0]:
            held = asks[task][1] if ok else None
        take(slot.end(task, ok=ok))
    assert granted == list(range(len(asks)))
    assert slot.idle()
