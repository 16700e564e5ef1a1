# SPDX-License-Identifier: Apache-2.0
"""The transfer pipeline: one rank's state machine between KV cache, staging and pool.

`TransferPipeline` has no thread, no vLLM and no torch, and its clock is injected; only its engines
do I/O. Commands come in, `step` moves everything that can move, reports and finished jobs come out.
All calls come from one thread: that of a `PipelineRunner`, or the simulator's.

The steps of a chunk, by kind of job:

    store   gate(fill) → copy → cache slot
    load    gate(read) → copy                         from a cache slot
            stream slot → read → copy                 from the pool
            gate(fill) → read → copy                  from the pool, landing in a cache slot
    write   gate(read) → write → table entry
    fetch   gate(fill) → read

Chunks do not wait for each other: while some of a job are read, others are copied.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_nvmeof_offload.copy.base import CopyEngine, Descriptors, Direction, gather
from vllm_nvmeof_offload.errors import CANCELLED, DEADLINE, STALE, EngineError, Outcome
from vllm_nvmeof_offload.io.base import IoEngine, Waker
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.protocol import (
    CancelCommand,
    Command,
    FetchCommand,
    LevelReport,
    LoadCommand,
    OpKind,
    OpReport,
    ReleaseReport,
    Report,
    ResetCommand,
    SlotIdentity,
    StoreCommand,
    Urgency,
    WriteCommand,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.units import HEADER_BYTES
from vllm_nvmeof_offload.worker.io_scheduler import IoEvent, IoScheduler, SchedulerConfig
from vllm_nvmeof_offload.worker.rates import count_transfer
from vllm_nvmeof_offload.worker.slots import Grant, SlotGates, StreamSlots
from vllm_nvmeof_offload.worker.tasks import FinishedJob, Job, Step, Task

_NOTHING = SlotIdentity(b"", 0)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies that the copy engine has under one ticket."""

    tasks: list[Task]
    direction: Direction
    size_bytes: int
    began_s: float


