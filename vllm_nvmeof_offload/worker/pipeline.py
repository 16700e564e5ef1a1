# SPDX-License-Identifier: Apache-2.0
"""The transfer pipeline: one rank's transfers between KV cache, staging and pool.

`TransferPipeline` connects the native machine (native/machine/machine.h) to the engines. The
machine owns the order, the bounds and the state of every chunk; Python makes one call per batch.
The pipeline creates no thread and uses neither vLLM nor torch, and its clock is injected. It
accepts commands, advances in `step`, and returns reports and finished jobs. Only one thread at a
time may call it: the simulator's, or the one that holds a `PipelineRunner`'s lock.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from vllm_nvmeof_offload import logger
from vllm_nvmeof_offload.config import TUNING
from vllm_nvmeof_offload.copy.base import CopyEngine, Direction, Payloads
from vllm_nvmeof_offload.copy.geometry import CacheGeometry
from vllm_nvmeof_offload.errors import ERRORS, EngineError, Outcome, code_of, outcome_of
from vllm_nvmeof_offload.io.base import IoEngine, Waker, end_of, reset_op
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Machine, MachineOptions, PythonLanes
from vllm_nvmeof_offload.peers.base import SlotMemory
from vllm_nvmeof_offload.pool.format import SlotPlace, Stamp
from vllm_nvmeof_offload.protocol import (
    AttachCommand,
    CancelCommand,
    ChunkBatch,
    Command,
    DetachCommand,
    FetchCommand,
    LevelReport,
    OpKind,
    OpReport,
    OpReports,
    RateReport,
    Report,
    ResetCommand,
    SessionsCommand,
    Urgency,
    Verdict,
    VerdictReport,
    WriteCommand,
)
from vllm_nvmeof_offload.staging import StagingMap
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.units import HEADER_BYTES, MIB
from vllm_nvmeof_offload.worker.peer_reads import Peering, PeerLinks, Peers, Serve, Serving
from vllm_nvmeof_offload.worker.regions import RegionFiles, Regions

#: A store or load: op, whether it is a store, batch, and the GPU blocks of all groups (int32[m]),
#: group by group. The last two are the number of blocks per group, and the index of each group's
#: first block in its request.
Transfer: TypeAlias = tuple[
    int, bool, ChunkBatch, npt.NDArray[np.int32], Sequence[int], Sequence[int]
]

#: The bytes in flight that saturate a target: 100 Gb/s × 0.6 ms. One operation is never enough.
_SATURATING_BYTES = 8 * MIB
#: The limit on bytes in flight for peers on a target: a new local load waits for the reads that its
#: target has already started for peers. The limit still saturates a target with 10 GB/s and a
#: latency of 400 µs.
_SERVED_BYTES = 4 * MIB
_SATURATING_OPS_MIN = 2
_KINDS = tuple(OpKind)  # the kinds of operations, indexed by their numbers in the native machine
_RETRYABLE = [ERRORS.get(number, (False,))[0] for number in range(max(ERRORS) + 1)]


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """The limits on one rank's I/O. Deadlines are in seconds from the first submission. Limits on
    bytes are per target; limits on operations are divided among the targets, at least one each."""

    group_bytes: tuple[int, ...] = field(kw_only=True)  # per chunk, by group
    rank: int = 0
    target_count: int = 1
    reads_in_flight_max: int = 64
    writes_in_flight_max: int = 32
    read_deadline_s: float = 5.0
    write_deadline_s: float = TUNING.write_deadline_ms / 1000
    #: The targets' health, shared with the code that reattaches them; None if no target can return.
    health: tuple[TargetHealth, ...] | None = None
    pool_slots: int = 0  # the number on this rank; 0 disables the check of places
    read_bytes_in_flight_max: int = TUNING.read_bytes_in_flight_max
    write_bytes_in_flight_max: int = TUNING.write_bytes_in_flight_max
    #: The limit on bytes being written to a target while reads from it are waiting or running.
    write_bytes_beside_reads_max: int = TUNING.write_bytes_beside_reads_max
    #: The largest share of a target's reads and bytes in flight that peers may use. The rest is for
    #: this server's own loads. One read for a peer is always allowed.
    serve_share: float = 0.9
    #: The limit on bytes in flight for peers; None for a limit that keeps a target busy.
    serve_bytes_in_flight_max: int | None = None
    #: Whether a load's copy verifies the payload if the copy engine can (`makes_checksums`).
    copies_check: bool = False


class FinishedJob(NamedTuple):
    """A store or load whose copies are done. `failures` pairs chunk indexes with outcomes."""

    op: int
    failures: tuple[tuple[int, Outcome], ...]
    copied_bytes: int
    seconds: float


class _Ticket(NamedTuple):
    """A batch of copies in the copy engine. `payloads` is None unless the batch needs checksums: in
    stores, and in loads whose copies verify payloads."""

    batch: int
    direction: Direction
    size_bytes: int
    began_s: float
    payloads: Payloads | None
    #: uint8[n]: whether each CRC is needed, to compare it in the set or to verify a load; None
    #: without `payloads`.
    sampled: npt.NDArray[np.uint8] | None


class TransferPipeline:
    """One rank's transfer pipeline, as described in the module's docstring."""

    def __init__(
        self,
        staging: StagingMap,
        copy: CopyEngine,
        io: IoEngine,
        limits: TransferLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        opener: RegionFiles | None = None,
        peers: Peers | None = None,
        serve: Serve | None = None,
    ) -> None:
        """`opener` opens other engines' regions; None if no command will name one. `peers` are the
        peers that read for us, and `serve` is our service for peers; both can be None."""
        self._counters = Counts()
        self._copy, self._io, self._clock = copy, io, clock
        self._limits = limits
        targets = limits.target_count
        self._health = limits.health or tuple(
            TargetHealth(can_return=False) for _ in range(targets)
        )
        self._verdicts = [Verdict.OK] * targets  # as last reported
        self._known: list[tuple[Verdict, int] | None] = [None] * targets  # the machine's view
        self._lanes = io.attach()
        self._in_python = isinstance(self._lanes, PythonLanes)  # Python lanes use our clock
        self._peering = Peering(peers, self._foreign_place, self._counters) if peers else None
        options = _machine_options(staging, limits, io.stamp, peers)
        options.copies_check = limits.copies_check and copy.makes_checksums
        of_peers = self._peering.lanes.address if self._peering else 0
        self._machine = Machine(options, self._lanes.address, clock(), of_peers)
        self._regions = Regions(self._machine, io, opener, targets) if opener else None
        self._tag = io.stamp.tag
        self._serving = self._serving_of(serve, staging) if serve else None
        self.in_set = staging.members is not None  # whether other ranks have equal bytes
        self._newest: tuple[int, object] = (0, None)  # the newest fence, preceded by its number
        self._passed = 0  # the number of the newest fence known to have passed
        self._open: dict[int, object] = {}  # the fences after that one, oldest first
        self._tickets: dict[int, _Ticket] = {}
        self._levels: tuple[int, ...] = (0,) * 7

    def _serving_of(self, serve: Serve, staging: StagingMap) -> Serving:
        memory = SlotMemory(staging.serve_address, staging.slot_bytes, staging.serve_slots)
        return Serving(
            self._machine, serve, memory, self._limits.group_bytes, self._clock, self._find_region
        )

    # -- commands ---------------------------------------------------------------------

    def transfer(
        self,
        geometry: CacheGeometry,
        transfers: list[Transfer],
        fence: object,
        helpers: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Begin `transfers` after `fence`. `helpers` maps ops to masks of peers that may help."""
        number = self._number_of(fence)
        self._machine.set_time(self._clock())
        self._machine.begin_transfers(geometry.native, transfers, number)
        for op, peers in helpers.items():
            self._machine.let_help(op, peers)

    def command(self, command: Command) -> None:
        """Execute a command that moves no GPU blocks."""
        match command:
            case WriteCommand():
                what = command.op, OpKind.WRITE, Urgency.WRITE, command.batch
                self._begin(*what, command.clients)
            case SessionsCommand():
                self._io.save_sessions(command.content)
            case FetchCommand():
                self._begin(command.op, OpKind.FETCH, command.urgency, command.batch)
            case ResetCommand():
                self._set_targets()  # newly attached targets lack this superblock
                stamp, unnamed = self._io.begin_reset(command.tag, command.named)
                self._machine.set_time(self._clock())
                self._machine.reset(command.op, astuple(stamp), astuple(unnamed))
                self._tag = stamp.tag
            case CancelCommand():
                self.cancel(command.target_op, command.indexes)
            case AttachCommand() | DetachCommand():
                assert self._regions is not None, "without a pool there are no other engines' pools"
                self._machine.set_time(self._clock())
                if isinstance(command, AttachCommand):
                    self._regions.attach(command)
                else:
                    self._regions.detach(command.owner)

    def cancel(self, op: int, rows: npt.NDArray[np.uint32] | None = None) -> None:
        """Cancel `rows` of an op, or all rows if None. The rows are still reported. Copies by DMA
        continue, and so do stores and resets, because other ops depend on them."""
        self._machine.set_time(self._clock())
        self._machine.cancel(op, rows)

    def _begin(
        self, op: int, kind: OpKind, urgency: Urgency, batch: ChunkBatch, clients: bytes = b""
    ) -> None:
        self._machine.set_time(self._clock())
        self._machine.begin(op, _KINDS.index(kind), int(urgency), batch, clients=clients)

    def _number_of(self, fence: object) -> int:
        """Return the number of `fence`, or 0 for None. The model's thread records fences in order,
        so only the newest one can be passed in again."""
        if fence is None:
            return 0
        number, newest = self._newest
        if fence != newest:
            number += 1
            self._newest = number, fence
            self._open[number] = fence
        return number

    # -- progress ---------------------------------------------------------------------

    def step(self) -> None:
        """Advance everything that can make progress now."""
        self._machine.set_time(self._clock())
        if self._serving is not None:  # first, to cancel reads before they complete
            self._serving.take_in(self._tag)
        for ticket, outcome in self._copy.poll():
            self._copied(self._tickets.pop(ticket), outcome)
        self._take_superblocks()
        if self._regions is not None:
            self._regions.step()
        if self._peering is not None:
            self._peering.take_in(self._machine)
        self._drive_lanes()
        if self._peering is not None:
            self._peering.hand_over(self._machine)
        if self._serving is not None:
            self._serving.hand_over()
        self._submit_copies()

    def submit_copies(self) -> bool:
        """Submit the ready copies. Return whether a row was decided; if so, call `step`."""
        self._submit_copies()
        return self._machine.to_report > 0

    def take_reports(self) -> list[Report]:
        machine = self._machine
        reports = [self._report_of(columns) for columns in machine.take_reports()]
        reports += self._take_verdicts()
        if reports:  # rates and levels alone are no reason to make the engine step
            rank = self._limits.rank
            reports += [RateReport(rank, *rate) for rate in machine.take_rates()]
            if machine.levels() != self._levels:
                reports.append(self.level_report())
        return reports

    def level_report(self) -> LevelReport:
        self._levels = self._machine.levels()
        waits_s = tuple(seconds for _, seconds in self.read_queues())
        return LevelReport(self._limits.rank, *self._levels, waits_s)

    def _report_of(self, columns: tuple[Any, ...]) -> Report:
        if len(columns) == 2:
            return OpReports(*columns)
        op, indexes, codes, errnos, released, seconds, crcs = columns
        rank = 0 if crcs is None else self._limits.rank
        return OpReport(op, indexes, codes, errnos, released, seconds, crcs, rank)

    def take_finished(self) -> list[FinishedJob]:
        finished = []
        for op, failures, copied_bytes, seconds in self._machine.take_finished():
            failed = [(row, outcome_of(code, number)) for row, code, number in failures]
            finished.append(FinishedJob(op, tuple(failed), copied_bytes, seconds))
        return finished

    @property
    def counters(self) -> Counts:
        """The counts since they were last cleared, by series (`metrics.COUNTERS`)."""
        reads, writes, written = self._machine.take_counts()
        if reads[0]:
            self._count_transfer("load", "pool", *reads)
        if writes[0]:
            self._count_transfer("store", "pool", *writes)
        for target, size in enumerate(written):
            if size:
                self._counters["target_written_bytes", str(target)] += size
        return self._counters

    def deadline_in_s(self) -> float:
        """Return the seconds until `step` must be called even if nothing happens; can be inf."""
        return max(0.0, self._machine.next_deadline_s() - self._clock())

    def await_set(self, fds: Sequence[int], seconds: float) -> bool:
        """Wait until another member of the set makes progress, one of `fds` is readable, or
        `seconds` have passed. Return False immediately if no other member can cause an event. The
        set's shared memory is polled every 200 µs, because other members cannot wake this
        process."""
        return self.in_set and self._machine.await_set(fds, seconds)

    def leave_set(self) -> None:
        """Announce that this rank is leaving the set, so that members waiting for it fail
        immediately."""
        if self.in_set:
            self._machine.leave_set()

    def idle(self) -> bool:
        """Return whether no job is open, no gate is held, and no engine holds a buffer."""
        return self._machine.idle

    def read_queues(self) -> list[tuple[int, float]]:
        """Return, by lane, the bytes ahead of a new read and the seconds they take (0 if
        unknown)."""
        return self._machine.read_queues()

    def _foreign_place(self, place: int) -> SlotPlace | None:
        return None if self._regions is None else self._regions.slot_place(place)

    def _find_region(self, uuid: bytes) -> tuple[int, int] | None:
        return None if self._regions is None else self._regions.find(uuid)

    # -- I/O --------------------------------------------------------------------------

    def _take_superblocks(self) -> None:
        """Report written superblocks to the machine, unless Python lanes already report them."""
        if self._in_python:
            return
        if ended := [end_of(one) for one in self._io.poll()]:
            self._machine.ended(ended)

    def _drive_lanes(self) -> None:
        """Let the machine drive the lanes until nothing more can advance."""
        machine = self._machine
        self._set_targets()
        ahead_s = 0.0 if self._in_python else self._clock() - time.monotonic()
        while machine.advance(ahead_s):
            self._look_at_targets()  # may make a target unusable
        self._look_at_targets()
        self._offer_resets()

    def _offer_resets(self) -> None:
        """Submit the superblocks that may be written now."""
        found = self._machine.offer_resets()
        if found is None:
            return
        resets, unwritten = found
        if resets:
            self._io.submit([reset_op(token, target) for token, target in resets])
        for target, code, number in unwritten:
            logger.warning(
                "target %d failed to write its superblock (%s): the reset continues, but a later "
                "start will not find chunks stored on this target from now on, unless the write "
                "succeeds or the target is reattached",
                target,
                outcome_of(code, number),
            )

    def _look_at_targets(self) -> None:
        """Update each target's health from its operations, and apply the verdict."""
        found = self._machine.take_health()
        if found is None:
            return
        counts, outcomes = found
        for target, attachment, began, late, released, released_late in counts:
            health = self._health[target]
            health.began(attachment, began)
            if late:
                health.late(attachment, late)
            health.released(attachment, released, released_late)
        for target, attachment, is_write, code, number, place in outcomes:
            outcome = outcome_of(code, number)
            self._health[target].ended(attachment, outcome, place, is_write=is_write)
        self._set_targets()

    def _set_targets(self) -> None:
        """Pass changed target states to the machine. Other threads also change them."""
        for target, health in enumerate(self._health):
            found = health.verdict, health.attachment
            if found != self._known[target]:
                self._known[target] = found
                self._machine.set_target(target, health.verdict.usable, health.attachment)
                if self._regions is not None:
                    self._regions.target_changed(target, *found)

    def _take_verdicts(self) -> list[Report]:
        """Return the verdicts that changed since the last call. Every target starts as OK."""
        changed: list[Report] = []
        for target, health in enumerate(self._health):
            verdict = health.verdict
            if verdict is not self._verdicts[target]:
                self._verdicts[target] = verdict
                changed.append(VerdictReport(self._limits.rank, target, verdict))
        return changed

    # -- copies -----------------------------------------------------------------------

    def _submit_copies(self) -> None:
        copies = self._machine.take_copies(self._newest_passed())
        for batch, is_store, fence, size_bytes, pieces, summed in copies:
            direction = Direction.STORE if is_store else Direction.LOAD
            after = self._open[fence] if fence else None
            payloads = sampled = None
            if summed is not None:
                counts, addresses, sizes, sampled = summed
                payloads = Payloads.of(counts, addresses, sizes)
            ticket = self._copy.submit(direction, pieces, after, payloads)
            began_s = self._clock()
            self._tickets[ticket] = _Ticket(
                batch, direction, size_bytes, began_s, payloads, sampled
            )

    def _newest_passed(self) -> int:
        """Return the number of the newest fence that has passed. Fences pass in order."""
        while self._open:
            number, fence = next(iter(self._open.items()))
            if not self._copy.has_passed(fence):
                break
            del self._open[number]
            self._passed = number
        return self._passed

    def _copied(self, ticket: _Ticket, outcome: Outcome) -> None:
        batch, direction, size_bytes, began_s, payloads, sampled = ticket
        moved_bytes = size_bytes if outcome.ok else 0
        self._count_transfer(direction.value, "gpu", 1, moved_bytes, self._clock() - began_s)
        if outcome.ok and payloads is not None and sampled is not None:
            self._add_crcs(payloads, sampled)
        crcs = None if payloads is None else payloads.crcs
        self._machine.copied(batch, code_of(outcome.kind), outcome.errno, crcs)

    def _add_crcs(self, payloads: Payloads, sampled: npt.NDArray[np.uint8]) -> None:
        """Compute those needed CRCs that the copy engine did not compute."""
        for at in ((payloads.crcs < 0) & (sampled > 0)).nonzero()[0].tolist():
            payloads.crcs[at] = self._crc_of(int(payloads.addresses[at]), int(payloads.sizes[at]))

    def _crc_of(self, address: int, size: int) -> int:
        return int(crc32c(memoryview((ctypes.c_char * size).from_address(address))))

    def _count_transfer(
        self, direction: str, stage: str, operations: int, size_bytes: int, seconds: float
    ) -> None:
        """Count a transfer. `direction` is store (from the GPU towards the pool) or load; `stage`
        is gpu (copies between KV cache and staging) or pool (reads and writes of slots). A copy's
        seconds start at its submission, so they include the wait for the fence.
        `TransferResult.seconds` start with the job, and include pool reads too."""
        self._counters["transfer_operations", direction, stage] += operations
        self._counters["transfer_bytes", direction, stage] += size_bytes
        self._counters["transfer_seconds", direction, stage] += max(0.0, seconds)


