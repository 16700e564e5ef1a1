# SPDX-License-Identifier: Apache-2.0
"""Queues in front of the I/O engine: order, bounds, one retry, and the verdict on each target.

Reads go before writes; among reads those that a load waits for go first, then urgent fetches,
then other fetches. Each target has bounds of its own, so that a slow one cannot take what the
others need. Operations for a target that is not usable (`targets.health`) fail at once with
DEADLINE. So do those that wait for a target of which the engine has taken nothing of their kind
for the time of a deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, Outcome, OutcomeKind
from vllm_nvmeof_offload.io.base import Completion, IoEngine, IoOp
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import OpKind, Urgency, VerdictReport
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.targets.health import TargetHealth, Verdict
from vllm_nvmeof_offload.worker.rates import RateMeter, count_transfer, saturating
from vllm_nvmeof_offload.worker.tasks import FairQueue, Job, Task

_FETCHES = (Urgency.URGENT, Urgency.PREFETCH)
_READS = (Urgency.DEMAND, *_FETCHES)


class TargetQueue:
    """Tasks for one target. A task holds a place from the hand-over to its outcome.

    Reads that a load waits for share the places by job; everything else is first come, first
    served. Fetches hold at most half of the places of reads, so that a load always finds some.
    """

    def __init__(self, reads_max: int, writes_max: int) -> None:
        self._reads_max = reads_max
        self._writes_max = writes_max
        self._fetches_max = max(1, reads_max // 2)
        # With one job for all tasks a fair queue is first come, first served.
        self._queues = {urgency: FairQueue(lambda task: None) for urgency in Urgency}
        self._queues[Urgency.DEMAND] = FairQueue(lambda task: task.charged_to)
        #: is_write → since when the engine has taken nothing while something waited here.
        self._stalled_since_s: dict[bool, float | None] = {False: None, True: None}

    def queue(self, urgency: Urgency) -> FairQueue:
        return self._queues[urgency]

    def has_room(self, urgency: Urgency) -> bool:
        """Return whether one more of this urgency may be with the engine."""
        if urgency is Urgency.WRITE:
            return self._queues[urgency].held < self._writes_max
        if urgency in _FETCHES and self._held(_FETCHES) >= self._fetches_max:
            return False
        return self._held(_READS) < self._reads_max

    @property
    def waiting(self) -> bool:
        return any(self._queues.values())

    def progressed(self, *, is_write: bool) -> None:
        """Note that the engine has taken something of this kind."""
        self._stalled_since_s[is_write] = None

    def take_stalled(self, now_s: float, patience_s: float, *, is_write: bool) -> list[Task]:
        """Take out what waits if the engine has taken nothing of this kind for `patience_s`.

        While the engine accepts nothing, new tasks are offered once and then fail too; otherwise
        a load larger than what may wait here at a time would fail one batch at a time.
        """
        queues = [self._queues[one] for one in ((Urgency.WRITE,) if is_write else _READS)]
        since_s = self._stalled_since_s[is_write]
        if not any(queues):
            self._stalled_since_s[is_write] = None
        elif since_s is None:
            self._stalled_since_s[is_write] = now_s
        elif now_s - since_s >= patience_s:
            return [task for queue in queues for task in queue.take_all()]
        return []

    def _held(self, urgencies: tuple[Urgency, ...]) -> int:
        return sum(self._queues[urgency].held for urgency in urgencies)


@dataclass(frozen=True, slots=True)
class IoEvent:
    """An event of a task. outcome None: the late release of one whose outcome came before."""

    task: Task
    outcome: Outcome | None
    released: bool
    ended_s: float | None = None


@dataclass(slots=True)
class InFlight:
    """A task that the engine has, or whose buffer the kernel still has."""

    task: Task
    #: The queue in which it holds a place until its outcome; None: a reset.
    urgency: Urgency | None
    #: The attachment of its target when it was submitted.
    attachment: int
    began_s: float = 0.0
    late: bool = False  # past its deadline, not released

    @property
    def is_write(self) -> bool:
        return self.urgency in (None, Urgency.WRITE)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one rank. A deadline runs from the hand-over to the engine, in seconds.

    The targets share what may be in flight evenly; each may have at least one.
    """

    rank: int = 0
    target_count: int = 1
    reads_in_flight_max: int = 64
    writes_in_flight_max: int = 32
    read_deadline_s: float = 5.0
    write_deadline_s: float = 30.0
    #: One per target, shared with the code that attaches targets again; None: no target returns.
    health: tuple[TargetHealth, ...] | None = None
    #: Has a failed reset been made good because its targets came back?
    reset_is_durable: Callable[[], bool] = lambda: False


