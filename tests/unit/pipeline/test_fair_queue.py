# SPDX-License-Identifier: Apache-2.0
"""Jobs share places: the job that holds the fewest goes first, then the one that waited longest.

Shown by the order in which the machine hands over the reads of loads that land in cache slots.
"""

from __future__ import annotations

import errno
import itertools
import random
import time
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.chunks import place_in
from vllm_nvmeof_offload.native import PythonLanes
from vllm_nvmeof_offload.protocol import ChunkBatch, Urgency, slot_of

from .bench import machine_of

Item = tuple[int, int]  # a load's op, and a row of it or of the fetch that it waits for

_LOAD, _FETCH = 1, 3
_DEMAND, _PREFETCH = int(Urgency.DEMAND), int(Urgency.PREFETCH)
_OK, _IO_ERROR, _DEADLINE = 0, 1, 4
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
        code, number = (_IO_ERROR, errno.EIO) if retry else (_OK, 0)
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
        self.machine.set_time(self._now_s)
        self.machine.begin(
            op,
            kind,
            urgency,
            ChunkBatch.of(
                b"".join(b"%08d" % slot for slot in slots),
                np.ones(count, np.uint64),
                np.array(slots, np.int32),
                np.array([place if place < 0 else place_in(place) for place in places], np.int64),
                np.zeros(count, np.uint8),
            ),
            np.array([[1, 0, 1]] * count, np.uint64).reshape(count, 3),
            np.arange(count + 1, dtype=np.uint32),
        )

    def _settle(self) -> None:
        self._advance()
        for number, *_ in self.machine.take_copies(0):
            self.machine.copied(number, _OK, 0)
        self.machine.take_reports()
        self.machine.take_finished()


def test_jobs_take_turns_and_each_keeps_its_order() -> None:
    queue = Queue()
    a, b = queue.load(5), queue.load(2)
    taken = [queue.take() for _ in range(8)]
    assert taken == [a[0], b[0], a[1], b[1], a[2], a[3], a[4], None]
    assert queue.held == 7
    assert not queue


def test_a_released_place_goes_to_the_job_with_the_fewest() -> None:
    queue = Queue()
    a = queue.load(4)
    taken = [queue.take() for _ in range(3)]
    b = queue.load(2)
    assert taken[0] is not None
    queue.give_back(taken[0])
    assert [queue.take(), queue.take(), queue.take()] == [b[0], b[1], a[3]]


def test_a_retry_goes_first() -> None:
    queue = Queue()
    a, b = queue.load(2), queue.load(2)
    assert queue.take() == a[0]
    queue.give_back(a[0], retry=True)
    assert [queue.take(), queue.take()] == [a[0], b[0]]


def test_a_removed_task_is_gone_and_places_remain() -> None:
    queue = Queue()
    a, b = queue.load(4), queue.load(1)
    assert [queue.take(), queue.take(), queue.take()] == [a[0], b[0], a[1]]
    queue.give_back(b[0])
    assert queue.remove(a[2])
    assert not queue.remove(a[2])
    assert (len(queue), queue.held) == (1, 2)
    queue.give_back(a[1], retry=True)
    c = queue.load(1)
    assert queue.take() == c[0], "job a still holds a place"
    assert queue.take() == a[1]


def test_a_task_with_a_place_cannot_be_removed() -> None:
    queue = Queue()
    a = queue.load(1)
    assert queue.take() == a[0]
    assert not queue.remove(a[0]), "it has a place, it does not wait"
    assert queue.held == 1


def test_what_waits_in_vain_fails_in_the_order_in_which_it_came() -> None:
    queue = Queue()
    jobs = [queue.load(rows)[0][0] for rows in (3, 1, 2)]
    assert queue.fail_all() == jobs
    assert (queue.take(), len(queue), queue.held) == (None, 0, 0)


def test_promoted_fetches_wait_on_the_share_of_their_load() -> None:
    queue = Queue()
    a, b = queue.load(1, fetched=2), queue.load(2)
    assert [queue.take() for _ in range(6)] == [a[0], b[0], a[1], b[1], a[2], None]


def test_the_order_holds_after_long_use() -> None:
    """Many places given and given back between few jobs: still the fewest, then the oldest."""
    rng = random.Random(7)
    queue = Queue()
    since = itertools.count()
    waiting: dict[int, list[tuple[int, Item]]] = {}
    holding: list[Item] = []
    for _ in range(15):
        for _ in range(rng.randrange(1, 4)):
            items = queue.load(rng.randrange(20, 150))
            waiting[items[0][0]] = [(next(since), item) for item in items]
        while len(holding) < 150 and any(waiting.values()):
            best = min(
                filter(waiting.get, waiting),
                key=lambda j: (sum(item[0] == j for item in holding), waiting[j][0][0]),
            )
            taken = queue.take()
            assert taken == waiting[best].pop(0)[1]
            holding.append(taken)
        for _ in range(rng.randrange(len(holding))):
            queue.give_back(holding.pop(rng.randrange(len(holding))))


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
