# SPDX-License-Identifier: Apache-2.0
"""Feeds the I/O engine: classes, bounds, one retry, and the verdict on each target.

Reads go before writes, demand before urgent fetches before other fetches, each target within
bounds of its own (`lanes`). What would go to a target that is not usable (`fabric.health`) fails
at once with DEADLINE. So does what waits for a target from which the engine has taken nothing
of its kind for a deadline's time.

One target's lane to the I/O engine: what waits for it, in which line, and how much may go.

Each target has bounds of its own, so that a slow one cannot take what the others need. Reads
that a load waits for share by job; all else goes first come, first served. Fetches hold at
most half of the places of reads, so that a load always finds some.

Operations with the I/O engine, and what the pump tells the pipeline of them.

How much of each kind may be with the I/O engine, and for how long.

How full one rank's queues are, told when it changes and something else is told anyway.

Verdicts on targets as reports to the manager: each change once.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, Outcome, OutcomeKind
from vllm_nvmeof_offload.io.base import Completion, IoEngine, IoKind, IoOp
from vllm_nvmeof_offload.protocol import IoClass, LevelReport, RateReport, VerdictReport
from vllm_nvmeof_offload.targets.health import TargetHealth, Verdict
from vllm_nvmeof_offload.worker.fair_queue import FairQueue
from vllm_nvmeof_offload.worker.rates import RateMeter, TransferMeter, saturating
from vllm_nvmeof_offload.worker.slots import StreamSlots
from vllm_nvmeof_offload.worker.tasks import Job, JobKind, Task

__all__ = [
    "Flight",
    "IoEvent",
    "IoPump",
    "Lane",
    "LevelNews",
    "Line",
    "PumpConfig",
    "VerdictNews",
]


class Line(enum.Enum):
    """Where a task waits. Reads are given in the order in which they go."""

    DEMAND = "demand"
    URGENT = "urgent"
    PREFETCH = "prefetch"
    WRITE = "write"

    @staticmethod
    def of(task: Task) -> Line:
        if task.io_class is IoClass.WRITE_BEHIND:
            return Line.WRITE
        if task.io_class is IoClass.READ_DEMAND:
            return Line.DEMAND
        return Line.URGENT if task.urgent else Line.PREFETCH


_FETCHES = (Line.URGENT, Line.PREFETCH)
_READS = (Line.DEMAND, *_FETCHES)


class Lane:
    """Tasks towards one target. A task holds a place from the hand-over to its outcome."""

    def __init__(self, reads_max: int, writes_max: int) -> None:
        self._reads_max = reads_max
        self._writes_max = writes_max
        self._fetches_max = max(1, reads_max // 2)
        self._queues = {line: FairQueue[Task](_in_one_line) for line in Line}
        self._queues[Line.DEMAND] = FairQueue[Task](_by_job)
        #: is_write → since when the engine has taken nothing while something waited here.
        self._stalled_since_s: dict[bool, float | None] = {False: None, True: None}

    def queue(self, line: Line) -> FairQueue[Task]:
        return self._queues[line]

    def has_room(self, line: Line) -> bool:
        """May one more of this line be with the engine?"""
        if line is Line.WRITE:
            return self._queues[line].held < self._writes_max
        if line in _FETCHES and self._held(_FETCHES) >= self._fetches_max:
            return False
        return self._held(_READS) < self._reads_max

    @property
    def waiting(self) -> bool:
        return any(self._queues.values())

    def moves(self, *, is_write: bool) -> None:
        """The engine has taken something of this kind."""
        self._stalled_since_s[is_write] = None

    def take_stalled(self, now_s: float, patience_s: float, *, is_write: bool) -> list[Task]:
        """Take out what waits if the engine has taken nothing of this kind for long.

        Until it takes something, what comes next is offered once and is stalled as well: a
        load much larger than what may wait here at a time would fail bit by bit otherwise.
        """
        queues = [self._queues[line] for line in ((Line.WRITE,) if is_write else _READS)]
        since_s = self._stalled_since_s[is_write]
        if not any(queues):
            self._stalled_since_s[is_write] = None
        elif since_s is None:
            self._stalled_since_s[is_write] = now_s
        elif now_s - since_s >= patience_s:
            return [task for queue in queues for task in queue.take_all()]
        return []

    def _held(self, lines: tuple[Line, ...]) -> int:
        return sum(self._queues[line].held for line in lines)


def _by_job(task: Task) -> Job:
    return task.charged_to


def _in_one_line(task: Task) -> None:
    """All tasks count as one job's: first come, first served."""