class IoScheduler:
    """Queues in front of one engine. Only the pipeline's thread calls it."""

    def __init__(
        self,
        engine: IoEngine,
        config: SchedulerConfig,
        staging: StagingMap,
        clock: Callable[[], float],
        counters: Counts,
    ) -> None:
        targets, slot_bytes = config.target_count, staging.slot_bytes
        reads_max = max(1, config.reads_in_flight_max // targets)
        writes_max = max(1, config.writes_in_flight_max // targets)
        # Reads of loads that a target has at a time while all targets are busy.
        streamed_max = max(1, min(reads_max, staging.stream_slots // targets))
        self._engine = engine
        self._config = config
        self._staging = staging
        self._clock = clock
        self._counters = counters
        self.rates = RateMeter(
            config.rank,
            targets,
            clock,
            saturating_reads=saturating(streamed_max, slot_bytes),
            saturating_writes=saturating(writes_max, slot_bytes),
        )
        self._targets = [TargetQueue(reads_max, writes_max) for _ in range(targets)]
        self._first = 0  # the target that is asked first: each in its turn
        self._resets: deque[Task] = deque()
        self._in_flight: dict[int, InFlight] = {}
        self._next_token = 1
        self._health = config.health or [TargetHealth(can_return=False) for _ in range(targets)]
        self._verdicts = [Verdict.OK] * targets
        self._failed: list[IoEvent] = []
        self._resetting = False
        #: A reset has failed: nothing may be written that a later start could adopt.
        self._barred = False

    def enqueue(self, task: Task) -> None:
        """Queue a task's read or write of its slot, or a reset."""
        if task.job.kind is OpKind.RESET:
            self._resets.append(task)
        else:
            self._queue_of(task).push(task)

    def promote(self, task: Task, job: Job) -> None:
        """Let a fetch for which load `job` waits go with the load's reads, on their share.

        One that the engine has stays as it is there; its retry, if any, is promoted.
        """
        waited = self._queue_of(task).remove(task)
        task.urgency, task.promoted_for = Urgency.DEMAND, job
        if waited:
            self.enqueue(task)

    def cancel(self, task: Task) -> bool:
        """True: it was still queued and is gone. Otherwise its completion will come."""
        if self._queue_of(task).remove(task):
            return True
        if task.io_token is not None:
            self._engine.cancel([task.io_token])
        return False

    def step(self) -> list[IoEvent]:
        """Collect completions, then hand over what fits."""
        return self._reap() + self.hand_over()

    def hand_over(self) -> list[IoEvent]:
        """Hand over what fits; return what failed without being tried."""
        self._first = (self._first + 1) % len(self._targets)
        targets = self._targets[self._first :] + self._targets[: self._first]
        full = False
        for urgency in _READS:
            full = self._offer(urgency, targets, full=full)
        self._offer_reset()
        self._offer(Urgency.WRITE, targets, full=False)
        self._fail_stalled(False, self._config.read_deadline_s)
        self._fail_stalled(True, self._config.write_deadline_s)
        failed, self._failed = self._failed, []
        return failed

    def take_verdicts(self) -> list[VerdictReport]:
        """Return the verdicts that changed since the last call; every target begins as ok."""
        reported, self._verdicts = self._verdicts, [one.verdict for one in self._health]
        return [
            VerdictReport(self._config.rank, target, verdict.value)
            for target, verdict in enumerate(self._verdicts)
            if verdict is not reported[target]
        ]

    def take_queued_writes(self) -> list[Task]:
        """Take every queued write out, for a reset that voids them."""
        return [task for one in self._targets for task in one.queue(Urgency.WRITE).take_all()]

    @property
    def busy(self) -> bool:
        waiting = any(target.waiting for target in self._targets)
        return bool(self._in_flight) or bool(self._resets) or waiting

    def waiting(self, urgency: Urgency) -> int:
        """Count the tasks that wait with this urgency, over all targets."""
        return sum(len(target.queue(urgency)) for target in self._targets)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Reads and writes that the engine has, or whose buffers the kernel has."""
        writes = sum(one.is_write for one in self._in_flight.values())
        return len(self._in_flight) - writes, writes

    def _queue_of(self, task: Task) -> FairQueue:
        return self._targets[task.target].queue(task.urgency)

    # -- towards the engine -----------------------------------------------------------

    def _offer(self, urgency: Urgency, targets: Sequence[TargetQueue], *, full: bool) -> bool:
        """Hand over what waits, one per target at a time, until the engine is full.

        Returns whether the engine is full. What cannot go at all fails even then.
        """
        is_write = urgency is Urgency.WRITE
        while targets:
            going_on = []
            for target in targets:
                queue = target.queue(urgency)
                task = queue.peek()
                if task is None or (is_write and not self._write_may_start(task)):
                    continue
                failure = self._refusal(task)
                if failure is not None:
                    queue.remove(task)
                    self._failed.append(IoEvent(task, failure, True))
                elif full or not target.has_room(urgency):
                    continue
                elif self._submit(task, urgency):
                    queue.take()
                    target.progressed(is_write=is_write)
                else:
                    full = True
                    continue
                going_on.append(target)
            targets = going_on
        return full

    def _offer_reset(self) -> None:
        if not self._resets or not self._write_may_start(self._resets[0]):
            return
        if self._submit(self._resets[0], None):
            self._resets.popleft()
            self._resetting = True
            for target in self._targets:  # their writes wait for the reset: their time restarts
                target.progressed(is_write=True)

    def _refusal(self, task: Task) -> Outcome | None:
        """Return why a read or write is not even tried, or None. A reset is always tried."""
        if self._barred and task.job.kind is OpKind.WRITE and not self._config.reset_is_durable():
            return CANCELLED
        return None if self._health[task.target].verdict.usable else DEADLINE

    def _fail_stalled(self, is_write: bool, patience_s: float) -> None:
        for target in self._targets:
            stalled = target.take_stalled(self._clock(), patience_s, is_write=is_write)
            self._failed += [IoEvent(task, DEADLINE, True) for task in stalled]

    def _write_may_start(self, task: Task) -> bool:
        """A reset waits for the writes before it, and writes after it wait for the reset.

        Otherwise a chunk from before could reach the disk as one from after. A write past its
        deadline is not waited for: it may hang for ever, and its epoch, taken when it was
        submitted, keeps it from being adopted, whenever it reaches the disk.
        """
        if task.job.kind is OpKind.RESET:
            return not any(one.is_write and not one.late for one in self._in_flight.values())
        # What was queued before a reset has been taken out (`take_queued_writes`).
        return not self._resetting and not self._resets

    def _submit(self, task: Task, urgency: Urgency | None) -> bool:
        health = self._health[task.target]
        one = InFlight(task, urgency, health.attachment)
        is_reset, is_write = urgency is None, one.is_write
        config = self._config
        deadline_s = config.write_deadline_s if is_write else config.read_deadline_s
        op = IoOp(
            token=self._next_token,
            kind=task.job.kind,
            urgency=task.urgency,
            pool_slot=task.pool_slot or 0,
            address=0 if is_reset else task.address(self._staging),
            identity=None if is_reset else task.identity,
            deadline_s=None if is_reset else self._clock() + deadline_s,
            adoptable=task.adoptable,
        )
        if not self._engine.submit([op]):
            return False
        self._next_token += 1
        task.io_token = op.token
        self._in_flight[op.token] = one
        if not is_reset:
            health.began()
            one.began_s = self.rates.began(task.target, is_write=is_write)
        return True

    # -- from the engine --------------------------------------------------------------

    def _reap(self) -> list[IoEvent]:
        events: list[IoEvent] = []
        for completion in self._engine.poll():
            one, outcome = self._in_flight[completion.token], completion.outcome
            if outcome is not None:
                self._ended(one, completion, outcome)
            if completion.released:
                del self._in_flight[completion.token]
                if one.urgency is not None:
                    health = self._health[one.task.target]
                    health.released(one.attachment, late=one.late)
                if outcome is not None and self._retries(one, outcome):
                    continue
            released, ended_s = completion.released, completion.ended_s
            events.append(IoEvent(one.task, outcome, released, ended_s))
            if completion.released and one.urgency is None:
                self._resetting = False
                self._barred = outcome is None or not outcome.ok
        return events

    def _ended(self, one: InFlight, completion: Completion, outcome: Outcome) -> None:
        task, is_write = one.task, one.is_write
        one.late = not completion.released
        if one.urgency is None:
            return
        self._targets[task.target].queue(one.urgency).give_back(task)
        size = self._staging.slot_bytes if outcome.ok else 0
        # The engine's own time if it knows it: this thread may learn of the end late.
        ended_s = self._clock() if completion.ended_s is None else completion.ended_s
        self.rates.ended(task.target, size, one.began_s, ended_s, is_write=is_write)
        direction = "store" if is_write else "load"
        count_transfer(self._counters, direction, "pool", size, ended_s - one.began_s)
        health = self._health[task.target]
        if one.late:
            health.late(one.attachment)
        health.ended(one.attachment, outcome, task.pool_slot or 0, is_write=is_write)

    def _retries(self, one: InFlight, outcome: Outcome) -> bool:
        """Queue a read or reset once more if that may help. True: the failure is not reported."""
        task = one.task
        if (
            task.job.kind is OpKind.WRITE
            or outcome.kind is not OutcomeKind.IO_ERROR
            or not outcome.retryable
            or not task.io_retries_left
            or task.job.cancelled
        ):
            return False
        task.io_retries_left -= 1
        if one.urgency is None:
            self._resets.appendleft(task)
        else:
            self._queue_of(task).push(task, front=True)
        return True
