# SPDX-License-Identifier: Apache-2.0
"""Jobs share places: the job that holds the fewest goes first, then the one that waited longest."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_nvmeof_offload.worker.tasks import FairQueue

Item = tuple[str, int]  # job, number


def _queue(**jobs: int) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(lambda item: item[0])
    for job, tasks in jobs.items():
        for number in range(tasks):
            queue.push((job, number))
    return queue


def test_jobs_take_turns_and_each_keeps_its_order() -> None:
    queue = _queue(a=5, b=2)
    taken = [queue.take() for _ in range(8)]
    assert taken == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3), ("a", 4), None]
    assert queue.held == 7
    assert not queue


def test_a_released_place_goes_to_the_job_with_the_fewest() -> None:
    queue = _queue(a=4)
    taken = [queue.take() for _ in range(3)]
    queue.push(("b", 0))
    queue.push(("b", 1))
    assert taken[0] is not None
    queue.give_back(taken[0])
    assert [queue.take(), queue.take(), queue.take()] == [("b", 0), ("b", 1), ("a", 3)]


def test_a_retry_goes_first() -> None:
    queue = _queue(a=2, b=2)
    assert queue.take() == ("a", 0)
    queue.give_back(("a", 0))
    queue.push(("a", 0), front=True)
    assert [queue.take(), queue.take()] == [("a", 0), ("b", 0)]


def test_a_removed_task_is_gone_and_places_remain() -> None:
    queue = _queue(a=3, b=1)
    assert queue.take() == ("a", 0)
    assert queue.remove(("a", 1))
    assert not queue.remove(("a", 1))
    assert not queue.remove(("a", 0)), "it has a place, it does not wait"
    assert queue.take_all() == [("a", 2), ("b", 0)]
    assert (queue.peek(), len(queue), queue.held) == (None, 0, 1)
    queue.push(("a", 4))
    queue.push(("b", 4))
    assert queue.take() == ("b", 4), "job a still holds a place"


def test_the_order_holds_after_long_use() -> None:
    """Many places given and given back between few jobs: still the fewest, then the oldest."""
    rng = random.Random(7)
    queue = _queue()
    waiting: dict[str, list[tuple[int, Item]]] = {job: [] for job in "abcdef"}
    holding: list[Item] = []
    for number in range(3000):
        job = rng.choice("abcdef")
        queue.push((job, number))
        waiting[job].append((number, (job, number)))
        if number % 200 < 150:  # then they all go at once, in bursts
            continue
        while len(holding) < 150 and any(waiting.values()):
            held = {job: sum(item[0] == job for item in holding) for job in waiting}
            best = min(filter(waiting.get, waiting), key=lambda j: (held[j], waiting[j][0][0]))
            taken = queue.take()
            assert taken == waiting[best].pop(0)[1]
            holding.append(taken)
        for _ in range(rng.randrange(len(holding))):
            queue.give_back(holding.pop(rng.randrange(len(holding))))


@dataclass(frozen=True, eq=False)
class Counted:
    """A task that counts how often one like it is looked at."""

    job: int
    looks: ClassVar[list[int]] = [0]

    def __hash__(self) -> int:
        self.looks[0] += 1
        return id(self)

    def __eq__(self, other: object) -> bool:
        self.looks[0] += 1
        return self is other


def test_a_job_of_many_tasks_costs_no_more_per_task() -> None:
    """Looks at a task, for each task: waiting, a place and back, or a cancel, in any order."""
    costs = []
    for size in (500, 5000):
        queue: FairQueue[Counted] = FairQueue(lambda task: task.job)
        tasks = [Counted(number % 2) for number in range(2 * size)]
        Counted.looks[0] = 0
        for task in tasks:
            queue.push(task)
        for task in reversed(tasks[size:]):
            assert queue.remove(task)
        for _ in range(size):
            taken = queue.take()
            assert taken is not None
            queue.give_back(taken)
        assert not queue
        costs.append(Counted.looks[0] / size)
    assert costs[1] < 1.1 * costs[0]


class SharedByJobs(RuleBasedStateMachine):
    """Compare with the plain definition, for any order of waits, places, retries and cancels."""

    @initialize()
    def start(self) -> None:
        self.queue = _queue()
        self.waiting: dict[str, list[tuple[int, Item]]] = {}  # job → (waits since, task)
        self.holding: list[Item] = []
        self.number = 0

    @rule(job=st.sampled_from("abcd"), count=st.integers(1, 5))
    def wait(self, job: str, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.queue.push((job, self.number))
            self.waiting.setdefault(job, []).append((self.number, (job, self.number)))

    @precondition(lambda self: any(self.waiting.values()))
    @rule()
    def take(self) -> None:
        held = {job: sum(item[0] == job for item in self.holding) for job in self.waiting}
        jobs = [job for job in self.waiting if self.waiting[job]]
        best = min(jobs, key=lambda job: (held[job], self.waiting[job][0][0]))
        _, expected = self.waiting[best].pop(0)
        assert self.queue.peek() == expected
        assert self.queue.take() == expected
        self.holding.append(expected)

    @precondition(lambda self: self.holding)
    @rule(data=st.data(), retry=st.booleans())
    def give_back(self, data: st.DataObject, retry: bool) -> None:
        item = data.draw(st.sampled_from(self.holding))
        self.holding.remove(item)
        self.queue.give_back(item)
        if retry:
            self.number += 1
            self.queue.push(item, front=True)
            self.waiting.setdefault(item[0], []).insert(0, (-self.number, item))

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        everyone = [entry for entries in self.waiting.values() for entry in entries]
        entry = data.draw(st.sampled_from(everyone))
        assert self.queue.remove(entry[1])
        self.waiting[entry[1][0]].remove(entry)

    @rule()
    def fail_fast(self) -> None:
        everyone = sorted(entry for entries in self.waiting.values() for entry in entries)
        assert self.queue.take_all() == [item for _, item in everyone]
        self.waiting.clear()

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == sum(map(len, self.waiting.values()))
            assert self.queue.held == len(self.holding)


TestSharedByJobs = SharedByJobs.TestCase
TestSharedByJobs.settings = settings(max_examples=150, stateful_step_count=40)