@dataclass(frozen=True, slots=True)
class IoEvent:
    """outcome None: the late release of a task whose outcome came before."""

    task: Task
    outcome: Outcome | None
    released: bool
    ended_s: float | None = None


@dataclass(slots=True)
class Flight:
    """line: where its task waited, and holds a place until the outcome; None: a reset.

    attachment: of its target, when it was submitted. began_s: when that was. late: past its
    deadline, not released.
    """

    task: Task
    line: Line | None
    attachment: int
    began_s: float = 0.0
    late: bool = False

    @property
    def is_write(self) -> bool:
        return self.line in (None, Line.WRITE)


@dataclass(frozen=True, slots=True)
class PumpConfig:
    """Bounds. A deadline runs from the hand-over to the engine, in seconds.

    What may be in flight is shared evenly by the targets; each may have one at least.
    stream_slots: what loads are read into; None: more than enough.
    """

    rank: int = 0
    target_count: int = 1
    reads_in_flight_max: int = 64
    writes_in_flight_max: int = 32
    read_deadline_s: float = 5.0
    write_deadline_s: float = 30.0
    #: One a target, shared with who attaches targets again; None: nobody does.
    health: tuple[TargetHealth, ...] | None = None
    #: Has a reset that failed been made good, as its targets came back?
    reset_is_durable: Callable[[], bool] = lambda: False
    stream_slots: int | None = None

    @property
    def target_reads_max(self) -> int:
        return max(1, self.reads_in_flight_max // self.target_count)

    @property
    def target_streamed_max(self) -> int:
        """Reads of loads that a target has at a time, at most, while all are busy."""
        if self.stream_slots is None:
            return self.target_reads_max
        return max(1, min(self.target_reads_max, self.stream_slots // self.target_count))

    @property
    def target_writes_max(self) -> int:
        return max(1, self.writes_in_flight_max // self.target_count)


class VerdictNews:
    """Of one rank. Every target begins as ok."""

    def __init__(self, rank: int, health: Sequence[TargetHealth]) -> None:
        self._rank = rank
        self._health = health
        self._told = [Verdict.OK] * len(health)

    def take(self) -> list[VerdictReport]:
        """What has changed since the last call."""
        news = []
        for target, health in enumerate(self._health):
            verdict = health.verdict
            if verdict is not self._told[target]:
                self._told[target] = verdict
                news.append(VerdictReport(self._rank, target, verdict.value))
        return news


class IoPump:
    """Queues in front of one engine. Single-threaded, the pipeline's."""

    def __init__(
        self,
        engine: IoEngine,
        config: PumpConfig,
        clock: Callable[[], float],
        address_of: Callable[[Task], int],
        slot_bytes: int,
        meter: TransferMeter,
    ) -> None:
        reads_max, writes_max = config.target_reads_max, config.target_writes_max
        self._engine = engine
        self._config = config
        self._clock = clock
        self._address_of = address_of
        self._slot_bytes = slot_bytes
        self._meter = meter
        self._rates = RateMeter(
            config.rank,
            config.target_count,
            clock,
            saturating_reads=saturating(config.target_streamed_max, slot_bytes),
            saturating_writes=saturating(writes_max, slot_bytes),
        )
        self._lanes = [Lane(reads_max, writes_max) for _ in range(config.target_count)]
        self._first = 0  # the target that is asked first: each in its turn
        self._resets: deque[Task] = deque()
        self._flights: dict[int, Flight] = {}
        self._next_token = 1
        lanes = self._lanes
        self._health = config.health or [TargetHealth(can_return=False) for _ in lanes]
        self._verdicts = VerdictNews(config.rank, self._health)
        self._failed: list[IoEvent] = []
        self._resetting = False
        #: A reset has failed: nothing may be written that a later start could adopt.
        self._barred = False

    def enqueue(self, task: Task) -> None:
        """Queue a task's read or write of its slot, or a reset."""
        if task.job.kind is JobKind.RESET:
            self._resets.append(task)
        else:
            self._lanes[task.target].queue(Line.of(task)).push(task)

    def promote(self, task: Task, job: Job) -> None:
        """Load `job` waits for this fetch: it goes with the load's reads, on their share.

        One that is with the engine stays as it is there; its retry, if any, is promoted.
        """
        waited = self._lanes[task.target].queue(Line.of(task)).remove(task)
        task.io_class, task.promoted_for = IoClass.READ_DEMAND, job
        if waited:
            self.enqueue(task)

    def cancel(self, task: Task) -> bool:
        """True: it was still queued and is gone. Otherwise its completion will come."""
        if self._lanes[task.target].queue(Line.of(task)).remove(task):
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
        return self._verdicts.take()

    def take_rates(self) -> list[RateReport]:
        return self._rates.take()

    @property
    def busy(self) -> bool:
        waiting = any(lane.waiting for lane in self._lanes)
        return bool(self._flights) or bool(self._resets) or waiting

    def waiting(self, line: Line) -> int:
        """How many wait in this line, over all targets."""
        return sum(len(lane.queue(line)) for lane in self._lanes)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Reads and writes that the engine has, or whose buffers the kernel has."""
        writes = sum(flight.is_write for flight in self._flights.values())
        return len(self._flights) - writes, writes

    # -- towards the engine -----------------------------------------------------------

    def _hand_over(self) -> None:
        self._first = (self._first + 1) % len(self._lanes)
        lanes = self._lanes[self._first :] + self._lanes[: self._first]
        full = False
        for line in (Line.DEMAND, Line.URGENT, Line.PREFETCH):
            full = self._offer(line, lanes, full=full)
        self._offer_reset()
        self._offer(Line.WRITE, lanes, full=False)
        self._fail_stalled(False, self._config.read_deadline_s)
        self._fail_stalled(True, self._config.write_deadline_s)

    def _offer(self, line: Line, lanes: Sequence[Lane], *, full: bool) -> bool:
        """Hand over what waits in one line, one a target at a time, until the engine is full.

        Returns whether it is. What cannot go at all fails even then.
        """
        is_write = line is Line.WRITE
        while lanes:
            going_on = []
            for lane in lanes:
                queue = lane.queue(line)
                task = queue.peek()
                if task is None or (is_write and not self._write_may_start(task)):
                    continue
                failure = self._refusal(task)
                if failure is not None:
                    queue.remove(task)
                    self._failed.append(IoEvent(task, failure, True))
                elif full or not lane.has_room(line):
                    continue
                elif self._submit(task, line):
                    queue.take()
                    lane.moves(is_write=is_write)
                else:
                    full = True
                    continue
                going_on.append(lane)
            lanes = going_on
        return full

    def _offer_reset(self) -> None:
        if not self._resets or not self._write_may_start(self._resets[0]):
            return
        failure = self._refusal(self._resets[0])
        if failure is not None:
            self._failed.append(IoEvent(self._resets.popleft(), failure, True))
        elif self._submit(self._resets[0], None):
            self._resets.popleft()
            self._resetting = True
            for lane in self._lanes:  # their writes wait for the reset: their time begins anew
                lane.moves(is_write=True)

    def _refusal(self, task: Task) -> Outcome | None:
        """Why a task is not even tried. A reset always is: what follows depends on it."""
        if task.job.kind is JobKind.RESET:
            return None
        if self._barred and task.job.kind is JobKind.WRITE and not self._config.reset_is_durable():
            return CANCELLED
        return None if self._health[task.target].verdict.usable else DEADLINE

    def _fail_stalled(self, is_write: bool, patience_s: float) -> None:
        for lane in self._lanes:
            stalled = lane.take_stalled(self._clock(), patience_s, is_write=is_write)
            self._failed += [IoEvent(task, DEADLINE, True) for task in stalled]

    def _write_may_start(self, task: Task) -> bool:
        """A reset waits for the writes before it, and writes after it wait for the reset:
        otherwise a chunk from before could reach the disk as one from after. A write past its
        deadline is not waited for: it may hang for ever, and its epoch, taken when it was
        submitted, keeps it from being adopted, whenever it reaches the disk."""
        if task.job.kind is JobKind.RESET:
            return not any(f.is_write and not f.late for f in self._flights.values())
        # What was queued before a reset has been taken out (`take_queued_writes`).
        return not self._resetting and not self._resets

    def _submit(self, task: Task, line: Line | None) -> bool:
        token = self._next_token
        health = self._health[task.target]
        flight = Flight(task, line, health.attachment)
        reset = line is None
        config = self._config
        deadline_s = config.write_deadline_s if flight.is_write else config.read_deadline_s
        kind = IoKind.WRITE_SLOT if flight.is_write else IoKind.READ_SLOT
        op = IoOp(
            token=token,
            kind=IoKind.RESET if reset else kind,
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
        self._flights[token] = flight
        if not reset:
            health.began()
            flight.began_s = self._rates.began(task.target, is_write=flight.is_write)
        return True

    # -- from the engine --------------------------------------------------------------

    def _reap(self) -> list[IoEvent]:
        events: list[IoEvent] = []
        for completion in self._engine.poll():
            flight, outcome = self._flights[completion.token], completion.outcome
            if outcome is not None:
                self._ended(flight, completion, outcome)
            if completion.released:
                del self._flights[completion.token]
                if flight.line is not None:
                    health = self._health[flight.task.target]
                    health.released(flight.attachment, late=flight.late)
                if outcome is not None and self._retries(flight, outcome):
                    continue
            released, ended_s = completion.released, completion.ended_s
            events.append(IoEvent(flight.task, outcome, released, ended_s))
            if completion.released and flight.line is None:
                self._resetting = False
                self._barred = outcome is None or not outcome.ok
        return events

    def _ended(self, flight: Flight, completion: Completion, outcome: Outcome) -> None:
        task, line, is_write = flight.task, flight.line, flight.is_write
        flight.late = not completion.released
        if line is None:
            return
        self._lanes[task.target].queue(line).give_back(task)
        size, time_s = self._slot_bytes if outcome.ok else 0, (flight.began_s, completion.ended_s)
        self._rates.ended(task.target, size, time_s, is_write=is_write)
        self._meter.moved(size, time_s, is_write=is_write)
        health = self._health[task.target]
        if flight.late:
            health.late(flight.attachment)
        health.ended(flight.attachment, outcome, task.pool_slot or 0, is_write=is_write)

    def _retries(self, flight: Flight, outcome: Outcome) -> bool:
        """True: it is tried once more, and nobody hears of it. Only a read or a reset may be."""
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
        if flight.line is None:
            self._resets.appendleft(task)
        else:
            self._lanes[task.target].queue(Line.of(task)).push(task, front=True)
        return True

    def take_queued_writes(self) -> list[Task]:
        """Take every queued write out, for a reset that voids them."""
        return [task for lane in self._lanes for task in lane.queue(Line.WRITE).take_all()]


class LevelNews:
    """Of one rank; its queues begin empty."""

    def __init__(self, rank: int, streams: StreamSlots, pump: IoPump) -> None:
        self._streams = streams
        self._pump = pump
        self._told = LevelReport(rank)
        self._rank = rank

    def take(self) -> list[LevelReport]:
        """One report if anything has changed since the last."""
        waiting, (reads, writes) = self._pump.waiting, self._pump.in_flight
        now = LevelReport(
            self._rank,
            stream_slots_used=self._streams.used,
            stream_slot_waiting=self._streams.waiting,
            read_waiting=waiting(Line.DEMAND),
            prefetch_waiting=waiting(Line.URGENT) + waiting(Line.PREFETCH),
            write_waiting=waiting(Line.WRITE),
            reads_in_flight=reads,
            writes_in_flight=writes,
        )
        if now == self._told:
            return []
        self._told = now
        return [now]