class TransferPipeline:
    """See the module's docstring. `pieces`: one array per chunk, as `Task.pieces`."""

    def __init__(
        self,
        staging: StagingMap,
        copy: CopyEngine,
        io: IoEngine,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: What happened since it was cleared, under the names of `metrics.COUNTERS`.
        self.counters = Counts()
        self._staging = staging
        self._copy = copy
        self._clock = clock
        self._rank, self._target_count = config.rank, config.target_count
        self._scheduler = IoScheduler(io, config, staging, clock, self.counters)
        self._gates = SlotGates()
        self._jobs: dict[int, Job] = {}
        self._streams = StreamSlots(staging.stream_slots, config.target_count)
        self._levels = LevelReport(config.rank)
        self._to_copy: dict[int, list[Task]] = {}  # op → tasks ready to be copied
        self._tickets: dict[int, _Batch] = {}
        self._reports: list[Report] = []
        self._finished: list[FinishedJob] = []

    # -- commands ---------------------------------------------------------------------

    def store(self, command: StoreCommand, pieces: Sequence[Descriptors], fence: object) -> None:
        """Copy KV cache → cache slots, after `fence`."""
        job = self._open(command.op, OpKind.STORE, fence)
        for chunk, chunk_pieces in zip(command.chunks, pieces, strict=True):
            task = self._task(job, chunk.identity, chunk.cache_slot, None, Urgency.DEMAND)
            task.pieces, task.fills = chunk_pieces, True
        self._start(job)

    def load(self, command: LoadCommand, pieces: Sequence[Descriptors], fence: object) -> None:
        """Copy cache slots or pool slots → KV cache, after `fence`."""
        job = self._open(command.op, OpKind.LOAD, fence)
        for chunk, chunk_pieces in zip(command.chunks, pieces, strict=True):
            slots = chunk.cache_slot, chunk.pool_slot
            task = self._task(job, chunk.identity, *slots, Urgency.DEMAND)
            task.pieces, task.fills = chunk_pieces, None not in slots
        self._start(job)

    def command(self, command: Command) -> None:
        """Execute a command that moves no GPU blocks."""
        match command:
            case WriteCommand(op=op, identity=identity, cache_slot=cache, pool_slot=pool):
                job = self._open(op, OpKind.WRITE)
                self._task(job, identity, cache, pool, Urgency.WRITE)
                self._start(job)
            case FetchCommand(op=op, identity=identity, cache_slot=cache, pool_slot=pool):
                job = self._open(op, OpKind.FETCH)
                self._task(job, identity, cache, pool, command.urgency).fills = True
                self._start(job)
            case ResetCommand():
                self._reset(command)
            case CancelCommand():
                self.cancel(command.target_op)

    def cancel(self, op: int) -> None:
        """Stop what has not started; what DMA works on goes on. The report still comes.

        Stores and resets go on, because other ops depend on them.
        """
        job = self._jobs.get(op)
        if job is None or job.cancelled or job.kind in (OpKind.STORE, OpKind.RESET):
            return
        job.cancelled = True
        for task in job.tasks:
            if task.step in (Step.GATE, Step.STREAM, Step.IO):
                self._cancel_task(task)

    # -- progress ---------------------------------------------------------------------

    def step(self) -> None:
        """Move everything that can move now."""
        for ticket, outcome in self._copy.poll():
            batch = self._tickets.pop(ticket)
            size, seconds = batch.size_bytes if outcome.ok else 0, self._clock() - batch.began_s
            count_transfer(self.counters, batch.direction.value, "gpu", size, seconds)
            for task in batch.tasks:
                self._copied(task, outcome)
        self._hand_out_stream_slots()
        events = self._scheduler.step()
        while events:  # what they made room for starts now: the next step may be far away
            for event in events:
                self._io_event(event)
            self._hand_out_stream_slots()
            events = self._scheduler.hand_over()
        self._reports.extend(self._scheduler.take_verdicts())
        self._submit_copies()

    def take_reports(self) -> list[Report]:
        reports, self._reports = self._reports, []
        if reports:  # rates and levels ride along: they never make the engine step
            reports += self._scheduler.rates.take()
            levels = self._level_report()
            if levels != self._levels:
                reports.append(levels)
                self._levels = levels
        return reports

    def take_finished(self) -> list[FinishedJob]:
        finished, self._finished = self._finished, []
        return finished

    def idle(self) -> bool:
        """Return whether there is no job, no gate held, and no buffer with an engine."""
        engines_idle = not self._scheduler.busy and self._streams.idle()
        return not self._jobs and self._gates.idle() and engines_idle

    def _level_report(self) -> LevelReport:
        waiting, (reads, writes) = self._scheduler.waiting, self._scheduler.in_flight
        return LevelReport(
            self._rank,
            stream_slots_used=self._streams.used,
            stream_slot_waiting=self._streams.waiting,
            read_waiting=waiting(Urgency.DEMAND),
            prefetch_waiting=waiting(Urgency.URGENT) + waiting(Urgency.PREFETCH),
            write_waiting=waiting(Urgency.WRITE),
            reads_in_flight=reads,
            writes_in_flight=writes,
        )

    # -- jobs -------------------------------------------------------------------------

    def _open(self, op: int, kind: OpKind, fence: object = None) -> Job:
        assert op not in self._jobs, f"op {op} given twice"
        job = self._jobs[op] = Job(op, kind, fence=fence, started_s=self._clock())
        return job

    def _task(
        self,
        job: Job,
        identity: SlotIdentity,
        cache_slot: int | None,
        pool_slot: int | None,
        urgency: Urgency,
    ) -> Task:
        target = (pool_slot or 0) % self._target_count
        task = Task(job, len(job.tasks), identity, cache_slot, pool_slot, urgency, target)
        job.tasks.append(task)
        job.tasks_left += 1
        return task

    def _start(self, job: Job) -> None:
        for task in job.tasks:
            if task.cache_slot is None:
                task.step = Step.STREAM
                self._streams.wait(task)
            else:
                if job.kind is OpKind.LOAD:
                    self._promote_fetches(task.cache_slot, job)
                self._follow(self._gates.ask(task.cache_slot, task, task.identity, fill=task.fills))

    def _promote_fetches(self, slot: int, load: Job) -> None:
        """Promote the fetches that fill the slot: a load is about to wait for them."""
        for filler in self._gates.fillers(slot):
            if filler.urgency in (Urgency.URGENT, Urgency.PREFETCH):
                self._scheduler.promote(filler, load)

    def _reset(self, command: ResetCommand) -> None:
        # No write from before may follow the reset, wherever it waits.
        for waiting in [job for job in self._jobs.values() if job.kind is OpKind.WRITE]:
            for task in waiting.tasks:
                if task.step is Step.GATE:
                    self._cancel_task(task)
        for task in self._scheduler.take_queued_writes():
            self._leave_slot(task)
            self._decide(task, CANCELLED)
        job = self._open(command.op, OpKind.RESET)
        task = self._task(job, _NOTHING, None, None, Urgency.WRITE)
        task.adoptable = command.adoptable
        task.step = Step.IO
        self._scheduler.enqueue(task)

    def _decide(self, task: Task, outcome: Outcome, *, released: bool = True) -> None:
        """Settle the chunk's outcome; `released`: no engine has its buffer."""
        assert task.step not in (Step.ZOMBIE, Step.DONE)
        job = task.job
        task.step = Step.DONE if released else Step.ZOMBIE
        if not released:
            self._hold_buffer(task)
        if not outcome.ok:
            job.failures.append((task.index, outcome))
        job.tasks_left -= 1
        if job.tasks_left:
            return
        failures = tuple(sorted(job.failures, key=lambda f: f[0]))
        seconds = (job.ended_s or self._clock()) - job.started_s
        self._reports.append(OpReport(job.op, failures, not job.unreleased, seconds))
        if job.kind in (OpKind.STORE, OpKind.LOAD):
            self._finished.append(FinishedJob(job.op, failures, job.copied_bytes, seconds))
        if not job.unreleased:
            del self._jobs[job.op]

    def _hold_buffer(self, task: Task) -> None:
        """Count a decided task's buffer that the engine keeps, for an unknown time."""
        if task.stream_slot is None and task.cache_slot is not None:
            task.job.unreleased += 1
            if task.fills and not self._read_for_others(task):
                self._follow(self._gates.abandon(task.cache_slot))

    def _read_for_others(self, task: Task) -> bool:
        """Return whether a cancelled load's read goes on because others wait for it to land."""
        job, slot = task.job, task.cache_slot
        if job.kind is not OpKind.LOAD or not task.fills or slot is None:
            return False
        return job.cancelled and self._gates.awaited(slot)

    def _mark_hung(self, task: Task) -> None:
        """Note that a task is past its deadline and not released: its slot may never come back."""
        if task.stream_slot is not None:
            self._streams.mark_hung(task)
        elif task.fills and task.cache_slot is not None:
            self._follow(self._gates.abandon(task.cache_slot))

    def _released_late(self, task: Task, *, filled: bool) -> None:
        """Release the buffer of a task that was decided before."""
        assert task.step is Step.ZOMBIE
        task.step = Step.DONE
        self._leave_slot(task, filled=filled)
        if task.cache_slot is None:
            return
        (job := task.job).unreleased -= 1
        if not job.tasks_left and not job.unreleased:
            self._reports.append(ReleaseReport(job.op))
            del self._jobs[job.op]

    # -- slots ------------------------------------------------------------------------

    def _follow(self, grants: list[Grant]) -> None:
        """Let these tasks go on at their cache slots."""
        for grant in grants:
            task = grant.task
            if grant.stale:
                self._decide(task, STALE)
                continue
            task.reads = not task.fills
            if task.pool_slot is not None:
                task.step = Step.IO
                self._scheduler.enqueue(task)
            else:
                self._ready_to_copy(task)

    def _leave_slot(self, task: Task, *, filled: bool = False) -> None:
        """Give back the slot that the task holds, if any."""
        if task.stream_slot is not None:
            self._streams.give_back(task)
        elif task.cache_slot is not None and task.reads:
            task.reads = False
            self._follow(self._gates.read(task.cache_slot))
        elif task.cache_slot is not None and task.fills:
            task.fills = False
            self._follow(self._gates.filled(task.cache_slot, ok=filled))

    def _hand_out_stream_slots(self) -> None:
        for task in self._streams.hand_out():
            task.step = Step.IO
            self._scheduler.enqueue(task)
        for task in self._streams.take_unservable():
            self._decide(task, DEADLINE)

    # -- I/O --------------------------------------------------------------------------

    def _io_event(self, event: IoEvent) -> None:
        task, outcome = event.task, event.outcome
        if task.step is Step.ZOMBIE:
            # Cancelled or past its deadline: only the buffer matters any more.
            if event.released:
                self._released_late(task, filled=outcome is not None and outcome.ok)
            else:
                self._mark_hung(task)
            return
        assert outcome is not None
        if not event.released:
            self._decide(task, outcome, released=False)
            self._mark_hung(task)
            return
        kind = task.job.kind
        if outcome.ok and kind is not OpKind.RESET:
            size = self._staging.slot_bytes
            if kind is OpKind.WRITE:
                self.counters["written_bytes"] += size
                self.counters["target_written_bytes", str(task.target)] += size
            else:
                self.counters["read_bytes"] += size
        if outcome.ok and kind is OpKind.LOAD:
            if task.fills:  # landed: others may read the slot from now on
                task.fills, task.reads = False, True
                assert task.cache_slot is not None
                self._follow(self._gates.filled_and_read(task.cache_slot))
            self._ready_to_copy(task)
            return
        self._leave_slot(task, filled=outcome.ok)
        if kind is OpKind.FETCH:
            task.job.ended_s = event.ended_s
        self._decide(task, outcome)

    def _cancel_task(self, task: Task) -> None:
        if task.step is Step.GATE:
            assert task.cache_slot is not None
            waiting, grants = self._gates.withdraw(task.cache_slot, task)
            assert waiting
            self._decide(task, CANCELLED)
            self._follow(grants)
        elif task.step is Step.STREAM:
            self._streams.withdraw(task)
            self._decide(task, CANCELLED)
        elif not self._read_for_others(task) and self._scheduler.cancel(task):
            self._leave_slot(task)
            self._decide(task, CANCELLED)
        else:
            # The engine has its buffer, and nothing will be copied from it for this job.
            self._decide(task, CANCELLED, released=False)

    # -- copies -----------------------------------------------------------------------

    def _ready_to_copy(self, task: Task) -> None:
        task.step = Step.COPY
        self._to_copy.setdefault(task.job.op, []).append(task)

    def _submit_copies(self) -> None:
        to_copy, self._to_copy = self._to_copy, {}
        for op, tasks in to_copy.items():
            job = self._jobs[op]
            payloads = [task.address(self._staging) + HEADER_BYTES for task in tasks]
            pieces = gather([task.pieces for task in tasks], payloads)
            size = int(pieces[:, 2].sum())
            job.copied_bytes += size
            direction = Direction.STORE if job.kind is OpKind.STORE else Direction.LOAD
            ticket = self._copy.submit(direction, pieces, job.fence)
            self._tickets[ticket] = _Batch(tasks, direction, size, self._clock())

    def _copied(self, task: Task, outcome: Outcome) -> None:
        self._leave_slot(task, filled=outcome.ok)
        self._decide(task, outcome)


#: Deadlines wake the I/O engine's eventfd; this is only a backstop.
_POLL_MS = 1000


class PipelineRunner:
    """Runs the pipeline on its own thread, so that transfers go on while the model computes.

    The model's thread calls all methods: it hands over calls, which run in their order, and picks
    up results. It waits only in `wait`, for copies that vLLM must see finished.
    """

    def __init__(self, pipeline: TransferPipeline, waker: Waker, io_fd: int) -> None:
        self._pipeline = pipeline
        self._waker = waker
        self._io_fd = io_fd
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._finished: list[FinishedJob] = []
        self._reports: list[Report] = []
        self._counters = Counts()
        self._open: set[int] = set()  # stores and loads handed over and not finished
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nvmeof-pipeline", daemon=True)
        self._thread.start()

    def hand_over(self, call: Callable[[TransferPipeline], None], op: int | None = None) -> None:
        """Run `call` on the pipeline's thread. `op`: the store or load that it starts."""
        if op is not None:
            with self._changed:
                self._open.add(op)
        self._inbox.append(lambda: call(self._pipeline))
        self._waker.wake()

    def wait(self, ops: Iterable[int]) -> None:
        """Block until these stores and loads are finished: no DMA works on them."""
        waiting = set(ops)
        with self._changed:
            while waiting & self._open:
                self._raise_failure()
                self._changed.wait(timeout=1.0)

    def take(self) -> tuple[list[FinishedJob], list[Report], Counts]:
        """Finished jobs, reports and counters since the last call; a consistent snapshot."""
        with self._changed:
            self._raise_failure()
            taken = (self._finished, self._reports, self._counters)
            self._finished, self._reports, self._counters = [], [], Counts()
            return taken

    def stop(self) -> None:
        """End the thread. The engines' `close` ends what is under way."""
        self._stopping = True
        self._waker.wake()
        self._thread.join(timeout=5.0)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineError("the transfer pipeline stopped; see the cause") from self._failure

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        poller.register(self._io_fd, select.POLLIN)
        try:
            while not self._stopping:
                self._waker.clear()
                while self._inbox:
                    self._inbox.popleft()()
                self._pipeline.step()
                self._publish()
                poller.poll(_POLL_MS)
        except BaseException as error:  # noqa: BLE001 - handed to the model's thread, which raises
            # A broken invariant: the model's thread must fail too instead of waiting for ever.
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _publish(self) -> None:
        finished = self._pipeline.take_finished()
        reports = self._pipeline.take_reports()
        if not finished and not reports and not self._pipeline.counters:
            return
        with self._changed:
            self._finished += finished
            self._reports += reports
            self._counters.add(self._pipeline.counters)
            self._pipeline.counters.clear()
            self._open.difference_update(job.op for job in finished)
            self._changed.notify_all()
