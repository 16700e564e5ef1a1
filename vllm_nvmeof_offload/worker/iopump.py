# SPDX-License-Identifier: Apache-2.0
"""Feeds the I/O engine: classes, bounds, one retry, and the verdict on each target.

Reads go before writes, demand before urgent fetches before other fetches, each target within
bounds of its own (`lanes`). What would go to a target that is not usable (`fabric.health`) fails
at once with DEADLINE. So does what waits for a target from which the engine has taken nothing
of its kind for a deadline's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, Outcome, OutcomeKind
from vllm_nvmeof_offload.io.base import Completion, IoEngine, IoKind, IoOp
from vllm_nvmeof_offload.protocol import IoClass, RateReport, VerdictReport
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.worker.flights import Flight, IoEvent
from vllm_nvmeof_offload.worker.lanes import Lane, Line
from vllm_nvmeof_offload.worker.meter import TransferMeter
from vllm_nvmeof_offload.worker.pump_config import PumpConfig
from vllm_nvmeof_offload.worker.rates import RateMeter, saturating
from vllm_nvmeof_offload.worker.tasks import Job, JobKind, Task
from vllm_nvmeof_offload.worker.verdicts import VerdictNews

__all__ = ["IoEvent", "IoPump", "PumpConfig"]


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
