# SPDX-License-Identifier: Apache-2.0
"""The process under test: the real pool, engine, pipeline and runner under a steady load.

A minimal manager sends commands: it stores chunks into cache slots, has them written to pool
slots, and loads them from the pool slots into other memory. It follows the protocol's rules on
the reuse of slots, has the one right content of every chunk, and sends its parent the outcome of
each operation.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.chunks import Reported, batch_of, begin, geometry_of, identity_of, place_in, rows_of
from tests.fabric.modules import PYTHON
from tests.fabric.report import LoadSpec, OpEnd
from vllm_nvmeof_offload import LOGGER_NAME
from vllm_nvmeof_offload.child import child_command
from vllm_nvmeof_offload.config import Tuning
from vllm_nvmeof_offload.copy.geometry import CacheTensor
from vllm_nvmeof_offload.copy.host import HostCopyEngine
from vllm_nvmeof_offload.io.base import Waker
from vllm_nvmeof_offload.io.choose_engine import choose_io_engine
from vllm_nvmeof_offload.manager.ledger import columns_of
from vllm_nvmeof_offload.manager.target_choice import Targets
from vllm_nvmeof_offload.metrics import Counts
from vllm_nvmeof_offload.native import Batch, Tiers
from vllm_nvmeof_offload.pool.format import Keyspace
from vllm_nvmeof_offload.pool.pool import Pool, PoolSpec
from vllm_nvmeof_offload.protocol import (
    ChunkBatch,
    LoadCommand,
    OpKind,
    OpReport,
    RateReport,
    SlotIdentity,
    StoreCommand,
    VerdictReport,
    WriteCommand,
    slot_of,
    slots_by_target,
    target_of,
    unpacked,
)
from vllm_nvmeof_offload.staging import Staging
from vllm_nvmeof_offload.targets.health import TargetHealth
from vllm_nvmeof_offload.targets.reattach import Attachments, TargetWatcher
from vllm_nvmeof_offload.units import KIB, MIB
from vllm_nvmeof_offload.worker.pipeline import PipelineRunner, TransferLimits, TransferPipeline

PAYLOAD_BYTES = 124 * KIB
CACHE_SLOTS = 24
LOADS_MAX = 8
WRITES_MAX = 8  # of one target
KEY_BYTES = 16
TICK_S = 0.02
_BASE = np.random.default_rng(7).integers(0, 1 << 63, PAYLOAD_BYTES // 8, np.uint64)
_MIX = 0x9E3779B97F4A7C15


class _Parent(logging.Handler):
    """The parent process, which receives all messages and log lines from any thread."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self.pipe = pipe
        self._turn = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        self.send("log", record.getMessage())

    def send(self, what: str, *rest: Any) -> None:
        with self._turn:
            self.pipe.send((what, time.monotonic(), *rest))


@dataclass
class _Op:
    """One row of a command. number None: a store's, whose write has no place yet."""

    kind: OpKind
    began_s: float
    identity: SlotIdentity
    number: int | None
    cache_slot: int | None = None
    page: int | None = None


