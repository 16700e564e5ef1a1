# SPDX-License-Identifier: Apache-2.0
"""Feeds the I/O engine: classes, bounds, one retry, and the verdict on each target.

Reads go before writes, demand before prefetch, each class in its order. A target that holds
an operation beyond its deadline is *suspect*: no new I/O goes there until the kernel has
given everything back, and what would go there fails at once with DEADLINE. So does what has
been queued for a deadline's time in which the engine took nothing of its kind.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, Outcome, OutcomeKind
from vllm_nvmeof_offload.io.base import IoEngine, IoKind, IoOp
from vllm_nvmeof_offload.protocol import IoClass, RateReport, VerdictReport
from vllm_nvmeof_offload.worker.rates import RateMeter
from vllm_nvmeof_offload.worker.tasks import JobKind, Task

__all__ = ["IoEvent", "IoPump", "PumpConfig"]


@dataclass(frozen=True, slots=True)
class PumpConfig:
    """Bounds. A deadline runs from the hand-over to the engine, in seconds."""

    rank: int = 0
    target_count: int = 1
    reads_in_flight_max: int = 64
    writes_in_flight_max: int = 32
    read_deadline_s: float = 5.0
    write_deadline_s: float = 30.0


@dataclass(frozen=True, slots=True)
class IoEvent:
    """outcome None: the late release of a task whose outcome came before."""

    task: Task
    outcome: Outcome | None
    released: bool


@dataclass(slots=True)
class _Flight:
    task: Task
    target: int
    is_write: bool
    late: bool = False


class IoPump:
    """Queues in front of one engine. Single-threaded, the pipeline's."""

    def __init__(
        self,
        engine: IoEngine,
        config: PumpConfig,
        clock: Callable[[], float],
        address_of: Callable[[Task], int],
        slot_bytes: int,
    ) -> None:
        self._engine = engine
        self._config = config
        self._clock = clock
        self._address_of = address_of
        self._slot_bytes = slot_bytes
        self._rates = RateMeter(config.rank, config.target_count, clock)
        self._queues: dict[IoClass, deque[Task]] = {c: deque() for c in IoClass}
        self._flights: dict[int, _Flight] = {}
        self._next_token = 1
        self._in_flight = {False: 0, True: 0}  # is_write → operations before their outcome
        self._unreleased: Counter[int] = Counter()  # target → operations past their deadline
        self._failed: list[IoEvent] = []
        self._verdicts: list[VerdictReport] = []
        self._resetting = False
        #: A reset has failed: nothing may be written that a later start could adopt.
        self._barred = False
        #: is_write → since when the engine has taken nothing while something was queued.
        self._stalled_since_s: dict[bool, float | None] = {False: None, True: None}

    def enqueue(self, task: Task) -> None:
        """Queue a task's read or write of its slot, or a reset."""
        self._queues[task.io_class].append(task)

    def cancel(self, task: Task) -> bool:
        """True: it was still queued and is gone. Otherwise its completion will come."""
        queue = self._queues[task.io_class]
        if task in queue:  # tasks compare by identity
            queue.remove(task)
            return True
        if task.io_token is not None:
            self._engine.cancel([task.io_token])
        return False

    def step(self) -> list[IoEvent]:
        """Reap what has happened, hand over what fits."""
        return self._reap() + self.feed()

    def feed(self) -> list[IoEvent]:
        """Hand over what fits; returns what failed without being tried."""
        self._hand_over()
        failed, self._failed = self._failed, []
        return failed

    def take_verdicts(self) -> list[VerdictReport]:
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def take_rates(self) -> list[RateReport]:
        return self._rates.take()

    @property
    def busy(self) -> bool:
        return bool(self._flights) or any(self._queues.values())

    # -- towards the engine -----------------------------------------------------------

    def _hand_over(self) -> None:
        for io_class, queue in self._queues.items():
            is_write = io_class is IoClass.WRITE_BEHIND
            config = self._config
            limit = config.writes_in_flight_max if is_write else config.reads_in_flight_max
            while queue and self._in_flight[is_write] < limit:
                task = queue[0]
                if is_write and not self._write_may_start(task):
                    break
                failure = self._refusal(task)
                if failure is not None:
                    queue.popleft()
                    self._failed.append(IoEvent(task, failure, True))
                    continue
                if not self._submit(task, self.target(task), is_write):
                    break  # BUSY: the engine is full, the rest waits
                queue.popleft()
                self._stalled_since_s[is_write] = None
        self._fail_stalled(False, self._config.read_deadline_s)
        self._fail_stalled(True, self._config.write_deadline_s)

    def _refusal(self, task: Task) -> Outcome | None:
        """Why a task is not even tried. A reset always is: what follows depends on it."""
        if task.job.kind is JobKind.RESET:
            return None
        if self._barred and task.job.kind is JobKind.WRITE:
            return CANCELLED
        return DEADLINE if self._unreleased[self.target(task)] else None

    def _fail_stalled(self, is_write: bool, patience_s: float) -> None:
        """Behind a full engine or a reset that hangs nothing may wait for ever."""
        queues = [q for c, q in self._queues.items() if (c is IoClass.WRITE_BEHIND) == is_write]
        since_s = self._stalled_since_s[is_write]
        if since_s is None or not any(queues):
            self._stalled_since_s[is_write] = self._clock() if any(queues) else None
            return
        if self._clock() - since_s < patience_s:
            return
        self._stalled_since_s[is_write] = None
        for queue in queues:
            stalled = [task for task in queue if task.job.kind is not JobKind.RESET]
            self._failed += [IoEvent(task, DEADLINE, True) for task in stalled]
            kept = [task for task in queue if task.job.kind is JobKind.RESET]
            queue.clear()
            queue.extend(kept)

    def _write_may_start(self, task: Task) -> bool:
        """A reset waits for the writes before it, and writes after it wait for the reset:
        otherwise a chunk from before could reach the disk as one from after."""
        if task.job.kind is JobKind.RESET:
            return not any(f.is_write for f in self._flights.values())
        return not self._resetting

    def _submit(self, task: Task, target: int, is_write: bool) -> bool:
        token = self._next_token
        reset = task.job.kind is JobKind.RESET
        deadline_s = self._config.write_deadline_s if is_write else self._config.read_deadline_s
        op = IoOp(
            token=token,
            kind=IoKind.RESET if reset else (IoKind.WRITE_SLOT if is_write else IoKind.READ_SLOT),
            io_class=task.io_class,
            pool_slot=task.pool_slot or 0,
            address=0 if reset else self._address_of(task),
            identity=None if reset else task.identity,
            deadline_s=None if reset else self._clock() + deadline_s,
            adoptable=task.adoptable,
        )
        if not self._engine.submit([op]):
            return False
        self._next_token += 1
        task.io_token = token
        self._flights[token] = _Flight(task, target, is_write)
        self._in_flight[is_write] += 1
        if not reset:
            self._rates.began(target, is_write=is_write)
        self._resetting = self._resetting or reset
        return True

    def target(self, task: Task) -> int:
        return (task.pool_slot or 0) % self._config.target_count

    # -- from the engine --------------------------------------------------------------

    def _reap(self) -> list[IoEvent]:
        events: list[IoEvent] = []
        for completion in self._engine.poll():
            flight = self._flights[completion.token]
            task = flight.task
            if completion.outcome is None:
                self._let_go(flight)
                events.append(IoEvent(task, None, True))
            else:
                self._in_flight[flight.is_write] -= 1
                if task.job.kind is not JobKind.RESET:
                    done_bytes = self._slot_bytes if completion.outcome.ok else 0
                    self._rates.ended(flight.target, done_bytes, is_write=flight.is_write)
                if not completion.released:
                    self._hold(flight)
                elif self._retries(flight, completion.outcome):
                    del self._flights[completion.token]
                    continue
                events.append(IoEvent(task, completion.outcome, completion.released))
            if completion.released:
                del self._flights[completion.token]
                if task.job.kind is JobKind.RESET:
                    self._resetting = False
                    self._barred = completion.outcome is None or not completion.outcome.ok
        return events

    def _retries(self, flight: _Flight, outcome: Outcome) -> bool:
        """Once, and only a read or a reset that may succeed the next time."""
        task = flight.task
        if (
            task.job.kind is JobKind.WRITE
            or outcome.kind is not OutcomeKind.IO_ERROR
            or not outcome.retryable
            or not task.io_retries_left
            or task.job.cancelled
        ):
            return False
        task.io_retries_left -= 1
        self._queues[task.io_class].appendleft(task)
        return True

    def _hold(self, flight: _Flight) -> None:
        flight.late = True
        self._unreleased[flight.target] += 1
        if self._unreleased[flight.target] == 1:
            self._verdicts.append(VerdictReport(self._config.rank, flight.target, usable=False))

    def _let_go(self, flight: _Flight) -> None:
        assert flight.late
        self._unreleased[flight.target] -= 1
        if not self._unreleased[flight.target]:
            self._verdicts.append(VerdictReport(self._config.rank, flight.target, usable=True))

    def take_queued_writes(self) -> list[Task]:
        """Take every queued write out, for a reset that voids them."""
        queue = self._queues[IoClass.WRITE_BEHIND]
        writes = [task for task in queue if task.job.kind is JobKind.WRITE]
        kept = [task for task in queue if task.job.kind is not JobKind.WRITE]
        queue.clear()
        queue.extend(kept)
        return writes