def _machine_options(
    staging: StagingMap, limits: TransferLimits, stamp: Stamp, peers: Peers | None
) -> MachineOptions:
    targets = limits.target_count
    reads_max = max(1, limits.reads_in_flight_max // targets)
    writes_max = max(1, limits.writes_in_flight_max // targets)
    # The number of concurrent reads per target when loads keep all targets and peers busy.
    readers = targets + (peers.lanes if peers else 0)
    streamed_max = max(1, min(reads_max, staging.stream_slots // readers))
    enough = max(_SATURATING_OPS_MIN, -(-_SATURATING_BYTES // staging.slot_bytes))
    options = MachineOptions()
    options.cache_slots, options.stream_slots = staging.cache_slots, staging.stream_slots
    options.pool_slots, options.serve_slots = limits.pool_slots, staging.serve_slots
    if staging.members is not None:
        options.join_set(astuple(staging.members))
    io = options.io
    if peers is not None:
        io.peers, options.peer_chunks_min = peers.lanes, peers.chunks_min
    io.targets, io.reads_max, io.writes_max = targets, reads_max, writes_max
    io.read_deadline_ns = round(limits.read_deadline_s * 1e9)
    io.write_deadline_ns = round(limits.write_deadline_s * 1e9)
    io.header_bytes, io.slot_bytes = HEADER_BYTES, staging.slot_bytes
    io.group_bytes = limits.group_bytes
    io.cache_address = staging.base_address
    io.stream_address = staging.stream_address
    io.saturating_reads = min(streamed_max, enough)
    io.saturating_writes = min(writes_max, enough)
    io.retryable = _RETRYABLE
    io.read_bytes_max = limits.read_bytes_in_flight_max
    io.write_bytes_max = limits.write_bytes_in_flight_max
    io.write_bytes_beside_reads_max = limits.write_bytes_beside_reads_max
    io.set_stamp(astuple(stamp))
    io.serve_share = limits.serve_share
    served = limits.serve_bytes_in_flight_max
    io.serve_bytes_max = served or max(_SERVED_BYTES, 2 * staging.slot_bytes)
    return options


_WAIT_S_MAX = 1.0  # the longest wait for an event or a deadline

#: The longest time for which Python lets a busy thread keep the interpreter lock. A load wakes the
#: pipeline's thread a few times, and can wait this long each time while the engine computes.
_SWITCH_S_MAX = 0.0005


class PipelineRunner:
    """A thread that runs the pipeline, so that transfers continue while the model computes.

    The model's thread calls all methods: it hands over calls, which run in order, and takes
    results. It blocks only in `wait`, for copies that must complete before vLLM continues. Other
    threads may call only `hand_over`.

    The pipeline's thread holds a lock on the pipeline except while it waits. During such a wait,
    the model's thread can start a load itself (`start`), without waking the pipeline's thread.
    """

    def __init__(
        self,
        pipeline: TransferPipeline,
        waker: Waker,
        io_fd: int,
        links: PeerLinks | None = None,
    ) -> None:
        """`io_fd` is readable while completed I/O may be waiting."""
        self._pipeline = pipeline
        self._waker = waker
        self._links = links
        self._fds = (waker.fd, io_fd, *(links.fds if links else ()))
        self._inbox: deque[Callable[[], None]] = deque()
        self._handing_over = threading.Lock()  # the targets' watcher also hands over calls
        self._turn = threading.Lock()  # held by the only thread that may call the pipeline
        self._changed = threading.Condition()
        self._finished: list[FinishedJob] = []
        self._reports: list[Report] = []
        self._counters = Counts()
        self._open: set[int] = set()  # stores and loads handed over but not finished
        self._failure: BaseException | None = None
        self._stopping = False
        sys.setswitchinterval(min(_SWITCH_S_MAX, sys.getswitchinterval()))
        self._thread = threading.Thread(target=self._run, name="nvmeof-pipeline", daemon=True)
        self._thread.start()
        # At exit, Python ends a daemon thread when it next takes the interpreter lock. Inside a
        # native call, this aborts the process.
        atexit.register(self.stop)

    def hand_over(self, call: Callable[[TransferPipeline], None], *ops: int) -> None:
        """Run `call` on the pipeline's thread. `ops` are the stores and loads that it starts."""
        if ops:
            with self._changed:
                self._open.update(ops)
        with self._handing_over:
            self._inbox.append(lambda: call(self._pipeline))
            # Only the first call wakes the thread, which then takes all queued calls.
            is_first = len(self._inbox) == 1
        if is_first:
            self._waker.wake()

    def start(self, call: Callable[[TransferPipeline], None], *ops: int) -> None:
        """Run `call` on this thread and submit the copies that it makes ready, if the pipeline's
        thread is waiting and no earlier call is queued. Otherwise, and in a set, hand it over. Only
        for the model's thread, and for calls that start no I/O. `ops` are as in `hand_over`."""
        # In a set, the pipeline's thread uses the machine while it waits for other members.
        if not self._pipeline.in_set and self._turn.acquire(blocking=False):
            try:
                if not (self._inbox or self._stopping or self._failure):
                    with self._changed:
                        self._open.update(ops)
                    call(self._pipeline)
                    if self._pipeline.submit_copies():
                        self._waker.wake()
                    return
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._turn.release()
        self.hand_over(call, *ops)

    def wait(self, ops: Iterable[int]) -> None:
        """Block until the copies of these stores and loads are done."""
        waiting = set(ops)
        with self._changed:
            while waiting & self._open:
                self._raise_failure()
                self._changed.wait(timeout=1.0)

    def take(self) -> tuple[list[FinishedJob], list[Report], Counts]:
        """Take the finished jobs, reports and counters since the last call, as one snapshot."""
        with self._changed:
            self._raise_failure()
            taken = (self._finished, self._reports, self._counters)
            self._finished, self._reports, self._counters = [], [], Counts()
            return taken

    def stop(self) -> None:
        """End the thread. The engines' `close` ends what is still in progress."""
        atexit.unregister(self.stop)
        self._stopping = True
        self._waker.wake()
        self._thread.join(timeout=5.0)

    def leave_set(self) -> None:
        """Leave the set. Call after `stop`, when no copy and no I/O of this rank is in progress."""
        self._pipeline.leave_set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineError("the transfer pipeline stopped; see the cause") from self._failure

    def _run(self) -> None:
        poller = select.poll()
        for fd in self._fds:
            poller.register(fd, select.POLLIN)
        woken, ready = (self._waker.fd, select.POLLIN), []
        try:
            while not (self._stopping or self._failure):
                if woken in ready:
                    self._waker.clear()
                with self._turn:
                    while self._inbox:
                        self._inbox.popleft()()
                    self._pipeline.step()
                    self._publish()
                    wait_ms = self._wait_ms()
                if self._pipeline.await_set(self._fds, wait_ms / 1000):
                    ready = [woken]  # the waker may be set
                else:
                    ready = poller.poll(wait_ms)
        except BaseException as error:  # noqa: BLE001 - handed to the model's thread, which raises
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Record a broken invariant: all calls fail from now on, instead of waiting forever."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _wait_ms(self) -> int:
        return math.ceil(1000 * min(self._pipeline.deadline_in_s(), _WAIT_S_MAX))

    def _publish(self) -> None:
        finished = self._pipeline.take_finished()
        reports = self._pipeline.take_reports()
        if self._links is not None:
            self._publish_links(self._links)
        if not finished and not reports:
            return
        counters = self._pipeline.counters  # published together with the reports
        with self._changed:
            self._finished += finished
            self._reports += reports
            self._counters.add(counters)
            counters.clear()
            self._open.difference_update(job.op for job in finished)
            self._changed.notify_all()

    def _publish_links(self, links: PeerLinks) -> None:
        """Publish the peers' counters separately, because reads for peers produce no reports."""
        grown = links.take_counts()
        if not grown:
            return
        with self._changed:
            self._counters.add(grown)
            if not self._reports:
                self._reports.append(self._pipeline.level_report())