@dataclass
class _Load:
    """The minimal manager; it runs only on the child's main thread."""

    spec: LoadSpec
    parent: _Parent
    #: pool slot → the contents it may have, also after a failed write. Any other is wrong.
    stored: dict[int, SlotIdentity] = field(default_factory=dict)
    ops: dict[tuple[int, int], _Op] = field(default_factory=dict)  # by op and row
    #: What the manager's tiers know of an op, if they choose the targets.
    batches: dict[int, Batch] = field(default_factory=dict)
    busy_slots: set[int] = field(default_factory=set)
    counters: Counts = field(default_factory=Counts)
    next_op: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        count = len(spec.targets)
        slot_bytes = PoolSpec(spec.targets, 1, PAYLOAD_BYTES, KEYSPACE).slot_bytes
        pool_bytes = spec.slots * (slot_bytes + KIB)
        self.pool = Pool.open(PoolSpec(spec.targets, pool_bytes, PAYLOAD_BYTES, KEYSPACE))
        self.staging = Staging(slot_bytes, CACHE_SLOTS, 2 * LOADS_MAX)
        waker = Waker()
        copy = HostCopyEngine(on_done=waker.wake)
        base = self.staging.map.base_address
        limits = Tuning(io_threads=8, io_depth=16)
        self.io, fallbacks = choose_io_engine(
            spec.engine, self.pool, self.staging.view, base, limits
        )
        assert not fallbacks, fallbacks
        self.health = tuple(TargetHealth() for _ in range(count))
        config = TransferLimits(
            group_bytes=(PAYLOAD_BYTES,),
            target_count=count,
            health=self.health,
            reads_in_flight_max=LOADS_MAX * count,
            writes_in_flight_max=WRITES_MAX * count,
            read_bytes_in_flight_max=8 * MIB,
            read_deadline_s=spec.read_deadline_s,
            write_deadline_s=spec.write_deadline_s,
        )
        pipeline = TransferPipeline(self.staging.map, copy, self.io, config)
        self.runner = PipelineRunner(pipeline, waker, self.io.fileno())
        self.watcher = TargetWatcher(
            Attachments(self.pool, self.io, self.health),
            [os.path.realpath(directory) for directory in self.pool.directories],
            lambda call: self.runner.hand_over(lambda _: call()),
            command=child_command("targets.prober"),
        )
        # In place of vLLM's KV cache: one page per chunk that is stored and one per load.
        self.pages = np.zeros((CACHE_SLOTS + LOADS_MAX, PAYLOAD_BYTES // 8), np.uint64)
        address, pages = self.pages.ctypes.data, len(self.pages)
        self.geometry = geometry_of([CacheTensor(address, PAYLOAD_BYTES, PAYLOAD_BYTES, pages)])
        self.free_cache = list(range(CACHE_SLOTS))
        self.free_pages = list(range(CACHE_SLOTS, CACHE_SLOTS + LOADS_MAX))
        # The manager's tiers choose the targets if the load only writes.
        by_target = slots_by_target(self.pool.slots, count)
        writes_max = WRITES_MAX * count
        self.tiers = Tiers(CACHE_SLOTS, by_target, key_bytes=KEY_BYTES, writes_max=writes_max)
        self.placement = Targets(self.tiers, count)
        self.dice = random.Random(11)

    # -- commands ---------------------------------------------------------------------

    def open(self, *rows: _Op) -> int:
        self.next_op += 1
        self.ops |= {(self.next_op, row): op for row, op in enumerate(rows)}
        return self.next_op

    def store(self) -> None:
        """Store KV memory to a cache slot; its write starts when the store is done."""
        if not self.spec.loads:
            self.store_by_the_rule()
            return
        free = [p for p in range(self.pool.slots) if p not in self.busy_slots]
        if not self.free_cache or not free:
            return
        number, cache_slot = self.dice.choice(free), self.free_cache.pop(0)
        self.generation += 1
        identity = SlotIdentity(b"%012d" % number + bytes(4), self.generation)
        self.stored.pop(number, None)
        self.busy_slots.add(number)
        op = self.open(_Op(OpKind.STORE, time.monotonic(), identity, number, cache_slot))
        self.copy_in(op, identity, cache_slot)

    def store_by_the_rule(self) -> None:
        """Store a chunk that the manager's tiers have a cache slot for."""
        key = b"%012d" % self.generation + bytes(4)  # group 0
        batch, *_, self.generation = self.tiers.plan_store([key], None, self.generation)
        if not len(batch):
            return
        identity, cache_slot = SlotIdentity(key, batch.generation(0)), int(batch.cache[0])
        op = self.open(_Op(OpKind.STORE, time.monotonic(), identity, None, cache_slot))
        self.batches[op] = batch
        self.copy_in(op, identity, cache_slot)

    def copy_in(self, op: int, identity: SlotIdentity, cache_slot: int) -> None:
        self.pages[cache_slot] = content(identity)
        command = StoreCommand(op, batch_of((identity, cache_slot, None)))
        self.begin(command, cache_slot)

    def write(self, stored: _Op) -> None:
        """Write a chunk that was stored to the pool slot that it was stored for."""
        assert stored.number is not None
        place = place_in(stored.number, self.pool.target_count)
        write = replace(stored, kind=OpKind.WRITE, began_s=time.monotonic())
        row = stored.identity, stored.cache_slot, place
        self.send_writes(self.open(write), batch_of(row))

    def write_by_the_rule(self) -> None:
        """Write what the manager's tiers want to be written now, where they want it."""
        self.tiers.drain()
        batch = self.tiers.take_writes()
        if not len(batch):
            return
        columns, now_s, targets = columns_of(batch), time.monotonic(), self.pool.target_count
        places = [slot_of(at) * targets + target_of(at) for at in columns.places.tolist()]
        rows = [
            _Op(OpKind.WRITE, now_s, identity_of(columns, row), number, int(columns.cache[row]))
            for row, number in enumerate(places)
        ]
        op = self.open(*rows)
        self.batches[op] = batch
        self.send_writes(op, columns)

    def send_writes(self, op: int, batch: ChunkBatch) -> None:
        command = WriteCommand(op, batch)
        self.runner.hand_over(lambda pipeline: pipeline.command(command))

    def load(self) -> None:
        """Load a pool slot into other KV memory, which is wiped first."""
        ready = [p for p in self.stored if p not in self.busy_slots]
        if not ready or not self.free_pages:
            return
        number, page = self.dice.choice(ready), self.free_pages.pop(0)
        self.busy_slots.add(number)
        self.pages[page] = 0
        identity = self.stored[number]
        op = self.open(_Op(OpKind.LOAD, time.monotonic(), identity, number, page=page))
        place = place_in(number, self.pool.target_count)
        command = LoadCommand(op, batch_of((identity, None, place)))
        self.begin(command, page)

    def begin(self, command: StoreCommand | LoadCommand, page: int) -> None:
        self.runner.hand_over(lambda p: begin(p, self.geometry, command, [page]), command.op)

    # -- reports ----------------------------------------------------------------------

    def take_reports(self) -> None:
        _, reports, counters = self.runner.take()
        self.counters.add(counters)
        for report in unpacked(reports):
            match report:
                case OpReport():
                    self.reported(report)
                case VerdictReport():
                    self.placement.verdict(report)
                    reason = self.health[report.target].reason
                    self.parent.send("verdict", report.target, str(report.verdict), reason)
                case RateReport():
                    self.placement.rate(report)

    def reported(self, report: OpReport) -> None:
        batch = self.batches.get(report.op)
        for row in rows_of(report, 1 if batch is None else len(batch)):
            op = self.ops[row.op, row.row]
            if row.outcome is not None:
                self.ended(op, row)
            if row.released:
                del self.ops[row.op, row.row]
                self.released(op, row)
        if batch is None:
            return
        kind = list(OpKind).index(OpKind.WRITE if batch.places[0] >= 0 else OpKind.STORE)
        self.tiers.report(kind, batch, report.indexes, report.codes, report.errnos, report.released)
        if batch.over:
            del self.batches[report.op]
        self.write_by_the_rule()

    def ended(self, op: _Op, report: Reported) -> None:
        assert report.outcome is not None
        outcome = "ok" if report.outcome.ok else f"miss: {report.outcome}"
        if op.kind is OpKind.LOAD:
            assert op.page is not None
            assert op.number is not None
            right = np.array_equal(self.pages[op.page], content(op.identity))
            if report.outcome.ok and not right:
                outcome = "WRONG BYTES"
            self.free_pages.append(op.page)
            self.busy_slots.discard(op.number)
        elif op.kind is OpKind.WRITE and op.number is not None:
            # A failed write may still have reached the disk: right bytes and a miss are allowed.
            self.stored[op.number] = op.identity
        target = -1 if op.number is None else op.number % self.pool.target_count
        now_s = time.monotonic()
        self.parent.send("op", OpEnd(op.kind.value, target, op.began_s, now_s, outcome))

    def released(self, op: _Op, report: Reported) -> None:
        """The op's buffers are free: no engine uses them."""
        if op.cache_slot is None or not self.spec.loads:
            return
        assert op.number is not None
        if op.kind is OpKind.STORE and report.outcome is not None and report.outcome.ok:
            self.write(op)
            return
        self.free_cache.append(op.cache_slot)
        self.busy_slots.discard(op.number)

    # -- the loop ---------------------------------------------------------------------

    def run(self) -> None:
        due_s, turn = time.monotonic(), 0
        tick_s = max(TICK_S, self.spec.interval_s / 4)
        while not self.parent.pipe.poll(tick_s):
            self.take_reports()
            now_s = time.monotonic()
            due_s = max(due_s, now_s - tick_s)  # missed operations are not caught up
            while due_s <= now_s:
                due_s, turn = due_s + self.spec.interval_s, turn + 1
                if self.spec.loads and turn % 2:
                    self.load()
                else:
                    self.store()
        self.parent.pipe.recv()
        self.end()

    def end(self) -> None:
        """Wait until all operations have ended, then close as the worker does."""
        end_s = time.monotonic() + self.spec.write_deadline_s + self.spec.read_deadline_s
        while self.ops and time.monotonic() < end_s:
            self.take_reports()
            time.sleep(TICK_S)
        self.watcher.stop()
        self.runner.stop()
        closed = self.io.close(1.0)
        self.pool.close(abandon=not closed)
        counted = {str(series): amount for series, amount in self.counters.items()}
        self.parent.send("end", counted, len(self.ops))


KEYSPACE = Keyspace.of({"tests": "fabric"})


def content(identity: SlotIdentity) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The one right payload of an identity."""
    return _BASE + np.uint64(_MIX * identity.generation % (1 << 64))


def run_load(spec: LoadSpec, pipe: Connection) -> None:
    """The child process; runs until the parent requests the end."""
    sys.executable = str(PYTHON)  # for the processes that the product starts
    parent = _Parent(pipe)
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.addHandler(parent)
    load = _Load(spec, parent)
    parent.send("ready", load.io.name)
    load.run()
